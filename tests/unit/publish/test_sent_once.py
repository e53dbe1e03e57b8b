"""A frozen tower is sent with the first version, and compared with what engines hold at every later one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.backends import buckets
from pa_npu.backends.fsdp.model import ScoredModel, load_model
from pa_npu.backends.fsdp.weights import ShardedWeights
from pa_npu.config.mesh import Mesh
from pa_npu.engines.protocol import LoadedWeights, WeightGroups
from pa_npu.engines.transformers.weights import ModelWorker
from pa_npu.engines.worker_answers import loaded_weights
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.publish import PublishedBytes, published_bytes
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.vision.family import TOWER, is_of_tower
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.contents import added
from pa_npu.weight_transfer.manifest import Manifest, WeightSyncError
from tests.helpers.vision import make_vision, vision_config


class Broadcast:
    """One end of a group of two: what rank 0 sends waits for the other end."""

    def __init__(self, sent: deque[torch.Tensor], rank: int) -> None:
        self.sent, self.rank = sent, rank

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if self.rank == 0:
            self.sent.append(tensor.clone())
            return Work(None, tensor)
        return Work(self.sent.popleft(), tensor)


@dataclass
class Work:
    arrived: torch.Tensor | None
    target: torch.Tensor

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        if self.arrived is not None:
            self.target.copy_(self.arrived)


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of processes, within one."""
    sent: dict[str, deque[torch.Tensor]] = {}

    def join(host: str, port: int, name: str, *, rank: int, **_: Any) -> Broadcast:
        return Broadcast(sent.setdefault(name, deque()), rank)

    monkeypatch.setattr(transport, "join_group", join)
    for name in ("announce_begin", "leave_group", "drop_group"):
        monkeypatch.setattr(transport, name, lambda *_: None)


class Both:
    """Trainers with a frozen tower, and one engine, in one process."""

    def __init__(self, path: Path, *, num_senders: int = 1, tower_alone: bool = False) -> None:
        """tower_alone: the last sender sends the tower, and nothing else."""
        self.trained = load_model(str(path), torch.float32)
        self.served = load_model(str(path), torch.float32)
        with torch.no_grad():  # the engine begins with other weights
            for parameter in self.served.parameters():
                parameter.zero_()
        spec = ModelSpec.from_config(vision_config(path))
        mesh = Mesh(data=num_senders)
        scored = ScoredModel(self.trained, "auto")
        with pytest.MonkeyPatch.context() as patch:
            if tower_alone:
                patch.setattr(buckets, "divide", _tower_to_the_last)
            self.sources = [
                ShardedWeights(
                    scored,
                    spec,
                    mesh.place(rank),
                    2**15,
                    torch.float32,
                    None,
                    sent_once=TOWER,
                    senders="all" if num_senders > 1 else "leader",
                )
                for rank in range(num_senders)
            ]
        self.publishers = [
            Publisher(
                source,
                store_host="127.0.0.1",
                store_port=1,
                timeout_s=30.0,
                backend="gloo",
                device=torch.device("cpu"),
            )
            for source in self.sources
        ]
        self.source, self.publisher = self.sources[0], self.publishers[0]
        self.worker = ModelWorker(self.served, torch.device("cpu"), str(path), False, True)
        self.check = LiveMemoryCheck()
        self.epoch = -1

    def connected(self) -> dict[str, Any]:
        self.epoch += 1
        stages = [publisher.manifest().group(self.epoch) for publisher in self.publishers]
        return vars(WeightGroups(("127.0.0.1", 1), 1, 2, stages, "gloo", 30.0))

    def publish(self, version: int, groups: dict[str, Any] | None = None) -> PublishStats:
        """As publish_all, of one sender."""
        (stats,) = self.publish_all(version, groups)
        return stats

    def publish_all(self, version: int, groups: dict[str, Any] | None = None) -> list[PublishStats]:
        """groups: that the engine joins first. Compares all that a run compares."""
        members = PublishMembers(self.epoch, 1)
        sent = [publisher.publish(version, members) for publisher in self.publishers]
        if groups is not None:
            self.worker.pa_connect(groups)
        answer = self.worker.pa_receive(version)
        loaded: LoadedWeights = loaded_weights([answer], "e")
        assert loaded.digests == (tuple(stats.digests for stats in sent),)
        self.check.expect(version, added(publisher.contents() for publisher in self.publishers))
        self.check.check(version, {"e": loaded})
        return sent

    def step(self) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                if not is_of_tower(name):
                    parameter.add_(1e-3)

    def are_equal(self) -> bool:
        ours, theirs = self.trained.state_dict(), self.served.state_dict()
        return all(torch.equal(ours[name], theirs[name]) for name in ours)


def _tower_to_the_last(
    tensors: Mapping[str, Any], regions: Mapping[str, Any], senders: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Divides as buckets.divide does, in another way."""
    shares: dict[int, dict[str, Any]] = {rank: {} for rank in senders}
    for name in tensors:
        shares[senders[-1] if is_of_tower(name) else senders[0]][name] = list(regions[name])
    return shares


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    made = Both(make_vision(tmp_path))
    yield made
    made.worker.pa_close()
    made.publisher.close()


def test_a_tower_is_sent_once_for_each_time_that_engines_join(both: Both) -> None:
    whole = both.publish(0, both.connected())
    assert both.are_equal()
    tower = sum(p.numel() * 4 for n, p in both.trained.named_parameters() if is_of_tower(n))
    assert whole.bytes == both.publisher.num_bytes > tower > 0
    for version in (1, 2):
        both.step()
        later = both.publish(version)
        assert both.are_equal()
        assert later.bytes == whole.bytes - tower
        assert len(later.digests.split()) == len(whole.digests.split())
        assert later.digests != whole.digests
    both.step()
    assert both.publish(3, both.connected()).bytes == whole.bytes
    assert both.are_equal()


def test_a_tower_that_changes_at_either_end_ends_the_run(both: Both) -> None:
    both.publish(0, both.connected())
    place = next(n for n, _ in both.served.named_parameters() if is_of_tower(n))
    both.step()
    with torch.no_grad():
        both.served.get_parameter(place).view(-1)[0] += 1e-3
    with pytest.raises(InvariantViolation, match=r"e holds other values .* in 1 of .*visual"):
        both.publish(1)
    both.publish(2, both.connected())
    with torch.no_grad():
        both.trained.get_parameter(place).view(-1)[0] += 1e-3
    with pytest.raises(
        InvariantViolation, match=r"other values than they train, .* in 1 of .*visual"
    ):
        both.publish(3)


def test_what_arrives_in_the_background_has_no_tower_either(both: Both) -> None:
    both.publish(0, both.connected())
    both.step()
    stats = both.publisher.publish(1, PublishMembers(both.epoch, 1))
    both.worker.pa_prepare(1)
    both.worker._pa_get()._prepared[1].result(30)  # type: ignore[index]
    answer = both.worker.pa_swap(1)
    assert answer["digests"] == [stats.digests] and both.are_equal()
    assert any(TOWER in name for name in answer["live"]["memory"])


def test_an_engine_that_expects_the_whole_refuses_a_part(both: Both) -> None:
    groups = both.connected()
    both.publisher._whole_epoch = both.epoch
    with pytest.raises(WeightSyncError, match="disagree on whether it has what is sent once"):
        both.publish(0, groups)


def test_a_bucket_is_sent_once_as_a_whole_or_not_at_all(both: Both) -> None:
    raw = both.source.manifest.to_json()
    assert Manifest.from_json(raw) == both.source.manifest
    raw["sent_once"] = "norm"
    with pytest.raises(WeightSyncError, match="of which one is sent once"):
        Manifest.from_json(raw)


def test_two_senders_send_a_tower_once_in_all(tmp_path: Path) -> None:
    """Each sends its share of the tower with the first version. What an engine loses is found."""
    both = Both(make_vision(tmp_path), num_senders=2)
    first = both.publish_all(0, both.connected())
    assert both.are_equal()
    tower = sum(p.numel() * 4 for n, p in both.trained.named_parameters() if is_of_tower(n))
    whole = sum(stats.bytes for stats in first)
    shares = [publisher.num_bytes for publisher in both.publishers]
    assert [stats.bytes for stats in first] == shares and min(shares) > 0
    for source in both.sources:
        assert any(source.manifest.once) and not all(source.manifest.once)
    for version in (1, 2):
        both.step()
        later = both.publish_all(version)
        assert both.are_equal()
        assert sum(stats.bytes for stats in later) == whole - tower
    both.step()
    place = next(n for n, _ in both.served.named_parameters() if is_of_tower(n))
    with torch.no_grad():
        both.served.get_parameter(place).zero_()
    with pytest.raises(InvariantViolation, match=r"e holds other values .*visual"):
        both.publish_all(3)


def test_a_sender_of_only_the_tower_still_sends_its_header(tmp_path: Path) -> None:
    both = Both(make_vision(tmp_path), num_senders=2, tower_alone=True)
    both.publish_all(0, both.connected())
    both.step()
    stats = both.publish_all(1)
    assert stats[1].bytes == 0 and stats[1].digests and both.are_equal()


@pytest.mark.parametrize("num_senders", [1, 2])
def test_a_plan_counts_a_frozen_tower_once(num_senders: int, tmp_path: Path) -> None:
    path = make_vision(tmp_path)
    both = Both(path, num_senders=num_senders)
    sections = {"trainer": {"devices": num_senders, "shards": 1}, "publish": {"senders": "all"}}

    def predicted(vision: str = "frozen", **placement: Any) -> PublishedBytes:
        model = {"vision": vision}
        config = vision_config(path, model=model, placement=placement, **sections)
        return published_bytes(config, ModelSpec.from_config(config))

    first = [stats.bytes for stats in both.publish_all(0, both.connected())]
    both.step()
    later = [stats.bytes for stats in both.publish_all(1)]
    frozen = predicted()
    assert (frozen.worker, frozen.worker + frozen.once) == (sum(later), sum(first))
    assert frozen.of_run(2) == sum(first) + 2 * sum(later)
    assert frozen.sender == pytest.approx(max(later), rel=0.15)
    assert "of a frozen tower with the first version" in frozen.line()
    for whole in (predicted("trained"), predicted(colocate=True)):
        assert (whole.worker, whole.once) == (sum(first), 0)
        assert "tower" not in whole.line()
