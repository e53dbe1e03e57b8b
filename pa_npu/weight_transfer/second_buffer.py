"""A version that an engine receives beside what it does, into memory of its own, until the engine swaps to it.

Knows nothing of any engine, as the receiver: a thread reads all buckets (Receiver.receive) and keeps the tensors, as many bytes as
the weights have. Imports torch only.
"""

from __future__ import annotations

import threading

import torch

from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.transport import WeightSyncError


class SecondBuffer:
    """The second buffer of one worker. One version at a time: `begin`, then `received` until it says so, then `take`; or `drop`."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._thread: threading.Thread | None = None
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._digests: tuple[str, ...] = ()
        self._error: Exception | None = None

    def begin(self, receiver: Receiver, version: int) -> None:
        """Receive `version` in a thread. Raises WeightSyncError while another one is under way."""
        if self._thread is not None and self._thread.is_alive():
            raise WeightSyncError(f"weight version {self._version} is still being received; one at a time")
        self.drop()
        self._version = version
        self._thread = threading.Thread(
            target=self._receive, args=(receiver, version), name=f"weight version {version}", daemon=True
        )
        self._thread.start()

    def received(self, version: int, wait_s: float = 0.0) -> tuple[str, ...] | None:
        """Digests of what each stage sent, once all of `version` is here; None before. Raises what went wrong with it."""
        if self._version != version or self._thread is None:
            raise WeightSyncError(
                f"weight version {version} was never asked for, or given up; the last one is {self._version}"
            )
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._digests

    def take(self, version: int) -> tuple[list[tuple[str, torch.Tensor]], tuple[str, ...]]:
        """(HF name, tensor) of all weights, and the digests; they are the caller's. Raises WeightSyncError until they are here."""
        if self.received(version) is None:
            raise WeightSyncError(f"weight version {version} is still being received")
        weights, digests = self._weights, self._digests
        self.drop()
        return weights, digests

    def drop(self) -> None:
        """Forget what has been received. A thread that still receives ends by the publish's deadline or abandonment."""
        self._version, self._thread, self._weights, self._digests, self._error = None, None, [], (), None

    @torch.no_grad()
    def _receive(self, receiver: Receiver, version: int) -> None:
        try:
            # memory of their own, aligned as an engine's, so that kernels compute the same bits whichever way a version came
            weights = [(name, tensor.clone()) for name, tensor in receiver.receive(version)]
        except Exception as error:  # for whoever asks
            if self._version == version:
                self._error = error
            return
        if self._version == version:
            self._weights, self._digests = weights, receiver.digests
