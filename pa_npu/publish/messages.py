"""Messages of trainers and coordinator in a publish: each with its key in the store, defined once.

pa_npu.publish draws the sequence in which they are used. Ranks are trainer ranks;
attempts of a version and late deliveries are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pa_npu.control.typed import Topic
from pa_npu.weight_transfer.transport import Way, group_name


@dataclass(frozen=True)
class StageManifest:
    """Tells an engine how to join the groups of one sender of a stage and to read its buckets.

    name: beginning of the groups' names. manifest: Manifest.to_json().
    """

    name: str
    manifest: dict[str, Any]

    def group(self, epoch: int, way: Way = "group") -> dict[str, Any]:
        """Returns the group of this way after the `epoch`-th change of members, as Receiver.join
        takes it.
        """
        return {"name": group_name(self.name, epoch, way), "manifest": self.manifest}


MANIFEST = Topic(
    "publish/manifest/{rank}",
    StageManifest,
    "trainers: rank {rank} to announce the weights that it sends",
)
LATE_MANIFEST = Topic("late/manifest/{rank}", StageManifest, MANIFEST.description)


@dataclass(frozen=True)
class TrainersReady:
    """Says that all trainers hold `version`, and that the iteration before has its report.

    Rank 0 sends it at a border. publishes: False if engines keep the version that they have
    (publish.divergence), so that nothing of a publish follows.
    """

    version: int
    publishes: bool = True


READY = Topic(
    "publish/{version}/ready",
    TrainersReady,
    "trainers: rank 0 to announce weight version {version}",
)


@dataclass(frozen=True)
class PublishMembers:
    """Says which engine workers take part in an attempt.

    Args:
        epoch: of the groups that they are in.
        workers: how many there are in groups of the trainers' backend.
        host_workers: how many more there are in groups through host memory: those of engines that
            the backend cannot have in a group with the trainers (weight_transfer.transport.Way).
        delayed: whether engines receive while they generate, and swap later (ENGINES_SWAPPED).
            Until then engines that come late get the version before.
    """

    epoch: int
    workers: int
    host_workers: int = 0
    delayed: bool = False


MEMBERS = Topic(
    "publish/{version}/{attempt}/members",
    PublishMembers,
    "engines that can load weight version {version}",
)


@dataclass(frozen=True)
class SentWeights:
    """Says what a rank has sent as `version`.

    digests: of every bucket, as Digests.read returns them.
    """

    version: int
    digests: str


SENT = Topic(
    "publish/{version}/{attempt}/sent/{rank}",
    SentWeights,
    "trainers: rank {rank} to say what it sent as weight version {version}",
)


@dataclass(frozen=True)
class TrainedContents:
    """Says what a sending rank holds of `version` in the model that trains.

    contents: ordered ones, by tensor (weight_transfer.contents). The sum over all ranks that take
        part is the tensor's.
    """

    version: int
    contents: dict[str, str]


TRAINED = Topic(
    "publish/{version}/{attempt}/trained/{rank}",
    TrainedContents,
    "trainers: rank {rank} to sum up what it trains as weight version {version}",
)


@dataclass(frozen=True)
class PublishBroken:
    """Says that a trainer rank could not complete its part of an attempt."""

    reason: str


BROKEN = Topic("publish/{version}/{attempt}/broken", PublishBroken, "a failure that did not come")
GAVE_UP = Topic(
    "publish/{version}/{attempt}/gave_up/{rank}",
    PublishBroken,
    "trainer rank {rank} to give up its part",
)


@dataclass(frozen=True)
class ProbeResponse:
    """Holds one response of an engine.

    logprobs: of each token, under the distribution that it was sampled from.
    """

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class ProbeImage:
    """Holds an image of a probe's prompt.

    start, length: its placeholders. png: its pixels, a PNG in base64.
    """

    start: int
    length: int
    png: str


@dataclass(frozen=True)
class Probe:
    """Responses to one prompt, one of each engine, under the version just published."""

    prompt_tokens: list[int]
    responses: list[ProbeResponse]
    images: list[ProbeImage] = field(default_factory=list)


@dataclass(frozen=True)
class PublishVerdict:
    """Ends an attempt.

    Args:
        done: whether engines hold the version.
        reason: why they do not.
        probe: their answers; None if none was due.
    """

    done: bool
    reason: str = ""
    probe: Probe | None = None


VERDICT = Topic(
    "publish/{version}/{attempt}/verdict",
    PublishVerdict,
    "the engines to load weight version {version}",
)


@dataclass(frozen=True)
class EnginesSwapped:
    """Says that engines have swapped to `version`, which they received while they generated."""

    version: int


ENGINES_SWAPPED = Topic(
    "publish/{version}/swapped", EnginesSwapped, "the engines to swap to weight version {version}"
)


@dataclass(frozen=True)
class LateRequest:
    """Asks for `version` for one engine of `workers` workers, inside its iteration."""

    version: int
    workers: int


LATE_REQUEST = Topic(
    "late/{number}", LateRequest, "the coordinator to ask for late delivery {number}"
)


@dataclass(frozen=True)
class LateAnswer:
    """Says whether a rank holds the version, and keeps it until the delivery is over."""

    held: bool


@dataclass(frozen=True)
class LateDecision:
    """Says whether all ranks hold the version, so that it is sent."""

    held: bool


LATE_ANSWER = Topic(
    "late/{number}/answer/{rank}",
    LateAnswer,
    "trainer rank {rank} to say whether it holds the weights",
)


LATE_DECISION = Topic(
    "late/{number}/decision", LateDecision, "the coordinator to decide about late delivery {number}"
)
LATE_SENT = Topic(
    "late/{number}/sent/{rank}", SentWeights, "rank {rank} to say what it sent to a late engine"
)
LATE_BROKEN = Topic("late/{number}/broken", PublishBroken, BROKEN.description)
