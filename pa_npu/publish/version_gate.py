"""When a rank's weights may be sent to a late engine: as long as they are one version's, and at which point of training.

The training thread says where it is; a thread that sends late asks. Two things are kept apart:

    held      the weights stay as they are: `close`, which comes before they change, waits for `release`
    stopped   training stands still at a microbatch border, with nothing of it left on the device after a synchronize

Backends of collectives that run the groups of two threads side by side (gloo) need only the first. For the others, all
tensor-parallel ranks of a stage must stop at the same border, or one waits in a collective of training for another that has
stopped. They count borders alike, because they take the same microbatches:

    freeze()      from here on this rank passes no further border; returns the next one, which it is at or comes to
    stop_at(b)    b is the last of those that the ranks named: whoever is behind goes on until b
    wait_stopped  until this rank is at b

A rank that waits for rollouts is at a border, so a delivery goes on while there is nothing to train, above all where the engine
that is to be delivered to is the one that would produce it. `close` is a border as well: the last of its version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pa_npu.errors import DeadlineExceeded

_CHECK_EVERY_S = 0.1


class VersionGate:
    """One rank's. timeout_s: the longest that training waits for a sender."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version: int | None = None
        self._offered: tuple[int, Callable[[], None]] | None = None
        self._held = False
        self._border = 0  # the one training is at, or comes to next
        self._at_border = False
        self._last: int | None = None  # training may not pass this border
        self._changed = threading.Condition()

    # training

    def open(self, version: int) -> None:
        """The weights are those of `version`, until `close`."""
        with self._changed:
            self._version, self._offered = version, None

    @contextmanager
    def border(self) -> Iterator[None]:
        """Between two microbatches: inside, training waits for the next one and uses no device; leaving may take a delivery's time.

        Raises DeadlineExceeded where a sender does not let go.
        """
        with self._changed:
            self._at_border = True
            self._changed.notify_all()
        try:
            yield
        except BaseException:
            with self._changed:
                self._at_border = False
            raise
        with self._changed:
            passes = self._changed.wait_for(lambda: self._last is None or self._border < self._last, self._timeout_s)
            self._at_border = False
            self._border += 1
        if not passes:
            raise self._too_long()

    def close(self) -> None:
        """The weights are about to change: waits for a sender to let go, after which nobody can hold them."""
        with self.border(), self._changed:
            if not self._changed.wait_for(lambda: not self._held, self._timeout_s):
                raise self._too_long()
            self._version = None

    def offer(self, version: int, take: Callable[[], None]) -> None:
        """Engines receive `version` and will swap to it; what is held is the version before. take: makes it what is held."""
        with self._changed:
            self._offered = (version, take)

    def take_offer(self) -> None:
        """Engines have swapped: what was offered is held from now on, if that has not come about by itself."""
        with self.border(), self._changed:
            if not self._changed.wait_for(lambda: not self._held, self._timeout_s):
                raise self._too_long()
            self._take()

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
        """Let the weights change, and training go on."""
        with self._changed:
            self._held = False
            self._last = None
            self._changed.notify_all()

    def freeze(self) -> int:
        """Training passes no further border until `stop_at` or `go_on`; returns the one that it is at, or comes to next."""
        with self._changed:
            self._last = self._border
            return self._border

    def stop_at(self, border: int) -> None:
        """Training stops at this border, which is not behind the one that `freeze` returned."""
        with self._changed:
            self._last = border
            self._changed.notify_all()

    def wait_stopped(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Raises DeadlineExceeded where training does not come to the border of `stop_at` in time, and what `check` raises.

        check: asked now and then, whether the wait is still of use.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(lambda: self._at_border and self._border == self._last, _CHECK_EVERY_S):
                check()
                if time.monotonic() < end_s:
                    continue
                raise DeadlineExceeded(
                    f"training did not come to microbatch border {self._last} within {timeout_s:g} s (it is before border "
                    f"{self._border}); a pipeline stage that waits for another one cannot stop"
                )

    def go_on(self) -> None:
        """Training passes borders again; the weights stay held."""
        with self._changed:
            self._last = None
            self._changed.notify_all()

    def _too_long(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"weight version {self._version} is still being sent to a late engine after {self._timeout_s:g} s; look at "
            f"that engine's log, or raise publish.timeout_s"
        )
