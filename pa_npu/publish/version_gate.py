"""When a rank's weights may be sent to a late engine: as long as they are one version's.

The training thread says which version they are; a thread that sends late holds them. `close`, which comes before they change, waits
for `release`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pa_npu.errors import DeadlineExceeded


class VersionGate:
    """One rank's. timeout_s: the longest that training waits for a sender."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version: int | None = None
        self._offered: tuple[int, Callable[[], None]] | None = None
        self._held = False
        self._changed = threading.Condition()

    # training

    def open(self, version: int) -> None:
        """The weights are those of `version`, until `close`."""
        with self._changed:
            self._version, self._offered = version, None

    def close(self) -> None:
        """The weights are about to change: waits for a sender to let go, after which nobody can hold them."""
        with self._changed:
            self._wait_released()
            self._version = None

    def offer(self, version: int, take: Callable[[], None]) -> None:
        """Engines receive `version` and will swap to it; what is held is the version before. take: makes it what is held."""
        with self._changed:
            self._offered = (version, take)

    def take_offer(self) -> None:
        """Engines have swapped: what was offered is held from now on, if that has not come about by itself."""
        with self._changed:
            self._wait_released()
            self._take()

    def _wait_released(self) -> None:
        if not self._changed.wait_for(lambda: not self._held, self._timeout_s):
            raise DeadlineExceeded(
                f"weight version {self._version} is still being sent to a late engine after {self._timeout_s:g} s; look at "
                f"that engine's log, or raise publish.timeout_s"
            )

    def _take(self) -> None:
        if self._offered is not None:
            (self._version, take), self._offered = self._offered, None
            take()

    # a thread that sends

    def hold(self, version: int) -> bool:
        """Keep the weights as they are until `release`, if they are those of `version`."""
        with self._changed:
            if self._offered is not None and self._offered[0] == version:
                self._take()  # who asks for it knows that engines have swapped
            self._held = self._version == version
            return self._held

    def release(self) -> None:
        """Let the weights change."""
        with self._changed:
            self._held = False
            self._changed.notify_all()
