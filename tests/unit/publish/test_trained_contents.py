"""What trainers send is what they train, tensor by tensor (I5): a tensor that is sent from an old copy is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pa_npu.backends.buckets import GatheredWeights
from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.engines.live_weights import LiveReport, LiveTensor, LiveWeights
from pa_npu.engines.protocol import LoadedWeights
from pa_npu.errors import InvariantViolation
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.publish.publisher import Publisher
from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.contents import added
from tests.helpers.publish_world import World
from tests.helpers.weights import FAMILIES, make_checkpoint, run_threads

OLD = "model.layers.2.mlp.down_proj.weight"
DTYPES = [torch.float32, torch.bfloat16]


class Run:
    """Trainers and an engine worker in real groups, whose loader `changes` what it was given; one
    publish after another.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, spec: Any, dtype: torch.dtype, *layout: int
    ) -> None:
        self.world = World(monkeypatch, spec, *layout)
        self.publishers: list[Publisher] = self.world.publishers(dtype=dtype)
        (self.receiver,) = self.world.connect(self.publishers)
        self.check = LiveMemoryCheck()

    def update(self) -> None:
        """Changes every element by a few units of its type's last place."""
        with torch.no_grad():
            for module in self.world.modules:
                for parameter in module.parameters():
                    parameter.mul_(1.03125)

    def contents(self) -> dict[str, str]:
        of_ranks: list[Any] = run_threads(*(publisher.contents for publisher in self.publishers))
        assert not any(isinstance(contents, Exception) for contents in of_ranks), of_ranks
        return added(of_ranks)

    def publish(
        self,
        version: int,
        change: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = dict,
    ) -> dict[str, torch.Tensor]:
        _, (weights,) = self.world.publish(version, self.publishers, [self.receiver])
        self.check.expect(version, self.contents())
        live = LiveWeights()
        loaded = change(dict(live.received(weights.items())))
        memory = [LiveTensor(name, (name,), tensor) for name, tensor in loaded.items()]
        report = msgspec.convert(live.report(memory, Computation()), LiveReport)
        self.check.check(version, {"http://engine": LoadedWeights((version,), live=(report,))})
        return dict(loaded)


def make(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: torch.dtype,
    tied: bool,
    *layout: int,
) -> Run:
    return Run(monkeypatch, make_checkpoint(directory, family, tied=tied, vocab=61), dtype, *layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "tied", "tensor", "stages", "experts"),
    [
        *((family, True, 1, 1, 1) for family in FAMILIES),
        ("qwen2", True, 2, 2, 1),
        ("qwen3", False, 4, 1, 1),
        ("qwen3_moe", True, 2, 1, 4),
        ("qwen3_moe", False, 2, 2, 2),
    ],
)
def test_ranks_together_hold_the_contents_that_arrive(
    family: str,
    tied: bool,
    tensor: int,
    stages: int,
    experts: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused, tied, cut, stacked and padded tensors; an update that changes all of them, and one
    that changes nothing.
    """
    run = make(tmp_path, monkeypatch, family, dtype, tied, tensor, stages, 1, experts)
    run.publish(0)
    first = run.contents()
    run.update()
    run.publish(1)
    changed = run.contents()
    assert first.keys() == changed.keys() and all(first[name] != changed[name] for name in first)
    run.publish(2)
    assert run.contents() == changed


def sent_from_an_old_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's parameters are not looked up again, and one of them was put into other memory."""
    for publisher in run.publishers:
        source: Any = publisher._source
        for tensor in source._tensors:
            if tensor.name == OLD:
                old = source._parameters[tensor.parameter]
                source._parameters = {**source._parameters, tensor.parameter: old.detach().clone()}


def changed_in_its_bucket(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    start = GatheredWeights._start

    def changed(self: GatheredWeights, bucket: Any, parts: Any) -> Any:
        words, work = start(self, bucket, parts)
        flat = words.view(bucket.torch_dtype)
        offset = 0
        for segment in bucket.segments:
            if segment.name == OLD:
                elements = flat[offset : offset + segment.size]
                elements.copy_(change(elements.clone()))
            offset += segment.size
        return words, work

    monkeypatch.setattr(GatheredWeights, "_start", changed)


def scaled_in_its_bucket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_in_its_bucket(monkeypatch, lambda elements: elements * 1.0625)


def shifted_in_its_bucket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_in_its_bucket(monkeypatch, lambda elements: elements.roll(1))


def turned_in_its_bucket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_in_its_bucket(monkeypatch, lambda elements: elements.flip(0))


def left_out_of_its_bucket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = StageTensors.parts

    def without(self: StageTensors, leads: bool) -> Any:
        sent = dict(parts(self, leads))
        if OLD in sent:
            sent[OLD] = replace(sent[OLD], view=None)
        return sent

    monkeypatch.setattr(StageTensors, "parts", without)


SENDERS: dict[str, tuple[Callable[[Run, pytest.MonkeyPatch], None], str]] = {
    "an old copy": (
        sent_from_an_old_copy,
        r", of which 1 are still those of version 0, first " + OLD,
    ),
    "scaled": (scaled_in_its_bucket, ""),
    "shifted": (shifted_in_its_bucket, ""),
    "last element first": (turned_in_its_bucket, ""),
    "left out": (left_out_of_its_bucket, ""),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)], ids=["one", "TP2", "PP2"])
@pytest.mark.parametrize("fault", SENDERS)
def test_a_tensor_that_was_not_sent_as_it_is_trained_is_named(
    fault: str,
    layout: tuple[int, int],
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make(tmp_path, monkeypatch, "qwen2", dtype, True, *layout)
    run.publish(0)
    inject, reason = SENDERS[fault]
    inject(run, monkeypatch)
    run.update()
    message = (
        rf"I5: as weight version 1 the trainers sent other values .* in 1 of \d+ tensors "
        rf"\({OLD}\){reason}"
    )
    with pytest.raises(InvariantViolation, match=message):
        run.publish(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_that_keeps_an_old_tensor_is_named(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, monkeypatch, "qwen2", dtype, True)
    before = run.publish(0)
    run.update()
    with pytest.raises(
        InvariantViolation, match=rf"I5: engine http://engine holds other .* the first is {OLD}"
    ):
        run.publish(1, lambda weights: {**weights, OLD: before[OLD]})


def test_versions_that_nobody_expects_and_engines_that_say_nothing_are_not_compared() -> None:
    check = LiveMemoryCheck()
    live = LiveWeights()
    weights: Iterator[tuple[str, torch.Tensor]] = iter([("w", torch.ones(2))])
    list(live.received(weights))
    report = msgspec.convert(live.report([], Computation()), LiveReport)
    loaded = {"e": LoadedWeights((0,), live=(report,))}
    check.check(0, loaded)
    check.expect(1, {"w": "0" * 16})
    check.check(1, {"e": LoadedWeights((1,))})
    check.check(1, loaded, as_published=False)
    with pytest.raises(InvariantViolation, match="version 1"):
        check.check(1, loaded)
