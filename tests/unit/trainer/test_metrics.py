"""Every number of the trainers in metrics.jsonl against its definition, computed by transformers and numpy in double precision.

Two updates of one iteration, so that the policy of the second has left the old policy, which is the
one that sampled. The engines' log-probs are off by made-up differences, so that all that compares
engine and trainer has something to show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.backends.protocol import TrainBackend
from pa_npu.config.schema import Config
from pa_npu.control.messages import AgreementReport, IterationReport, ProbeReport, merge_updates
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.samples.replica_feed import Traffic
from tests.helpers.backend import Source, make_learner
from tests.helpers.groups import with_trained
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups

# these import megatron, which the helper above has prepared
from pa_npu.trainer.learner import Update  # isort: skip

RESPONSES, SHARES, CLIP, CAP, KL, TEMPERATURE = 4, 2, 0.1, 1.2, 0.05, 0.8
LEARNING_RATE = 3e-3
EACH = Traffic(1, 300, 40, 70)  # how a group came to its replica


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


class Policy:
    """An HF directory in double precision at TEMPERATURE: log-probs and entropies of the trained
    tokens of groups.
    """

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)

    def __call__(self, groups: list[Group]) -> tuple[np.ndarray, np.ndarray]:
        logprobs, entropies = [], []
        for group in groups:
            trained = np.split(group.trained, group.offsets()[1:-1])
            for tokens, own in zip(group.sequences(), trained, strict=True):
                ids = torch.from_numpy(tokens.astype(np.int64))
                with torch.no_grad():
                    table = (self._model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1).numpy()
                positions = np.flatnonzero(own)
                logprobs += [table[p - 1, tokens[p]] for p in positions]
                entropies += [-(np.exp(table[p - 1]) * table[p - 1]).sum() for p in positions]
        return np.array(logprobs), np.array(entropies)


def expected(
    policy: Policy, old: Policy, groups: list[Group], reference: Policy
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The numbers of one update by their definitions, and the per-token values behind them."""
    (new, entropy), (before, _), (far, _) = policy(groups), old(groups), reference(groups)
    engine = np.concatenate([group.logprobs[group.trained] for group in groups]).astype(np.float64)
    advantage = np.concatenate([group.advantages[group.trained] for group in groups]).astype(
        np.float64
    )
    ratio = np.exp(new - before)
    clipped = np.clip(ratio, 1 - CLIP, 1 + CLIP)
    weight = np.minimum(np.exp(before - engine), CAP)
    policy_loss = -np.minimum(ratio * advantage, clipped * advantage) * weight
    kl = np.exp(far - new) - 1 - (far - new)
    k3 = np.exp(before - engine) - 1 - (before - engine)
    numbers = {
        "loss": (policy_loss + KL * kl).mean(),
        "policy_loss": policy_loss.mean(),
        "kl": kl.mean(),
        "entropy": entropy.mean(),
        "clip_ratio": (ratio * advantage > clipped * advantage).mean(),
        "logprob_diff_mean": np.abs(before - engine).mean(),
        "logprob_diff_max": np.abs(before - engine).max(),
        "logprob_k3": k3.mean(),
        "importance_weight_mean": weight.mean(),
        "importance_truncated_ratio": (np.exp(before - engine) > CAP).mean(),
        "effective_sample_size": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
        "tokens_response": len(new),
        # every prompt once, every response
        "tokens_computed": sum(group.prompt_lengths()[0] for group in groups) + len(new),
        "microbatches": len(groups),
        "rollout_reads": EACH.reads * len(groups),
        "rollout_buffer_bytes": EACH.buffer_bytes * len(groups),
        "rollout_head_bytes": EACH.head_bytes * len(groups),
        "rollout_collective_bytes": EACH.collective_bytes * len(groups),
    }
    return numbers, {"k3": k3, "k3 the other way": np.exp(engine - before) - 1 - (engine - before)}


def configuration(model: Path) -> Config:
    return model_config(
        model,
        rollout={
            "responses_per_prompt": RESPONSES,
            "max_response_tokens": 16,
            "temperature": TEMPERATURE,
        },
        schedule={"prompts_per_iteration": 2 * SHARES, "updates_per_iteration": SHARES},
        optimizer={
            "learning_rate": LEARNING_RATE,
            "clip_grad": 0.0,
            "epsilon": 1e-3,
            "weight_decay": 0.0,
        },
        algorithm={
            **{"clip_low": CLIP, "clip_high": CLIP, "kl_coef": KL, "kl_estimator": "k3"},
            **{"importance_sampling": "token", "importance_cap": CAP},
        },
    )


def test_every_number_is_what_its_definition_gives(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    spec = ModelSpec.read(config.model.path)
    learner, stage = make_learner(config)
    # the reference is another model than the first version, or its KL would be 0 in the first
    # update
    start = Policy(model)
    with torch.no_grad():
        for parameter in stage.frozen["reference"].parameters():
            parameter.mul_(1.05)
    policies, rng = [model], np.random.default_rng(5)
    learner.publish(0)
    groups = make_groups(0, 2 * SHARES, RESPONSES, seed=5)
    groups = [
        with_trained(
            g, logprobs=np.minimum(start([g])[0] + 0.15 * rng.standard_normal(g.num_trained), 0)
        )
        for g in groups
    ]
    updates: list[Update] = []
    gradient_norms = []
    for share in range(SHARES):
        own = groups[2 * share : 2 * share + 2]
        microbatches = [m for group in own for m in build_microbatches(group, RESPONSES, True, 1)]
        source = Source(microbatches, waited_s=0.25, each=EACH)
        trained = learner.accumulate(source)
        assert sum(response.tokens for response in trained) == sum(
            group.num_trained for group in own
        )
        updates.append(learner.step())
        gradient_norms.append(updates[-1].report.grad_norm)
        learner.backend.export(tmp_path / f"after_{share}")
        policies.append(tmp_path / f"after_{share}")
    reference = tmp_path / "reference"
    _export_reference(stage, spec, reference, learner.backend)

    columns = []
    for share, update in enumerate(updates):
        own = groups[2 * share : 2 * share + 2]
        wanted, tokens = expected(Policy(policies[share]), start, own, Policy(reference))
        found = asdict(update.report)
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=2e-4, abs=2e-6), (
                f"update {share}: {name}"
            )
        columns.append(wanted)
        assert found["learning_rate"] == pytest.approx(LEARNING_RATE)
        assert found["wait_s"] == 0 and 0 < found["step_s"] < found["train_s"]
        # each case must show what it compares
        assert wanted["logprob_k3"] > 1e-3 and 0 < wanted["importance_truncated_ratio"] < 1
        other = tokens["k3 the other way"].mean()
        assert abs(other - wanted["logprob_k3"]) > 1e-3 * wanted["logprob_k3"], (
            "the direction of K3 must show"
        )
    assert columns[0]["clip_ratio"] == 0 < columns[1]["clip_ratio"], (
        "the ratio is 1 before the first update"
    )

    report = IterationReport(
        0,
        merge_updates([u.report for u in updates]),
        ProbeReport(),
        AgreementReport(1.0, 2.0, 3.0, 4.0),
    )
    record = report.record()
    counts = np.array([column["tokens_response"] for column in columns], float)
    for name in columns[0]:
        values = np.array([column[name] for column in columns])
        if name in ("tokens_response", "tokens_computed", "microbatches") or name.startswith(
            "rollout_"
        ):
            merged = values.sum()
        elif name in ("loss", "policy_loss"):
            merged = values.mean()
        elif name == "logprob_diff_max":
            merged = values.max()
        else:
            merged = (values * counts).sum() / counts.sum()
        assert record[name] == pytest.approx(merged, rel=2e-4, abs=2e-6), name
    assert record["grad_norm"] == pytest.approx(np.mean(gradient_norms))
    assert (
        record["memory_trainer_host_bytes"]
        == max(u.report.memory_trainer_host_bytes for u in updates)
        > 50 * 2**20
    )
    judged = {
        "logodds_diff_mean": 1.0,
        "logodds_diff_limit": 2.0,
        "logodds_slope": 3.0,
        "logodds_slope_limit": 4.0,
    }
    assert {name: record[name] for name in judged} == judged
    names = {
        *columns[0],
        "grad_norm",
        "learning_rate",
        "wait_s",
        "train_s",
        "step_s",
        "memory_trainer_host_bytes",
    }
    assert record.keys() == names | judged.keys(), "a number that nothing here checks"


def _export_reference(stage, spec, directory: Path, backend: TrainBackend) -> None:  # type: ignore[no-untyped-def]
    from pa_npu.backends.megatron.weights.buckets import export_hf

    export_hf(stage.frozen["reference"], spec, directory, backend.place)
