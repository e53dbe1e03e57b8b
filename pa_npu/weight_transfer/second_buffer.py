"""A version that an engine receives beside what it does, into memory of its own, until the engine swaps to it.

Knows nothing of any engine, as the receiver: a thread reads all buckets (Receiver.receive) and keeps the tensors, as many bytes as
the weights have. Imports torch only.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.transport import WeightSyncError

Received = tuple[list[tuple[str, torch.Tensor]], tuple[str, ...]]
"""(HF name, tensor) of all that was sent, and the digests of what each stage sent."""


class SecondBuffer:
    """The second buffer of one worker. One version at a time: `begin`, then `received` until it says so, then `take`."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._arriving: Future[Received] | None = None

    def begin(self, receiver: Receiver, version: int) -> None:
        """Receive `version` in a thread, which ends by the publish's deadline or abandonment. Raises WeightSyncError while another
        one is under way."""
        if self._arriving is not None and not self._arriving.done():
            raise WeightSyncError(f"weight version {self._version} is still being received; one at a time")
        self._version, self._arriving = version, Future()
        threading.Thread(
            target=_receive, args=(receiver, version, self._arriving), name=f"weight version {version}", daemon=True
        ).start()

    def received(self, version: int) -> tuple[str, ...] | None:
        """Digests of what each stage sent, once all of `version` is here; None before. Raises what went wrong with it."""
        if self._version != version or self._arriving is None:
            raise WeightSyncError(
                f"weight version {version} was never asked for, or given up; the last one is {self._version}"
            )
        return self._arriving.result()[1] if self._arriving.done() else None

    def take(self, version: int) -> Received:
        """They are the caller's. Raises WeightSyncError until they are here."""
        if self.received(version) is None or self._arriving is None:
            raise WeightSyncError(f"weight version {version} is still being received")
        taken = self._arriving.result()
        self._version, self._arriving = None, None
        return taken


@torch.no_grad()
def _receive(receiver: Receiver, version: int, arriving: Future[Received]) -> None:
    try:
        # memory of their own, aligned as an engine's, so that kernels compute the same bits whichever way a version came
        weights = [(name, tensor.clone()) for name, tensor in receiver.receive(version)]
        arriving.set_result((weights, receiver.digests))
    except Exception as error:  # for whoever asks
        arriving.set_exception(error)
