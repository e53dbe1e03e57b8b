"""The reward `code`: the program in a response passes the tests of its row, each run in a cell of its own (sandbox.py).

The column of tests holds one of the layouts of published datasets, as it is or as JSON text:

    {"inputs": [...], "outputs": [...]}                      standard input and output (APPS, TACO, CodeContests as flattened)
    the same with "fn_name": NAME                            arguments and result of a function, or of Solution().NAME
    [{"input": text, "output": text}, ...]                   standard input and output (LiveCodeBench)
    ["assert f(1) == 2", ...]                                assertions (MBPP)
    "def check(candidate): ..."  and a column entry_point    assertions in a function (HumanEval); other text is run as it is
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pa_npu.config.sections.rollout import MOST_TESTS, CodeConfig
from pa_npu.control.tasks import Turns
from pa_npu.errors import DataError
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.sandbox import Limits, Outcome, SandboxFailed, run

_HARNESS = Path(__file__).with_name("code_harness.py")
_OUTPUT_BYTES = 256 << 10  # of standard output, and of errors
_ATTEMPTS = 3  # at a cell that could not be made
_BLOCK = re.compile(r"```([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = frozenset({"", "python", "python3", "py"})
_RELATIVE_TOLERANCE = 1e-6  # of numbers with a fraction, as graders of programming contests have it


@dataclass(frozen=True)
class CodeTest:
    """kind stdin: given is what the program reads, wanted what it must write. call: given are arguments, wanted the result of
    `name`. assertion: given is a piece of program that must not fail."""

    kind: Literal["stdin", "call", "assertion"]
    given: Any
    wanted: Any = None
    name: str = ""


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


def row_tests(row: Mapping[str, Any], column: str) -> list[CodeTest]:
    """The tests of a row; at least one. Raises DataError in one line."""
    found = row.get(column)
    if found is None:
        raise DataError(
            f"reward.code.tests: the row has no column {column!r} (it has {', '.join(map(str, row))}); name the one with the tests"
        )
    if isinstance(found, str):
        found = _json_or_text(found)
    try:
        tests = _tests(found, row)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"reward.code.tests: column {column!r} has no layout that is known ({type(error).__name__}: {error}); "
            f"docs/rewards.md lists them"
        ) from None
    if not tests:
        raise DataError(f"reward.code.tests: column {column!r} holds no test; leave such rows out")
    return tests


def program_of(response: str) -> str | None:
    """The last block of Python code of a response; None where there is none."""
    blocks = [text for language, text in _BLOCK.findall(response) if language.lower() in _PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def same_output(written: str, wanted: str) -> bool:
    """Equal line by line but for space at their ends, or word by word, where numbers with a fraction may be rounded."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (written, wanted)]
    if lines[0] == lines[1]:
        return True
    words = [text.split() for text in (written, wanted)]
    return len(words[0]) == len(words[1]) and all(map(_same_word, *words))


def same_result(found: Any, wanted: Any) -> bool:
    """Compares two results of a call, both as JSON. A list of one equals its element, as APPS writes results."""
    if found == wanted:
        return True
    if isinstance(wanted, list) and len(wanted) == 1 and found == wanted[0]:
        return True
    if isinstance(found, float) and isinstance(wanted, (int, float)):
        return math.isclose(found, wanted, rel_tol=_RELATIVE_TOLERANCE)
    return False


def _tests(found: Any, row: Mapping[str, Any]) -> list[CodeTest]:
    if isinstance(found, str):
        entry = row.get("entry_point")
        return [CodeTest("assertion", f"{found}\ncheck({entry})\n" if entry else found)]
    if isinstance(found, Mapping):
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        found = [{"fn_name": found.get("fn_name"), "input": given, "output": wanted} for given, wanted in pairs]
    if not isinstance(found, Sequence):
        raise TypeError(f"a {type(found).__name__}")
    return [_one(test) for test in found]


def _one(test: Any) -> CodeTest:
    if isinstance(test, str):
        return CodeTest("assertion", test)
    name = test.get("fn_name") or test.get("func_name")
    if name:
        return CodeTest("call", _arguments(test["input"]), _value(test["output"]), str(name))
    return CodeTest("stdin", _text(test["input"]), _text(test["output"]))


def _text(value: Any) -> str:
    """APPS has lists of lines in some rows."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """LiveCodeBench has one JSON value a line."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    return list(value)


def _value(value: Any) -> Any:
    return _json_or_text(value) if isinstance(value, str) else value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _same_word(first: str, second: str) -> bool:
    if first == second:
        return True
    if "." not in first + second:
        return False
    try:
        return math.isclose(float(first), float(second), rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-9)
    except ValueError:
        return False
