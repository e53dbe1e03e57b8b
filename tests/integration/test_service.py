"""`pa-npu serve` and the unmodified SDK: a client's exact answers, beside another one, through killed processes, and its loops.

The SDK is no dependency of this package: tests/run.sh installs it beside the environment, in
.venv-tinker; PA_NPU_TINKER names another directory.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launched import ROOT, Launched

SDK = Path(os.environ.get("PA_NPU_TINKER", ROOT / ".venv-tinker"))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
    pytest.mark.skipif(
        not (SDK / "tinker").is_dir(), reason="needs requirements/tinker.txt in .venv-tinker"
    ),
]
READY_S = 300.0
LOOP_S = 400.0


class Server(Launched):
    """`pa-npu serve` on a tiny model."""

    def __init__(self, model: Path, directory: Path, **keys: Any) -> None:
        self.run = directory / "run"
        self.model = model
        named = {
            "model.path": model,
            "model.dtype": "fp32",
            "run.device": "cpu",
            "run.dir": self.run,
            "run.restarts": 10,
            "lora.rank": 8,
            "data.max_prompt_tokens": 128,
            "rollout.max_response_tokens": 64,
            "service.port": 0,
            "service.unembed": "leave_out",
            "service.checkpoint_every": 4,
            "service.slots": 16,
            **{name.replace("__", "."): value for name, value in keys.items()},
        }
        super().__init__(directory, "serve", *(f"{name}={value}" for name, value in named.items()))
        self.wait_for(lambda: "ready: " in self.output, "the service is ready", READY_S)
        self.url = self.output.split("ready: ")[1].split()[0]
        self.key = self.run / "service" / "key"

    def pid_of(self, part: str, rank: int | None = None) -> int:
        """Returns the process whose command line has `part`, not its keeper. rank: of a trainer."""
        found = [
            pid
            for pid, line in self.family().items()
            if f"-m {part}" in line and "keeper" not in line
            if rank is None or f"RANK={rank}".encode() in environment_of(pid)
        ]
        assert len(found) == 1, self.family()
        return found[0]


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


class Loop:
    """A loop of a client in a process of its own."""

    def __init__(self, server: Server, name: str, directory: Path, **options: Any) -> None:
        self.out = directory / f"{name}-{len(list(directory.glob('*.json')))}.json"
        self.out.write_text("")
        self.steps = directory / f"{self.out.stem}.steps"
        path = os.pathsep.join(filter(None, (str(SDK), os.environ.get("PYTHONPATH", ""))))
        given = [f"{key}={value}" for key, value in options.items()]
        given += [f"model={server.model}", f"steps_file={self.steps}"]
        script = str(ROOT / "tests" / "helpers" / "tinker_loops.py")
        argv = [sys.executable, script, server.url, str(server.key), name, str(self.out), *given]
        env = {**os.environ, "PYTHONPATH": path, "TINKER_TELEMETRY": "0"}
        self.log = directory / f"{self.out.stem}.log"
        with self.log.open("wb") as stream:
            self.popen = subprocess.Popen(argv, env=env, stdout=stream, stderr=subprocess.STDOUT)

    def result(self) -> Any:
        try:
            code = self.popen.wait(LOOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise AssertionError(
                f"the client did not end:\n{self.log.read_text()[-3000:]}"
            ) from None
        assert code == 0, self.log.read_text()[-3000:]
        return json.loads(self.out.read_text())

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LOOP_S
        while not self.steps.exists() or int(self.steps.read_text() or -1) < step:
            assert self.popen.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"step {step} did not begin"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tiny / "model", tmp_path_factory.mktemp("service"))
    yield started
    started.popen.send_signal(signal.SIGTERM)
    assert started.popen.wait(30) == 0, started.output
    started.close()


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
    server = Server(tiny / "model", tmp_path, trainer__devices=2)
    try:
        alone = Loop(server, "exact", tmp_path, label="a").result()
        loop = Loop(server, "exact", tmp_path, label="b")
        loop.wait_for_step(2)
        os.kill(server.pid_of("pa_npu.service.trainer", rank=1), signal.SIGKILL)
        assert loop.result() == alone
        assert "starts again" in server.output
    finally:
        server.close()


@pytest.mark.nightly
def test_vllm_samples_from_the_snapshot_that_was_asked_for(tiny: Path, tmp_path: Path) -> None:
    server = Server(tiny / "model", tmp_path, rollout__backend="vllm")
    try:
        seen = Loop(server, "sampling", tmp_path).result()
    finally:
        server.close()
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
    server = Server(tiny / "model", tmp_path, rollout__backend=careless)
    try:
        seen = Loop(server, "sampling", tmp_path).result()
    finally:
        server.close()
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
def test_reinforcement_on_arithmetic(tmp_path: Path, plain: int) -> None:
    """The model that slips at sums, as the quick start has it: made here, about a minute."""
    from tools import make_tiny_model

    assert make_tiny_model.main(["--out", str(tmp_path / "tiny")]) == 0
    server = Server(tmp_path / "tiny" / "model", tmp_path)
    try:
        data = {name: tmp_path / "tiny" / f"{name}.jsonl" for name in ("train", "test")}
        seen = Loop(server, "rl", tmp_path, steps=12, plain=plain, **data).result()
    finally:
        server.close()
    assert seen["after"] > seen["before"] + 0.2
