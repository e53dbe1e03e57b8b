"""`pa-npu verify --replay` on real runs: iterations that are repeated have the run's bits, and one flipped bit is found and named.

Nightly on both backends and engines, in fp32 and bf16, with adapters, roles and staleness, each
after a kill; across a resume; and on another number of replicas.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.verify_a_run import FLIP_FILE
from pa_npu.telemetry.chain import CHAIN, read_chain
from tests.helpers.engine_process import API_KEY, KEY
from tests.helpers.launched import Launched, find, settings

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

TIMEOUT_S = 400.0
ITERATIONS = 4
KEYS: dict[str, object] = {
    "schedule.iterations": ITERATIONS,
    "schedule.order": "prompt",
    "reward.functions": "[{name: 'examples.verify_a_run:brevity'}]",
    "data.test": "null",
    "optimizer.learning_rate": "1e-3",
    "telemetry.trackers": "[]",
    "checkpoint.every": 1,
}
VARIANTS: dict[str, dict[str, object]] = {
    "megatron, two stages": {"trainer.devices": 2, "trainer.pipeline_parallel": 2},
    "fsdp": {"trainer.backend": "fsdp", "trainer.devices": 2},
    "adapters": {"trainer.backend": "fsdp", "lora.rank": 4, "optimizer.learning_rate": "2e-3"},
    "roles": {"placement.colocate": "true", "rollout.engines": 2, "trainer.devices": 2},
    "roles with adapters": {
        "placement.colocate": "true",
        "rollout.engines": 2,
        "trainer.backend": "fsdp",
        "trainer.devices": 2,
        "lora.rank": 4,
    },
    "staleness": {"schedule.max_staleness": 1, "schedule.updates_per_iteration": 2},
    "vllm": {"rollout.backend": "vllm"},
    "bf16, megatron": {"model.dtype": "bf16", "trainer.devices": 2},
    "bf16, fsdp": {"model.dtype": "bf16", "trainer.backend": "fsdp", "trainer.devices": 2},
}
ANOTHER_NUMBER: dict[str, tuple[dict[str, object], list[str]]] = {
    "megatron": ({}, ["trainer.devices=2"]),
    "fsdp": ({"trainer.backend": "fsdp"}, ["trainer.devices=2"]),
    "fsdp, fewer": ({"trainer.backend": "fsdp", "trainer.devices": 2}, ["trainer.devices=1"]),
    "adapters": (VARIANTS["adapters"], ["trainer.devices=2"]),
    "roles": (VARIANTS["roles"], ["trainer.devices=1", "rollout.engines=1"]),
}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(command: str, *arguments: str, **variables: str) -> Launched:
        directory = tmp_path / f"{command}{len(launched)}"
        directory.mkdir()
        launched.append(Launched(directory, command, *arguments, variables={**KEY, **variables}))
        return launched[-1]

    yield start
    for item in launched:
        item.close()


def ended(launched: Launched) -> tuple[int, str]:
    code = launched.popen.wait(TIMEOUT_S)
    return code, launched.output


def test_one_bit_that_a_reward_lost_is_found_by_repeating_and_everything_before_it_is_equal(
    launch: Callable[..., Launched],
    tiny: Path,
    tmp_path: Path,
    shared_engine: Callable[[Path], str],
) -> None:
    attach = shared_engine(tiny / "model")
    run_dir, flip = tmp_path / "run", tmp_path / "flip"
    arguments = settings(tiny, run_dir, **KEYS | {"rollout.attach": attach, "checkpoint.every": 0})
    run = launch("run", *arguments, **{FLIP_FILE: str(flip)})
    run.wait_for(
        lambda: (run_dir / CHAIN).is_file() and any(read_chain(run_dir)),
        "the first iteration",
        TIMEOUT_S,
    )
    flip.touch()
    assert ended(run)[0] == 0, run.output
    assert not flip.exists(), "a bit was flipped"
    assert API_KEY not in (run_dir / CHAIN).read_text()

    repeat = [
        "--replay",
        f"0:{ITERATIONS}",
        "--work",
        str(tmp_path / "repeated"),
        f"rollout.attach={attach}",
    ]
    code, printed = ended(launch("verify", str(run_dir), *repeat))
    assert code == 1, printed
    assert "all of it holds" in printed, "by its files nothing is wrong"
    named = [line for line in printed.splitlines() if line.startswith("they differ in iteration ")]
    assert (
        len(named) == 1 and "first in the rewards: the reward of response 0 of group " in named[0]
    ), printed
    assert "1 bit apart; 1 of 8 differ" in named[0] and "they differ in iteration 0" not in named[0]
    assert "the first bits differ" not in printed, "the iterations before it are equal to the bit"


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_killed_and_went_on_is_repeated_bit_for_bit(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path, variant: str
) -> None:
    run_dir = tmp_path / "run"
    run = launch("run", *settings(tiny, run_dir, **KEYS | VARIANTS[variant]))
    saved = run_dir / "checkpoints" / "iteration_000002"
    run.wait_for(saved.is_dir, "a checkpoint", TIMEOUT_S)
    victim = find(run, "trainer.main")
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert ended(run)[0] == 0, run.output
    assert "starting coordinator and trainers again" in run.output, "it was killed in time"
    assert [link.iteration for link in read_chain(run_dir)] == list(range(ITERATIONS))

    code, printed = ended(launch("verify", str(run_dir), "--replay", f"1:{ITERATIONS}"))
    assert code == 0, printed
    assert printed.splitlines()[-1].startswith("equal to the bit: "), printed
    assert "bits may differ" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_that_was_stopped_and_resumed_is_repeated_bit_for_bit_across_the_resume(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path, backend: str
) -> None:
    run_dir = tmp_path / "run"
    arguments = settings(tiny, run_dir, **KEYS | {"trainer.backend": backend})
    run = launch("run", *arguments)
    saved = run_dir / "checkpoints" / "iteration_000002"
    run.wait_for(saved.is_dir, "a checkpoint", TIMEOUT_S)
    run.popen.send_signal(signal.SIGTERM)
    assert (
        ended(run)[0] != 0
        and not (run_dir / "checkpoints" / f"iteration_{ITERATIONS:06d}").exists()
    )
    code, printed = ended(launch("run", *arguments, "checkpoint.resume=auto"))
    assert code == 0, printed
    assert [link.iteration for link in read_chain(run_dir)] == list(range(ITERATIONS))

    code, printed = ended(launch("verify", str(run_dir), "--replay", f"1:{ITERATIONS}"))
    assert code == 0, printed
    assert "equal to the bit: " in printed and "bits may differ" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ANOTHER_NUMBER)
def test_another_number_of_replicas_repeats_it_within_rounding(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path, kind: str
) -> None:
    run_dir = tmp_path / "run"
    keys, others = ANOTHER_NUMBER[kind]
    run = launch("run", *settings(tiny, run_dir, **KEYS | keys))
    assert ended(run)[0] == 0, run.output
    arguments = ["--replay", f"1:{ITERATIONS}", *others]
    code, printed = ended(launch("verify", str(run_dir), *arguments))
    assert code == 0, printed
    before, after = keys.get("trainer.devices", 1), others[0].partition("=")[2]
    assert f"bits may differ: trainer.devices is {before} and {after}" in printed
    assert f"equal within rounding over {ITERATIONS - 1} iterations" in printed, printed
    assert f"checkpoints of version {ITERATIONS}: " in printed, printed

    arguments += ["--work", str(tmp_path / "repeated"), "optimizer.learning_rate=1.01e-3"]
    code, printed = ended(launch("verify", str(run_dir), *arguments))
    assert code == 1 and "first in the configuration" in printed, "negative control"


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_in_bf16_another_number_of_replicas_is_within_rounding_or_undecided_and_a_flipped_reward_is_neither(
    launch: Callable[..., Launched], tiny: Path, tmp_path: Path, backend: str
) -> None:
    run_dir, flip = tmp_path / "run", tmp_path / "flip"
    keys = KEYS | {
        "model.dtype": "bf16",
        "trainer.backend": backend,
        "optimizer.learning_rate": "1e-4",
    }
    run = launch("run", *settings(tiny, run_dir, **keys), **{FLIP_FILE: str(flip)})
    assert ended(run)[0] == 0, run.output
    code, printed = ended(launch("verify", str(run_dir), "--replay", "0:2", "trainer.devices=2"))
    assert code in (0, 3), printed
    assert "bits may differ: trainer.devices is 1 and 2" in printed

    repeat = ["--replay", "0:2", "--work", str(tmp_path / "repeated"), "trainer.devices=2"]
    repetition = launch("verify", str(run_dir), *repeat, **{FLIP_FILE: str(flip)})
    # rewards are tried before the coordinator starts, and a trial is no group
    started = tmp_path / "repeated" / "run" / "logs" / "coordinator.log"
    repetition.wait_for(started.exists, "a coordinator", TIMEOUT_S)
    flip.touch()
    code, printed = ended(repetition)
    assert not flip.exists() and code == 1, "negative control: " + printed
    assert "they differ in iteration 0, first in the rewards: " in printed
