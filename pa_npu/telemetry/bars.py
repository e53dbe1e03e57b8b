"""Progress bars below the lines of a command, on a terminal; nothing at all where the output is piped or the terminal is dumb.

Lines are printed above the bars. Bars fit from 80 columns on: text beyond the width is cut, lines are not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LABEL_COLUMNS = 18
_BAR_COLUMNS = 20


@dataclass(frozen=True)
class Bar:
    """One thing that is waited for. done of total; total None: how long it takes is unknown. text: what it does."""

    label: str
    done: float
    total: float | None
    text: str = ""


class Bars:
    """The bars of one command on one stream. Owns the lines that it draws: use `with`, or close()."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @property
    def are_shown(self) -> bool:
        """Whether anybody sees bars: asked for each time, because the stream may be exchanged."""
        return self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, bars: Sequence[Bar]) -> None:
        """Draw these, and no longer those of before."""
        if not self.are_shown:
            return
        progress = self._drawing()
        for label in self._tasks.keys() - {bar.label for bar in bars}:
            progress.remove_task(self._tasks.pop(label))
        for bar in bars:
            if bar.label not in self._tasks:
                self._tasks[bar.label] = progress.add_task(bar.label[:_LABEL_COLUMNS], total=bar.total, text="")
            room = max(progress.console.width - _LABEL_COLUMNS - _BAR_COLUMNS - 3, 0)
            progress.update(self._tasks[bar.label], completed=bar.done, total=bar.total, text=bar.text[:room])
        progress.refresh()

    def tracked(self, label: str, total: int) -> Iterator[int]:
        """1 to total, with a bar that follows; it ends with the loop, however that ends."""
        try:
            for step in range(1, total + 1):
                self.show([Bar(label, step - 1, total, f"step {step} of {total}")])
                yield step
        finally:
            self.close()

    def say(self, line: str) -> None:
        """A line of the command's own output, above the bars where there are any."""
        if not self.print(line):
            print(line, file=self._stream, flush=True)

    def print(self, line: str) -> bool:
        """Print a line above the bars; False where there are none, and the caller prints it itself."""
        if self._progress is None:
            return False
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return True

    def close(self) -> None:
        """Take the bars away. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._tasks = None, {}

    def _drawing(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description:<" + str(_LABEL_COLUMNS) + "}", markup=False),
                BarColumn(_BAR_COLUMNS),
                TextColumn("{task.fields[text]}", markup=False),
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
        return self._progress

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
