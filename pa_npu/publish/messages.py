"""Messages of trainers and coordinator in a publish: each with its key in the store, defined once.

pa_npu.publish draws the sequence in which they are used. Stages are pipeline stages of the
trainers, ranks are trainer ranks; attempts of a version and late deliveries are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pa_npu.control.typed import Topic
from pa_npu.weight_transfer.transport import Way, group_name


@dataclass(frozen=True)
class StageManifest:
    """The message by which an engine joins a stage's groups and reads its buckets. name: begins
    those of the groups; manifest: Manifest.to_json()."""

    name: str
    manifest: dict[str, Any]

    def group(self, epoch: int, way: Way = "group") -> dict[str, Any]:
        """As Receiver.join takes it, for the group that goes this way after the `epoch`-th change
        of members.
        """
        return {"name": group_name(self.name, epoch, way), "manifest": self.manifest}


MANIFEST = Topic(
    "publish/manifest/{stage}",
    StageManifest,
    "trainers: the leader of pipeline stage {stage} to announce its weights",
)
LATE_MANIFEST = Topic("late/manifest/{stage}", StageManifest, MANIFEST.what)


@dataclass(frozen=True)
class TrainersReady:
    """Rank 0 at a border: all trainers hold `version`, and the report of the iteration before is
    there.

    publishes: false where engines keep the version that they have (publish.divergence), and nothing
    of a publish follows.
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
    """Who takes part in an attempt: `workers` engine workers, in the groups of this epoch.

    host_workers: further ones, of engines that the backend of collectives cannot have in a group
    with the trainers: they are in groups of their own, through host memory
    (weight_transfer.transport.Way).
    delayed: engines receive beside generation, and swap later (ENGINES_SWAPPED); until then engines
    that come late get the version before.
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
    """The message of what a stage's leader has sent as `version`: the digest of every bucket, as
    Digests.read gives it.
    """

    version: int
    digests: str


SENT = Topic(
    "publish/{version}/{attempt}/sent/{stage}",
    SentWeights,
    "trainers: the leader of stage {stage} to say what it sent as weight version {version}",
)


@dataclass(frozen=True)
class TrainedContents:
    """What a sending rank holds of `version` in the model that trains: contents by tensor
    (weight_transfer.contents). Those of all sending ranks, added up, are the tensor's."""

    version: int
    contents: dict[str, str]


TRAINED = Topic(
    "publish/{version}/{attempt}/trained/{rank}",
    TrainedContents,
    "trainers: rank {rank} to sum up what it trains as weight version {version}",
)


@dataclass(frozen=True)
class PublishBroken:
    """A trainer rank could not complete its part of an attempt."""

    reason: str


BROKEN = Topic("publish/{version}/{attempt}/broken", PublishBroken, "a failure that did not come")


@dataclass(frozen=True)
class ProbeResponse:
    """One response of an engine. tokens and their log-probs under what they were sampled from, of
    equal length.
    """

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Probe:
    """Responses to one prompt, one of each engine, under the version just published."""

    prompt_tokens: list[int]
    responses: list[ProbeResponse]


@dataclass(frozen=True)
class PublishVerdict:
    """The end of an attempt. done: engines hold the version, and answered `probe` unless probes are
    off; else why not.
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
    """Engines have swapped to `version`, which they had received while they generated."""

    version: int


ENGINES_SWAPPED = Topic(
    "publish/{version}/swapped", EnginesSwapped, "the engines to swap to weight version {version}"
)


@dataclass(frozen=True)
class LateRequest:
    """One engine of `workers` workers wants `version` inside its iteration."""

    version: int
    workers: int


LATE_REQUEST = Topic(
    "late/{number}", LateRequest, "the coordinator to ask for late delivery {number}"
)


@dataclass(frozen=True)
class LateAnswer:
    """Whether a rank holds the version, and will keep it until the delivery is over; as the
    decision, whether all do, so that it is sent."""

    held: bool


LATE_ANSWER = Topic(
    "late/{number}/answer/{rank}",
    LateAnswer,
    "trainer rank {rank} to say whether it holds the weights",
)


LATE_DECISION = Topic(
    "late/{number}/decision", LateAnswer, "the coordinator to decide about late delivery {number}"
)
LATE_SENT = Topic(
    "late/{number}/sent/{stage}", SentWeights, "stage {stage} to say what it sent to a late engine"
)
LATE_BROKEN = Topic("late/{number}/broken", PublishBroken, BROKEN.what)
