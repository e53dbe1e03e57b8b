"""The reward `code`: runs the program of a response against the tests of its row.

Each run is in a cell of its own (sandbox.py).


response ──code_program──> program ─┐
row ──code_tests──> tests ──────────┴──code_harness, in a cell──> output ──code_results──> passed or not
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pa_npu.config.sections.reward import CodeConfig
from pa_npu.control.tasks import GroupSemaphore
from pa_npu.errors import DataError
from pa_npu.rewards.code_program import whole_program
from pa_npu.rewards.code_results import same_output, same_result
from pa_npu.rewards.code_tests import CodeTest, row_tests
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.sandbox import CellLimits, ProgramOutcome, SandboxFailed, run
from pa_npu.rewards.thoughts import without_thought

_HARNESS = Path(__file__).with_name("code_harness.py")
_OUTPUT_BYTES = 256 << 10  # of standard output, and of errors, beside what a test wants printed
_ATTEMPTS = 3  # at a cell that could not be made
# A program that passes wherever programs can run: it is started as a file and as functions.
_TRIAL = (
    "def double(x):\n    return 2 * x\n\n\nif __name__ == '__main__':\n    "
    "print(double(int(input())))\n"
)
_TRIAL_TESTS = (CodeTest("stdin", "21", ("42",)), CodeTest("call", [21], (42,), "double"))


class CodeReward:
    """Rewards a group: called with a RewardInput, returns a reward per response.

    A reward is 1 if all tests pass, else 0; with score=share it is the share of tests that pass. A
    response without a program gets 0. It is None if the sandbox failed, not the program; `problem`
    then says why.
    """

    def __init__(self, config: CodeConfig, programs: int) -> None:
        self._config = config
        self._turns = GroupSemaphore(programs)
        self._groups = itertools.count()
        self._harness = _HARNESS.read_text(encoding="utf-8")
        self.problem: str | None = None
        self._limits = CellLimits(
            wall_s=config.timeout_s,
            cpu_s=max(1, round(config.timeout_s)),
            memory_bytes=config.memory_mib << 20,
            output_bytes=_OUTPUT_BYTES,
            require=config.require,
        )

    async def __call__(self, group: RewardInput) -> list[float | None]:
        try:
            tests = row_tests(group.row, self._config.tests)
        except DataError as error:
            self.problem = str(error)
            return [None] * len(group.responses)
        needed = frozenset().union(*(test.needed for test in tests))
        programs = []
        for response in group.responses:
            text = without_thought(group.prompt, response)
            programs.append(whole_program(text, group.row, needed))
        # Equal programs of a group run once.
        number = next(self._groups)
        scores: dict[str, asyncio.Future[float | None]] = {}
        for program in programs:
            if program and program not in scores:
                scores[program] = asyncio.ensure_future(self._score(number, program, tests))
        try:
            await asyncio.gather(*scores.values())
        finally:
            for task in scores.values():
                task.cancel()
        return [scores[program].result() if program else 0.0 for program in programs]

    async def check(self) -> str:
        """Runs a program that passes anywhere, in the way that responses' programs will run.

        Returns its isolation in words. Raises SandboxFailed if it does not pass, or is less
        isolated than the configuration demands.
        """
        isolation = ""
        for test in _TRIAL_TESTS:
            outcome, mark = await self._outcome(0, _TRIAL, [test])
            if not _num_passed(outcome, [test], mark):
                raise SandboxFailed(
                    "a program of four lines does not pass its test with reward.code.memory_mib = "
                    f"{self._config.memory_mib} and reward.code.timeout_s = "
                    f"{self._config.timeout_s:g} ({_ending(outcome)}); raise them"
                )
            isolation = outcome.isolation
        return isolation

    async def _score(self, group: int, program: str, tests: Sequence[CodeTest]) -> float | None:
        """Returns the reward of a program, or None if the sandbox failed.

        Each test by standard input has a cell of its own. All others share one, so that the program
        is loaded once for them.
        """
        batches = [[test] for test in tests if test.kind == "stdin"]
        together = [test for test in tests if test.kind != "stdin"]
        if together:
            batches.append(together)
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
        """Returns how many tests of a batch pass."""
        outcome, mark = await self._outcome(group, program, batch)
        return _num_passed(outcome, batch, mark)

    async def _outcome(
        self, group: int, program: str, batch: Sequence[CodeTest]
    ) -> tuple[ProgramOutcome, str]:
        """Runs a program for a batch of tests; returns the outcome and the mark of its answers."""
        mark = secrets.token_hex(16)
        if batch[0].kind == "stdin":
            kind = "script"
            stdin = str(batch[0].content)
        else:
            fields = ("content", "name", "whole_keys", "cases", "by_pytest")
            tests = [{field: getattr(test, field) for field in fields} for test in batch]
            kind = "tests"
            stdin = json.dumps({"mark": mark, "tests": tests})
        arguments = ["{files}/harness.py", "{files}/program.py", kind, "{packages}"]
        files = {"harness.py": self._harness, "program.py": program}
        wanted_bytes = sum(len(json.dumps(test.wanted)) for test in batch)
        output_bytes = min(
            _OUTPUT_BYTES + 2 * wanted_bytes, max(_OUTPUT_BYTES, self._limits.files_bytes)
        )
        limits = replace(self._limits, output_bytes=output_bytes)
        for attempt in range(_ATTEMPTS):
            try:
                async with self._turns.request(group):
                    outcome = await run(arguments, stdin.encode("utf-8", "replace"), limits, files)
                break
            except SandboxFailed:
                if attempt == _ATTEMPTS - 1:
                    raise
        return outcome, mark


def _num_passed(outcome: ProgramOutcome, batch: Sequence[CodeTest], mark: str) -> int:
    """Returns how many tests of a batch pass, by the output of its run."""
    text = outcome.stdout.decode("utf-8", "replace")
    if batch[0].kind == "stdin":
        has_ended_well = outcome.ended == "itself" and outcome.code == 0
        return int(has_ended_well and same_output(text, batch[0].wanted[0]))
    passed = 0
    for answer, test in zip(_answers(text, mark), batch, strict=False):
        if test.kind == "assertion":
            passed += answer.get("passed") is True
        elif "result" in answer:
            passed += any(same_result(answer["result"], wanted) for wanted in test.wanted)
    return passed


def _answers(text: str, mark: str) -> list[dict[str, object]]:
    """Returns the harness's answers, one for each test that ran; an unreadable one is empty."""
    answers = []
    for line in text.splitlines():
        if line.startswith(f"{mark} "):
            try:
                answers.append(json.loads(line.removeprefix(f"{mark} ")))
            except ValueError:
                answers.append({})
    return answers


def _ending(outcome: ProgramOutcome) -> str:
    """Describes in a line how a program ended that should have passed."""
    last_line = outcome.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    if outcome.ended != "itself":
        how = {"timeout": "it took longer", "output": "it wrote too much"}[outcome.ended]
    else:
        how = f"it ended with status {outcome.code}"
    return f"{how}: {last_line}" if last_line else how
