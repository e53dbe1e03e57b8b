"""The reward `code`: the program in a response passes the tests of its row, each run in a cell of its own (sandbox.py)."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from pa_npu.config.sections import MOST_TESTS, CodeConfig
from pa_npu.errors import DataError
from pa_npu.rewards.code_tests import CodeTest, program_of, row_tests, same_output, same_result
from pa_npu.rewards.sandbox import Limits, Outcome, SandboxFailed, run
from pa_npu.rewards.turns import Turns
from pa_npu.rewards.types import RewardInput

_HARNESS = Path(__file__).with_name("code_harness.py")
_OUTPUT_BYTES = 256 << 10  # of standard output, and of errors
_ATTEMPTS = 3  # at a cell that could not be made


class CodeReward:
    """async call: from a group to a reward per response; None where the sandbox, not the program, has failed.

    1 where all tests pass, else 0; with score=share the share of tests that pass. A response without a program has 0.
    """

    def __init__(self, config: CodeConfig, programs: int) -> None:
        self._config = config
        self._turns = Turns(programs)
        self._groups = itertools.count()
        self._harness = _HARNESS.read_text(encoding="utf-8")
        self.problem: str | None = None
        self._limits = Limits(
            wall_s=config.timeout_s,
            cpu_s=max(1, round(config.timeout_s)),
            memory_bytes=config.memory_mib << 20,
            output_bytes=_OUTPUT_BYTES,
            require=config.require,
        )

    async def __call__(self, group: RewardInput) -> list[float | None]:
        try:
            tests = row_tests(group.row, self._config.tests)[:MOST_TESTS]
        except DataError as error:
            self.problem = str(error)
            return [None] * len(group.responses)
        programs = [program_of(response) for response in group.responses]
        number = next(self._groups)
        known = {program: asyncio.ensure_future(self._score(number, program, tests)) for program in programs if program}
        try:
            await asyncio.gather(*known.values())
        finally:
            for task in known.values():
                task.cancel()
        return [known[program].result() if program else 0.0 for program in programs]

    async def check(self) -> str:
        """How programs are isolated, in words. Raises SandboxFailed where they cannot be run here, or less isolated than wanted."""
        outcome = await run(["-c", ""], b"", self._limits, {})
        return outcome.isolation

    async def _score(self, group: int, program: str, tests: Sequence[CodeTest]) -> float | None:
        """Tests by standard input are a cell each, all others one together, so that a program loads once for them."""
        together = [test for test in tests if test.kind != "stdin"]
        batches = [[test] for test in tests if test.kind == "stdin"] + ([together] if together else [])
        passed = 0
        try:
            for batch in batches:
                passed_here = await self._run(group, program, batch)
                passed += passed_here
                if passed_here < len(batch) and self._config.score == "all":
                    return 0.0
        except SandboxFailed as failed:
            self.problem = str(failed)
            return None
        return passed / len(tests)

    async def _run(self, group: int, program: str, batch: Sequence[CodeTest]) -> int:
        """How many tests of a batch pass."""
        mark = secrets.token_hex(16)
        if batch[0].kind == "stdin":
            kind, stdin = "script", str(batch[0].given)
        else:
            kind, stdin = "tests", json.dumps({"mark": mark, "tests": [[test.given, test.name] for test in batch]})
        arguments = ["{files}/harness.py", "{files}/program.py", kind, "{packages}"]
        files = {"harness.py": self._harness, "program.py": program}
        for attempt in range(_ATTEMPTS):
            try:
                async with self._turns.of(group):
                    outcome = await run(arguments, stdin.encode("utf-8", "replace"), self._limits, files)
                break
            except SandboxFailed:
                if attempt == _ATTEMPTS - 1:
                    raise
        return _passed(outcome, batch, mark)


def _passed(outcome: Outcome, batch: Sequence[CodeTest], mark: str) -> int:
    text = outcome.stdout.decode("utf-8", "replace")
    if batch[0].kind == "stdin":
        right = outcome.ended == "itself" and outcome.code == 0 and same_output(text, str(batch[0].wanted))
        return int(right)
    answers = []
    for line in text.splitlines():
        if line.startswith(f"{mark} "):
            try:
                answers.append(json.loads(line.removeprefix(f"{mark} ")))
            except ValueError:
                answers.append({})
    return sum(
        answer.get("passed") is True if test.kind == "assertion" else same_result(answer.get("result"), test.wanted)
        for answer, test in zip(answers, batch, strict=False)
        if "failed" not in answer
    )
