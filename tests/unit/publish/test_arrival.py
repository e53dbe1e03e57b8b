"""Weights arrive as they were sent (I5): skipped, changed and stale ones are found without a tolerance, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.control.channel import StoreChannel
from pa_npu.engines.protocol import LoadedWeights
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.publish import trainer_side
from pa_npu.publish.engines import ArrivalCheck, Connection
from pa_npu.publish.messages import (
    BROKEN,
    MEMBERS,
    READY,
    SENT,
    VERDICT,
    PublishMembers,
    PublishVerdict,
    SentWeights,
    StageManifest,
)
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.publish.trainer_side import TrainerPublish, check_follows
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.digest import digest_of
from pa_npu.weight_transfer.receiver import Message, Receiver
from pa_npu.weight_transfer.transport import WeightSyncError
from tests.helpers.publish_world import World
from tests.helpers.weights import make_checkpoint, run_threads


def connection_of(stages: list[StageManifest]) -> Connection:
    return Connection(("127.0.0.1", 1), "gloo", stages, stages)


class Pair:
    """A trainer and an engine worker, in real gloo groups; the trainer's weights change by an
    update of 1e-6 per version.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, stages: int = 1) -> None:
        world = World(monkeypatch, make_checkpoint(directory, "qwen2", tied=False), stages=stages)
        self.publishers: list[Publisher] = world.publishers()
        (self.receiver,) = world.connect(self.publishers)
        self.world = world
        self.modules = world.modules
        self.manifests = [publisher.manifest() for publisher in self.publishers]
        self.check = ArrivalCheck(connection_of(self.manifests))

    def update(self) -> None:
        self.world.add(1e-6)

    def publish(
        self, version: int, load: Callable[[Receiver, int], None] | None = None
    ) -> LoadedWeights:
        """One publish with the coordinator's check after it. load: what the engine does instead of
        receiving everything.
        """
        load = load or (
            lambda receiver, version: [None for _ in receiver.receive(version)] and None
        )  # type: ignore[func-returns-value]
        senders = [
            lambda p=publisher: p.publish(version, self.world.members)
            for publisher in self.publishers
        ]
        results: list[Any] = run_threads(*senders, lambda: load(self.receiver, version))
        errors = [result for result in results if isinstance(result, Exception)]
        assert not errors, errors
        self.stats = results[:-1]
        self.sent = [SentWeights(version, stats.digests) for stats in self.stats]
        loaded = LoadedWeights((version,), (self.receiver.digests,))
        self.check.check(version, self.sent, {"http://engine": loaded})
        return loaded


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(tmp_path, monkeypatch)


def test_what_was_sent_arrives(pair: Pair) -> None:
    digests = []
    for version in range(3):
        pair.publish(version)
        digests.append(pair.stats[0].digests)
        pair.update()
    assert len(set(digests)) == 3, "an update of 1e-6 is another version"


def test_a_load_that_was_skipped_is_found(pair: Pair) -> None:
    """The engine takes part, says that it holds version 1, and still has what it received as
    version 0.
    """

    def skip(receiver: Receiver, version: int) -> None:
        held = receiver._digests
        for _ in receiver.receive(version):
            pass
        receiver._digests = held

    pair.publish(0)
    pair.update()
    with pytest.raises(
        InvariantViolation,
        match=r"I5: engine http://engine, worker 0, .* version 1 as stage 0 sent it: bucket 1 of "
        r"\d+",
    ):
        pair.publish(1, skip)


def test_weights_scaled_by_a_hundredth_on_the_way_are_found_and_the_bucket_is_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = Receiver._arrived

    def scaled(self: Receiver, *args: Any) -> Message:
        message = arrived(self, *args)
        if message.bucket is not None and "layers.2.mlp" in message.bucket.summary:
            message.buffer.mul_(1.01)
        return message

    pair.publish(0)
    monkeypatch.setattr(Receiver, "_arrived", scaled)
    with pytest.raises(
        InvariantViolation, match=r"I5: engine http://engine, worker 0.* \(.*layers\.2\.mlp"
    ):
        pair.publish(1)


def test_an_engine_that_does_not_say_what_it_received_is_refused(pair: Pair) -> None:
    pair.publish(0)
    with pytest.raises(
        InvariantViolation, match=r"I5: engine a does not say what it received as weight version 1"
    ):
        pair.check.check(1, pair.sent, {"a": LoadedWeights((1,))})
    assert not ArrivalCheck(connection_of([StageManifest("stage-0", {})])).applies, (
        "trainers played by a test announce nothing"
    )


def test_a_late_engine_that_is_sent_another_versions_copy_is_found(pair: Pair) -> None:
    pair.publish(0)
    stale = pair.sent
    pair.update()
    loaded = pair.publish(1)
    pair.check.check_late(1, pair.sent, {"late": loaded})
    held = LoadedWeights((1,), (tuple(stage.digests for stage in stale),))
    with pytest.raises(
        InvariantViolation,
        match=r"I5: stage 0 sent a late engine other weights than .* version 1, first in b",
    ):
        pair.check.check_late(1, stale, {"late": held})


def test_the_stage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, monkeypatch, stages=2)
    loaded = pair.publish(0)
    first, second = loaded.digests[0]
    words = second.split()
    words[1] = "0" * 16
    changed = LoadedWeights((0,), ((first, " ".join(words)),))
    with pytest.raises(InvariantViolation, match=r"as stage 1 sent it: bucket 2 of"):
        pair.check.check(0, pair.sent, {"http://engine": changed})


def test_a_publish_of_something_that_does_not_follow_the_policy_is_found(pair: Pair) -> None:
    """Two versions of equal digests while the policy changed by 1e-6: what is sent is a copy that
    nobody refreshes.
    """
    policy = [parameter.detach().clone() for parameter in pair.modules[0].parameters()]
    pair.publish(0)
    before = replace(pair.stats[0], policy=digest_of(policy))
    pair.publish(1)
    unchanged = replace(pair.stats[0], policy=digest_of(policy))
    check_follows(1, 0, unchanged, before)  # an update of nothing publishes the same weights
    policy = [parameter + 1e-6 for parameter in policy]
    with pytest.raises(
        InvariantViolation, match=r"I5: stage 0 sent, as weight version 1, bit for bit"
    ):
        check_follows(1, 0, replace(unchanged, policy=digest_of(policy)), before)
    pair.update()
    pair.publish(2)
    check_follows(2, 0, replace(pair.stats[0], policy=digest_of(policy)), unchanged)


# the trainers' end of the protocol


class Trainers:
    """TrainerPublish of one rank on a real store; `sends` says what each attempt does."""

    def __init__(
        self, sends: Iterator[PublishStats | Exception | None], rank: int = 0, stage: int | None = 0
    ) -> None:
        self.channel = StoreChannel(
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
        self.members: list[PublishMembers] = []

        def send(version: int, members: PublishMembers) -> PublishStats | None:
            self.members.append(members)
            outcome = next(sends)
            if isinstance(outcome, Exception):
                raise outcome
            self.policy = outcome.policy if outcome is not None else ""
            return outcome

        trained = lambda: self.policy  # noqa: E731
        self.side = TrainerPublish(
            self.channel, send, trained, rank, stage, 20.0, Timeline(None, "")
        )

    def decide(self, version: int, *done: bool) -> None:
        for attempt, verdict in enumerate(done):
            place = {"version": version, "attempt": attempt}
            MEMBERS.put(self.channel, PublishMembers(attempt, 2), **place)
            VERDICT.put(
                self.channel, PublishVerdict(verdict, "" if verdict else "an engine died"), **place
            )


@pytest.mark.parametrize(
    "error", [WeightSyncError("the connection broke"), DeadlineExceeded("too long")]
)
def test_an_attempt_that_fails_is_told_and_made_again(error: Exception) -> None:
    trainers = Trainers(iter([error, PublishStats(digests="ab")]))
    trainers.decide(3, False, True)
    trainers.side.publish(3)
    assert [members.epoch for members in trainers.members] == [0, 1]
    assert READY.get(trainers.channel, version=3).version == 3
    assert BROKEN.get(trainers.channel, version=3, attempt=0).reason == str(error)
    assert not SENT.exists(trainers.channel, version=3, attempt=0, rank=0)
    assert SENT.get(trainers.channel, version=3, attempt=1, rank=0) == SentWeights(3, "ab")


def test_a_rank_that_sends_nothing_says_nothing() -> None:
    trainers = Trainers(iter([None]), rank=1, stage=None)
    trainers.decide(0, True)
    trainers.side.publish(0)
    assert not READY.exists(trainers.channel, version=0)
    assert not SENT.exists(trainers.channel, version=0, attempt=0, rank=0)


def test_a_stale_publish_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [PublishStats(digests="ab", policy="1"), PublishStats(digests="ab", policy="2")]
    trainers = Trainers(iter(versions))
    for version in range(2):
        trainers.decide(version, True)
    trainers.side.publish(0)
    with pytest.raises(
        InvariantViolation, match="I5: stage 0"
    ):  # before the verdict, and so before anything is trained by it
        trainers.side.publish(1)

    # the control: nothing else sees it
    monkeypatch.setattr(trainer_side, "check_follows", lambda *_: None)
    control = Trainers(iter(versions))
    for version in range(2):
        control.decide(version, True)
        control.side.publish(version)


def test_a_leader_that_cannot_join_leaves_its_tensor_parallel_peers_ready_for_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers are in the gather by then; a leader that went away without it would meet them one
    attempt late.
    """
    world = World(monkeypatch, make_checkpoint(tmp_path, "qwen2", tied=False), tp_size=2)
    leader, peer = world.publishers(timeout_s=20.0)
    join = world._join

    def broken(*_: Any, **__: Any) -> Any:
        raise WeightSyncError("ranks [1] of 2 did not join")

    monkeypatch.setattr("pa_npu.weight_transfer.transport.join_group", broken)
    members = PublishMembers(0, 1)
    results: list[Any] = run_threads(
        lambda: leader.publish(0, members), lambda: peer.publish(0, members)
    )
    assert isinstance(results[0], WeightSyncError) and isinstance(results[1], PublishStats), results
    monkeypatch.setattr("pa_npu.weight_transfer.transport.join_group", join)
    (receiver,) = world.connect([leader, peer], epoch=1)
    members = PublishMembers(1, 1)
    results = run_threads(
        lambda: leader.publish(0, members),
        lambda: peer.publish(0, members),
        lambda: dict(receiver.receive(0)),
    )
    assert not [result for result in results if isinstance(result, Exception)], results
    assert receiver.digests == (results[0].digests,)
