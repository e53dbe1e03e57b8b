"""What is read before any program runs: the program of a response, the tests of a row, and how results are compared."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt, PromptSet
from pa_npu.errors import DataError
from pa_npu.rewards import code_tests
from pa_npu.rewards.check import check_row_tests
from pa_npu.rewards.code_program import program_of, whole_program
from pa_npu.rewards.code_results import same_output, same_result
from pa_npu.rewards.code_tests import CodeTest, row_tests
from pa_npu.rewards.thoughts import without_thought

# response, and its program
BLOCKS: dict[str, tuple[str, str | None]] = {
    "the last of several": ("```python\na()\n```\nno:\n```python\nb()\n```", "b()\n"),
    "before sample output": ("```python\na()\n```\nIt prints\n```\n3\n```", "a()\n"),
    "before another language": ("```python3\na()\n```\n```text\nb\n```", "a()\n"),
    "indented in a list": (
        "1. So:\n   ```python\n   def f():\n       return 1\n   ```\n2. Done",
        "def f():\n    return 1\n",
    ),
    "on the line of a list's mark": ("- ```py\n  a()\n  ```", "a()\n"),
    "indented further than its fence": (
        "1.\n  ```python\n      a()\n      b()\n  ```",
        "a()\nb()\n",
    ),
    "in a quotation": ("> ```python\n> a()\n> ```", "a()\n"),
    "behind text on its line": ("So: ```python\na()\n```", "a()\n"),
    "closed on its last line": ("```python\na()```\nand\n```text\nb\n```", "a()\n"),
    "closed before a tag": ("<answer>```python\na()\n```</answer>", "a()\n"),
    "with a fence in a docstring": (
        '```python\ndef f():\n    """x\n    ```\n    """\n```',
        'def f():\n    """x\n    ```\n    """\n',
    ),
    "with tildes": ("~~~python\na()\n~~~", "a()\n"),
    "with attributes": ("```{.python .numberLines}\na()\n```", "a()\n"),
    "with a file's name": ("```python:main.py\na()\n```", "a()\n"),
    "with other line ends": ("```Python\r\na()\r\n```\r\n", "a()\n"),
    "in a block of Markdown": ("````markdown\nSo\n```python\na()\n```\n````", "a()\n"),
    "between MBPP's marks": ("[BEGIN]\na()\n[DONE]\n", "a()\n"),
    "between MBPP's marks, stopped": ("[BEGIN]\na()\n", "a()\n"),
    "between tags": ("<code>\na()\n</code>", "a()\n"),
    "between tags of the answer": ("<answer>\na()\n</answer>", "a()\n"),
    "never closed": ("```python\na()", "a()\n"),
    "unmarked": ("```\na()\n```", "a()\n"),
    "unmarked, before sample output": ("```\na()\n```\n```\n[1, 2]\n```", "a()\n"),
    "without any block": ("def f():\n    return 1", "def f():\n    return 1"),
    "prose": ("I would add the numbers.", None),
    "a word": ("none", None),
    "an empty block": ("```python\n \n```", None),
    "sample output alone": ("It prints\n```\n3\n```", None),
    "another language": ("```cpp\nint x;\n```", None),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_the_program_is_the_last_block_of_python_wherever_it_stands(case: str) -> None:
    response, program = BLOCKS[case]
    assert program_of(response) == program


def test_a_block_that_only_shows_how_a_function_is_called_is_not_the_program() -> None:
    response = "```python\ndef f(x):\n    return x\n```\nUse it:\n```python\nprint(f(2))\n```"
    assert program_of(response, {"f"}) == "def f(x):\n    return x\n"
    assert program_of(response, set()) == "print(f(2))\n", "a script needs no name"
    draft = (
        "```python\ndef f(x):\n    return 1\n```\nBetter:\n```python\ndef f(x):\n    return\n```"
    )
    assert program_of(draft, {"f"}) == "def f(x):\n    return\n", "the last that defines it"


HEAD = (
    'from typing import List\n\n\ndef g(x):\n    return x\n\n\ndef f(x: List[int]):\n    """F."""\n'
)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("    return g(x)\n", f"{HEAD}    return g(x)\n"),
        ("```python\n    return g(x)\n```", f"{HEAD}    return g(x)\n"),
        ("```python\ndef f(x):\n    return g(x)\n```", f"{HEAD}\n\ndef f(x):\n    return g(x)\n"),
        (f"```python\n{HEAD}    return g(x)\n```", f"{HEAD}    return g(x)\n"),
        ("```python\ndef other(x):\n    return x\n```", "def other(x):\n    return x\n"),
        ("I would return x.", None),
    ],
)
def test_a_response_may_be_the_rest_of_a_program_that_its_row_begins(
    response: str, program: str | None
) -> None:
    written = whole_program(response, {"prompt": HEAD}, {"f"})
    if program is None or written is None:
        assert written == program
    else:
        assert written.split() == program.split()
    assert whole_program(response, {"prompt": "Write f."}, {"f"}) == program_of(response, {"f"})


@pytest.mark.parametrize(
    ("prompt", "response", "rest"),
    [
        ("Q", "<think>a</think>b", "b"),
        ("Q", "<think>a", ""),
        ("Q<think>\n", "a", ""),
        ("Q<think>\n", "a</think>b", "b"),
        ("Put it in <think> tags.", "a", "a"),
        ("Q<think>\n\n</think>\n", "a", "a"),
    ],
)
def test_a_thought_holds_no_program_whoever_opened_it(
    prompt: str, response: str, rest: str
) -> None:
    assert without_thought(prompt, response) == rest


CALL = {"kind": "call", "name": "f"}
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "APPS": (
        {"tests": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'},
        [{"kind": "stdin", "content": "1\n", "wanted": ("2\n",)}],
    ),
    "a text under functional": (
        {"tests": '{"functional": "assert f(1) == 2"}'},
        [{"kind": "assertion", "content": "assert f(1) == 2"}],
    ),
    "APPS with lines": (
        {"tests": {"inputs": [["1", "2"]], "outputs": [["3"]]}},
        [{"kind": "stdin", "content": "1\n2", "wanted": ("3",)}],
    ),
    "APPS with a function": (
        {"tests": {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[5]]}},
        [CALL | {"content": [1, [2]], "wanted": ([5], 5), "whole_keys": True}],
    ),
    "CodeContests": (
        {"tests": {"input": ["1", "2"], "output": ["3", "4"]}},
        [
            {"kind": "stdin", "content": "1", "wanted": ("3",)},
            {"kind": "stdin", "content": "2", "wanted": ("4",)},
        ],
    ),
    "LiveCodeBench by standard input": (
        {"tests": '[{"input": "4\\n", "output": "8", "testtype": "stdin"}]', "metadata": "{}"},
        [{"kind": "stdin", "content": "4\n", "wanted": ("8",)}],
    ),
    "LiveCodeBench with the name in metadata": (
        {
            "tests": '[{"input": "[1, 2]\\n\\"a\\"", "output": "[5]", "testtype": "functional"}]',
            "metadata": '{"func_name": "f"}',
        },
        [CALL | {"content": [[1, 2], "a"], "wanted": ([5],)}],
    ),
    "DeepCoder with the name in each test's metadata": (
        {
            "tests": [
                {
                    "input": "1",
                    "output": "2",
                    "testtype": "functional",
                    "metadata": {"func_name": "f"},
                }
            ]
        },
        [CALL | {"content": [1], "wanted": (2,)}],
    ),
    "PrimeIntellect": (
        {
            "tests": {
                "language": "python",
                "test_cases": [
                    {"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}
                ],
            }
        },
        [CALL | {"content": [1], "wanted": ([2], 2), "whole_keys": True}],
    ),
    "verl's, of a text in a text": (
        {"tests": json.dumps(json.dumps({"fn_name": "f", "inputs": ["1\n2"], "outputs": ["3"]}))},
        [CALL | {"content": [1, 2], "wanted": (3, "3"), "whole_keys": True}],
    ),
    "verl's with assertions": (
        {"tests": '{"assert_case": ["assert f(1)"], "import_prefix": "import math"}'},
        [{"kind": "assertion", "content": "import math\nassert f(1)"}],
    ),
    "MBPP": (
        {
            "tests": ["assert f(1)"],
            "test_imports": ["import math"],
            "test_setup_code": "r = Node(1)",
        },
        [{"kind": "assertion", "content": "import math\nr = Node(1)\nassert f(1)"}],
    ),
    "MBPP as a CSV file has it": (
        {"tests": "['assert f(1)', 'assert f(2)']", "test_imports": "[]"},
        [
            {"kind": "assertion", "content": "assert f(1)"},
            {"kind": "assertion", "content": "assert f(2)"},
        ],
    ),
    "HumanEval": (
        {"tests": "def check(candidate):\n    assert candidate(1)", "entry_point": "f"},
        [
            {
                "kind": "assertion",
                "content": "def check(candidate):\n    assert candidate(1)\ncheck(f)\n",
            }
        ],
    ),
    "HumanEval that calls check itself": (
        {"tests": "def check(c):\n    assert c(1)\ncheck(f)", "entry_point": "f"},
        [{"kind": "assertion", "content": "def check(c):\n    assert c(1)\ncheck(f)"}],
    ),
    "KodCode": (
        {"tests": "from solution import f\ndef test_f():\n    assert f(1)"},
        [
            {
                "kind": "assertion",
                "content": "from solution import f\ndef test_f():\n    assert f(1)\ntest_f()\n",
            }
        ],
    ),
    "BigCodeBench": (
        {
            "tests": "class T(unittest.TestCase):\n    def test_f(self):\n        "
            "self.assertTrue(f(np.ones(1)))",
            "entry_point": "f",
            "test_imports": "import unittest",
        },
        [{"kind": "assertion", "cases": ("T",), "needed": frozenset({"f"})}],
    ),
    "assertions behind a main guard": (
        {"tests": "if __name__ == '__main__':\n    assert f(1)"},
        [{"kind": "assertion", "content": "assert f(1)"}],
    ),
    "functions that wait": (
        {"tests": "async def test_f():\n    assert f(1)"},
        [
            {
                "kind": "assertion",
                "content": "async def test_f():\n    assert "
                "f(1)\n__import__('asyncio').run(test_f())\n",
            }
        ],
    ),
    "pytest": (
        {"tests": "class TestF:\n    def test_f(self, tmp_path):\n        assert f(1)"},
        [{"kind": "assertion", "by_pytest": True, "cases": (), "needed": frozenset({"f"})}],
    ),
    "assertions beside an entry point": (
        {"tests": "assert f(1)", "entry_point": "f"},
        [{"kind": "assertion", "content": "assert f(1)"}],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tests_of_a_published_layout_are_read_as_their_dataset_means_them(layout: str) -> None:
    row, wanted = LAYOUTS[layout]
    tests = row_tests(row, "tests")
    defaults = {"wanted": (), "name": "", "whole_keys": False}
    wanted = [defaults | test for test in wanted]
    assert [
        {name: getattr(test, name) for name in expected}
        for test, expected in zip(tests, wanted, strict=True)
    ] == wanted


def test_a_module_that_a_test_only_tries_to_import_need_not_be_there() -> None:
    text = "try:\n    import nobody_has_this\nexcept ImportError:\n    pass\nassert f(1)"
    assert row_tests({"tests": text}, "tests")[0].content == text


def test_a_suite_that_needs_pytest_is_one_line_where_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_tests, "is_importable", lambda name: name != "pytest")
    with pytest.raises(
        DataError, match="only pytest can run it, which is not installed here; install pytest"
    ):
        row_tests({"tests": "class TestF:\n    def test_f(self):\n        assert f(1)"}, "tests")


def test_tests_may_be_a_column_inside_another_with_what_stands_beside_them() -> None:
    truth = {"ground_truth": "def check(c):\n    assert c(1)", "entry_point": "f"}
    for row in ({"reward_model": truth}, {"reward_model": json.dumps(truth)}):
        (test,) = row_tests(row, "reward_model.ground_truth")
        assert test.content.endswith("check(f)\n") and test.needed == {"f"}
    (test,) = row_tests({"a.b": ["assert f"]}, "a.b")
    assert test == CodeTest("assertion", "assert f", needed=frozenset({"f"}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, r"the row has no column 'tests' \(it has other\)"),
        ({"tests": []}, "holds no test"),
        ({"tests": 5}, "has no layout that is known"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "has no layout that is known"),
        ({"tests": [{"in": 1}]}, "has no layout that is known"),
        ({"tests": {}}, "has no layout that is known"),
        ({"tests": [5]}, "has no layout that is known"),
        ({"tests": [""]}, "it is empty"),
        ({"tests": "assert ("}, "does not compile"),
        ({"tests": ["assert f(1)", "{"]}, "does not compile"),
        ({"tests": "\0"}, "does not compile"),
        ({"tests": "(" * 1000}, "does not compile"),
        ({"tests": ["assert f(1)"], "test_setup_code": "def"}, "does not compile"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "the row has no entry_point"),
        ({"tests": "def check(c):\n    assert c(1)", "entry_point": 5}, "entry_point is 5"),
        (
            {"tests": "def check(c):\n    assert c(1)", "entry_point": "f); print(1"},
            "entry_point is",
        ),
        ({"tests": "import math"}, "no statement that can fail"),
        ({"tests": ["f(2) == 4"]}, "no statement that can fail"),
        ({"tests": ["assert True"]}, "no statement that can fail"),
        ({"tests": ["assert (f(2) == 4, 'four')"]}, "no statement that can fail"),
        ({"tests": ["print(f(2))"]}, "no statement that can fail"),
        (
            {"tests": "import unittest\nclass T(unittest.TestCase):\n    pass"},
            "no statement that can fail",
        ),
        ({"tests": "import unittest\nunittest.main()"}, "no statement that can fail"),
        ({"tests": "if __name__ == '__main__':\n    print(f(2))"}, "no statement that can fail"),
        ({"tests": "def test_f(mocker):\n    assert f(1)"}, "it wants the fixture mocker"),
        ({"tests": "import nobody_has_this\nassert f(1)"}, "it needs the module nobody_has_this"),
        (
            {"tests": ["assert f(1)"], "libs": "['json', 'nobody_has_this']"},
            "it needs the module nobody_has_this",
        ),
        ({"tests": "eJxr" * 40 + "YA=="}, "base64"),
        (
            {"tests": [{"input": "1", "output": "2", "testtype": "functional"}], "metadata": "{}"},
            "which function it calls",
        ),
        ({"tests": [{"input": "1", "output": "2", "fn_name": 5}]}, "calls 5"),
        (
            {"tests": [{"input": "x = 1", "output": "2", "fn_name": "f"}]},
            "not one JSON value a line",
        ),
        ({"tests": {"fn_name": "f", "inputs": [5], "outputs": [5]}}, "arguments are a int"),
        ({"tests": [{"input": "1", "output": None}]}, "output is a NoneType"),
    ],
)
def test_tests_that_test_nothing_or_cannot_be_read_are_one_line(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        row_tests(row, "tests")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("1 2 \n3\n\n", "1 2\n3"),
        ("a  b", "a b"),
        ("0.3333333", "0.33333333"),
        ("1e-07", "0.0000001"),
        ("3.0", "3"),
        ("1.5 x", "1.50 x"),
    ],
)
def test_outputs_that_contests_take_are_right(written: str, wanted: str) -> None:
    assert same_output(written, wanted)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("1 2", "1 3"),
        ("1", "1.5"),
        ("", "0"),
        ("100000001", "100000002"),
        ("100000002.0", "100000001"),
        ("1_0.0", "10.0"),
        ("nan", "1.0"),
        ("1e999", "1.0"),
        ("007", "7"),
        ("1.0 2.0", "1.0"),
    ],
)
def test_outputs_that_contests_refuse_are_wrong(written: str, wanted: str) -> None:
    assert not same_output(written, wanted)


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (0.1 + 0.2, 0.3),
        ([0.1 + 0.2], [0.3]),
        ([[0.1 + 0.2], {"a": [0.1 + 0.2]}], [[0.3], {"a": [0.3]}]),
        ({"a": {"b": 1e-17}}, {"a": {"b": 0}}),
        (2.0, 2),
        ([float("nan")], [float("nan")]),
        (float("inf"), float("inf")),
        (None, None),
    ],
)
def test_results_are_equal_but_for_rounding_at_every_depth(result: Any, wanted: Any) -> None:
    assert same_result(result, wanted)


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        ("1", 1),
        (None, 1),
        (5, [5]),
        ([0.3, 1], [0.3]),
        ([0.31], [0.3]),
        ({"a": 1.0}, {"b": 1.0}),
        (100000001.0, 100000000),
        (10**400, 1.0),
        (float("nan"), 1.0),
        ([1.0], 1.0),
    ],
)
def test_results_that_differ_are_wrong(result: Any, wanted: Any) -> None:
    assert not same_result(result, wanted)


def test_every_rows_tests_are_read_before_a_run_and_the_first_bad_one_is_named() -> None:
    rows = [{"tests": ["assert f(1)"]}, {"tests": ["assert f("]}, {"tests": [""]}]
    prompts = [
        Prompt(7 + number, np.zeros(1, np.int32), "", "Q", row) for number, row in enumerate(rows)
    ]

    def check(function: str, count: int) -> None:
        tree = {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "reward": {"functions": [{"name": function}]},
        }
        loaded = PromptSet("d.jsonl", tuple(prompts[:count]), 3, 0, 0)
        check_row_tests(Config.model_validate(tree), loaded, "data.train", 7)

    with pytest.raises(
        DataError, match=r"^data\.train: d\.jsonl, row 2: reward\.code\.tests: .* does not compile"
    ) as refused:
        check("code", 3)
    assert "\n" not in str(refused.value)
    check("code", 1)
    check("math", 3)
