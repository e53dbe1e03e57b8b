"""Programs in responses: the tests of published layouts decide, and whatever a program does stays in its cell."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections import CodeConfig, RewardConfig, RewardFunction
from pa_npu.errors import DataError
from pa_npu.rewards import sandbox
from pa_npu.rewards.code_reward import CodeReward
from pa_npu.rewards.code_tests import program_of, row_tests, same_output, same_result
from pa_npu.rewards.pool import RewardPool, check_reward_functions
from pa_npu.rewards.sandbox import Limits, Outcome, SandboxFailed
from pa_npu.rewards.types import RewardInput

LIMITS = Limits(wall_s=20.0, cpu_s=10, memory_bytes=512 << 20)


def response(program: str) -> str:
    return f"I think\n```python\nwrong = 1\n```\nno, rather\n```python\n{program}\n```\nwhich is it."


def group(tests: Any, *programs: str, **row: Any) -> RewardInput:
    return RewardInput(
        "Write it", "", [response(text) for text in programs], [9] * len(programs), {"tests": tests, **row}
    )


async def rewards(given: RewardInput, **settings: Any) -> list[float | None]:
    return await CodeReward(CodeConfig(timeout_s=settings.pop("timeout_s", 20.0), **settings))(given)


async def run(program: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Outcome:
    return await sandbox.run(["{files}/program.py"], stdin, limits, {"program.py": program})


DOUBLE = "print(2 * int(input()))"
LAYOUTS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "APPS": ({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}, DOUBLE, "print(2)", {}),
    "APPS as text": (json.dumps({"inputs": [["1", ""]], "outputs": [["2"]]}), DOUBLE, "print(1)", {}),
    "APPS with a function": (
        {"fn_name": "double", "inputs": [[1], [[2, 3]]], "outputs": [2, [[2, 3, 2, 3]]]},
        "class Solution:\n    def double(self, x):\n        print('talks')\n        return 2 * x",
        "def double(x):\n    return x",
        {},
    ),
    "LiveCodeBench": ([{"input": "4\n", "output": "8", "testtype": "stdin"}], DOUBLE, "print(input())", {}),
    "LiveCodeBench with a function": (
        [{"input": '[1, 2]\n"a"', "output": '[1, 2, "a"]', "fn_name": "add"}],
        "def add(items, item):\n    return items + [item]",
        "def add(items, item):\n    return items",
        {},
    ),
    "MBPP": (
        ["assert f(2) == 4", "assert f(0) == 0"],
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return x + 2",
        {},
    ),
    "HumanEval": (
        "def check(candidate):\n    assert candidate('a') == 'aa'\n",
        "def twice(x):\n    return 2 * x",
        "def twice(x):\n    return x",
        {"entry_point": "twice"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_program_that_passes_all_tests_of_a_published_layout_has_one_and_others_zero(layout: str) -> None:
    tests, right, wrong, row = LAYOUTS[layout]
    given = group(tests, right, wrong, "syntax error here", "import sys; sys.exit(0)", **row)
    given = RewardInput(given.prompt, "", [*given.responses, "no program"], [9] * 5, given.row)
    assert await rewards(given) == [1.0, 0.0, 0.0, 0.0, 0.0]


async def test_the_share_of_tests_and_the_first_ones_alone_can_be_what_counts() -> None:
    tests = {"inputs": ["1", "2", "0", "3"], "outputs": ["2", "2", "0", "6"]}
    assert await rewards(group(tests, DOUBLE), score="share") == [0.75]
    assert await rewards(group(tests, DOUBLE), score="share", most_tests=2) == [0.5]
    assert await rewards(group(["assert f(1)", "assert f(0)", "assert 1 / 0"], "f = bool"), score="share") == [1 / 3]


def test_outputs_are_compared_as_contests_do() -> None:
    assert (
        same_output("1 2 \n3\n\n", "1 2\n3") and same_output("0.3333333", "0.33333333") and same_output("a  b", "a b")
    )
    assert not same_output("1 2", "1 3") and not same_output("1", "1.5") and not same_output("", "0")
    assert not same_output("3", "4") and not same_output("100000001", "100000002")
    assert (
        same_result([1], [[1]]) and same_result(0.1 + 0.2, 0.3) and not same_result("1", 1) and not same_result(None, 1)
    )
    assert program_of("```python\na\n```\n```text\nb\n```") == "a\n" and program_of("```py\nb") == "b"
    assert program_of("none") is None and program_of("```\n \n```") is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, r"the row has no column 'tests' \(it has other\)"),
        ({"tests": []}, "holds no test"),
        ({"tests": 5}, "has no layout that is known"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "has no layout that is known"),
        ({"tests": [{"in": 1}]}, "has no layout that is known"),
    ],
)
def test_tests_that_cannot_be_read_are_one_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        row_tests(row, "tests")
    assert "\n" not in str(refused.value)


HOSTILE = {
    "endless": ("while True: pass", Limits(wall_s=1.5, cpu_s=20)),
    "sleeping": ("import time; time.sleep(600)", Limits(wall_s=1.0)),
    "processor time": ("while True: pass", Limits(wall_s=60.0, cpu_s=1)),
    "much memory": ("x = bytearray(1 << 33)", LIMITS),
    "memory by and by": ("x = []\nwhile True: x.append(bytearray(1 << 22))", LIMITS),
    "huge output": ("while True: print('x' * 5000)", LIMITS),
    "huge errors": ("import sys\nwhile True: print('x' * 5000, file=sys.stderr)", LIMITS),
    "large file": ("open('large', 'wb').write(bytes(1 << 28))", LIMITS),
    "many files open": ("x = [open(__file__) for _ in range(10000)]", LIMITS),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_program_that_takes_too_much_is_ended_and_costs_nothing_else(kind: str) -> None:
    program, limits = HOSTILE[kind]
    start_s = time.monotonic()
    outcome = await run(program, limits=limits)
    assert (outcome.ended, outcome.code) != ("itself", 0), kind
    assert time.monotonic() - start_s < 45
    assert len(outcome.stdout) <= limits.output_bytes and len(outcome.stderr) <= limits.output_bytes


def alive(mark: str) -> int:
    found = 0
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                found += mark.encode() in (directory / "cmdline").read_bytes()
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)",
    ],
    ids=["fork bomb", "a process that leaves its group"],
)
async def test_no_process_outlives_its_cell_and_their_number_is_limited(program: str) -> None:
    outcome = await run(program, limits=Limits(wall_s=2.0, processes=16))
    assert outcome.ended in ("timeout", "itself")
    counted = await run(
        "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(60)\n        n += 1\n"
        "except OSError:\n    pass\nprint(n)",
        limits=Limits(wall_s=20.0, processes=16),
    )
    if os.geteuid() == 0 or "processes" in counted.isolated:
        assert int(counted.stdout) < 20
    deadline_s = time.monotonic() + 20
    while alive("pa_npu-cell-") and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert not alive("pa_npu-cell-")


async def test_a_program_has_no_network_no_keys_and_no_file_of_the_run_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    target = tmp_path / "of_the_run"
    target.write_text("as it was")
    tmp_path.chmod(0o777)
    target.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import json, os, socket
found = {{"env": dict(os.environ), "here": os.listdir("."), "wrote": [], "read": ""}}
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5)
    found["network"] = True
except OSError as error:
    found["network"] = False
for path in ({str(target)!r}, "/tmp/pa_npu_was_here", "/etc/pa_npu_was_here", "own"):
    try:
        with open(path, "a") as file:
            file.write("written")
        found["wrote"].append(path)
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        found["read"] += open(f"/proc/{{pid}}/environ").read()
    except OSError:
        pass
print(json.dumps(found))
"""
        outcome = await run(program)
    found = json.loads(outcome.stdout)
    assert "secret" not in json.dumps(found["env"]) and "PYTHONPATH" not in found["env"] and found["here"] == []
    if "network" in outcome.isolated:
        assert not found["network"]
    if "files" in outcome.isolated:
        assert found["wrote"] == ["own"] and target.read_text() == "as it was"
        assert "secret" not in found["read"]
    assert not Path("/tmp/pa_npu_was_here").exists()


async def test_without_namespaces_limits_hold_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The system's refusal is put in place of unshare."""
    child = tmp_path / "sandbox_child.py"
    source = Path(sandbox._CHILD).read_text()
    refusing = source.replace("_libc.unshare(", "_refuse(").replace(
        "def main()", "def _refuse(_: int) -> int:\n    ctypes.set_errno(1)\n    return -1\n\n\ndef main()"
    )
    assert refusing != source
    child.write_text(refusing)
    monkeypatch.setattr(sandbox, "_CHILD", child)
    monkeypatch.setattr(sandbox, "_said", set())
    if os.geteuid() == 0:
        # the interpreter may be root's alone; the program's user id is not what this is about
        child.write_text(
            refusing.replace("os.strerror(ctypes.get_errno()), was_root", "os.strerror(ctypes.get_errno()), False")
        )
    outcome = await run("import os; print(len(os.environ))")
    assert outcome.code == 0 and outcome.isolated == ()
    orphan = await run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(600)\nprint('left it')"
    )
    assert orphan.stdout == b"left it\n"
    assert (await run("while True: pass", limits=Limits(wall_s=1.0))).ended == "timeout"
    assert caplog.text.count("this system grants no namespaces (Operation not permitted)") == 1
    deadline_s = time.monotonic() + 20
    while alive("pa_npu-cell-") and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert not alive("pa_npu-cell-")
    with pytest.raises(SandboxFailed, match=r"reward\.code\.isolation: required, but this system grants no namespaces"):
        await run("print(1)", limits=Limits(required=True))


async def test_in_the_pool_programs_of_many_groups_are_scored_and_a_broken_row_is_no_verdict() -> None:
    config = RewardConfig(functions=(RewardFunction(name="code"),), code=CodeConfig(timeout_s=30.0))
    tests = {"inputs": ["3"], "outputs": ["6"]}
    async with RewardPool(config) as pool:
        good, broken = await asyncio.gather(
            pool.score(group(tests, DOUBLE, "print(7)")), pool.score(group(5, DOUBLE, "x"))
        )
    assert good.total.tolist() == [1, 0] and good.correct.tolist() == [True, False] and good.errors == ()
    assert broken.no_verdict == {"code": 2} and "no layout that is known" in broken.errors[0]
    assert broken.total[0] == broken.total[1]


def full(**code: Any) -> Config:
    reward = {"functions": [{"name": "code"}], "code": code}
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "reward": reward})


def test_the_check_before_a_run_tries_the_sandbox_and_reads_a_rows_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reward_functions(full(), group(["assert True"], "x = 1"))
    with pytest.raises(
        DataError, match=r"reward\.functions: code fails for a group .* no column 'cases' \(it has tests\)"
    ):
        check_reward_functions(full(tests="cases"), group(["assert True"], "x = 1"))
    tree = full().model_dump(mode="json") | {"reward": {"code": {"most_tests": 3}}}
    with pytest.raises(ValueError, match=r"reward\.code: would be read by nothing"):
        Config.model_validate(tree)


async def test_packages_of_this_environment_are_there_for_programs() -> None:
    assert await rewards(
        group(["assert mean == 2.0"], "import numpy\nmean = float(numpy.mean([1, 2, 3]))"), timeout_s=60
    ) == [1.0]
    assert sys.executable
