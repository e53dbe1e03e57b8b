"""Checks that each engine holds what the trainers sent, bucket by bucket, and that a late engine got what all others got (I5).

    an engine's digests against the trainers' of the same publish   a skipped or partial load, weights changed on the way, a stale
                                                                     copy that calls itself the new version
    a late engine's against those of the version's publish           a copy kept for late engines that is another version's

What a version's digests say of the weights that train is checked where these are, in pa_npu.publish.trainer_side. No tolerance: a
mismatch is a fault, whatever the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pa_npu.engines.protocol import LoadedWeights
from pa_npu.errors import InvariantViolation
from pa_npu.publish.messages import SentWeights, StageManifest
from pa_npu.weight_transfer.digest import first_difference
from pa_npu.weight_transfer.manifest import Manifest


class ArrivalCheck:
    """The coordinator's. stages and late_stages: of the regular publishes and of late deliveries."""

    def __init__(self, stages: Sequence[StageManifest], late_stages: Sequence[StageManifest]) -> None:
        self._stages = stages
        self._late_stages = late_stages
        self._published: tuple[int, tuple[str, ...]] | None = None  # the last version and its digests, per stage

    @property
    def applies(self) -> bool:
        """Whether trainers have said what they will send; stand-ins for them say nothing, and send nothing."""
        return any(stage.manifest for stage in self._stages)

    def check(self, version: int, sent: Sequence[SentWeights], loaded: Mapping[str, LoadedWeights]) -> None:
        """After a publish. sent: per stage. loaded: by the engine's name. Raises InvariantViolation."""
        self._compare(version, self._stages, sent, loaded)
        self._published = (version, tuple(stage.digests for stage in sent))

    def check_late(self, version: int, sent: Sequence[SentWeights], loaded: Mapping[str, LoadedWeights]) -> None:
        """After a delivery to one engine inside the iteration of `version`."""
        self._compare(version, self._late_stages, sent, loaded)
        if self._published is None or self._published[0] != version:
            return
        for number, (late, regular) in enumerate(zip(self._late_stages, self._stages, strict=True)):
            # a copy of another type is cut into other buckets, whose digests cannot be equal
            if late.manifest != regular.manifest:
                continue
            difference = first_difference(sent[number].digests, self._published[1][number])
            if difference is not None:
                raise InvariantViolation(
                    f"I5: stage {number} sent a late engine other weights than all others got as weight version {version}, "
                    f"first in {_bucket(late, difference)}; the trainers changed or never refreshed what they keep for late engines"
                )

    def _compare(
        self,
        version: int,
        stages: Sequence[StageManifest],
        sent: Sequence[SentWeights],
        loaded: Mapping[str, LoadedWeights],
    ) -> None:
        for engine, weights in loaded.items():
            if not weights.digests:
                raise InvariantViolation(
                    f"I5: engine {engine} does not say what it received as weight version {version}, so that nothing shows that it "
                    f"loaded it; engine and trainers must run the same pa_npu"
                )
            for worker, digests in enumerate(weights.digests):
                for number, stage in enumerate(stages):
                    arrived = digests[number] if number < len(digests) else ""
                    difference = first_difference(sent[number].digests, arrived)
                    if difference is None:
                        continue
                    raise InvariantViolation(
                        f"I5: engine {engine}, worker {worker}, did not receive weight version {version} as stage {number} sent "
                        f"it: {_bucket(stage, difference)} has another digest; look for what changes or skips weights between the "
                        f"broadcast and the engine's loader"
                    )


def _bucket(stage: StageManifest, index: int) -> str:
    buckets = Manifest.from_json(stage.manifest).buckets
    if index >= len(buckets):
        return f"bucket {index + 1}, of which the manifest knows {len(buckets)}"
    return f"bucket {index + 1} of {len(buckets)} ({buckets[index].summary})"
