"""How often something may be started again: so many times within a window of time, however long the run is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class RestartBudget:
    """`limit` restarts within `window_s`. A restart that led nowhere counts for longer: until there is progress.

    progress: something that changes when the run gets on, the newest checkpoint for example; None where time alone counts.
    """

    limit: int
    window_s: float
    progress: Callable[[], object] | None = None
    clock: Callable[[], float] = time.monotonic
    _spent: list[tuple[float, object]] = field(default_factory=list)

    def spent(self) -> int:
        """Restarts that count now."""
        now, mark = self.clock(), self.progress() if self.progress else None
        self._spent = [
            (when, then)
            for when, then in self._spent
            if now - when < self.window_s or (self.progress is not None and then == mark)
        ]
        return len(self._spent)

    def allows(self) -> bool:
        return self.spent() < self.limit

    def spend(self) -> int:
        """One more restart; returns how many count now."""
        self._spent.append((self.clock(), self.progress() if self.progress else None))
        return self.spent()
