"""`pa-npu serve` and the unmodified SDK: a client's exact answers, beside another one, through killed processes, and its loops.

tests/helpers/served.py says where the SDK is.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.served import Loop, Server, needs_sdk, served

pytestmark = [pytest.mark.integration, *needs_sdk]


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tiny / "model", tmp_path_factory.mktemp("service")) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All that a client sees when it is alone and nothing happens."""
    return Loop(server, "exact", tmp_path_factory.mktemp("alone")).result()


def test_two_clients_at_once_get_the_bits_of_each_alone(
    server: Server, alone: Any, tmp_path: Path
) -> None:
    beside = Loop(server, "exact", tmp_path, seed=11, label="b")
    same = Loop(server, "exact", tmp_path, label="a")
    assert same.result() == alone
    assert beside.result() != alone, "negative control: another seed"


@pytest.mark.parametrize(
    "part",
    [
        "pa_npu.service.trainer",
        pytest.param("pa_npu.service.main", marks=pytest.mark.nightly),
        pytest.param("pa_npu.engines.transformers.server", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_process_changes_nothing_that_the_client_sees(
    server: Server, alone: Any, tmp_path: Path, part: str
) -> None:
    loop = Loop(server, "exact", tmp_path, label=part.rpartition(".")[2])
    loop.wait_for_step(2)
    os.kill(server.pid_of(part), signal.SIGKILL)
    assert loop.result() == alone


@pytest.mark.nightly
def test_a_killed_rank_of_two_changes_nothing_that_the_client_sees(
    tiny: Path, tmp_path: Path
) -> None:
    with served(tiny / "model", tmp_path, trainer__devices=2) as server:
        alone = Loop(server, "exact", tmp_path, label="a").result()
        loop = Loop(server, "exact", tmp_path, label="b")
        loop.wait_for_step(2)
        os.kill(server.pid_of("pa_npu.service.trainer", rank=1), signal.SIGKILL)
        assert loop.result() == alone
        assert "starts again" in server.output


@pytest.mark.nightly
def test_a_call_for_which_a_rank_lacks_memory_is_one_error(tiny: Path, tmp_path: Path) -> None:
    """The other rank waits for it in a collective; both start again, and the call is not replayed."""
    with served(tiny / "model", tmp_path, trainer__devices=2, run__restarts=0) as server:
        undisturbed = Loop(server, "too_large", tmp_path).result()
        assert undisturbed["error"] is None
        until = tmp_path / "limited"
        loop = Loop(server, "too_large", tmp_path, large=1, until=until)
        loop.wait_for_step(1)
        rank = server.pid_of("pa_npu.service.trainer", rank=1)
        limit = virtual_bytes(rank) + 2**25
        resource.prlimit(rank, resource.RLIMIT_AS, (limit, limit))
        until.touch()
        seen = loop.result()
    assert "too little memory" in seen["error"]
    assert seen["steps"] == undisturbed["steps"]
    assert "the request that ended them is answered" in server.output


def virtual_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.nightly
def test_vllm_samples_from_the_snapshot_that_was_asked_for(tiny: Path, tmp_path: Path) -> None:
    with served(tiny / "model", tmp_path, rollout__backend="vllm") as server:
        seen = Loop(server, "sampling", tmp_path).result()
    first, second = seen["trained"]
    assert distance(first, second) > 0.1, "control: a step has moved the log-probs"
    for scored, trained in zip(seen["scored"], (first, second, first), strict=True):
        assert distance(scored, trained) < 1e-3
    assert distance(seen["prompt_logprobs"], second) < 1e-3
    places = seen["likely"][1:]
    assert [len(place) for place in places] == [30] * len(second), "vLLM's own limit is 20"
    assert all(sorted(place, key=lambda entry: -entry[1]) == place for place in places)
    assert [tokens for tokens, _, _ in seen["samples"]] == seen["again"], "seeded"
    for (tokens, logprobs, _), likely in zip(seen["samples"], seen["sample_likely"], strict=True):
        assert len(likely) == len(tokens) == len(logprobs)
        for token, logprob, place in zip(tokens, logprobs, likely, strict=True):
            assert dict(map(tuple, place)).get(token, logprob) == pytest.approx(logprob, abs=1e-3)
    assert seen["stopped"] == [[12, "length"], [1, "stop"]]


@pytest.mark.nightly
def test_an_engine_that_keeps_old_weights_is_one_clear_error_to_the_client(
    tiny: Path, tmp_path: Path
) -> None:
    """Digests say that every byte has arrived; the probe says that the engine computes without."""
    careless = "tests.helpers.careless_kind:KEEPS_WEIGHTS"
    with served(tiny / "model", tmp_path, rollout__backend=careless) as server:
        seen = Loop(server, "sampling", tmp_path).result()
    assert len(seen["scored"]) == 1, "the first snapshot is loaded"
    assert "I5" in seen["error"] and "log-probs" in seen["error"], seen["error"]


def distance(first: list[float], second: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


@pytest.mark.nightly
def test_the_launcher_killed_and_started_again(tiny: Path, alone: Any, tmp_path: Path) -> None:
    """Everything ends at once; a second `pa-npu serve` on the same directory goes on."""
    first = Server(tiny / "model", tmp_path)
    port = int(first.url.rpartition(":")[2])
    loop = Loop(first, "exact", tmp_path)
    loop.wait_for_step(2)
    first.family()
    first.popen.kill()
    first.popen.wait()
    first.assert_nothing_survives(30.0)
    second = Server(tiny / "model", tmp_path, service__port=port)
    try:
        assert loop.result() == alone
    finally:
        second.close()


@pytest.mark.nightly  # the exact client has a custom loss too
def test_loops_of_the_cookbook_learn(server: Server, tiny: Path, tmp_path: Path) -> None:
    """On random weights: supervised, preference by a custom loss, distillation of likely tokens."""
    data = {"train": tiny / "train.jsonl", "test": tiny / "test.jsonl", "tested": 2}
    seen = Loop(server, "supervised", tmp_path, batch=8, steps=6, **data).result()
    assert seen["losses"][-1] < 0.85 * seen["losses"][0]
    seen = Loop(server, "preference", tmp_path, pairs=4, steps=5, **data).result()
    assert seen["losses"][0] == pytest.approx(math.log(2), abs=1e-4)
    assert seen["losses"][-1] < 0.9 * math.log(2) and seen["margins"][-1] > 0
    seen = Loop(server, "distill", tmp_path, teacher_steps=2, steps=5, **data).result()
    assert seen["losses"][-1] < 0.9 * seen["losses"][0]


@pytest.mark.nightly
@pytest.mark.parametrize("plain", [1, 0])
def test_reinforcement_on_arithmetic(slipping: Path, tmp_path: Path, plain: int) -> None:
    data = {name: slipping / f"{name}.jsonl" for name in ("train", "test")}
    with served(slipping / "model", tmp_path) as server:
        seen = Loop(server, "rl", tmp_path, steps=12, plain=plain, **data).result()
    assert seen["after"] > seen["before"] + 0.2
