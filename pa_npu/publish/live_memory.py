"""Compare what the trainers train with what an engine's live modules hold after a load, tensor by tensor (invariant I5).

    the model    ──ordered contents──>  what is sent  ──digests──>  an engine's  ──contents──>  the memory that its
    that trains                                                     receiver                    modules compute with

Modules also compute with numbers that are no weights: rotations, scales, epsilons, routers'
settings. These are the trainers', too.

The arrow in the middle is pa_npu.publish.engines. The first one shows a tensor that the trainers
sent from a copy that was old, or whose values changed or changed places on their way into a bucket;
the last one a layer that a loader skipped, weights that it scaled, a packed copy that stayed old.
So every tensor that an update changed has changed in every engine, and no other. There is no
tolerance, so that it shows in bf16 what log-probs cannot. Where an engine keeps weights in a
narrower type than they are sent in, their values differ by design; there, memory must not change
when nothing of what it is made of does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pa_npu.engines.live_weights import LiveReport, ReportedTensor
from pa_npu.engines.protocol import LoadedWeights
from pa_npu.errors import InvariantViolation
from pa_npu.weight_transfer.computation import Computation, disagreements
from pa_npu.weight_transfer.contents import follows, summed

logger = logging.getLogger(__name__)

_NAMED = 3
# Versions whose contents are remembered: one may be loaded while the one after it arrives.
_REMEMBERED = 2
# Types that hold every value of the types that weights are sent in, fp32 and bf16, or are the same
# as these.
_EXACT = {
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}


class LiveMemoryCheck:
    """Compares what engines say of their memory after each load with the load before.

    trainers: what their modules compute with; None if they do not say it.
    """

    def __init__(self, trainers: Computation | None = None) -> None:
        self._trainers = trainers
        self._before: dict[str, dict[str, ReportedTensor]] = {}
        self._trained: dict[int, Mapping[str, str]] = {}
        self._notes: set[str] = set()

    def expect(self, version: int, trained: Mapping[str, str]) -> None:
        """Remembers what the trainers hold of `version` in the model that they train.

        trained: ordered contents by tensor.
        """
        self._trained[version] = trained
        for old in sorted(self._trained)[:-_REMEMBERED]:
            del self._trained[old]

    def check(
        self, version: int, loaded: Mapping[str, LoadedWeights], *, as_published: bool = True
    ) -> None:
        """Compares after a load. Raises InvariantViolation.

        loaded: by the engine's name. as_published: whether the weights were sent in the types of
        the publish.
        """
        for engine, weights in loaded.items():
            for report in weights.live:
                if as_published:
                    self._check_sent(version, report.arrived)
            if not weights.live:
                self._note(
                    f"engine {engine} does not say what its memory holds after a load; only "
                    "log-probs show it there"
                )
                continue
            self._check_computation(engine, weights.live)
            memory = _over_workers(weights.live)
            self._check_engine(version, engine, memory, len(weights.live))
            self._before[engine] = memory
            unplaced = weights.live[0].unplaced
            if unplaced:
                self._note(
                    f"engine {engine}: of {len(unplaced)} tensors it is not known which memory "
                    f"they become, the first is {unplaced[0]}; only log-probs show whether they "
                    "are loaded"
                )

    def _check_computation(self, engine: str, workers: Sequence[LiveReport]) -> None:
        if self._trainers is None:
            return
        for worker, report in enumerate(workers):
            reasons = disagreements(self._trainers, report.computation)
            if reasons:
                raise InvariantViolation(
                    f"I5: engine {engine}, worker {worker}, computes with something else than the "
                    f"trainers: {'; '.join(reasons)}; compare how both read config.json of "
                    "model.path, and rollout.extra_args"
                )

    def _check_sent(self, version: int, arrived: Mapping[str, str]) -> None:
        """Compares what an engine got with what the trainers train.

        arrived: ordered contents by tensor. Their digests are those of what was sent.
        """
        trained = self._trained.get(version)
        if trained is None or not arrived:
            return
        last = max((known for known in self._trained if known < version), default=None)
        before = {} if last is None else self._trained[last]
        wrong = [name for name, contents in trained.items() if arrived.get(name) != contents]
        wrong += [name for name in arrived if name not in trained]
        if not wrong:
            return
        old = [name for name in wrong if name in arrived and arrived[name] == before.get(name)]
        names = ", ".join(wrong[:_NAMED])
        if len(wrong) > _NAMED:
            names += f" and {len(wrong) - _NAMED} more"
        reason = ""
        if old:
            reason = f", of which {len(old)} are still those of version {last}, first {old[0]}"
        raise InvariantViolation(
            f"I5: as weight version {version} the trainers sent other values than they train, or "
            f"these in other places, in {len(wrong)} of {len(trained)} tensors ({names}){reason}; "
            "look for what keeps a copy of weights, or changes them, on their way into a publish"
        )

    def _check_engine(
        self, version: int, engine: str, memory: Mapping[str, ReportedTensor], workers: int
    ) -> None:
        before = self._before.get(engine, {})
        wrong = [
            name
            for name, held in memory.items()
            if not self._holds(held, before.get(name), workers)
        ]
        if wrong:
            raise InvariantViolation(
                f"I5: engine {engine} holds other values than were sent as weight version "
                f"{version} in {len(wrong)} of {len(memory)} tensors of its live modules, the "
                f"first is {wrong[0]}; look for what skips, changes or keeps weights between the "
                "engine's receiver and its modules"
            )

    def _holds(self, held: ReportedTensor, before: ReportedTensor | None, workers: int) -> bool:
        if held.received_dtype in _EXACT.get(held.dtype, ()):
            return follows(held.contents, held.received, workers)
        # of quantized weights: what they are made of is as before, so they are
        return (
            before is None or before.received != held.received or before.contents == held.contents
        )

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            logger.warning("%s", text)


def _over_workers(reports: Sequence[LiveReport]) -> dict[str, ReportedTensor]:
    """Returns the memory of all workers of an engine as one: contents added up."""
    memory = {}
    for name, held in reports[0].memory.items():
        parts = [report.memory[name] for report in reports if name in report.memory]
        memory[name] = ReportedTensor(
            contents=summed(part.contents for part in parts),
            dtype=held.dtype,
            received=held.received,
            received_dtype=held.received_dtype,
        )
    return memory
