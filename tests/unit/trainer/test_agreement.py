"""I5 with a real model: a transformers engine beside the Megatron trainer, and each fault that a run must not survive.

The engine samples with its own weights and says its own log-probs, as engines do; what is between
them and the trainer's is the rounding of two implementations, in fp32 and in bf16. 32 responses an
iteration, the fewest that anyone trains with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.agreement import (
    CHECKS,
    UNCERTAINTY_FLOOR,
    DifferenceSums,
    difference_sums,
    limits,
)
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.errors import InvariantViolation
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.trainer.agreement import FALSE_STOP_RATE, YARDSTICK_EVERY, Agreement
from tests.helpers.backend import make_learner
from tests.helpers.groups import with_trained
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.policies import probe_plan
from tests.helpers.shelf import shelf_iterator
from tools.groups import group_of_responses

from pa_npu.trainer.loop import Consumed, consume  # isort: skip

GROUPS, RESPONSES, TOKENS, PROBE_TOKENS = 4, 8, 16, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NONE = DifferenceSums()

Change = Callable[[list[Group]], list[Group]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With an entropy of 2.5 nats of at most 4.9: where all tokens are nearly as likely, their
    log-probs say nothing.
    """
    path = make_model(tmp_path_factory.mktemp("model"))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] *= 4.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with single_process(model_config(path)):
        yield path


class Engine:
    """Samples with the weights of an HF directory, times `scale`, at `temperature`."""

    def __init__(
        self, directory: Path, dtype: str, *, scale: float = 1.0, temperature: float = 1.0
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
        self._temperature = temperature
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(scale)

    def group(
        self,
        iteration: int,
        version: int,
        index: int,
        responses: int = RESPONSES,
        tokens: int = TOKENS,
    ) -> Group:
        (group,) = self.groups(iteration, version, [index], responses, tokens)
        return group

    @torch.no_grad()
    def groups(
        self,
        iteration: int,
        version: int,
        indices: Sequence[int],
        responses: int = RESPONSES,
        tokens: int = TOKENS,
    ) -> list[Group]:
        """Samples all groups in one batch, each with a generator of its own."""
        rngs = [np.random.default_rng((iteration, index)) for index in indices]
        prompts = [rng.integers(3, 128, 5) for rng in rngs]
        generators = [torch.Generator().manual_seed(1000 * iteration + index) for index in indices]
        sequences = newest = torch.from_numpy(np.repeat(np.stack(prompts), responses, axis=0))
        cache = None
        for _ in range(tokens):
            answer = self._model(newest, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            distributions = (
                (answer.logits[:, -1].float() / self._temperature).softmax(-1).split(responses)
            )
            drawn = zip(distributions, generators, strict=True)
            newest = torch.cat(
                [torch.multinomial(one, 1, generator=generator) for one, generator in drawn]
            )
            sequences = torch.cat([sequences, newest], dim=1)
        # the log-probs are of one pass over whole sequences, whose rounding this test knows
        table = (self._model(sequences).logits[:, :-1].float() / self._temperature).log_softmax(-1)
        logprobs = table.gather(-1, sequences[:, 1:, None])[:, prompts[0].size - 1 :, 0]
        return [
            group_of_responses(
                iteration=iteration,
                version=version,
                index=index,
                prompt_id=index,
                prompt_tokens=prompt.astype(np.int32),
                response_tokens=written.reshape(-1).numpy().astype(np.int32),
                response_lengths=np.full(responses, tokens, np.int32),
                logprobs=said.reshape(-1).numpy(),
                rewards=np.zeros(responses, np.float32),
                advantages=rng.standard_normal(responses).astype(np.float32),
                finished=np.zeros(responses, np.uint8),
            )
            for index, rng, prompt, written, said in zip(
                indices,
                rngs,
                prompts,
                sequences[:, prompts[0].size :].split(responses),
                logprobs.split(responses),
                strict=True,
            )
        ]


class Run:
    """A trainer rank's loop, with engines in the same process."""

    def __init__(
        self, model: Path, directory: Path, dtype: str = "fp32", **sections: dict[str, Any]
    ) -> None:
        self.directory, self.dtype = directory, dtype
        self.config = configuration(model, directory, dtype, **sections)
        self.learner, self.stage = make_learner(self.config)
        self.agreement = Agreement(self.config, self.learner, probe_plan(self.config))

    def iteration(
        self,
        number: int,
        engine: Engine,
        version: int | None = None,
        change: Change = lambda groups: groups,
    ) -> Consumed:
        """version: that of the engine's weights."""
        version = number if version is None else version
        groups = change(engine.groups(number, version, range(GROUPS), tokens=self.tokens))
        freshness = Freshness(self.config.schedule.max_staleness)
        microbatches = shelf_iterator(groups, number, responses=RESPONSES, freshness=freshness)

        def measure(share: MicrobatchIterator) -> None:
            self.agreement.measure(number, share.first)

        def judge(first: DifferenceSums) -> None:
            self.agreement.check_probe(number, first)

        rides = judge if self.agreement.probes_ride else None
        updates = self.config.schedule.updates_per_iteration
        consumed = consume(self.learner, microbatches, updates, measure, rides)
        self.agreement.check_trained(number, consumed.exact, consumed.aged)
        return consumed

    @property
    def tokens(self) -> int:
        return self.config.rollout.max_response_tokens

    def probe(self, version: int, engine: Engine) -> DifferenceSums:
        group = engine.group(
            version,
            version,
            99,
            responses=probe_plan(self.config).num_responses,
            tokens=PROBE_TOKENS,
        )
        return self.agreement.check_requests(
            version, build_microbatches(group, group.num_samples, True, 1)
        )

    def exported(self, name: str) -> Path:
        self.learner.backend.export(self.directory / name)
        return self.directory / name


def configuration(
    model: Path, directory: Path, dtype: str = "fp32", **sections: dict[str, Any]
) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype},
        "run": {"dir": str(directory)},
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": TOKENS},
        "schedule": {"prompts_per_iteration": GROUPS},
        "optimizer": {"learning_rate": 1e-3},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return model_config(model, **base)


FAULTS = ["skipped publish", "scaled weights", "temperature"]
SCALE, TEMPERATURE = 1.01, 1.3


def engine_with(fault: str | None, published: Path, before: Engine, dtype: str) -> Engine:
    """Returns the engine after a publish, with the published weights or a fault. before: the engine
    until then.
    """
    if fault == "skipped publish":
        return before
    return Engine(
        published,
        dtype,
        scale=SCALE if fault == "scaled weights" else 1.0,
        temperature=TEMPERATURE if fault == "temperature" else 1.0,
    )


# in CI fp32 has the faults at the smallest learning rate, below
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param(fault, dtype, marks=[pytest.mark.nightly] if fault and dtype == "fp32" else [])
        for fault in (None, *FAULTS)
        for dtype in DTYPES
    ],
)
def test_each_fault_ends_the_run_in_either_type_and_none_does_not(
    fault: str | None, dtype: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, dtype)
    engine = Engine(model, dtype)
    run.learner.publish(0)
    run.probe(0, engine)
    run.iteration(0, engine)
    after = engine_with(fault, run.exported("hf"), engine, dtype)
    run.learner.publish(1)
    if fault is None:
        run.probe(1, after)
        run.iteration(1, after)
        return
    with pytest.raises(InvariantViolation, match=r"I5 agreement: in .* engines hold other weights"):
        run.iteration(1, after)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
@pytest.mark.parametrize("fault", ["scaled weights", "temperature", "lower temperature"])
def test_a_fault_that_is_there_from_the_beginning_is_not_taken_for_noise(
    fault: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, dtype)
    wrong = Engine(model, dtype, temperature=0.8) if fault == "lower temperature" else None
    engine = wrong or engine_with(fault, model, Engine(model, dtype), dtype)
    run.learner.publish(0)
    with pytest.raises(
        InvariantViolation, match=r"I5 agreement: in (training iteration|the probe after .*) 0 "
    ):
        run.iteration(0, engine)


@pytest.mark.parametrize("fault", FAULTS)
def test_in_fp32_a_fault_shows_at_any_learning_rate(
    fault: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, optimizer={"learning_rate": 1e-6})
    engine = Engine(model, "fp32")
    run.learner.publish(0)
    run.iteration(0, engine)
    after = engine_with(fault, run.exported("hf"), engine, "fp32")
    run.learner.publish(1)
    with pytest.raises(InvariantViolation, match="I5 agreement"):
        run.iteration(1, after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_group_shows_a_wrong_temperature_before_anything_is_learned_from_it(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, dtype)
    run.learner.publish(0)
    before = [parameter.detach().clone() for parameter in run.stage.policy.parameters()]
    with pytest.raises(
        InvariantViolation, match="I5 agreement: in the probe after publishing version 0"
    ):
        run.iteration(0, Engine(model, dtype, temperature=TEMPERATURE))
    assert all(map(torch.equal, before, run.stage.policy.parameters()))
    gradients = [parameter.main_grad for parameter in run.stage.policy.parameters()]
    assert not any(gradient.any() for gradient in gradients), "it is judged before its backward"


# --- tokens of which the policy has moved on


def trained(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """`change` of every group's log-probs, [responses, tokens]."""

    def changed(group: Group) -> Group:
        found = group.logprobs[group.trained].reshape(group.num_samples, -1)
        return with_trained(group, logprobs=change(found).reshape(-1).astype(np.float32))

    return lambda groups: [changed(group) for group in groups]


def swapped(groups: list[Group]) -> list[Group]:
    """Two responses of one group have each other's log-probs."""
    rows = np.arange(RESPONSES)
    rows[[2, 5]] = rows[[5, 2]]
    (first,) = trained(lambda found: found[rows])(groups[1:2])
    return [groups[0], first, *groups[2:]]


CHANGES: dict[str, Change] = {
    "shifted": trained(lambda found: np.roll(found, 1, axis=1)),
    "shifted back": trained(lambda found: np.roll(found, -1, axis=1)),
    "zeros": trained(lambda found: found * 0.0),
    "swapped": swapped,
}
STALE: dict[str, dict[str, Any]] = {
    "k=1": {"max_staleness": 1},
    "k=2": {"max_staleness": 2},
    "k=4": {"max_staleness": 4},
    "k=1, two updates": {"max_staleness": 1, "updates_per_iteration": 2},
    "two updates": {"updates_per_iteration": 2},
}
IN_CI = [("k=1, two updates", "bf16")]
OLDER_FAULTS = [
    *(
        pytest.param(fault, marks=() if fault == "swapped" else pytest.mark.nightly)
        for fault in CHANGES
    ),
    "temperature",
]


def stale_run(
    model: Path,
    tmp_path: Path,
    dtype: str,
    schedule: dict[str, Any],
    fault: str | None,
    iterations: int,
) -> None:
    """The fault comes with the last iteration.

    Two updates without an old policy: ratios against the sampling one.
    """
    run = Run(
        model,
        tmp_path,
        dtype,
        schedule={**schedule, "iterations": 2 * iterations},
        algorithm={"ratio": "sampling"},
        rollout={"max_response_tokens": 48},
        optimizer={"learning_rate": 3e-4},
    )
    assert trainer_models(run.config).computed == ()
    staleness = run.config.schedule.max_staleness
    directories: list[Path] = []
    for version in range(iterations):
        directories.append(run.exported(f"hf-{version}"))
        run.learner.publish(version)
        if staleness:
            run.probe(version, Engine(directories[version], dtype))
        by, last = max(0, version - staleness), version == iterations - 1
        engine = Engine(
            directories[by], dtype, temperature=1.3 if last and fault == "temperature" else 1.0
        )
        change: Change = (
            CHANGES.get(fault or "", lambda groups: groups) if last else lambda groups: groups
        )
        consumed = run.iteration(version, engine, by, change)
    tokens = GROUPS * RESPONSES * 48
    assert (consumed.exact.n, consumed.aged.n) == (
        (0, tokens) if staleness else (tokens / 2, tokens / 2)
    )


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        pytest.param(
            schedule, dtype, marks=() if (schedule, dtype) in IN_CI else pytest.mark.nightly
        )
        for schedule in STALE
        for dtype in DTYPES
    ],
)
def test_a_policy_that_moves_on_ends_no_run(
    schedule: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    stale_run(model, tmp_path, dtype, STALE[schedule], None, 6)


@pytest.mark.parametrize("fault", OLDER_FAULTS)
def test_log_probs_that_belong_to_other_tokens_end_the_run_whatever_their_age(
    fault: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InvariantViolation, match=r"I5 agreement: in the older tokens of training iteration 2 "
    ):
        stale_run(model, tmp_path, "bf16", STALE["k=1"], fault, 3)


@pytest.mark.parametrize("fault", OLDER_FAULTS)
def test_a_later_update_without_an_old_policy_is_judged_too(
    fault: str, model: Path, tmp_path: Path
) -> None:
    """Both updates have groups of the fault, so that the first one's tokens show it exactly."""
    with pytest.raises(InvariantViolation, match="I5 agreement: in "):
        stale_run(model, tmp_path, "bf16", STALE["two updates"], fault, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", ["k=1", "k=2", "k=4", "k=1, two updates"])
@pytest.mark.parametrize("fault", [*CHANGES, "temperature"])
def test_faults_of_older_tokens_at_every_age(
    fault: str, schedule: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvariantViolation, match="I5 agreement"):
        stale_run(model, tmp_path, dtype, STALE[schedule], fault, 6)


# --- the yardstick, and the keys


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_engine_moves_the_yardstick(dtype: str, model: Path, tmp_path: Path) -> None:
    """It follows from tokens and weights: other log-probs of the same tokens give the same numbers,
    and change nothing.
    """
    run = Run(model, tmp_path, dtype)
    group = Engine(model, dtype).group(0, 0, 0)
    before = [parameter.detach().clone() for parameter in run.stage.policy.parameters()]
    found = [
        run.learner.rounding(build_microbatches(one, RESPONSES, True, 1))
        for one in (group, trained(lambda logprobs: logprobs * 1.5)([group])[0])
    ]
    assert found[0] is not None and found[0] == found[1] and found[0].responses == RESPONSES
    assert RESPONSES / 2 < found[0].independent < RESPONSES, "few of their tokens are the same"
    assert 0.1 < found[0].absolute_mean / {"fp32": 2e-7, "bf16": 8e-3}[dtype] < 3
    assert all(map(torch.equal, before, run.stage.policy.parameters()))
    update = run.iteration(0, Engine(model, dtype))
    assert update.report.grad_norm > 0, "gradient hooks are still on the parameters"


def test_in_bf16_the_yardstick_is_the_distance_to_the_same_weights_in_fp32(
    model: Path, tmp_path: Path
) -> None:
    """Against a whole second model in fp32 with the bf16 weights."""
    run = Run(model, tmp_path / "narrow", "bf16")
    group = Engine(model, "bf16").group(0, 0, 0)
    wide = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
    with torch.no_grad():
        sequences = torch.from_numpy(np.stack(group.sequences()).astype(np.int64))
        table = wide(sequences).logits[:, :-1].log_softmax(-1)
    exact = table.gather(-1, sequences[:, 1:, None])[:, -TOKENS:, 0].reshape(-1).numpy()
    (microbatch,) = build_microbatches(with_trained(group, logprobs=exact), RESPONSES, True, 1)
    found = run.learner.rounding([microbatch])
    assert found is not None
    assert found.absolute == pytest.approx(run.learner.probe([microbatch]).absolute, rel=2e-3)


class Fixed:
    """A learner whose rounding is known."""

    def __init__(self, *scales: float) -> None:
        self.asked = 0
        self.backend = SimpleNamespace(place=Mesh().place(0))
        self._scales = scales

    def rounding(self, microbatches: list[Any]) -> DifferenceSums | None:
        self.asked += 1
        return sums(self._scales[self.asked - 1]) if self._scales else None


def sums(scale: float, responses: int = 64) -> DifferenceSums:
    """Differences of `scale` of log-odds, without a slope but by chance."""
    z = scale * np.random.default_rng(1).standard_normal((responses, 20))
    logprobs = np.full(z.shape, -1.0)
    floor = UNCERTAINTY_FLOOR["fp32"]
    engine = logprobs - z * (1 - np.exp(logprobs) + floor)
    index = torch.arange(responses).repeat_interleave(20)
    t, e = (torch.from_numpy(values.reshape(-1)) for values in (logprobs, engine))
    entropy = torch.full_like(t, 1.5)
    return DifferenceSums(*difference_sums(t, e, entropy, index, responses, floor=floor).tolist())


def test_limits_follow_the_yardstick_which_is_measured_at_the_start_and_every_so_many_iterations(
    model: Path, tmp_path: Path
) -> None:
    learner: Any = Fixed(1e-3, 1e-4)
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    found = []
    for iteration in range(5, 5 + YARDSTICK_EVERY + 1):
        agreement.measure(iteration, lambda number: [])
        found.append(agreement.check_trained(iteration, sums(1e-5), NONE).logodds_diff_limit)
    first, last = found[0], found[-1]
    assert learner.asked == 2 and found == [first] * YARDSTICK_EVERY + [last], (
        "a resumed run measures anew"
    )
    assert first is not None and last is not None and last == pytest.approx(first / 10, rel=1e-6)
    assert agreement.check_trained(99, sums(1e-6), NONE).logodds_diff_limit == last, (
        "what engines say moves no limit"
    )


def test_a_device_without_a_wider_type_has_a_stated_yardstick(model: Path, tmp_path: Path) -> None:
    learner: Any = Fixed()
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    assert 4e-6 < (agreement.check_trained(0, sums(1e-6), NONE).logodds_diff_limit or 0) < 2e-5
    with pytest.raises(
        InvariantViolation,
        match=r"times the trainer's own rounding, mean .difference. of log-odds = 1e-06",
    ):
        agreement.check_trained(1, sums(1e-4), NONE)


def test_without_a_margin_everything_is_recorded_and_nothing_judged(
    model: Path, tmp_path: Path
) -> None:
    learner: Any = Fixed()
    config = configuration(model, tmp_path, publish={"noise_margin": None})
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    assert (
        agreement.check_trained(0, sums(1.0), sums(1.0)).logodds_diff_limit is None
        and not learner.asked
    )
    agreement.check_probe(0, replace(sums(1.0), largest=5.0))


def test_an_absolute_tolerance_holds_beside_the_yardstick(model: Path, tmp_path: Path) -> None:
    learner: Any = Fixed()
    config = configuration(model, tmp_path, publish={"probe_tolerance": 0.1})
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.check_probe(0, replace(sums(1e-7), largest=0.09))
    with pytest.raises(
        InvariantViolation, match=r"difference of 0.11, more than publish.probe_tolerance = 0.1"
    ):
        agreement.check_probe(0, replace(sums(1e-7), largest=0.11))
    with pytest.raises(InvariantViolation, match="probe_tolerance"):
        agreement.check_probe(0, replace(sums(1e-7), largest=float("nan")))


def broken_by(check: str) -> DifferenceSums:
    """Sums that break this check alone."""
    found = sums(1e-5)
    slope = 0.05  # as all responses have it, so that there is no scatter
    changes: dict[str, dict[str, float]] = {
        "mean": {"odds": found.n * 1e-2},
        "square": {"square": found.n * 1e-4},
        "slope": {
            "moment": slope * found.weight,
            "moment_squared": slope**2 * found.weight_squared,
            "moment_times_weight": slope * found.weight_squared,
            "scatter_moment": slope**2 * found.scatter_weight,
            "scatter_cross": slope * found.scatter_weight,
        },
        "strays": {"strays": 1e4},
    }
    return replace(found, **changes[check])


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_is_only_logged_ends_no_run_and_leaves_all_that_it_judged(
    check: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner: Any = Fixed(1e-4)
    wrong = broken_by(check)
    message = rf"I5 agreement: .*publish.only_logged=\[{check}\]"

    def judge(**publish: Any) -> Agreement:
        learner.asked = 0
        config = configuration(model, tmp_path, publish=publish)
        agreement = Agreement(config, learner, probe_plan(config))
        agreement.measure(3, lambda number: [])
        agreement.check_trained(3, wrong, NONE)
        return agreement

    with pytest.raises(InvariantViolation, match=message):
        judge()
    with pytest.raises(InvariantViolation, match=message):
        judge(only_logged=[other for other in CHECKS if other != check])
    caplog.clear()
    judge(only_logged=[check]).close()
    assert re.search(message, caplog.text)
    lines = [
        json.loads(line)
        for line in (tmp_path / "agreement" / "replica_00000.jsonl").read_text().splitlines()
    ]
    assert [line["broken"] for line in lines] == [[check]] * 3
    line = lines[-1]
    assert (line["version"], line["margin"], line["subject"]) == (3, 4.0, "training iteration 3")
    recorded, yardstick = DifferenceSums(**line["sums"]), DifferenceSums(**line["yardstick"])
    assert limits(yardstick, recorded, 4.0, FALSE_STOP_RATE).broken(recorded).keys() == {check}


def test_an_agreement_is_recorded_too(model: Path, tmp_path: Path) -> None:
    learner: Any = Fixed(1e-4)
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    agreement.check_probe(0, sums(1e-5))
    report = agreement.check_trained(0, sums(1e-5), NONE)
    lines = [
        json.loads(line)
        for line in (tmp_path / "agreement" / "replica_00000.jsonl").read_text().splitlines()
    ]
    assert [line["broken"] for line in lines] == [[], []]
    assert report.logodds_diff_mean == pytest.approx(1e-5 * math.sqrt(2 / math.pi), rel=0.1)
