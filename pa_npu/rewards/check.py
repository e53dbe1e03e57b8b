"""Reward worker processes as their parent sees them: start, what they read first, and the check before a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.sections import JUDGE_ATTEMPTS
from pa_npu.control.worker_process import WorkerProcess, json_line, run_worker
from pa_npu.errors import DataError, DeadlineExceeded
from pa_npu.rewards.functions import CONCURRENT, FunctionSpec, build_function, function_specs
from pa_npu.rewards.types import RewardInput, group_line

STARTUP_TIMEOUT_S = 120.0  # importing math-verify and a user's module on a busy machine
WORKER = "pa_npu.rewards.worker"


async def start_worker(first: Mapping[str, Any]) -> WorkerProcess:
    """Return a process whose functions are loaded. first: what it reads first.

    Raises DataError where a function cannot be used, DeadlineExceeded where loading takes too long.
    """
    try:
        worker = await WorkerProcess.start([WORKER], first, STARTUP_TIMEOUT_S)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"a reward worker did not load its functions within {STARTUP_TIMEOUT_S:.0f} s; make them import faster"
        ) from None
    try:
        _check_ready(worker.ready)
    except BaseException:
        await worker.reap()
        raise
    return worker


def check_reward_functions(config: Config, sample: RewardInput | None = None, ask_judge: bool = True) -> list[str]:
    """Loads the reward functions as the workers will, and rewards one group with the user's, the judge and the sandbox.

    Call it before a run; it returns the lines that the run begins with. sample: a group of the dataset; None only loads them.
    ask_judge: False sends the judge nothing. Raises UserError where one cannot be used.
    """
    specs = function_specs(config.reward, config.run.dir, config.rollout.max_response_tokens)
    own = tuple(spec for spec in specs if ":" in spec.name)
    for spec in specs:
        if spec not in own and spec.name not in CONCURRENT:
            build_function(spec)
    others = _try(config, own, sample, waits=False)["others"] if own else []
    waiting = tuple(
        spec
        for spec in specs
        if spec.label in others or spec.name == "code" or (spec.name == "judge" and ask_judge and sample)
    )
    isolation = _try(config, waiting, sample, waits=True)["isolation"] if waiting else ""
    return [f"reward.code: programs of responses run at isolation {isolation}"] if isolation else []


def _try(config: Config, specs: Sequence[FunctionSpec], sample: RewardInput | None, *, waits: bool) -> dict[str, Any]:
    """One start of a worker's process, with one group where there is one. Returns its first reply."""
    names = ", ".join(spec.name for spec in specs)
    first = first_message(specs, config.reward.timeout_s, waits=waits, trial=True)
    lines = [json_line(first)] + ([group_line(0, sample)] if sample else [])
    limit_s = STARTUP_TIMEOUT_S + config.reward.timeout_s
    if any(spec.name == "judge" for spec in specs):
        limit_s += JUDGE_ATTEMPTS * config.reward.judge.timeout_s
    output, code = run_worker([WORKER], b"".join(lines), limit_s)
    if code is None and not output:
        raise DataError(f"reward.functions: importing {names} takes more than {limit_s:.0f} s; make the import faster")
    head, *others = output.splitlines() or [b"{}"]
    ready = _check_ready(json.loads(head))
    if sample is None:
        return ready
    replies = [reply for reply in map(json.loads, others) if "id" in reply]
    if not replies:
        raise DataError(
            f"reward.functions: {names} did not reward a group of the dataset: the worker died or took more than "
            f"{limit_s:.0f} s; correct what its output above says"
        )
    if replies[0].get("fatal"):
        raise DataError(replies[0]["fatal"])
    for label, error in replies[0]["errors"].items():
        what = f"reward.judge.url: {config.reward.judge.url}" if label == "judge" else f"reward.functions: {label}"
        remedy = "let its server answer" if label == "judge" else "correct the function"
        raise DataError(f"{what} fails for a group of the dataset: {error}; {remedy}")
    return ready


def sample_group(prompt: str, answer: str, row: Mapping[str, Any], size: int) -> RewardInput:
    """A made-up group to try reward functions on: every other response is right."""
    responses = [f"#### {answer}" if number % 2 == 0 else "I do not know." for number in range(size)]
    return RewardInput(prompt, answer, responses, [8] * size, row)


def first_message(
    specs: Sequence[FunctionSpec], timeout_s: float, *, waits: bool, trial: bool = False
) -> dict[str, Any]:
    """Returns the first message to pa_npu.rewards.worker."""
    return {"functions": [asdict(spec) for spec in specs], "waits": waits, "timeout_s": timeout_s, "trial": trial}


def _check_ready(reply: dict[str, Any]) -> dict[str, Any]:
    if not reply:
        raise DataError(
            "reward.functions: the reward worker died while loading them; correct what its output above says"
        )
    if "unusable" in reply:
        raise DataError(reply["unusable"])
    return reply
