"""Environments and tools of one's own are tried before a run, and refused in one line where they cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from pa_npu.config.load import load_config
from pa_npu.coordinator import environment_trial
from pa_npu.errors import ConfigError, PaNpuError
from tests.helpers.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_starts", "supported_versions")


ENVIRONMENTS = """
from pa_npu.environments.single_turn import SingleTurn

class Raises(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return prompt.colour

class TooFew(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return (await super().rollout(prompt, num_samples, generate))[:0]

class Fine(SingleTurn):
    pass

class Fewer(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return (await super().rollout(prompt, num_samples, generate))[:3]

class Shut(SingleTurn):
    async def open(self):
        raise OSError("no server at port 9")

class ReturnsNothing(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return None

class ReturnsTexts(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return ["text"] * num_samples

class OneText(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return "a" * num_samples

class Leaves(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        raise SystemExit(3)

class Own(BaseException):
    pass

class RaisesOwn(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        raise Own("x")

class OpensOwn(SingleTurn):
    async def open(self):
        raise Own("x")

class OpensAndLeaves(SingleTurn):
    async def open(self):
        raise SystemExit(3)

class MadeOwn(SingleTurn):
    def __init__(self, context):
        raise Own("x")

class TooLong(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        from dataclasses import replace
        import numpy as np
        samples = await super().rollout(prompt, num_samples, generate)
        names = ("tokens", "component", "logprobs", "versions")
        return [replace(s, **{n: np.concatenate([getattr(s, n)] + [getattr(s, n)[-1:]] * 99) for n in names}) for s in samples]

class Unmade:
    def __init__(self):
        pass

class Ends(SingleTurn):
    def __init__(self, context):
        import os
        os._exit(9)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Raises", "AttributeError: 'Prompt' object has no attribute 'colour', "),
        ("TooFew", "must return samples, at least one, returned nothing"),
        ("ReturnsNothing", "must return samples, at least one, returned NoneType"),
        ("ReturnsTexts", "must return samples, at least one, returned str"),
        ("OneText", "must return samples, at least one, returned str"),
        ("Leaves", "SystemExit: 3"),
        ("RaisesOwn", "environment RaisesOwn, prompt 0: Own: x, "),
        ("OpensOwn", "environment OpensOwn: open: Own: x, "),
        ("OpensAndLeaves", "environment OpensAndLeaves: open: SystemExit: 3"),
        ("MadeOwn", "cannot be made (Own: x, "),
        ("TooLong", "more than rollout.max_response_tokens = 32; end it sooner"),
        ("Unmade", "cannot be made (TypeError"),
        ("Nowhere", "cannot be imported (AttributeError"),
        ("Fine", None),
        ("Fewer", None),
        (
            "Fewer trainer.devices=2 trainer.pipeline_parallel=2",
            "2, whose stages agree on the number of microbatches",
        ),
        (
            "Fewer algorithm.name=online-dpo",
            "Fewer made 3 samples of prompt 0, but algorithm.loss=dpo needs exactly",
        ),
        ("Shut", "environment Shut: open: OSError: no server at port 9"),
    ],
)
def test_an_environment_of_ones_own_is_tried_on_a_prompt(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected: str | None,
) -> None:
    name, *keys = name.split()
    module = f"my_environments_{name}"
    (tmp_path / f"{module}.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    config = load_config([], [*base, f"environment.name={module}:{name}", *keys])
    prompt = {
        "prompt_id": 0,
        "tokens": [1, 2],
        "answer": "2",
        "text": "1+1",
        "row": {},
        "images": [],
    }
    with contextlib.nullcontext() if expected is None else pytest.raises(PaNpuError) as refusal:
        asyncio.run(environment_trial._try(config, prompt))
    if refusal is not None:
        assert expected in str(refusal.value)
        assert name != "Raises" or f"{module}.py:6" in str(refusal.value)


TOOLS = """
import os, sys, time
value = 3
def good(call): return eval(call)
def search(call):
    if call != "SEARCH cats": raise ValueError("no search")
    return "meow"
def nothing(call): return None
def listing(call): return [call]
def two(call, more): return call
def broken(call): return undefined
def refuses(call): raise ConnectionError("refused")
def leaves(call): sys.exit(0)
def dies(call): os._exit(4)
def blocks(call): time.sleep(99)
def fills(call): sys.stdout.write("x" * 9); return None
async def waits(call): return call
class Own(BaseException): pass
def own(call): raise Own("x")
"""


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("good", None),
        ("search", "ValueError: no search"),
        ("search SEARCH cats", None),
        ("nothing", "returned NoneType, not a text or a number"),
        ("listing", "returned list"),
        ("two", "TypeError: two() missing 1 required"),
        ("broken", "NameError: name 'undefined'"),
        ("refuses", "ConnectionError: refused"),
        ("leaves", "SystemExit: 0"),
        ("dies", "the tool ended, or wrote what cannot be read"),
        ("blocks", "no answer within 1 s"),
        ("waits", "returned coroutine"),
        ("own", "Own: x"),
        ("value", "is a int, not a function"),
        ("missing", "cannot be imported"),
    ],
)
def test_a_tool_of_ones_own_is_tried_before_a_run(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    expected: str | None,
) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    name, _, example = tool.partition(" ")
    options = [
        f"environment.options.tool=my_tools:{name}",
        *([f"environment.options.example='{example}'"] if example else []),
    ]
    config = load_config([], [*base, "environment.name=tools", "environment.timeout_s=1", *options])
    prompt = {
        "prompt_id": 0,
        "tokens": [1, 2],
        "answer": "2",
        "text": "What is 1+1?",
        "row": {},
        "images": [],
    }
    with contextlib.nullcontext() if expected is None else pytest.raises(ConfigError) as refusal:
        asyncio.run(environment_trial._try(config, prompt))
    if refusal is not None:
        assert f"environment.options: tool my_tools:{name}" in str(
            refusal.value
        ) and expected in str(refusal.value)


def test_an_environment_that_ends_its_process_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *base, "environment.name=my_environments:Ends")
    assert "environment.name: my_environments:Ends: the process that tried it ended with 9" in line
