"""Conformance of training backends: every TrainBackend passes these on one rank; test_gradient_sum.py has more.

`make(config)` gives a Learner over a fresh backend with the weights of config.model.path, inside
the one process group that the backend is content with. Numbers are compared with the same update by
hand on the HF model: plain autograd and torch's AdamW. The suite is the list of what a backend must
do: every member of TrainBackend and of BackendModule occurs in it.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pa_npu import platform as platforms
from pa_npu.algorithm.model_outputs import PolicyState
from pa_npu.algorithm.objective import Objective
from pa_npu.backends.registry import backend_module
from pa_npu.checkpoints.directories import directory_name
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.cpu import CpuPlatform
from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.samples.microbatch import Microbatch
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner
from pa_npu.weight_transfer.computation import computation_of, disagreements
from pa_npu.weight_transfer.contents import OrderedContents
from pa_npu.weight_transfer.manifest import Assembler, Manifest
from pa_npu.weight_transfer.transport import Deadline
from tests.helpers.adapters import plain
from tests.helpers.backend import Source
from tests.helpers.backend_fault_conformance import BackendFaultConformance
from tests.helpers.backend_resume_conformance import BackendResumeConformance
from tests.helpers.backend_updates import (
    DTYPES,
    LEARNING_RATE,
    Make,
    by_hand,
    config_of,
    microbatches,
    save,
    shares,
    tensors_of,
)

BUCKET_BYTES = 20_000  # a few tensors of the model in each, and its embedding in several
ALONE_S = 240.0


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


class BackendConformance(BackendFaultConformance, BackendResumeConformance):
    """Subclass it as a test class with fixtures `make` and `model`, an HF directory, and the
    backend's name in the registry.
    """

    offloads = True
    """Whether it reads optimizer.offload."""

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

    def test_copied_weights_are_views_of_what_it_computes_with(
        self, make: Make, model: Path
    ) -> None:
        """A rank without peers may name copies among itself, or none."""
        backend = make(config_of(model)).backend
        for part in backend.copied():
            assert part.group.size() == 1 and part.among and part.tensors
            before = backend.digest()
            with torch.no_grad():
                part.tensors[-1].weights.add_(1.0)
            assert backend.digest() != before

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
            assembler, actual = Assembler(manifest), {}
            for bucket, data in zip(manifest.buckets, weights.buckets(Deadline(30.0)), strict=True):
                assert data is not None
                actual |= {
                    name: tensor.clone() for name, tensor in assembler.completed(bucket, data)
                }
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], expected[name]) for name in expected)
            contents = OrderedContents()
            for name, tensor in actual.items():
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

    @pytest.mark.parametrize("dtype", DTYPES)
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
