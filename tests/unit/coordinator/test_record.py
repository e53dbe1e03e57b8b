"""The coordinator's numbers in metrics.jsonl against their definitions, on made-up groups, seconds and counters."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import EngineSettings
from pa_npu.control.messages import BorderReport
from pa_npu.coordinator.delivery import Production
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.record import BorderOutcome, Interval, iteration_record
from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import EngineUse
from pa_npu.planning.iteration_model.subjects import Prediction
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.rewards.functions import RewardResult
from pa_npu.samples.types import Sample, SampleBuilder
from tests.helpers.reports import iteration_report

RESPONSES = 3
SECONDS = 8.0
DEVICES = 5


def hold(done_s: float) -> EnginesHold:
    """A publish that ends then."""
    return EnginesHold(
        None, done_s - 0.75, done_s - 0.5, done_s - 0.125, done_s, MemoryPeak(7000, 5000), 0.5
    )


def test_a_device_that_decodes_and_trains_is_idle_while_it_does_neither() -> None:
    """Four trainer devices, of which two have an engine: one busy for half of the iteration and one
    for a quarter.
    """
    produced: Any = SimpleNamespace(
        iteration=4, numbers={"tokens_prompt": 10, "tokens_response": 10}
    )
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})

    def record(shared: bool) -> dict[str, Any]:
        before = {name: EngineUse(busy_s=1.0, shared=shared) for name in "ab"}
        after = {
            name: EngineUse(busy_s=busy_s, shared=shared)
            for name, busy_s in (("a", 5.0), ("b", 3.0))
        }
        return iteration_record(
            config,
            produced,
            iteration_report(4, wait_s=3.5, train_s=4.0, tokens_computed=70),
            BorderReport(0.5, 0.125),
            Prediction("", None, None),
            Interval(None, BorderOutcome(hold(10.75 - SECONDS), before, 3), ()),
            BorderOutcome(hold(10.75), after, 3),
        )

    numbers = record(shared=True)
    assert numbers["trainer_idle"] == pytest.approx(0.5) and numbers[
        "engine_idle"
    ] == pytest.approx(1 - 0.375)
    assert numbers["device_idle"] == pytest.approx(0.5 - 2 * 0.375 / 4), (
        "waiting while the device decodes is not idle"
    )
    assert "device_idle" not in record(shared=False)


def sample(prompt: np.ndarray, length: int, finished: bool) -> Sample:
    builder = SampleBuilder(prompt)
    builder.write(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), 4)
    return builder.finish(finished, "")


def test_every_number_is_what_its_definition_gives() -> None:
    rng = np.random.default_rng(1)
    production = Production(4)
    lengths = []
    prompts = []
    totals = []
    correct = []
    finished = []
    for index in range(4):
        prompt = Prompt(
            prompt_id=index, text="", tokens=np.arange(3 + index, dtype=np.int32), answer="", row={}
        )
        sizes = rng.integers(1, 9, RESPONSES)
        ends = rng.random(RESPONSES) < 0.6
        samples = [
            sample(prompt.tokens, int(n), bool(end)) for n, end in zip(sizes, ends, strict=True)
        ]
        reward = rng.random(RESPONSES).astype(np.float32)
        right = rng.random(RESPONSES) < 0.5
        if index == 1:
            reward[:] = reward[0]
        result = RewardResult(
            total=reward, correct=right, functions={"math": 2 * reward}, errors=()
        )
        scored = ScoredGroup(
            prompt,
            samples,
            result,
            {"tokens": 10, "tokens_unique": 4 + index, f"sessions_{index % 2}": 1},
        )
        production.scored(index, scored)
        if index < 3:  # one that is generated and not trained
            production.add(index, scored)
            production.put(scored.group(0, 4, index), scored, {(index % 2, index // 2): None})
            (
                lengths.append(sizes),
                prompts.append(3 + index),
                totals.append(reward),
                finished.append(ends),
            )
        correct.append(right)
    produced = production.end(replica_imbalance=0.1)
    produced = replace(produced, numbers=produced.numbers | {"window": 12, "tail_waste": 0.25})
    length = np.array(lengths)
    total = np.array(totals)
    end = np.array(finished)

    before = {
        "a": EngineUse(requests=5, tokens=100, busy_s=2.0),
        "gone": EngineUse(requests=9, busy_s=9.0),
    }
    after = {
        "a": EngineUse(requests=8, tokens=160, busy_s=6.0),
        "new": EngineUse(
            requests=2,
            tokens=40,
            busy_s=1.0,
            settings=EngineSettings(engines=(1,), device="npu 910B"),
        ),
    }
    record = iteration_record(
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}),
        produced,
        iteration_report(4, wait_s=1.5, train_s=3.0, tokens_computed=70),
        BorderReport(0.5, 0.125),
        Prediction("periodic", 7.0, -0.1),
        Interval(
            {"seconds": 1.25, "accuracy": 0.5},
            BorderOutcome(hold(10.75 - SECONDS), before, DEVICES - 1),
            (),
        ),
        BorderOutcome(hold(10.75), after, DEVICES - 1),
    )
    tokens = int(length.sum())
    prompt_tokens = RESPONSES * sum(prompts)
    expected = {
        "iteration": 4,
        "version": 4,
        "groups": 3,
        "groups_dispatched": 4,
        "reward_mean": total.mean(),
        "reward_std": np.mean([np.std(values, ddof=1) for values in totals]),
        "accuracy": np.array(correct[:3]).mean(),
        "accuracy_dispatched": np.array(correct).mean(),
        "reward_errors": 0,
        "equal_reward_ratio": 1 / 3,
        "response_length_mean": length.mean(),
        "response_length_min": length.min(),
        "response_length_max": length.max(),
        "prompt_length_mean": np.mean(prompts),
        "truncated_ratio": 1 - end.mean(),
        # all groups that are generated
        "environment": {"sessions_0": 2, "sessions_1": 2, "tokens": 40, "tokens_unique": 22},
        "unique_ratio": 22 / 40,
        "tokens_prompt": prompt_tokens,
        "tokens_response": tokens,
        "tokens_computed": 70,
        "window": 12,
        "tail_waste": 0.25,
        "replica_imbalance": 0.1,
        "wait_s": 1.5,
        "border_wait_s": 0.5,
        "trainer_idle": 2.0 / SECONDS,
        # two engines that serve at the end: one busy for 4 s of the 8, one new and busy for 1
        "engine_idle": 1 - (4.0 + 1.0) / (2 * SECONDS),
        "tpspd": (tokens + prompt_tokens) / SECONDS / DEVICES,
        "tpspd_response": tokens / SECONDS / DEVICES,
        "tpspd_computed": 70 / SECONDS / DEVICES,
        "publish_s": 0.75,
        "border_load_s": 0.25,
        "border_compare_s": 0.375,
        "border_probe_s": 0.125,
        "border_send_s": 0.125,
        "engine_still_s": 0.5,
        "evaluation_s": 1.25,
        "eval_accuracy": 0.5,
        "iteration_s": SECONDS,
        "devices": DEVICES,
        "memory_engine_host_bytes": 7000,
        "memory_engine_device_bytes": 5000,
    }
    for name, value in expected.items():
        assert record[name] == pytest.approx(value), name
    assert record["rewards"] == {"math": pytest.approx(2 * total.mean())}
    assert record["engines"] == {
        "a": {"requests": 3, "tokens": 60},
        "new": {"requests": 2, "tokens": 40, "device": "npu 910B"},
    }
    assert [(g.index, g.replica, list(g.response_tokens)) for g in produced.dispatched.groups] == [
        (index, index % 2, length[index].tolist()) for index in range(3)
    ]
