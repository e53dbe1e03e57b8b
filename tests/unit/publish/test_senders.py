"""Every rank sends its own shards: engines get the same weights, and the busiest sender sends its share of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh
from pa_npu.config.sections.operation import Senders
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.planning.publish import published_bytes, senders_of
from pa_npu.publish.engines import check_announced
from pa_npu.publish.messages import StageManifest
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.contents import OrderedContents, added
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment, check_covered
from pa_npu.weight_transfer.receiver import Receiver
from tests.helpers.megatron import model_config
from tests.helpers.publish_world import World, assert_equal_weights, received
from tests.helpers.weights import Stage, make_checkpoint, run_threads


@dataclass(frozen=True)
class Layout:
    """How many ranks share a model how, who sends, and how many senders that makes."""

    family: str = "qwen2"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    copies: int = 1
    senders: Senders = "shards"
    count: int = 2


TWO = Layout(tp=2)
LAYOUTS = [
    TWO,
    Layout(tp=4, count=4),
    Layout(pp=2),
    Layout("qwen3_moe", ep=2),
    Layout("qwen3_moe", tp=2, ep=4, count=4),
    Layout(copies=2, senders="all"),
    Layout(tp=2, copies=2, senders="all", count=4),
    Layout("qwen3_moe", tp=2, ep=2, copies=2, senders="all", count=4),
    Layout(tp=2, copies=2),
]


@dataclass
class Connected:
    """Trainer ranks and engine workers that have joined. directory: of the model."""

    world: World
    publishers: list[Publisher]
    receivers: list[Receiver]
    directory: Path

    @property
    def manifests(self) -> list[Manifest]:
        return [Manifest.from_json(p.manifest().manifest) for p in self.publishers]

    def publish(self, version: int) -> tuple[list[PublishStats], list[dict[str, torch.Tensor]]]:
        return self.world.publish(version, self.publishers, self.receivers)

    def trained(self) -> dict[str, str]:
        """Returns the contents of what all ranks train."""
        return added(publisher.contents() for publisher in self.publishers)


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Connected]:
    """Makes trainers of a layout, by default of two senders of one stage, and their engine."""

    def make(
        layout: Layout = TWO, *, vocab: int = 64, workers: int = 1, timeout_s: float = 30.0
    ) -> Connected:
        spec = make_checkpoint(tmp_path, layout.family, tied=False, vocab=vocab)
        world = World(
            monkeypatch,
            spec,
            tp_size=layout.tp,
            stages=layout.pp,
            workers=workers,
            ep_size=layout.ep,
            copies=layout.copies,
            senders=layout.senders,
        )
        publishers = world.publishers(bucket_bytes=2048, timeout_s=timeout_s)
        receivers = world.connect(publishers, timeout_s=timeout_s)
        return Connected(world, publishers, receivers, tmp_path)

    return make


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_engines_get_the_same_bits_and_the_busiest_sender_sends_its_share(
    layout: Layout, connect: Callable[..., Connected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary of 61 is padded under TP; the second version is another one in every element.

    What each tensor's contents are is summed up in the trained model, once over all senders.
    """
    run = connect(layout, vocab=61, workers=2)
    assert sum(publisher.is_leader for publisher in run.publishers) == layout.count
    monkeypatch.setattr(
        "torch.distributed.ProcessGroup.reduce", None
    )  # no weights move between trainers
    expected = load_file(run.directory / "model.safetensors")
    for version in (0, 1):
        sent, arrived = run.publish(version)
        for weights in arrived:
            assert_equal_weights(weights, expected, version)
        digests = tuple(stats.digests for stats in sent if stats.bytes)
        assert [receiver.digests for receiver in run.receivers] == [digests] * 2

        num_bytes = [stats.bytes for stats in sent]
        total = sum(tensor.nbytes for tensor in expected.values())
        assert sum(num_bytes) == total, "nothing is sent twice"
        assert max(num_bytes) < 1.15 * total / layout.count
        assert run.trained() == contents_of(expected)

        expected = {name: tensor + 1 for name, tensor in expected.items()}
        run.world.add(1)


def test_one_gathering_leader_sends_all(connect: Callable[..., Connected]) -> None:
    """The control of the test above: it measures what it says."""
    run = connect(replace(TWO, senders="leader"), vocab=61)
    sent, _ = run.publish(0)
    weights = load_file(run.directory / "model.safetensors")
    assert [stats.bytes for stats in sent] == [sum(t.nbytes for t in weights.values()), 0]


def test_buckets_of_the_senders_are_taken_in_turn(
    connect: Callable[..., Connected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that read one stage after the other would leave the second sender's link idle."""
    run = connect(Layout(pp=2))
    order: list[int] = []
    message = Receiver._message

    def noted(self: Receiver, sender: int, *rest: Any) -> Any:
        order.append(sender)
        return message(self, sender, *rest)

    monkeypatch.setattr(Receiver, "_message", noted)
    run.publish(0)
    both = 2 * min(order.count(0), order.count(1))
    assert order[:both] == [0, 1] * (both // 2) and both > 20


def test_a_sender_that_dies_ends_the_publish_in_one_line(
    connect: Callable[..., Connected],
) -> None:
    """The engine names the rank that it waits for; once it gives up, the other sender stops too."""
    run = connect(timeout_s=3.0)
    sent, arrived = run_threads(
        lambda: run.publishers[0].publish(0, run.world.members), received(run.receivers[0], 0)
    )  # rank 1 takes no part any longer
    assert isinstance(arrived, DeadlineExceeded)
    assert "rank 1 of stage 0, header: not done within 3 s" in str(arrived)
    assert isinstance(sent, DeadlineExceeded | transport.WeightSyncError), sent
    assert "rank 0 of stage 0" in str(sent)
    assert "\n" not in f"{sent}{arrived}"


def test_a_sender_that_gives_up_is_not_waited_for_until_the_deadline(
    connect: Callable[..., Connected],
) -> None:
    run = connect(timeout_s=60.0)
    alive, dead = run.publishers
    names = [transport.epoch_name(publisher.manifest().name, 0) for publisher in (dead, alive)]

    def abandon() -> None:
        for name in names:  # as the coordinator does
            port = run.world.server.port
            transport.Abandonment("127.0.0.1", port, name).declare("rank 1 died")

    sent, arrived, _ = run_threads(
        lambda: alive.publish(0, run.world.members), received(run.receivers[0], 0), abandon
    )
    for error in (sent, arrived):
        assert isinstance(error, transport.WeightSyncError) and "rank 1 died" in str(error)


def test_a_sender_of_an_old_copy_is_found_by_its_tensors(
    connect: Callable[..., Connected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 sends version 0 as version 1. Its digests agree; what it trains does not."""
    run = connect()
    run.publish(0)
    source = run.publishers[1]._source
    assert source is not None
    old = [bucket for bucket in source.buckets(transport.Deadline(5.0)) if bucket is not None]
    monkeypatch.setattr(source, "buckets", lambda deadline, **_: iter(old))
    run.world.add(1)
    sent, (arrived,) = run.publish(1)
    assert run.receivers[0].digests == tuple(stats.digests for stats in sent)
    trained = run.trained()
    held = contents_of(arrived)
    wrong = {name for name in trained if held[name] != trained[name]}
    assert wrong == set(run.manifests[1].shapes)


def contents_of(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    contents = OrderedContents()
    for name, tensor in weights.items():
        contents.add(name, tensor)
    return contents.read()


@pytest.mark.parametrize("fault", ["absent", "dropped tensor", "twice", "shape", "type"])
def test_senders_that_do_not_make_up_the_stage_are_refused_before_anything_is_sent(
    fault: str, connect: Callable[..., Connected]
) -> None:
    first, second = connect().manifests
    check_covered([first, second])
    check_announced(announced([first, second]))
    name = "model.layers.1.mlp.down_proj.weight"
    manifests = [first, second]
    if fault == "absent":
        manifests = [first]
    elif fault == "dropped tensor":
        manifests = [first, _changed(second, name, lambda segment: None)]
    elif fault == "twice":
        column = 0
        manifests = [
            first,
            _changed(second, name, lambda s: msgspec.structs.replace(s, start=column)),
        ]
    elif fault == "shape":
        shapes = second.shapes | {name: (1, 2)}
        manifests = [first, msgspec.structs.replace(second, shapes=shapes)]
    else:
        buckets = tuple(Bucket("bfloat16", bucket.segments) for bucket in second.buckets)
        manifests = [first, msgspec.structs.replace(second, buckets=buckets)]
    expected = {
        "absent": r"of stage 0 are those of ranks \[0\].* divided among 2 senders",
        "dropped tensor": rf"of stage 0: the segments of {name} do not cover",
        "twice": rf"of stage 0: the segments of {name} do not cover",
        "shape": rf"{name} has shape",
        "type": "is sent as bfloat16 and as float32",
    }[fault]
    with pytest.raises(transport.WeightSyncError, match=expected):
        check_covered(manifests)
    if fault == "shape":  # which its own segments are not in
        expected = rf"of rank 1 .* the segments of {name} do not"
    with pytest.raises(InvariantViolation, match=rf"^I5: the trainers announce .*{expected}"):
        check_announced(announced(manifests))


def announced(manifests: Sequence[Manifest]) -> list[StageManifest]:
    """What the coordinator gets of them."""
    return [StageManifest(f"publish-{m.rank}", m.to_json()) for m in manifests]


def _changed(manifest: Manifest, name: str, change: Any) -> Manifest:
    """Returns the manifest with each segment of a tensor changed; None drops it."""
    buckets = []
    for bucket in manifest.buckets:
        segments = [change(s) if s.name == name else s for s in bucket.segments]
        kept = tuple(segment for segment in segments if segment is not None)
        if kept:
            buckets.append(Bucket(bucket.dtype, kept))
    return msgspec.structs.replace(manifest, buckets=tuple(buckets))


def test_blocks_of_columns_are_checked_element_by_element() -> None:
    """Against marks in a matrix, for every block of a small tensor beside another one."""
    shape = (4, 6)
    left = Segment("t", 0, 12, 3)
    for start in range(24):
        for width in range(1, 7):
            for rows in range(1, 5):
                block = Segment("t", start, rows * width, width)
                fits = start % 6 + width <= 6 and start // 6 + rows <= 4
                marks = torch.zeros(24, dtype=torch.int64)
                if fits:
                    left.view_of(marks, shape).add_(1)
                    block.view_of(marks, shape).add_(1)
                covers = fits and bool((marks == 1).all())
                manifest = Manifest(0, {}, {"t": shape}, (Bucket("float32", (left, block)),))
                if covers:
                    assert Manifest.from_json(manifest.to_json()) == manifest
                    continue
                with pytest.raises(transport.WeightSyncError, match="do not cover"):
                    Manifest.from_json(manifest.to_json())


@pytest.mark.parametrize("senders", ["leader", "shards", "all"])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(2, 2, 2),
        Mesh(2, 1, 3, expert=3, experts_tensor=1),
        Mesh(data=4, shards=2, context_shards=True),
        Mesh(2, 1, 2, context=2),
    ],
)
def test_senders_hold_all_weights(mesh: Mesh, senders: Senders) -> None:
    """Each stage has its leader among them, and they are all ranks of a copy, or of all copies."""
    publishers = mesh.publishers(senders)
    leaders = mesh.publishers("leader")
    assert set(leaders) <= set(publishers) <= set(mesh.contributors(senders))
    assert len(leaders) == mesh.pipeline
    copy = {rank for leader in leaders for rank in mesh.place(leader).shard_group}
    if senders == "shards":
        assert set(publishers) == copy == set(mesh.senders())
    if senders == "all":
        assert publishers == tuple(range(mesh.size))
    if senders == "leader":
        assert set(mesh.contributors(senders)) == copy


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plan_says_the_bytes_that_ranks_send(layout: Layout, tied: bool, tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, layout.family, tied=tied)
    senders = layout.senders
    stages = [
        Stage(layout.tp, stage, layout.pp, layout.ep, layout.copies) for stage in range(layout.pp)
    ]
    ranks_of_stage = range(layout.copies * stages[0].num_ranks)
    trainer = {
        "devices": layout.pp * len(ranks_of_stage),
        "tensor_parallel": layout.tp,
        "pipeline_parallel": layout.pp,
        "expert_parallel": layout.ep,
    }
    config = model_config(tmp_path, trainer=trainer, publish={"senders": senders})
    predicted = published_bytes(config, spec)
    sent = []
    for stage in stages:
        module = stage.build(spec)
        places = [stage.place(rank) for rank in ranks_of_stage]
        sent += [
            StageTensors(module, spec, place, 4096, senders=senders).manifest.num_bytes
            for place in places
            if place.is_publisher(senders)
        ]
    assert predicted.num_senders == len(sent) == layout.count
    assert predicted.worker == pytest.approx(sum(sent), rel=0.02)
    assert predicted.sender == pytest.approx(max(sent), rel=0.15)
    assert predicted.gathered == 0
    leader = model_config(tmp_path, trainer=trainer, publish={"senders": "leader"})
    assert published_bytes(leader, spec).sender == pytest.approx(
        predicted.sender * len(sent) / layout.pp, rel=0.01
    )


def test_on_npus_of_their_own_engines_are_in_few_groups(tmp_path: Path) -> None:
    """HCCL's buffers of a group take 400 MiB; through host memory, and with other backends, none."""
    make_checkpoint(tmp_path, "qwen2", tied=False)

    def chosen(kind: str, ranks: int, **placement: Any) -> Senders:
        trainer = {"devices": ranks, "tensor_parallel": ranks}
        config = model_config(tmp_path, trainer=trainer)
        run = config.run.model_copy(update={"device": kind})
        where = config.placement.model_copy(update=placement)
        return senders_of(config.model_copy(update={"run": run, "placement": where}))

    assert [chosen("npu", ranks) for ranks in (1, 4, 8)] == ["shards", "shards", "leader"]
    assert chosen("npu", 8, colocate=True) == "shards"
    assert chosen("cuda", 8) == chosen("cpu", 8) == "shards"
