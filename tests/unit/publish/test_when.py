"""publish.divergence: which versions are published, what is fresh whatever the divergence is, and what trainers keep."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness, iterations_ahead
from pa_npu.publish.probes import MIN_RESPONSES
from pa_npu.telemetry.run_summary import saved_publishes_line
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.publication import (
    BlockingTrainerPublication,
    PublishedVersions,
    SkippingTrainerPublication,
    TrainerPublication,
    make_publication,
)
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.policies import milestones, probe_plan
from tests.helpers.trainer_rank import make_groups
from tests.unit.trainer.test_updates import GROUPS, RESPONSES, make_config, make_learner, source

# these import megatron, which the helper above has prepared
from pa_npu.samples.microbatch import build_microbatches  # isort: skip
from pa_npu.trainer.loop import consume  # isort: skip

LIMIT = 0.01
ITERATIONS = 12
NO_CHANNEL: Any = None


def config_of(staleness: int, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "schedule": {"max_staleness": staleness, "iterations": ITERATIONS},
        "publish": {"divergence": LIMIT},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"schedule": {"max_staleness": 0}},
            "publish.divergence: 0.01 with schedule.max_staleness = 0",
        ),
        ({"publish": {"probe_tokens": 0}}, "publish.probe_tokens = 0 turns off"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(**{"staleness": 2, **sections})


class Scripted:
    """A backend whose probes say these divergences, one after another."""

    def __init__(self, kls: list[float]) -> None:
        self._kls = iter(kls)

    def probe(self, microbatches: list[Any]) -> DifferenceSums:
        return DifferenceSums(n=100.0, k3=100.0 * next(self._kls))


def choice_of(config: Config, kls: list[float]) -> PublishedVersions:
    """The choice of a run whose probe says `kls`, one after another."""
    assert config.publish.divergence is not None
    return PublishedVersions(
        probes=Scripted(kls),
        limit=config.publish.divergence,
        freshness=Freshness.from_sections(config.schedule, config.publish),
        milestones=milestones(config),
    )


def published(config: Config, kls: list[float], first: int = 0) -> list[int]:
    """The versions that are published when the probe says `kls` at the borders after the first."""
    choice = choice_of(config, kls)
    versions = []
    for version in range(first, ITERATIONS + 1):
        report = choice.decide(version)
        assert report.publish_kl is not None or version == first
        if not report.publish_skipped:
            choice.published(version, ["probe"])  # type: ignore[list-item]
            versions.append(version)
    return versions


def test_a_version_is_published_when_it_is_far_or_its_tokens_would_be_too_old() -> None:
    near = LIMIT / 2
    far = LIMIT
    assert published(config_of(1), [far] * ITERATIONS) == list(range(ITERATIONS + 1)), (
        "the limit itself is far"
    )
    assert published(config_of(1), [near] * ITERATIONS) == [0, 2, 4, 6, 8, 10, 12]
    assert published(config_of(4), [near] * ITERATIONS) == [0, 4, 8, 12]
    # far at the border of version 3 only; from version 11 on nothing is generated any more
    assert published(config_of(4), [near, near, far, *[near] * 7, far, far]) == [0, 3, 7, 12]


def test_what_is_evaluated_or_saved_is_published_however_near() -> None:
    near = [LIMIT / 2] * ITERATIONS
    assert published(config_of(4, checkpoint={"every": 5}), near) == [0, 4, 5, 9, 10, 12]
    evaluated = config_of(4, schedule={"evaluate_every": 6}, data={"test": "held-out"})
    assert published(evaluated, near) == [0, 4, 6, 10, 12]
    assert published(config_of(4, data={"test": "held-out"}), near) == [0, 4, 8, 12], (
        "nothing is evaluated in between"
    )


def test_a_run_that_continues_from_a_checkpoint_publishes_what_the_whole_one_does() -> None:
    config = config_of(3, checkpoint={"every": 4})
    rng = random.Random(1)
    for _ in range(20):
        kls = [rng.choice([0.5, 2.0]) * LIMIT for _ in range(ITERATIONS)]
        assert [v for v in published(config, kls) if v >= 4] == published(config, kls[4:], first=4)


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_every_iteration_is_produced_once_and_fresh_whatever_the_divergences(
    staleness: int,
) -> None:
    config = config_of(staleness)
    rng = random.Random(staleness)
    oldest = 0
    freshness = Freshness(staleness, iterations_ahead(config.schedule, config.publish))
    for _ in range(50):
        kls = [rng.choice([0.5, 2.0]) * LIMIT for _ in range(ITERATIONS)]
        versions = published(config, kls)
        produced = []
        held = 0
        for border in range(ITERATIONS):
            held = max(v for v in versions if v <= border)
            while len(produced) < ITERATIONS and freshness.is_due(len(produced), border):
                freshness.check_production(len(produced), held)
                oldest = max(oldest, len(produced) - held)
                produced.append(held)
            assert len(produced) > border, (
                "trainers would wait for an iteration that nobody produces"
            )
    assert oldest == staleness, "all of the staleness is used"


def test_without_the_key_every_version_is_published_and_nothing_is_measured() -> None:
    config = config_of(2, publish={"divergence": None})
    place = config.mesh.place(0)
    backend = SimpleNamespace(place=place, digest=lambda: "")
    learner: Any = SimpleNamespace(backend=backend, publish=lambda _: None)

    def policy(chosen: Config) -> TrainerPublication:
        return make_publication(
            chosen.publish,
            learner=learner,
            publisher=None,
            channel=NO_CHANNEL,
            timeline=Timeline(None, ""),
            timeout_s=1.0,
            freshness=Freshness.from_sections(chosen.schedule, chosen.publish),
            milestones=milestones(chosen),
        )

    assert type(policy(config)) is BlockingTrainerPublication
    assert type(policy(config_of(2))) is SkippingTrainerPublication, "negative control"
    assert iterations_ahead(config.schedule, config.publish) == 2
    assert probe_plan(config).num_responses == MIN_RESPONSES


def test_the_summary_counts_publishes_that_were_saved() -> None:
    records = [
        {"publish_skipped": skipped, "publish_kl": 0.001 * (1 + skipped)}
        for skipped in (True, False, True)
    ]
    assert saved_publishes_line(records) == (
        "Publishes saved: 2 of 3; KL from the engines' policy up to 0.002 nats a token."
    )
    assert saved_publishes_line([{"iteration": 0}]) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def test_trainers_keep_what_engines_hold_measure_the_divergence_and_go_on(model: Path) -> None:
    """Two updates per iteration: the old policy follows the version that trains, late engines get
    the one that was published.
    """
    schedule = {"max_staleness": 2, "updates_per_iteration": 2, "iterations": 5}
    algorithm = {"importance_sampling": "token"}
    learner, stage = make_learner(
        make_config(model, schedule=schedule, algorithm=algorithm, publish={"divergence": 1.0})
    )
    learner.publish(3)
    probe = make_groups(3, 1, RESPONSES, seed=7)[0]
    (microbatch,) = build_microbatches(probe, RESPONSES, True, 1)
    with torch.no_grad():
        before = stage(
            microbatch.tokens[None],
            microbatch.layout,
            microbatch.rows,
            microbatch.targets,
            temperature=1.0,
            chunk=64,
        ).logprobs
    sampled = microbatch.engine_logprobs.copy_(before)
    assert learner.probe([microbatch]).k3_mean == pytest.approx(0.0, abs=1e-9), (
        "an engine of this version"
    )
    consume(learner, source(make_groups(3, GROUPS, RESPONSES, seed=5), 3), 2)
    learner.skip_publish(4)
    with torch.no_grad():
        after = stage(
            microbatch.tokens[None],
            microbatch.layout,
            microbatch.rows,
            microbatch.targets,
            temperature=1.0,
            chunk=64,
        ).logprobs
    difference = (after - sampled).double()
    by_hand = (difference.exp() - 1 - difference).mean().item()
    assert by_hand > 1e-6
    assert learner.probe([microbatch]).k3_mean == pytest.approx(by_hand, rel=1e-3)
    assert learner.gate.acquire(3), (
        "an engine that comes late still gets the version that was published"
    )
    learner.gate.release()
    policy = dict(stage.policy.named_parameters())
    old, kept = (
        dict(part.named_parameters()) for part in (stage.frozen["old"], stage.model("published"))
    )
    assert all(torch.equal(old[name], value) for name, value in policy.items()), (
        "ratios are against version 4"
    )
    assert any(not torch.equal(kept[name], value) for name, value in policy.items())
