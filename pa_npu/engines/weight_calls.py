"""Calls by which an engine's workers get weights, the same for every kind of engine. Imports torch and msgspec only.

    pa_connect    once: join one group per pipeline stage, check that the trainer's model is the
                  engine's
    pa_receive    per version: receive and load everything in one call between engine steps, then
                  stamp the version; says what the live modules hold afterwards, and what memory was
                  used at most since the load before
    pa_prepare    per version, instead: begin to receive it in a thread, beside the engine's steps;
                  pa_prepared says when it is here
    pa_swap       load what was prepared, between two steps, with nothing on the wire
    pa_version    the version all of whose weights are loaded; None before the first and after a
                  failed receive
    pa_close      leave the groups

The caller must have no request in flight during pa_receive and pa_swap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from pa_npu.engines.live_weights import LiveTensor, LiveWeights
from pa_npu.platform.memory_peaks import (
    ResidentPeak,
    device_peak_bytes,
    own_processes,
    session_leader,
)
from pa_npu.weight_transfer.computation import computation_of
from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.transport import WeightSyncError


class WeightCalls:
    """A worker of an engine; a kind adds how it loads. All names start with `pa_`: vLLM, which
    mixes them into a class of its own, refuses names that this has already."""

    rank: int
    """Among the engine's workers."""
    device: torch.device | str
    _pa_version: int | None = None
    _pa_receiver: Receiver | None = None
    _pa_resident_peak: ResidentPeak | None = None

    def _pa_model(self) -> tuple[object, str]:
        """The model as the engine knows it, with the names of HF's config.json as attributes, and
        the model's directory.
        """
        raise NotImplementedError

    def _pa_take(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        """Load all weights by their HF names; returns the parameters for which none came. kept: the
        tensors' memory is the engine's from here on."""
        raise NotImplementedError

    def _pa_live(self, names: Sequence[str]) -> Iterable[LiveTensor]:
        """Finds the memory that the live modules compute with. names: HF names of the tensors that
        were loaded.
        """
        raise NotImplementedError

    def _pa_modules(self) -> Iterable[torch.nn.Module]:
        """Returns the live modules."""
        raise NotImplementedError

    def pa_connect(self, groups: dict[str, Any]) -> dict[str, Any]:
        """Join WeightGroups, as the member of this worker."""
        self.pa_close()
        model, directory = self._pa_model()
        self._pa_receiver = Receiver.join(
            groups, self.rank, torch.device(self.device), model, directory
        )
        return {}

    def pa_receive(self, version: int, begins_within_s: float | None = None) -> dict[str, Any]:
        """Load weight version `version`. On any error the version is unset; connect and receive
        again.

        begins_within_s: as Receiver.receive; the model is made ready to load before that wait.
        """
        receiver = self._pa_get()
        received = receiver.receive(version, begins_within_s=begins_within_s)
        return self._pa_load(version, received, lambda: receiver.digests)

    def pa_prepare(self, version: int) -> dict[str, Any]:
        """Begin to receive weight version `version` into a second buffer."""
        self._pa_get().prepare(version)
        return {}

    def pa_prepared(self, version: int) -> dict[str, Any]:
        """{"version": None} while it is still being received. Raises what went wrong."""
        digests = self._pa_get().prepared(version)
        return {"version": None if digests is None else version, "digests": list(digests or ())}

    def pa_swap(self, version: int) -> dict[str, Any]:
        """Load weight version `version` out of the second buffer. Errors as of pa_receive."""
        received, digests = self._pa_get().take(version)
        return self._pa_load(version, received, lambda: digests, kept=True)

    def _pa_load(
        self,
        version: int,
        received: Iterable[tuple[str, torch.Tensor]],
        digests: Callable[[], tuple[str, ...]],
        kept: bool = False,
    ) -> dict[str, Any]:
        """digests: of what was received, asked for when all of it has been loaded."""
        live, receiver = LiveWeights(), self._pa_get()
        if receiver.merges:
            received = live.arrived(received)
        weights = live.received(receiver.whole(received))
        self._pa_version = None  # on any error some weights may be new and others old
        with torch.no_grad():
            missing = self._pa_take(version, weights, kept)
            held = live.report(self._pa_live(live.names), computation_of(self._pa_modules()))
        if missing:
            raise WeightSyncError(
                f"weight version {version}: the trainer sent no weights for {len(missing)} "
                f"parameter(s) of the engine, the first is {min(missing)!r}; engine and trainer "
                "must be given the same model directory"
            )
        self._pa_version = version
        return {
            "version": version,
            "digests": list(digests()),
            "memory": self._pa_memory(),
            "live": held,
        }

    def pa_version(self) -> dict[str, Any]:
        """{"version": None} also means: do not generate."""
        return {"version": self._pa_version}

    def pa_close(self) -> dict[str, Any]:
        """Leave the groups, if any."""
        receiver, self._pa_receiver = self._pa_receiver, None
        if receiver is not None:
            receiver.close()
        return {}

    def _pa_memory(self) -> dict[str, int | None]:
        """Since the call before; "host" is of all the engine's processes where this worker is the
        first, and 0 of the others.
        """
        peak = self._pa_resident_peak = self._pa_resident_peak or ResidentPeak(own_processes)
        counts = self.rank == 0 or session_leader() is None
        return {
            "host": peak.take() if counts else 0,
            "device": device_peak_bytes(torch.device(self.device).type),
        }

    def _pa_get(self) -> Receiver:
        if self._pa_receiver is None:
            raise WeightSyncError(
                "this engine has no connection to the trainer; call pa_connect before pa_receive"
            )
        return self._pa_receiver
