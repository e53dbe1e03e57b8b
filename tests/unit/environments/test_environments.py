"""Environments: what becomes a sample of what the policy wrote and what it was shown, by whom, under which seeds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import GroupGenerate, run_episode, score
from pa_npu.data.prompts import Prompt
from pa_npu.data.text_encoder import TextEncoder
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.engines.protocol import EngineGone, Generation, RolloutEngine, Sampling
from pa_npu.environments import time_limit
from pa_npu.environments.protocol import (
    Environment,
    EnvironmentContext,
    EnvironmentFailed,
    Generate,
)
from pa_npu.environments.registry import make_environment, opened
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.environments.time_limit import interrupting
from pa_npu.environments.tools import ToolEnvironment, calculate
from pa_npu.errors import ConfigError, InvariantViolation, PaNpuError
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.samples.seeds import group_seed, turn_seed
from pa_npu.samples.types import Sample, SampleBuilder
from tools.make_tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPT = Prompt(
    4, np.asarray(TOKENIZER("What is 6*7?")["input_ids"], np.int32), "42", "What is 6*7?", {}
)
SEED = group_seed(1, 2, 3)
CONFIG = Config.model_validate(
    {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "environment": {"name": "own:Environment", "timeout_s": 0.01},
    }
)


def tokens(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


class Scripted:
    """An engine that writes a script's next text whatever it is asked: a sample's turn finds its
    text by what it has read.
    """

    name = "scripted"

    def __init__(self, scripts: list[list[str]], odd_tokens: bool = False) -> None:
        self.scripts = scripts
        self.requests: list[tuple[list[int], int, int, Sampling]] = []
        self.gone_at: int | None = None
        self.silent = False
        self._odd = odd_tokens

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        self.requests.append((prompt_tokens.tolist(), n, seed, sampling))
        if self.gone_at == len(self.requests):
            raise EngineGone("engine scripted: killed in the middle of a turn")
        await asyncio.sleep(0)
        return [self._text(prompt_tokens, seed + i, sampling) for i in range(n)]

    def _text(self, read: np.ndarray, seed: int, sampling: Sampling) -> Generation:
        number, turn = next(
            (s, t) for s in range(8) for t in range(8) if turn_seed(SEED, s, t) == seed
        )
        text = self.scripts[number % len(self.scripts)][turn]
        # byte by byte where the tokenizer would merge: what the policy wrote is not what its text
        # tokenises to
        written = np.concatenate([tokens(c) for c in text]) if self._odd else tokens(text)
        cut = len(written) > sampling.max_tokens
        written = written[: sampling.max_tokens]
        return Generation(
            written,
            np.linspace(-0.1, -0.9, len(written), dtype=np.float32) - np.float32(number + turn),
            text,
            "length" if cut else "stop",
            version=None if self.silent else turn,  # as if weights changed between turns
        )

    async def close(self) -> None:
        pass


def context(**values: Any) -> EnvironmentContext:
    return EnvironmentContext(TOKENIZER, **{"max_response_tokens": 60, "max_turns": 4, **values})


async def episode(
    environment: Environment, engine: Any, num_samples: int, most: int = 60
) -> list[Sample]:
    async with EnginePool([engine]) as pool:

        async def replace(lost: RolloutEngine, reason: str) -> None:
            pool.suspend(lost)
            successor = Scripted(engine.scripts)
            successor.name = "successor"
            engine.successor = successor
            pool.add(successor)  # type: ignore[arg-type]
            pool.serve(successor)  # type: ignore[arg-type]

        pool.subscribe(on_lost=replace)
        lease: Lease = await pool.admit(num_samples, 100, lambda _: 64, 1.0)
        with GroupSession(
            pool, lease, lambda _: 64, deadline_s=1.0, again_deadline_s=1.0
        ) as session:
            return await run_episode(
                CONFIG,
                environment,
                PROMPT,
                num_samples,
                GroupGenerate(session, SEED, Sampling(most, 1.0)),
                1000,
            )


SCRIPTS = [["I ask <<6*7>>", "so\n#### 42"], ["#### 41"], ["<<1/0>>", "<<2+2>>", "#### 4"]]


async def test_a_single_turn_is_one_request_whose_samples_follow_one_another() -> None:
    engine = Scripted([["#### 1"], ["#### 22"]])
    samples = await episode(SingleTurn(context()), engine, 4)
    assert [(request[1], request[2]) for request in engine.requests] == [(4, SEED)]
    assert [sample.text for sample in samples] == ["#### 1", "#### 22"] * 2
    assert all(sample.prompt_length == len(PROMPT.tokens) and sample.finished for sample in samples)
    for sample in samples:  # what is known beforehand is what the arrays say
        assert (
            sample.num_trained == np.count_nonzero(sample.trained)
            and sample.prompt_length == sample.trained.argmax()
        )


async def test_a_response_without_a_version_ends_the_run_in_one_line_that_names_its_engine() -> (
    None
):
    """Nobody fills it in: the check of I1 would compare its own number with itself."""
    engine = Scripted([["#### 1"]])
    engine.silent = True
    with pytest.raises(
        InvariantViolation,
        match=r"^I1 version: engine scripted does not say which weight version [^\n]+$",
    ):
        await episode(SingleTurn(context()), engine, 2)


@pytest.mark.parametrize("odd", [False, True], ids=["as tokenised", "in other tokens"])
async def test_what_the_policy_wrote_stays_token_for_token_and_what_the_tool_said_is_not_trained(
    odd: bool,
) -> None:
    engine = Scripted(SCRIPTS, odd)
    asking, guessing, failing = await episode(ToolEnvironment(context()), engine, 3)
    assert asking.text == "I ask <<6*7>>=42\nso\n#### 42"
    assert (
        failing.text == "<<1/0>>=error: division by zero\n<<2+2>>=4\n#### 4"
        and guessing.text == "#### 41"
    )
    pieces = ["I ask <<6*7>>", "=42\n", "so\n#### 42"]
    written = [
        np.concatenate([tokens(c) for c in p]) if odd and i != 1 else tokens(p)
        for i, p in enumerate(pieces)
    ]
    np.testing.assert_array_equal(asking.tokens, np.concatenate([PROMPT.tokens, *written]))
    spans = [
        (False, len(PROMPT.tokens)),
        (True, len(written[0])),
        (False, len(written[1])),
        (True, len(written[2])),
    ]
    np.testing.assert_array_equal(
        asking.trained, np.concatenate([np.full(n, trained) for trained, n in spans])
    )
    versions = asking.versions[asking.trained]
    assert versions.tolist() == [0] * len(written[0]) + [1] * len(written[2]), (
        "each turn has its own version"
    )
    # every turn is asked with exactly what stands before it
    second = next(request for request in engine.requests if request[2] == turn_seed(SEED, 0, 1))
    assert second[0] == np.concatenate([PROMPT.tokens, *written[:2]]).tolist()
    assert all(request[3].stop == (">>",) for request in engine.requests)


async def test_what_the_tool_said_is_trained_where_its_role_has_a_weight() -> None:
    observed = replace(context(), observations={"tool": 0.25}, observation_component=2)
    asking, guessing, _ = await episode(ToolEnvironment(observed), Scripted(SCRIPTS), 3)
    plain, _, _ = await episode(ToolEnvironment(context()), Scripted(SCRIPTS), 3)
    output = asking.component == 2
    np.testing.assert_array_equal(asking.tokens[output], tokens("=42\n"))
    assert asking.weight is not None and set(asking.weight[output].tolist()) == {0.25}
    assert guessing.weight is None and not (guessing.component == 2).any()
    np.testing.assert_array_equal(asking.tokens, plain.tokens)
    np.testing.assert_array_equal(asking.written, plain.written)


class Own(BaseException):
    """An exception of a user's own that is no Exception."""


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    "raised", [Own("x"), SystemExit("x"), GeneratorExit("x"), ValueError("x")], ids=repr
)
async def test_whatever_an_environment_raises_is_one_line_of_its_group(
    raised: BaseException, bounded: bool
) -> None:
    class Raises(SingleTurn):
        waits_are_bounded = bounded

        async def rollout(
            self, prompt: Prompt, num_samples: int, generate: Generate
        ) -> list[Sample]:
            await super().rollout(prompt, num_samples, generate)
            raise raised

    failed, fine = await asyncio.gather(
        episode(Raises(context()), Scripted([["#### 1"]]), 2),
        episode(SingleTurn(context()), Scripted([["#### 1"]]), 2),
        return_exceptions=True,
    )
    assert isinstance(failed, EnvironmentFailed) and "\n" not in str(failed)
    assert str(failed).startswith(
        f"environment Raises, prompt 4: {type(raised).__name__}: x, {__file__}:"
    )
    assert isinstance(fine, list) and len(fine) == 2


async def test_samples_of_several_turns_become_a_microbatch_whose_targets_see_their_own_past() -> (
    None
):
    samples = await episode(ToolEnvironment(context()), Scripted(SCRIPTS), 3)
    ones = np.ones(3, np.float32)
    group = Group.from_samples(samples, ones, ones, run_seed=1, iteration=2, index=3, prompt_id=4)
    assert group.version_range == (0, 2)
    (microbatch,) = build_microbatches(group, 3, True, 1)
    shared = len(PROMPT.tokens)
    assert microbatch.num_computed_tokens == len(group.tokens) - 2 * shared, (
        "the prompt is computed once"
    )
    positions, mask = microbatch.layout.position_ids(), microbatch.layout.dense_mask()
    number = 0
    for sample in samples:
        for position in np.flatnonzero(sample.trained):
            row = int(microbatch.rows[number])
            visible = mask[row].nonzero().flatten()
            seen = microbatch.tokens[visible[positions[visible].argsort()]]
            assert seen.tolist() == sample.tokens[:position].tolist()
            assert microbatch.targets[number] == sample.tokens[position]
            number += 1
    assert number == len(microbatch.targets)


async def test_an_engine_killed_in_the_middle_of_a_turn_changes_nothing() -> None:
    undisturbed = await episode(ToolEnvironment(context()), Scripted(SCRIPTS), 3)
    for request in range(1, 7):
        engine = Scripted(SCRIPTS)
        engine.gone_at = request
        samples = await episode(ToolEnvironment(context()), engine, 3)
        assert engine.successor.requests, "the successor went on"  # type: ignore[attr-defined]
        for first, sample in zip(undisturbed, samples, strict=True):
            for name in ("tokens", "trained", "logprobs", "versions"):
                assert getattr(first, name).tobytes() == getattr(sample, name).tobytes(), (
                    f"request {request}: {name}"
                )


@pytest.mark.parametrize(
    ("limits", "texts", "finished"),
    [
        ({"max_turns": 1}, "I ask <<6*7>>", False),
        ({"max_turns": 2}, "I ask <<6*7>>=42\nso\n#### 42", True),
        ({"max_response_tokens": len(tokens("I ask <<6*7>>"))}, "I ask <<6*7>>", False),
        ({"max_response_tokens": len(tokens("I ask <<6*7>>")) + 4}, "I ask <<6*7>>", False),
        ({"max_response_tokens": 5}, None, False),
    ],
)
async def test_turns_and_tokens_have_limits(
    limits: dict[str, int], texts: str | None, finished: bool
) -> None:
    most = limits.get("max_response_tokens", 60)
    (sample,) = await episode(ToolEnvironment(context(**limits)), Scripted(SCRIPTS), 1, most)
    assert len(sample.tokens) - len(PROMPT.tokens) <= most
    assert (sample.text if texts else None, sample.finished) == (texts, finished)


async def test_a_tool_of_ones_own_has_a_time_limit_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tool.py").write_text(
        "import time, os\n"
        "def tool(call):\n"
        "    print('noise')\n"
        "    if call == 'hang': time.sleep(1000)\n"
        "    if call == 'die': os._exit(3)\n"
        "    return call[::-1] if call != 'raise' else 1 / 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scripts = [[f"<<{call}>>", "#### 1"] for call in ("abc", "raise", "hang", "die", "xyz")]
    environment = ToolEnvironment(
        context(timeout_s=2.0, max_response_tokens=200, options={"tool": "own_tool:tool"})
    )
    texts = [sample.text for sample in await episode(environment, Scripted(scripts), 5, 200)]
    assert texts[0] == "<<abc>>=cba\n#### 1" and texts[4] == "<<xyz>>=zyx\n#### 1"
    assert "=error: ZeroDivisionError: division by zero\n" in texts[1]
    assert "=error: no answer within 2 s\n" in texts[2]
    assert "=error: the tool ended" in texts[3]
    process = environment._tool._worker._process  # type: ignore[attr-defined]
    await environment.close()
    assert process.returncode is not None, "the tool's process ends with the environment"
    missing = ToolEnvironment(context(options={"tool": "own_tool:missing"}))
    with pytest.raises(
        PaNpuError, match=r"tool own_tool:missing: .*cannot be imported.*correct the function"
    ):
        await episode(missing, Scripted(scripts), 1)


class Broken:
    def __init__(self, context: EnvironmentContext) -> None:
        self.kind = context.options["kind"]

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> Any:
        (generation,) = await generate(prompt.tokens)
        sample = SampleBuilder(prompt.tokens)
        if self.kind == "raises":
            raise KeyError("answer")
        if self.kind == "few":
            return []
        if self.kind == "nothing":
            return [sample.finish(True, "")] * num_samples
        if self.kind == "alien":
            return [generation] * num_samples
        await generate(prompt.tokens, max_tokens=0)


async def test_a_tool_that_answers_no_text_fails_and_one_that_answers_megabytes_ends_its_sample_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huge_tool.py").write_text(
        "def tool(call):\n"
        "    if call == 'half': return 'x\\ud800'\n"
        "    if call == 'raises': raise ValueError('\\ud800')\n"
        "    return 'word 12 ' * 600_000\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = ToolEnvironment(
        context(max_response_tokens=200, options={"tool": "huge_tool:tool"})
    )
    engine = Scripted([["<<half>>", "w<end>"], ["<<raises>>", "w<end>"], ["<<all>>", "w<end>"]])
    began_s = time.monotonic()
    half, raises, huge = await episode(environment, engine, 3, 200)
    assert "error: returned half of a surrogate pair" in half.text and half.finished
    assert "error: ValueError" in raises.text and raises.finished
    assert not huge.finished and huge.text == "<<all>>", "it cannot fit"
    assert time.monotonic() - began_s < 20.0, "five megabytes take a minute to tokenise"
    await environment.close()


async def test_long_texts_are_tokenised_beside_the_event_loop_and_alike() -> None:
    encoder, text = TextEncoder(TOKENIZER), "word 12 " * 20_000
    task = asyncio.ensure_future(encoder.encode(text, max_tokens=10**6))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100, "the loop went on"
    assert await task == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert await encoder.encode(text, max_tokens=10) is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "raises",
            r"environment Broken, prompt 4: KeyError: 'answer', \S*environments/test_environments.py:\d+; "
            r"correct",
        ),
        ("few", "must return samples, at least one, returned nothing"),
        ("nothing", "sample 0 must have arrays of one length and trained tokens"),
        ("alien", "must return samples, at least one, returned Generation"),
        ("empty", "ValueError: generate: n = 1 and max_tokens = 0 must be at least 1"),
    ],
)
async def test_a_broken_environment_is_one_line_that_names_it(kind: str, message: str) -> None:
    with pytest.raises(EnvironmentFailed, match=message) as caught:
        await episode(Broken(context(options={"kind": kind})), Scripted(SCRIPTS), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"name": "chess"},
            "'chess' is none of single_turn, tools, agents, remote, verifiers, tool_class and not module:Class",
        ),
        ({"name": "no_such_module:Class"}, "cannot be imported"),
        ({"name": "json:loads"}, "cannot be made"),
        ({"name": "builtins:id"}, "has no method rollout"),
        (
            {"name": "tools", "options": {"tols": 1}},
            "'tols' is unknown to tools, whose options are tool, call, answer",
        ),
        (
            {"name": "tools", "options": {"call": ["<"]}},
            r"call must be two texts, \[opening, closing\]",
        ),
        (
            {"name": "tools", "options": {"call": ["", ">"]}},
            "call must have marks that are not empty",
        ),
        (
            {"name": "tools", "options": {"tool": "abacus"}},
            "'abacus' is neither calculator nor module:function",
        ),
    ],
)
def test_an_unusable_environment_is_refused_before_anything_runs(
    section: dict[str, Any], message: str
) -> None:
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "environment": section}
    )
    with pytest.raises(ConfigError, match=message) as caught:
        make_environment(config, TOKENIZER)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("1/3", "0.333333"),
        ("-(2+3)*4", "-20"),
        ("0.1+0.2", "0.3"),
        ("2^10", "1024"),
        ("1,000*3", "3000"),
        ("-1/8", "-0.125"),
        ("7//2", "error: not an expression"),
        ("1/0", "error: division by zero"),
        ("__import__('os')", "error: not an expression"),
        ("9**9**9", "error: not an expression"),
        ("True+1", "error: not an expression"),
        ("(" * 150, "error: not an expression"),
        ("1+" * 200, "error: more than 200 characters"),
        ("", "error: not an expression"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(st.text(alphabet="0123456789+-*/().,^ e\x00\u0663x", max_size=60))
def test_the_calculator_answers_whatever_it_is_asked(expression: str) -> None:
    assert "\n" not in calculate(expression)


class Slow:
    async def open(self) -> None:
        await asyncio.sleep(60)

    async def close(self) -> None:
        raise OSError("nobody listens")

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        return []


async def test_an_environment_that_does_not_open_is_one_line_and_one_that_does_not_close_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"^environment Slow: open has not ended within 0.05 s; correct it$"
    ):
        async with opened(Slow(), 0.05):
            raise AssertionError("it is not open")
    assert "environment Slow: close: OSError: nobody listens" in caplog.text


class Never(SingleTurn):
    """Asks the policy, then does what it was made with, for ever."""

    def __init__(self, description: Any) -> None:
        super().__init__(context())
        self._what = description

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        samples = await super().rollout(prompt, num_samples, generate)
        await self._what()
        return samples


async def waits() -> None:
    await asyncio.Event().wait()


async def refuses_to_end() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


@pytest.mark.parametrize("description", [waits, refuses_to_end])
async def test_an_environment_that_never_returns_ends_in_one_line(
    description: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "LEAST_S", 0.1)
    monkeypatch.setattr(time_limit, "_END_S", 0.1)
    output = (
        r"^environment Never, prompt 4: it has neither asked the policy nor returned for 0.1 s; "
        r"[^\n]+timeout_s$"
    )
    with pytest.raises(EnvironmentFailed, match=output):
        await episode(Never(description), Scripted([["#### 1"]]), 2)


async def test_what_the_policy_takes_is_none_of_the_environments_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A control: an engine that takes ten times the limit, and an environment with limits of its
    own.
    """
    monkeypatch.setattr(time_limit, "LEAST_S", 0.05)

    class Slowly(Scripted):
        async def generate(self, *args: Any, **kwargs: Any) -> list[Generation]:
            await asyncio.sleep(0.5)
            return await super().generate(*args, **kwargs)

    assert len(await episode(SingleTurn(context()), Slowly([["#### 1"]]), 2)) == 2

    class Bounded(Never):
        waits_are_bounded = True

    bounded = Bounded(lambda: asyncio.sleep(0.5))
    assert len(await episode(bounded, Scripted([["#### 1"]]), 2)) == 2


async def sleeps() -> None:
    time.sleep(3600)


async def counts() -> None:
    while True:
        pass


@pytest.mark.timeout(60, method="thread")  # else pytest has the timer
@pytest.mark.parametrize("description", [sleeps, counts])
async def test_an_environment_that_blocks_every_group_is_interrupted_where_it_does(
    description: Any,
) -> None:
    environment = Never(description)
    line = description.__code__.co_firstlineno
    output = (
        rf"^environment Never: it has blocked all groups for 0.2 s at "
        rf".*environments/test_environments.py:({line + 1}|{line + 2}); wait"
    )
    with interrupting(environment, 0.2), pytest.raises(EnvironmentFailed, match=output):
        await episode(environment, Scripted([["#### 1"]]), 2)
    with interrupting(environment, 0.2):
        await asyncio.sleep(0.6)  # a control: the loop goes on meanwhile


@pytest.mark.parametrize("reward", [1e39, -1e308, 10**400, float("nan"), "x", [1.0]])
async def test_an_environments_reward_that_float32_cannot_hold_ends_the_run_in_one_line(
    reward: Any,
) -> None:
    samples: Any = [SimpleNamespace(reward=1.0), SimpleNamespace(reward=reward)]
    with pytest.raises(EnvironmentFailed, match="must be finite numbers in float32") as failed:
        await score(rewards=None, prompt=SimpleNamespace(prompt_id=7), samples=samples)  # type: ignore[arg-type]
    assert "\n" not in str(failed.value)
