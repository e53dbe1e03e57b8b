"""Programs in responses, run in their cells: the tests of published layouts decide, and a program runs as a file does."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.reward import CodeConfig, RewardConfig, RewardFunction
from pa_npu.errors import DataError
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.code_reward import CodeReward
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.pool import RewardPool
from pa_npu.rewards.sandbox import SandboxFailed


def response(program: str) -> str:
    return (
        f"I think\n```python\nwrong = 1\n```\nno, rather\n```python\n{program}\n```\nwhich is it."
    )


def group(tests: Any, *programs: str, **row: Any) -> RewardInput:
    return RewardInput(
        "Write it",
        "",
        [response(text) for text in programs],
        [9] * len(programs),
        {"tests": tests, **row},
    )


async def rewards(arguments: RewardInput, **settings: Any) -> list[float | None]:
    return await CodeReward(CodeConfig(timeout_s=settings.pop("timeout_s", 20.0), **settings), 2)(
        arguments
    )


DOUBLE = "print(2 * int(input()))"
LAYOUTS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "APPS": ({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}, DOUBLE, "print(2)", {}),
    "APPS as text": (
        json.dumps({"inputs": [["1", ""]], "outputs": [["2"]]}),
        DOUBLE,
        "print(1)",
        {},
    ),
    "APPS with a function": (
        {"fn_name": "double", "inputs": [[1], [[2, 3]]], "outputs": [2, [[2, 3, 2, 3]]]},
        "class Solution:\n    def double(self, x):\n        print('talks')\n        return 2 * x",
        "def double(x):\n    return x",
        {},
    ),
    "LiveCodeBench": (
        [{"input": "4\n", "output": "8", "testtype": "stdin"}],
        DOUBLE,
        "print(input())",
        {},
    ),
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
    "BigCodeBench": (
        "import unittest\nclass TestCases(unittest.TestCase):\n    def setUp(self):\n        "
        "self.given = json.loads('3')\n"
        "    def test_case_1(self):\n        self.assertEqual(task_func(self.given), 6)\n"
        "    def test_case_2(self):\n        with self.assertRaises(TypeError):\n            "
        "task_func(None)\n",
        "import json\n\ndef task_func(x):\n    return 2 * x",
        "import json\n\ndef task_func(x):\n    return 6",
        {"entry_point": "task_func", "libs": "['json']"},
    ),
    "unittest behind a main guard": (
        "from unittest import IsolatedAsyncioTestCase, main\nfrom solution import f\n"
        "class Base(IsolatedAsyncioTestCase):\n    async def test_f(self):\n        "
        "self.assertEqual(f(2), 4)\n"
        "class TestMore(Base):\n    pass\nif __name__ == '__main__':\n    main()\n",
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return x",
        {},
    ),
    "unittest with a runner that raises nothing": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        "
        "self.assertEqual(f(2), 4)\n"
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n",
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return x",
        {},
    ),
    "pytest with values and fixtures": (
        "import pytest\nfrom solution import f\n@pytest.fixture\ndef two():\n    return 2\n"
        "@pytest.mark.parametrize('x, y', [(0, 0), (3, 6)])\ndef test_values(x, y):\n    assert "
        "f(x) == y\n"
        "class TestMore:\n    def test_fixture(self, two, tmp_path):\n        assert f(two) == 4 "
        "and tmp_path.is_dir()\n",
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return 2 * x if x != 2 else 5",
        {},
    ),
    "assertions behind a main guard": (
        "if __name__ == '__main__':\n    assert f(2) == 4\n",
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return x",
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_program_that_passes_all_tests_of_a_published_layout_has_one_and_others_zero(
    layout: str,
) -> None:
    tests, right, wrong, row = LAYOUTS[layout]
    inputs = group(tests, right, wrong, "syntax error here", "import sys; sys.exit(0)", **row)
    inputs = RewardInput(inputs.prompt, "", [*inputs.responses, "no program"], [9] * 5, inputs.row)
    assert await rewards(inputs) == [1.0, 0.0, 0.0, 0.0, 0.0]


async def test_a_suite_that_the_program_replaces_or_skips_has_not_passed() -> None:
    tests = LAYOUTS["unittest behind a main guard"][0]
    replaced = (
        "import unittest\nclass TestMore(unittest.TestCase):\n    def test_f(self): "
        "pass\ndef f(x): return x"
    )
    skipping = "import unittest\ndef f(x):\n    raise unittest.SkipTest('no')"
    assert await rewards(group(tests, replaced, skipping)) == [0.0, 0.0]


async def test_the_share_of_tests_and_the_first_ones_alone_can_be_what_counts() -> None:
    tests = {"inputs": ["1", "2", "0", "3"], "outputs": ["2", "2", "0", "6"]}
    assert await rewards(group(tests, DOUBLE), score="share") == [0.75]
    many = {"inputs": ["1"] * 16 + ["2"] * 40, "outputs": ["2"] * 56}
    assert await rewards(group(many, DOUBLE), score="share") == [0.5], "of the first 32"
    assert await rewards(
        group(["assert f(1)", "assert f(0)", "assert 1 / 0"], "f = bool"), score="share"
    ) == [1 / 3]


# Each prints the double of what it reads.
AS_A_FILE = {
    "its name is __main__": "if __name__ == '__main__':\n    print(2 * int(input()))",
    "annotations are read at run time": "from typing import get_type_hints\nclass A:\n    "
    "pass\ndef f(x: 'A') -> A: ...\n"
    "assert get_type_hints(f) == {'x': A, 'return': A}\nassert "
    "f.__annotations__['return'] is A\nprint(2 * int(input()))",
    "dataclasses with annotations as text": "from __future__ import annotations\nfrom dataclasses "
    "import dataclass\n"
    "from typing import ClassVar\n@dataclass\nclass A:\n   "
    " x: int\n    y: ClassVar[int] = "
    "2\nprint(A(int(input())).x * A.y)",
    "classes are pickled": "import pickle\nclass A:\n    y = "
    "2\nprint(pickle.loads(pickle.dumps(A())).y * int(input()))",
    "its source is found": "import inspect\n"
    "def f():\n    return 2\nassert 'return 2' in inspect.getsource(f)\nprint(f() * int(input()))",
    "its module is found": "import __main__\ny = 2\nprint(__main__.y * int(input()))",
    "streams of bytes": "import sys\nsys.stdout.buffer.write(b'%d' % (2 * "
    "int(sys.stdin.buffer.read())))",
    "a thread with a deep stack": "import sys, "
    "threading\nsys.setrecursionlimit(9000)\nthreading.stack_size(1 "
    "<< 26)\n"
    "def f(n):\n    return 0 if n == 0 else f(n - 1)\n"
    "t = threading.Thread(target=lambda: print(f(6000) + 2 * "
    "int(input())))\nt.start()",
    "an event loop": "import asyncio\nasync def main():\n    print(2 * "
    "int(input()))\nasyncio.run(main())",
    "it ends itself": "import sys\nprint(2 * int(input()))\nsys.exit(0)",
}
NOT_AS_A_FILE = {
    "an annotation that nothing defines": "def f(x: Unknown):\n    return x\nprint(2 * "
    "int(input()))",
    "a module that it did not import": "print(2 * int(sys.stdin.read()))",
    "an error behind its output": "print(2 * int(input()))\n1 / 0",
    "it ends with a status": "import sys\nprint(2 * int(input()))\nsys.exit(3)",
}


async def test_a_script_runs_as_a_file_does() -> None:
    programs = AS_A_FILE | NOT_AS_A_FILE
    scored = await rewards(
        group({"inputs": ["4"], "outputs": ["8"]}, *programs.values()), timeout_s=30
    )
    assert dict(zip(programs, scored, strict=True)) == {
        name: float(name in AS_A_FILE) for name in programs
    }


# Each defines f, the double.
AS_A_MODULE = {
    "a main guard that reads": "def f(x):\n    return 2 * x\nif __name__ == '__main__':\n    "
    "print(f(int(input())))",
    "output of its own": "import sys\nprint('loads')\nsys.stdout.buffer.write(b'bytes')\ndef "
    "f(x):\n    print(x)\n    return 2 * x",
    "pickled classes": "import pickle\nclass A:\n    y = 2\ndef f(x):\n    return "
    "pickle.loads(pickle.dumps(A())).y * x",
    "annotations": "import typing\n"
    "def f(x: int) -> int:\n    assert typing.get_type_hints(f)['x'] is int\n    return 2 * x",
    "a thread that it leaves": "import threading, time\n"
    "threading.Thread(target=lambda: time.sleep(600)).start()\ndef f(x):\n    return 2 * x",
}
NOT_AS_A_MODULE = {
    "an annotation that nothing defines": "def f(x: Unknown):\n    return 2 * x",
    "it ends while it loads": "def f(x):\n    return 2 * x\nraise SystemExit",
    "it ends while it is called": "import os\ndef f(x):\n    os._exit(0)",
}
CALLS = {"fn_name": "f", "inputs": [[1], [4]], "outputs": [2, 8]}


@pytest.mark.parametrize(
    "tests", [["assert f(1) == 2", "assert f(4) == 8"], CALLS], ids=["assertions", "calls"]
)
async def test_a_program_that_is_called_is_imported(tests: Any) -> None:
    programs = AS_A_MODULE | NOT_AS_A_MODULE
    scored = await rewards(group(tests, *programs.values()), timeout_s=30)
    assert dict(zip(programs, scored, strict=True)) == {
        name: float(name in AS_A_MODULE) for name in programs
    }


async def test_calls_find_what_solutions_of_contests_do_not_import() -> None:
    right = (
        "class Solution:\n    def count(self, xs: List[int]) -> Dict[int, int]:\n        "
        "return Counter(xs)"
    )
    hidden = (
        "class Solution:\n    def count(self, xs):\n        return {x: pow(xs.count(x), 3, 5) "
        "for x in xs}"
    )
    tests = [{"input": "[7, 7, 8]", "output": '{"7": 2, "8": 1}', "testtype": "functional"}]
    metadata = json.dumps({"func_name": "count"})
    assert await rewards(group(tests, right, hidden, metadata=metadata)) == [1.0, 0.0]
    assert await rewards(group(["assert Solution().count([7]) == {7: 1}"], right)) == [0.0], (
        "an assertion is Python's"
    )


async def test_results_of_calls_are_numbers_of_any_kind_and_arguments_have_whole_keys_as_in_apps() -> (
    None
):
    program = (
        "import numpy as np\ndef f(x):\n    return np.float32(x[1]), np.arange(3), {(1, 2): "
        "np.int64(4)}, [0.1 + 0.2]"
    )
    tests = {
        "fn_name": "f",
        "inputs": [[{"1": 5}]],
        "outputs": [[[5, [0, 1, 2], {"[1, 2]": 4}, [0.3]]]],
    }
    assert await rewards(group(tests, program), timeout_s=60) == [1.0]


async def test_set_up_code_of_mbpp_runs_behind_the_program_and_before_each_assertion() -> None:
    program = "class Node:\n    def __init__(self, value):\n        self.value = value\n"
    program += "def f(node):\n    node.value += 1\n    return node.value"
    row = {"test_imports": ["import math"], "test_setup_code": "node = Node(1)"}
    assert await rewards(
        group(["assert f(node) == 2", "assert f(node) == math.sqrt(4)"], program, **row)
    ) == [1.0]


async def test_a_program_may_print_as_much_as_a_test_wants() -> None:
    much = "7\n" * 300_000
    assert await rewards(
        group({"inputs": [""], "outputs": [much]}, f"print('7\\n' * {300_000})")
    ) == [1.0]


async def test_a_thought_that_the_prompt_opened_holds_no_program() -> None:
    inside = response("print(1)")
    texts = [inside, f"{inside}</think>", f"</think>{inside}", f"<think>{inside}"]
    tests = {"tests": {"inputs": [""], "outputs": ["1"]}}
    opened = RewardInput("Write it<think>\n", "", texts, [9] * 4, tests)
    assert await CodeReward(CodeConfig(timeout_s=20.0), 2)(opened) == [0.0, 0.0, 1.0, 0.0]


# 16 MiB, the least that the key takes, are enough for an interpreter that is built without shared
# libraries.
@pytest.mark.parametrize("settings", [{"memory_mib": 4}, {"timeout_s": 0.001}])
async def test_limits_with_which_no_program_passes_are_refused_before_a_run(
    settings: dict[str, Any],
) -> None:
    (name,) = settings
    with pytest.raises(
        SandboxFailed, match=rf"does not pass its test with .*reward\.code\.{name} = .*raise them"
    ) as refused:
        await CodeReward(CodeConfig().model_copy(update=settings), 1).check()
    assert "\n" not in str(refused.value)


async def test_in_the_pool_programs_of_many_groups_are_scored_and_a_broken_row_is_no_verdict() -> (
    None
):
    config = RewardConfig(functions=(RewardFunction(name="code"),), code=CodeConfig(timeout_s=30.0))
    tests = {"inputs": ["3"], "outputs": ["6"]}
    async with RewardPool(config) as pool:
        good, broken = await asyncio.gather(
            pool.score(group(tests, DOUBLE, "print(7)")), pool.score(group(5, DOUBLE, "x"))
        )
    assert (
        good.total.tolist() == [1, 0]
        and good.correct.tolist() == [True, False]
        and good.errors == ()
    )
    assert broken.no_verdict == {"code": 2} and "no layout that is known" in broken.errors[0]
    assert broken.total[0] == broken.total[1]


def full(**code: Any) -> Config:
    reward = {"functions": [{"name": "code"}], "code": code}
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "reward": reward})


def test_the_check_before_a_run_tries_the_sandbox_and_reads_a_rows_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (line,) = check_reward_functions(full(), group(["assert x == 1"], "x = 1"))
    assert (
        line.startswith("reward.code: programs of responses run at isolation level ")
        and "\n" not in line
    )
    with pytest.raises(
        DataError,
        match=r"reward\.functions: code fails for a group .* no column 'cases' \(it has tests\)",
    ):
        check_reward_functions(full(tests="cases"), group(["assert x == 1"], "x = 1"))
    tree = full().model_dump(mode="json") | {"reward": {"code": {"timeout_s": 3}}}
    with pytest.raises(ValueError, match=r"reward\.code: would be read by nothing"):
        Config.model_validate(tree)


async def test_packages_of_this_environment_are_there_for_programs() -> None:
    assert await rewards(
        group(["assert mean == 2.0"], "import numpy\nmean = float(numpy.mean([1, 2, 3]))"),
        timeout_s=60,
    ) == [1.0]
    assert sys.executable
