"""Calls by which an engine's workers get weights, the same for every kind of engine.

Imports torch and msgspec only.

    pa_connect    once: joins one group per pipeline stage, and checks that the trainer's model is
                  the engine's
    pa_receive    per version: receives and loads everything in one call between engine steps, then
                  sets the version; reports what the live modules hold afterwards, and the largest
                  use of memory since the load before
    pa_prepare    per version, instead: begins to receive it in a thread, in the background;
                  pa_prepared reports when it is complete
    pa_swap       loads what was prepared, between two steps, with nothing on the wire
    pa_version    the version whose weights are all loaded; None before the first and after a failed
                  receive
    pa_close      leaves the groups

The caller must have no request in flight during pa_receive and pa_swap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from pa_npu.engines.live_weights import Known, LiveTensor, LiveWeights
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
    """A worker of an engine; each kind adds how it loads.

    All names start with `pa_`: vLLM mixes this class into one of its own, and refuses names that
    its class has already.
    """

    rank: int
    """Among the engine's workers."""
    device: torch.device | str
    _pa_version: int | None = None
    _pa_receiver: Receiver | None = None
    _pa_kept: Known | None = None
    """Of the weights that are sent once, what was received."""
    _pa_resident_peak: ResidentPeak | None = None

    def _pa_model(self) -> tuple[object, str]:
        """Returns the engine's model configuration, and the model's directory.

        The configuration has the names of HF's config.json as attributes.
        """
        raise NotImplementedError

    def _pa_load_weights(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        """Loads weights by their HF names; returns the parameters for which none came.

        Those that are sent once come with the first load only, and stay. `kept`: whether the engine may keep the tensors' memory.
        """
        raise NotImplementedError

    def _pa_live(self, names: Sequence[str]) -> Iterable[LiveTensor]:
        """Returns the memory that the live modules compute with.

        `names`: HF names of the tensors that were loaded.
        """
        raise NotImplementedError

    def _pa_modules(self) -> Iterable[torch.nn.Module]:
        """Returns the live modules."""
        raise NotImplementedError

    def pa_connect(self, groups: dict[str, Any]) -> dict[str, Any]:
        """Joins the groups (fields of WeightGroups) as the member of this worker."""
        self.pa_close()
        self._pa_kept = None
        model, directory = self._pa_model()
        self._pa_receiver = Receiver.join(
            groups, self.rank, torch.device(self.device), model, directory
        )
        return {}

    def pa_receive(self, version: int, begins_within_s: float | None = None) -> dict[str, Any]:
        """Loads weight version `version` from the groups.

        After an error no version is set; connect and receive again. `begins_within_s`: as for
        Receiver.receive.
        """
        receiver = self._pa_get()
        received = receiver.receive(version, begins_within_s=begins_within_s)
        return self._pa_load(version, received, lambda: receiver.digests)

    def pa_prepare(self, version: int) -> dict[str, Any]:
        """Begins to receive weight version `version` into a second buffer."""
        self._pa_get().prepare(version)
        return {}

    def pa_prepared(self, version: int) -> dict[str, Any]:
        """Returns {"version": None} while it is still being received. Raises what went wrong."""
        digests = self._pa_get().prepared(version)
        return {"version": None if digests is None else version, "digests": list(digests or ())}

    def pa_swap(self, version: int) -> dict[str, Any]:
        """Loads weight version `version` from the second buffer. Raises as pa_receive does."""
        received, digests = self._pa_get().pop_prepared(version)
        return self._pa_load(version, received, lambda: digests, kept=True)

    def _pa_load(
        self,
        version: int,
        received: Iterable[tuple[str, torch.Tensor]],
        digests: Callable[[], tuple[str, ...]],
        kept: bool = False,
    ) -> dict[str, Any]:
        """Loads weights and checks them; `digests` is called when all of them are loaded."""
        receiver = self._pa_get()
        live = LiveWeights(self._pa_kept)
        if receiver.merges:
            received = live.arrived(received)
        weights = live.received(receiver.whole(received))
        self._pa_version = None  # on any error some weights may be new and others old
        with torch.no_grad():
            missing = self._pa_load_weights(version, weights, kept)
            held = live.report(self._pa_live(live.names), computation_of(self._pa_modules()))
        if self._pa_kept is not None:
            missing = [name for name in missing if not receiver.is_sent_once(name)]
        known = live.known()
        self._pa_kept = {name: known[name] for name in known if receiver.is_sent_once(name)}
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
        """Returns the version; {"version": None} also means that it must not generate."""
        return {"version": self._pa_version}

    def pa_close(self) -> dict[str, Any]:
        """Leaves the groups, if it is in any."""
        receiver = self._pa_receiver
        self._pa_receiver = None
        if receiver is not None:
            receiver.close()
        return {}

    def _pa_memory(self) -> dict[str, int | None]:
        """Returns peaks in bytes since the call before.

        "host" is the sum over the engine's processes if this worker is the first, else 0.
        """
        if self._pa_resident_peak is None:
            self._pa_resident_peak = ResidentPeak(own_processes)
        peak = self._pa_resident_peak
        counts = self.rank == 0 or session_leader() is None
        return {
            "host": peak.pop_peak() if counts else 0,
            "device": device_peak_bytes(torch.device(self.device).type),
        }

    def _pa_get(self) -> Receiver:
        if self._pa_receiver is None:
            raise WeightSyncError(
                "this engine has no connection to the trainer; call pa_connect before pa_receive"
            )
        return self._pa_receiver
