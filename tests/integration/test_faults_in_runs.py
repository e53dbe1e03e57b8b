"""Faults that are put into whole runs end them in the iteration of the fault, with one line that says what is wrong.

Coordinator, engine and trainers are real. Faults of steps and losses in every layout of ranks:
test_gradient_sum.py.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import sender_faults, step_faults
from tests.helpers.fault_in_run import ADAPTERS as OF_ADAPTERS
from tests.helpers.fault_in_run import GROUPS, PUBLISHES, SENT_OLD, SESSIONS, variables
from tests.helpers.launched import Launched, settings
from tests.integration.test_agents_runs import AGENT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
LIMIT_S = 500.0

ADAPTERS = {"trainer.backend": "fsdp", "lora.rank": 4}
RUNS: dict[str, dict[str, object]] = {
    "megatron": {},
    "fsdp": {"trainer.backend": "fsdp"},
    "adapters, merged": ADAPTERS,
    "adapters, alone": {**ADAPTERS, "publish.lora": "adapter"},
    "roles": {"rollout.engines": 2, "trainer.devices": 2, "placement.colocate": "true"},
    "adapters, roles": {
        **ADAPTERS,
        "rollout.engines": 2,
        "trainer.devices": 2,
        "placement.colocate": "true",
    },
    "TP2": {"trainer.devices": 2, "trainer.tensor_parallel": 2},
    "PP2": {"trainer.devices": 2, "trainer.pipeline_parallel": 2},
    "delayed": {"schedule.max_staleness": 1, "publish.mode": "delayed", "schedule.iterations": 4},
    "vllm": {"rollout.backend": "vllm"},
}
FAULTS = {
    **PUBLISHES,
    **GROUPS,
    **OF_ADAPTERS,
    "the step skipped": step_faults.OPTIMIZER["the step skipped"],
    "the gradient behind the log-probs doubled": step_faults.LOSS[
        "the gradient behind the log-probs doubled"
    ],
    "advantages negated inside the loss": step_faults.LOSS["advantages negated inside the loss"],
}
CASES = [
    (run, dtype, fault)
    for run in RUNS
    for dtype in ("fp32", "bf16")
    for fault in FAULTS
    if fault not in OF_ADAPTERS or run == "adapters, alone"
]


@pytest.fixture
def launch(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(name: str, environment: dict[str, str] | None = None, /, **keys: object) -> Launched:
        (tmp_path / name).mkdir()
        base: dict[str, object] = {
            "data.test": "null",
            "rollout.responses_per_prompt": 4,
            "schedule.order": "prompt",
            "schedule.iterations": 3,
            "optimizer.learning_rate": 1e-2,
            "optimizer.warmup_iterations": 0,
            "reward.functions": '[{name: format, pattern: "[0-4]"}]',
            "telemetry.trackers": "[]",
        }
        arguments = settings(tiny, tmp_path / name / "run", **(base | keys))
        started.append(Launched(tmp_path / name, "run", *arguments, variables=environment))
        return started[-1]

    yield start
    for run in started:
        run.close()


def ends_with(run: Launched, message: str, limit_s: float = LIMIT_S) -> None:
    assert run.popen.wait(limit_s) != 0, f"nobody saw it:\n{run.output}"
    logs = "".join(file.read_text() for file in (run.output_file.parent / "run").rglob("*.log"))
    assert re.search(message, run.output + logs), run.output[-3000:]


@pytest.mark.nightly  # a shard that one of two senders shifts is below
@pytest.mark.parametrize(("run", "dtype", "fault"), CASES)
def test_a_fault_ends_the_run_in_its_iteration(
    run: str, dtype: str, fault: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    environment = variables(tmp_path / "site", fault)
    launched = launch("run", environment, **{"model.dtype": dtype, **RUNS[run]})
    ends_with(launched, FAULTS[fault])


TWO_SENDERS: dict[str, dict[str, object]] = {
    "TP2": RUNS["TP2"],
    "fsdp": {"trainer.backend": "fsdp", "trainer.devices": 2},
}
HANGS_LIMIT_S = 300.0
"""Of a run whose sender hangs: four attempts, none of which takes longer than 30 s."""
FEW_OF_SENDERS = [("TP2", "bf16", sender_faults.SHIFTED)]


@pytest.mark.parametrize(
    ("run", "dtype", "fault"),
    [
        pytest.param(
            run,
            dtype,
            fault,
            marks=[] if (run, dtype, fault) in FEW_OF_SENDERS else [pytest.mark.nightly],
        )
        for run in TWO_SENDERS
        for dtype in ("fp32", "bf16")
        for fault in sender_faults.FAULTS
    ],
)
def test_a_fault_of_one_of_two_senders_ends_the_run_in_its_iteration(
    run: str, dtype: str, fault: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    keys = _of_two_senders(run, dtype)
    if fault == sender_faults.HANGS:
        keys["run.restarts"] = 0
    launched = launch("run", variables(tmp_path / "site", fault), **keys)
    limit_s = HANGS_LIMIT_S if fault == sender_faults.HANGS else LIMIT_S
    ends_with(launched, sender_faults.FAULTS[fault], limit_s)
    records = tmp_path / "run" / "run" / "metrics.jsonl"
    num_iterations = len(records.read_text().splitlines()) if records.exists() else 0
    # the record of iteration 0 is written while version 1 is published
    assert num_iterations <= (0 if fault in sender_faults.ANNOUNCED else 1)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("run", TWO_SENDERS)
def test_a_rank_that_hangs_while_another_one_gathers_ends_the_run(
    run: str, dtype: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    keys = {**_of_two_senders(run, dtype), "publish.senders": "leader", "run.restarts": 0}
    launched = launch("run", variables(tmp_path / "site", sender_faults.HANGS), **keys)
    ends_with(launched, sender_faults.HANGS_GATHERING, HANGS_LIMIT_S)


@pytest.mark.nightly
@pytest.mark.parametrize("senders", ["shards", "leader"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("run", TWO_SENDERS)
def test_a_sender_that_hung_once_sends_again_and_the_run_ends_well(
    run: str, dtype: str, senders: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """The weights are those of a run whose senders do not hang."""
    keys = {
        **_of_two_senders(run, dtype),
        "publish.senders": senders,
        "schedule.iterations": 2,
    }
    links = {}
    for name, fault in {"stuck": sender_faults.STUCK_ONCE, "whole": ""}.items():
        environment = variables(tmp_path / "site", fault) if fault else None
        launched = launch(name, environment, **keys)
        assert launched.popen.wait(HANGS_LIMIT_S) == 0, launched.output
        chain = (tmp_path / name / "run" / "chain.jsonl").read_text().splitlines()
        links[name] = [json.loads(line)["weights_after"] for line in chain]
    assert links["stuck"] == links["whole"] and len(links["whole"]) == 2
    again = (
        r"weight version 1 is published again: .*not done within.*; nothing is heard of these "
        r"trainer ranks: (0, )?1;"
    )
    logs = [file.read_text() for file in (tmp_path / "stuck" / "run").rglob("*.log")]
    assert re.search(again, "".join(logs)), "".join(logs)[-3000:]


def _of_two_senders(run: str, dtype: str) -> dict[str, object]:
    return {
        "model.dtype": dtype,
        "publish.senders": "shards",
        "publish.timeout_s": sender_faults.PUBLISH_TIMEOUT_S,
        **TWO_SENDERS[run],
    }


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("run", RUNS)
def test_without_a_fault_the_same_run_ends_well(
    run: str, dtype: str, launch: Callable[..., Launched]
) -> None:
    every = {"model.dtype": dtype, "schedule.finite_difference_every": 1, **RUNS[run]}
    launched = launch("run", **every)
    assert launched.popen.wait(LIMIT_S) == 0, launched.output


AFTER_RESUME = {
    name: step_faults.ALL[name]
    for name in (
        "the step skipped",
        "the rate of the update before",
        "moments zeroed in the step",
        "gradients not zeroed",
        "advantages negated inside the loss",
        "the policy copied into the reference",
    )
}
AFTER_RESUME[SENT_OLD] = (
    PUBLISHES[SENT_OLD].replace("version 1", r"version \d").replace("version 0", r"version \d")
)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("fault", AFTER_RESUME)
def test_a_fault_after_a_resume_ends_the_run(
    fault: str, backend: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    keys: dict[str, Any] = {
        "trainer.backend": backend,
        "checkpoint.every": 1,
        "algorithm.kl_coef": 0.1,
        "schedule.updates_per_iteration": 2,
        "optimizer.warmup_iterations": 6,
        "run.dir": tmp_path / "run",
    }
    before = launch("before", **keys, **{"schedule.iterations": 2})
    assert before.popen.wait(LIMIT_S) == 0, before.output
    resumed = {**keys, "checkpoint.resume": "auto", "schedule.iterations": 5}
    after = launch("after", variables(tmp_path / "site", fault), **resumed)
    assert after.popen.wait(LIMIT_S) != 0, f"nobody saw it:\n{after.output}"
    logs = "".join(file.read_text() for file in (tmp_path / "run").rglob("*.log"))
    assert re.search(AFTER_RESUME[fault], after.output + logs), after.output[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", SESSIONS)
def test_a_fault_in_a_gateways_sessions_ends_the_run(
    fault: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    keys = {
        "environment.name": "agents",
        "environment.max_turns": 3,
        "agent.command": shlex.join([sys.executable, str(agent)]),
        "agent.programs": 1,
        "data.max_prompt_tokens": 64,
        "rollout.max_response_tokens": 48,
    }
    ends_with(launch("run", variables(tmp_path / "site", fault), **keys), SESSIONS[fault])
