"""Conformance of training backends: every TrainBackend passes these on one rank; test_gradient_sum.py has more.

`make(config)` gives a Learner over a fresh backend with the weights of config.model.path, inside
the one process group that the backend is content with. Numbers are compared with the same update by
hand on the HF model: plain autograd and torch's AdamW. The suite is the list of what a backend must
do: every member of TrainBackend and of BackendModule occurs in it.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pa_npu import platform as platforms
from pa_npu.algorithm.objective import Objective, PolicyState
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.backends.registry import backend_module
from pa_npu.checkpoints.directories import directory_name
from pa_npu.checkpoints.saving import Checkpointing
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError, InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.cpu import CpuPlatform
from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner, Update
from pa_npu.weight_transfer.computation import computation_of, disagreements
from pa_npu.weight_transfer.contents import Contents
from pa_npu.weight_transfer.manifest import Assembler, Manifest
from pa_npu.weight_transfer.transport import Deadline
from tests.helpers import step_faults
from tests.helpers.adapters import plain
from tests.helpers.backend import Source
from tests.helpers.gradient_faults import FAULTS, faults_of, inject, negated
from tests.helpers.groups import trained_advantages
from tests.helpers.megatron import model_config
from tests.helpers.trainer_rank import make_groups

Make = Callable[[Config], Learner]
GROUPS, RESPONSES, LEARNING_RATE = 4, 4, 3e-3
BUCKET_BYTES = 20_000  # a few tensors of the model in each, and its embedding in several
ALONE_S = 240.0


FEW_STEPS = [
    ("the step skipped", "bf16"),
    ("norms decayed, by their group", "fp32"),
    ("clipped twice", "fp32"),
    ("moments zeroed between updates", "fp32"),
    ("one tensor's gradient zero", "bf16"),
    ("gradients not zeroed", "fp32"),
    ("the gradient behind the log-probs doubled", "bf16"),
    ("advantages moved within a response", "fp32"),
    ("a denominator that is off, rightly named", "bf16"),
    ("the policy's values under the reference's name", "fp32"),
]
STEP_CASES = [
    pytest.param(fault, dtype, marks=[] if (fault, dtype) in FEW_STEPS else [pytest.mark.nightly])
    for fault in [*step_faults.FAULTS, step_faults.COPIES]
    for dtype in ("fp32", "bf16")
    if fault != step_faults.COPIES or dtype == "bf16"
]


FINITE_DIFFERENCE_FAULTS = [
    "the gradient doubled",
    "the gradient turned round",
    "the gradient behind the log-probs doubled",
    "advantages negated inside the loss",
]


def config_of(model: Path, /, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        "schedule": {"prompts_per_iteration": GROUPS, "updates_per_iteration": 2},
        "algorithm": {"kl_coef": 0.1},
        "optimizer": {"learning_rate": LEARNING_RATE, "clip_grad": 0.0, "epsilon": 1e-3},
        "publish": {"noise_margin": None},
    }
    return model_config(
        model,
        **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}},
    )


def shares() -> list[list[Group]]:
    groups = make_groups(0, GROUPS, RESPONSES, seed=5)
    return [groups[: GROUPS // 2], groups[GROUPS // 2 :]]


def microbatches(groups: list[Group]) -> list[Microbatch]:
    return [one for group in groups for one in build_microbatches(group, RESPONSES // 2, True, 1)]


def by_hand(policy: Any) -> list[dict[str, torch.Tensor]]:
    """An HF model's weights after each of the two updates: the clip to the first weights, 0.1 K3 to
    the same.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )

    def logprobs(group: Group) -> list[torch.Tensor]:
        found = []
        for tokens, trained in zip(
            group.sequences(), np.split(group.trained, group.offsets()[1:-1]), strict=True
        ):
            ids = torch.from_numpy(tokens.astype(np.int64))
            table = policy(ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(table.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(trained[1:])])
        return found

    after = []
    with torch.no_grad():
        first = {group.index: logprobs(group) for share in shares() for group in share}
    for share in shares():
        terms = []
        for group in share:
            advantages = np.split(
                group.advantages[group.trained], np.cumsum(group.trained_lengths)[:-1]
            )
            for new, old, advantage in zip(
                logprobs(group), first[group.index], advantages, strict=True
            ):
                value, ratio = torch.from_numpy(advantage), (new - old).exp()
                kl = (old - new).exp() - 1 - (old - new)
                terms.append(0.1 * kl - torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value))
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        optimizer.step()
        after.append({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    return after


def save(learner: Learner, run: Path, version: int) -> None:
    """Save the learner as it is, as a run in the directory `run` does."""
    config = learner._config
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})
    Checkpointing(config, learner, lambda version: {}, Timeline(None, "")).finish(version)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def made_and_left(name: str, config: Config, checkpoint: Path, output: Path) -> tuple[int, bool]:
    """In a process of its own: a backend is made, says its place and leaves its groups; then a
    checkpoint is exported.

    Returns the number of trainer ranks that the backend knows, and whether the process was in a
    group while it had it.
    """
    module, platform = backend_module(name), platforms.get("cpu")
    config, _ = module.fit(config, ModelSpec.from_config(config))
    backend = module.create(
        config, ModelSpec.from_config(config), platform, dist.HashStore(), 0, 0, Timeline(None, "")
    )
    ranks, joined = backend.place.mesh.size, dist.is_initialized()
    backend.close()
    assert not dist.is_initialized()
    assert all(isinstance(line, str) for line in module.changes())
    module.export_checkpoint(checkpoint, output, None, True)
    return ranks, joined


class BackendConformance:
    """Subclass it as a test class with fixtures `make` and `model`, an HF directory, and the
    backend's name in the registry.
    """

    name: str
    offloads = True
    """Whether it reads optimizer.offload."""
    has_no: frozenset[str] = frozenset()
    """Faults that it cannot have."""

    def train(self, learner: Learner) -> None:
        learner.publish(0)
        for share in shares():
            learner.accumulate(Source(microbatches(share)))
            learner.step()

    def by_hand(self, model: Path) -> list[dict[str, torch.Tensor]]:
        """See by_hand; whole HF models."""
        return by_hand(plain(model))

    def exported(self, learner: Learner, directory: Path) -> dict[str, torch.Tensor]:
        learner.backend.export(directory)
        return tensors_of(directory)

    def test_two_updates_are_those_by_hand(self, make: Make, model: Path, tmp_path: Path) -> None:
        """Forward over packed prefixes, backward, division, the step, the old policy and the
        reference, and the export.
        """
        learner = make(config_of(model))
        self.train(learner)
        weights, expected = self.exported(learner, tmp_path / "hf"), self.by_hand(model)
        assert weights.keys() <= expected[1].keys() and len(weights) > 10
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor.float(),
                expected[1][name],
                rtol=1e-3,
                atol=1e-5,
                msg=lambda t, n=name: f"{n}: {t}",
            )
        assert (
            max((expected[1][name] - expected[0][name]).abs().max().item() for name in weights)
            > 1e-3
        )

    def test_gradients_are_undivided_sums_from_zero_and_scale(
        self, make: Make, model: Path
    ) -> None:
        config = config_of(model)
        learner = make(config)
        learner.publish(0)
        backend, sizes = learner.backend, []
        for _ in range(2):  # the second begins with zero again
            backend.accumulate(Source(microbatches(shares()[0])), Objective(config, backend.device))
            sizes.append(float(backend.gradient_size()))
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-5) and sizes[0] > 0
        backend.scale_gradients(0.25)
        assert float(backend.gradient_size()) == pytest.approx(sizes[0] / 4, rel=1e-5)
        step = backend.step()
        assert np.isfinite(step.grad_norm) and step.learning_rate == pytest.approx(LEARNING_RATE)

    def test_what_is_written_where_the_optimizer_steps_is_computed_with(
        self, make: Make, model: Path
    ) -> None:
        learner = make(config_of(model))
        some, backend = microbatches(shares()[0])[:1], learner.backend
        tensors = [tensor for tensor in backend.stepped() if tensor.weights.numel()]
        assert all(tensor.share == 1 for tensor in tensors), "of one rank"
        seen: list[torch.Tensor] = []
        for change in (0.0, 0.01, -0.01):
            with torch.no_grad():
                for tensor in tensors:
                    (tensor.weights if tensor.model is None else tensor.model).add_(change)
            backend.share_weights()
            backend.evaluate(some, lambda _, outputs: seen.append(outputs.policy.values))
        assert not torch.allclose(seen[0], seen[1], atol=1e-3)
        torch.testing.assert_close(seen[0], seen[2], atol=1e-4, rtol=1e-4)

    def test_copies_take_the_policys_weights_and_their_name_along(
        self, make: Make, model: Path
    ) -> None:
        learner = make(config_of(model))
        self.train(learner)
        backend, seen = learner.backend, []
        assert backend.digest("old") != backend.digest(), "a copy stays"
        backend.name_policy(PolicyState(7))
        backend.copy_policy("old")
        assert backend.digest("old") == backend.digest()
        backend.evaluate(microbatches(shares()[0])[:1], lambda _, outputs: seen.append(outputs))
        assert seen[0].policy.weights == seen[0].frozen["old"].weights == PolicyState(7)
        assert torch.equal(seen[0].policy.values, seen[0].frozen["old"].values)
        assert not torch.equal(seen[0].policy.values, seen[0].frozen["reference"].values)

    def test_evaluating_changes_nothing(self, make: Make, model: Path) -> None:
        learner = make(config_of(model))
        before = learner.backend.digest()
        first, again = (learner.probe(microbatches(shares()[0])) for _ in range(2))
        assert first == again and first.n > 0 and learner.backend.digest() == before

    @pytest.mark.parametrize("step", ["accumulate", "evaluate", "rounding"])
    def test_attachments_that_the_model_does_not_take_are_refused_in_one_line(
        self, make: Make, model: Path, step: str
    ) -> None:
        config = config_of(model)
        backend = make(config).backend
        run = Placeholders(0, 1, (Attachment("pixels", np.zeros((2, 3), np.float32)),))
        (attached, *_) = microbatches([replace(shares()[0][0], placeholders=[run])])
        assert attached.attachments, "of the first sample"
        line = r"^environment.name: .* attaches pixels to samples of group 0 of iteration 0"
        with pytest.raises(ConfigError, match=line):
            if step == "accumulate":
                objective = Objective(config, backend.device)
                backend.accumulate(Source([attached.to(backend.device)]), objective)
            elif step == "evaluate":
                backend.evaluate([attached], lambda *_: None)
            elif not backend.rounding([attached], lambda *_: None):
                pytest.skip("no wider type")

    def test_it_says_where_and_what_it_is(self, make: Make, model: Path) -> None:
        backend = make(config_of(model)).backend
        assert backend.software and backend.place.mesh.size == 1 and backend.place.publishes
        assert backend.tensor_group is None and backend.replica_links is None, (
            "a replica is one rank"
        )
        own = torch.tensor([2.0, 3.0], device=backend.device)
        assert (
            backend.reductions.ranks(own).tolist()
            == backend.reductions.replicas(own).tolist()
            == [2.0, 3.0]
        )

    def test_what_is_published_is_what_is_exported(
        self, make: Make, model: Path, tmp_path: Path
    ) -> None:
        """Bucket by bucket as an engine puts them together, each overwritten when the one after the
        next is asked for.
        """
        learner = make(config_of(model))
        source = learner.backend.published_weights(BUCKET_BYTES)
        late = learner.backend.published_weights(BUCKET_BYTES, "old")
        self.train(learner)
        expected = self.exported(learner, tmp_path / "trained")
        learner.backend.copy_policy("old")
        for weights in (source, late):
            assert weights is not None and weights.is_leader
            manifest = Manifest.from_json(weights.manifest.to_json())
            rows = [shape[-1] * 4 for shape in manifest.shapes.values()]
            assert len(manifest.buckets) > 3 and all(
                b.num_bytes <= max(BUCKET_BYTES, *rows) for b in manifest.buckets
            )
            assembler, found = Assembler(manifest), {}
            for bucket, data in zip(manifest.buckets, weights.buckets(Deadline(30.0)), strict=True):
                assert data is not None
                found |= {
                    name: tensor.clone() for name, tensor in assembler.completed(bucket, data)
                }
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            contents = Contents()
            for name, tensor in found.items():
                contents.add(name, tensor)
            assert weights.contents() == contents.read(), "summed up in the model"

    def test_a_checkpoint_goes_on_as_if_nothing_had_been(
        self, make: Make, model: Path, tmp_path: Path
    ) -> None:
        """Weights, reference, optimizer and learning rate; and the same weights from an export of
        the checkpoint, on demand.
        """
        keys = {"algorithm": {"reference_refresh_every": 1}, "trainer": {"backend": self.name}}
        keys |= {"optimizer": {"warmup_iterations": 3}}
        learner = make(config_of(model, **keys))
        self.train(learner)
        learner.publish(1)  # and the reference becomes that version
        planned = learner.plan_save(tmp_path)
        assert planned.description["reference"] == {"version": 1, "saved": True}
        planned.release()
        save(learner, tmp_path, 1)
        checkpoint = tmp_path / "checkpoints" / directory_name(1)
        resumed = make(config_of(model, **keys))
        assert resumed.backend.digest() != learner.backend.digest()
        assert resumed.load(checkpoint) == 1
        steps = []
        for one in (learner, resumed):
            one.publish(1)
            before = [one.backend.digest(name) for name in ("policy", "reference", "old")]
            one.accumulate(Source(microbatches(shares()[0])))
            report = one.step().report
            steps.append((before, one.backend.digest(), report.learning_rate, report.grad_norm))
        assert steps[0] == steps[1] and steps[0][1] != steps[0][0][0]

        processes = multiprocessing.get_context("forkserver")
        # it imports once, whatever the number of backends
        processes.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(1, processes) as alone:
            config = learner._config
            done = alone.submit(made_and_left, self.name, config, checkpoint, tmp_path / "hf")
            assert done.result(ALONE_S) == (1, True)
        again, exported = make(config_of(model, **keys)), tensors_of(tmp_path / "hf")
        again.backend.load(checkpoint)
        expected = self.exported(again, tmp_path / "own")
        assert exported.keys() == expected.keys()
        assert all(torch.equal(exported[name], expected[name]) for name in expected)

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_a_state_that_waits_on_the_host_steps_and_is_saved_to_the_same_bits(
        self, make: Make, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
    ) -> None:
        """Memory that this test gives stands for the host's; the state is in it during passes, and
        nowhere else in a step.
        """
        if not self.offloads:
            pytest.skip("it does not read the key")
        hosts: list[torch.Tensor] = []

        def host_memory(platform: CpuPlatform, like: torch.Tensor) -> torch.Tensor:
            hosts.append(torch.empty_like(like))
            return hosts[-1]

        monkeypatch.setattr(CpuPlatform, "host_memory", host_memory)
        keys: dict[str, Any] = {"model": {"dtype": dtype}}
        keys["trainer"] = {"backend": self.name}

        def trained(offload: bool, checkpoint: Path | None) -> tuple[Learner, list[str]]:
            learner = make(config_of(model, **keys, optimizer={"offload": offload}))
            backend, digests, seen = learner.backend, [], {"pass": set(), "step": set()}  # type: ignore[var-annotated]
            optimizer, offloaded = backend._optimizer, backend._offloaded  # type: ignore[attr-defined]
            step = optimizer.step
            assert bool(offloaded._parked) <= offload

            def note(when: str) -> None:
                on_host = {host.data_ptr() for host in hosts}
                seen[when] |= {tensor.data_ptr() in on_host for tensor in offloaded._tensors()}

            def noted(*arguments: Any) -> Any:
                note("step")
                return step(*arguments)

            monkeypatch.setattr(optimizer, "step", noted)
            if checkpoint is not None:
                learner.load(checkpoint)
            learner.publish(0)
            for share in shares():
                note("pass")
                learner.accumulate(Source(microbatches(share)))
                note("pass")
                learner.step()
                digests.append(backend.digest())
            note("pass")
            assert seen == (
                {"pass": {True}, "step": {False}} if offload else {"pass": set(), "step": set()}
            )
            return learner, digests

        learners, digests = zip(*(trained(offload, None) for offload in (False, True)), strict=True)
        assert digests[0] == digests[1] and not len(hosts) > 3 * len(
            learners[1].backend._offloaded._parked
        )
        after = []
        # each goes on as the other began
        for learner, offload in zip(learners, (True, False), strict=True):
            run = tmp_path / f"from_{not offload}"
            save(learner, run, 1)
            after.append(trained(offload, run / "checkpoints" / directory_name(1))[1])
        assert after[0] == after[1] and after[0][-1] != digests[0][-1]

    def test_its_modules_compute_with_what_transformers_computes_with(
        self, make: Make, model: Path
    ) -> None:
        learner = make(config_of(model))
        reference = computation_of(AutoModelForCausalLM.from_pretrained(model).modules())
        assert reference.rotations and reference.norm_epsilons and reference.attention_scales
        assert disagreements(learner.backend.computation(), reference) == []

    def test_rounding_is_that_of_training_or_there_is_no_wider_type(
        self, make: Make, model: Path
    ) -> None:
        learner = make(config_of(model))
        self.train(learner)
        before, seen, own = learner.backend.digest(), {}, {}
        some = microbatches(shares()[0])[:2]

        def take(microbatch: Microbatch, narrow: torch.Tensor, wide: torch.Tensor) -> None:
            seen[microbatch.sources] = (narrow, wide)

        has_wider = learner.backend.rounding(some, take)
        assert learner.backend.digest() == before, "it changes nothing"
        if not has_wider:
            assert not seen and learner.rounding(some) is None
            return
        learner.backend.evaluate(some, lambda one, outputs: own.update({one.sources: outputs}))
        assert seen.keys() == own.keys() and len(seen) == 2
        for sources, (narrow, wide) in seen.items():
            assert torch.equal(narrow, own[sources].frozen["old"].values), (
                "of the iteration's version"
            )
            torch.testing.assert_close(
                wide.float(), own[sources].policy.values, rtol=1e-4, atol=1e-5
            )
            assert (
                not torch.equal(wide.float(), own[sources].policy.values)
                or wide.dtype != narrow.dtype
            )

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("fault", [name for name in faults_of(2, 1) if "buffer" not in name])
    def test_a_gradient_that_is_another_sum_is_an_invariant_broken(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pa_npu.algorithm import objective as objectives
        from pa_npu.control.messages import Dispatched, DispatchedGroup
        from pa_npu.samples import iterator
        from pa_npu.trainer.invariants import check_normalisers

        for place, name in (
            *(
                (objectives.Objective, attribute)
                for attribute in ("normaliser", "_denominator", "loss")
            ),
            *((iterator, "pack"), (torch.autograd, "backward")),
        ):
            # put back what the fault changes
            monkeypatch.setattr(place, name, getattr(place, name))
        algorithm = {"clip_low": 0.3, "clip_high": 0.3}
        config = config_of(model, model={"dtype": dtype}, algorithm=algorithm)
        learner = make(config)
        inject(fault, learner)
        learner.publish(0)
        normalisers = []
        with pytest.raises(InvariantViolation, match=f"I7 gradient: .*{FAULTS[fault]}"):
            for share in shares():
                source = Source(microbatches(share))
                if "advantages" in fault:
                    source = Source([negated(one) for one in microbatches(share)])
                source.advantages = {g.index: trained_advantages(g) for g in share}
                learner.accumulate(source)
                normalisers.append(learner.step().normaliser)
            groups = [
                DispatchedGroup(g.index, 0, tuple(g.trained_lengths.tolist()))
                for s in shares()
                for g in s
            ]
            check_normalisers(Dispatched(0, tuple(groups)), normalisers, build_algorithm(config))

    @pytest.mark.parametrize(("fault", "dtype"), STEP_CASES)
    def test_a_step_or_a_loss_that_is_another_one_is_an_invariant_broken(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if fault in self.has_no:
            pytest.skip("it cannot have that")
        config = config_of(model, model={"dtype": dtype}, **step_faults.KEYS)
        learner = make(config)
        restored_after(monkeypatch)  # once the backend's modules are there
        step_faults.inject(fault, learner)
        learner.publish(0)
        with pytest.raises(InvariantViolation, match=f"I7 .*({step_faults.ALL[fault]})"):
            for share in shares():
                train_share(learner, share)

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_without_a_fault_the_same_updates_pass(
        self, dtype: str, make: Make, model: Path
    ) -> None:
        learner = make(config_of(model, model={"dtype": dtype}, **step_faults.KEYS))
        for iteration in range(3):
            learner.publish(iteration)
            for share in shares():
                assert train_share(learner, share).report.grad_norm > 0

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_weights_that_move_along_the_gradient_change_log_probs_as_it_says(
        self, dtype: str, make: Make, model: Path
    ) -> None:
        """Other tensors every time; not a bit of what is trained afterwards is another one."""
        config = config_of(model, model={"dtype": dtype}, **step_faults.KEYS)
        learner, untouched = make(config), make(config)
        for one in (learner, untouched):
            one.publish(0)
        for number, share in enumerate([*shares(), *shares()]):
            before = learner.backend.digest()
            found = learner.finite_difference(microbatches(share)[:2], {})
            assert found is not None and found.limit is not None and found.tensors > 0, found
            assert abs(found.measured - found.predicted) <= found.limit < 0.5 * abs(found.predicted)
            assert learner.backend.digest() == before
            if number < 2:
                for one in (learner, untouched):
                    train_share(one, share)
                assert learner.backend.digest() == untouched.backend.digest()

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("fault", FINITE_DIFFERENCE_FAULTS)
    def test_a_finite_difference_shows_a_gradient_of_something_else(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learner = make(config_of(model, model={"dtype": dtype}, **step_faults.KEYS))
        restored_after(monkeypatch)
        factor = {"the gradient doubled": 2.0, "the gradient turned round": -1.0}.get(fault)
        if factor is None:
            step_faults.inject(fault, learner)
        else:
            accumulate, scale = learner.backend.accumulate, learner.backend.scale_gradients

            def scaled(*arguments: Any) -> Any:
                reduced = accumulate(*arguments)
                scale(factor)
                return reduced

            monkeypatch.setattr(learner.backend, "accumulate", scaled)
        learner.publish(0)
        with pytest.raises(
            InvariantViolation,
            match=r"I7 gradient: .* moved along the gradient .* the gradient says",
        ):
            learner.finite_difference(microbatches(shares()[0])[:2], {})

    @pytest.mark.parametrize("lost", ["both moments", "the square moment", "weights", "nothing"])
    def test_what_a_resume_lost_ends_it_before_anything_is_trained(
        self, lost: str, make: Make, model: Path, tmp_path: Path
    ) -> None:
        keys = {**step_faults.KEYS, "trainer": {"backend": self.name}}
        learner = make(config_of(model, **keys))
        learner.publish(0)
        for share in shares():
            train_share(learner, share)
        save(learner, tmp_path, 1)
        resumed = make(config_of(model, **keys))
        load = resumed.backend.load

        def losing(directory: Path) -> Any:
            meta = load(directory)
            for tensor in resumed.backend.stepped():
                parts = {
                    "both moments": (tensor.mean, tensor.square),
                    "the square moment": (tensor.square,),
                }
                for part in parts.get(lost, (tensor.weights,) if lost == "weights" else ()):
                    assert part is not None
                    part.mul_(0.0 if "moment" in lost else 1.001)
            return meta

        resumed.backend.load = losing  # type: ignore[method-assign]
        checkpoint = tmp_path / "checkpoints" / directory_name(1)
        if lost == "nothing":
            assert resumed.load(checkpoint) == 1
            resumed.publish(1)
            train_share(resumed, shares()[0])
        else:
            with pytest.raises(
                DataError, match="the optimizer's state of rank 0 is not the one that was saved"
            ):
                resumed.load(checkpoint)


def train_share(learner: Learner, share: list[Group]) -> Update:
    """An update over these groups, whose advantages are known."""
    source = Source(microbatches(share))
    source.advantages = {g.index: trained_advantages(g) for g in share}
    learner.accumulate(source)
    return learner.step()


def restored_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of modules go with the test."""
    from pa_npu.algorithm import objective as objectives

    places: list[tuple[Any, str]] = [(PolicyGradient, "loss_sums")]
    places += [(objectives.Objective, name) for name in ("_denominator", "loss")]
    for module in ("pa_npu.backends.megatron.optimizer", "pa_npu.backends.fsdp.optimizer"):
        places += [(sys.modules[module], "learning_rate")] if module in sys.modules else []
    if (toy := sys.modules.get("tests.helpers.toy_backend.backend")) is not None:
        places.append((toy, "learning_rate"))
    for place, name in places:
        monkeypatch.setattr(place, name, getattr(place, name))
