"""Classes whose methods are tools, written as for TRL's environment_factory."""

# mypy: ignore-errors

from __future__ import annotations

import os
import time
from pathlib import Path


class Calculator:
    """Multiplies; the reward is half for a use of the tool, and half for the row's answer in it."""

    def __init__(self) -> None:
        self.result = None

    def reset(self, question: str, **row) -> str:
        self.result = None
        self._answer = row.get("answer")
        return f" (by {os.getpid() > 0})" if "by" in row else ""

    def calculator(self, x: str) -> int:
        """
        Multiplies two numbers.

        Args:
            x: the product, such as 6*7.
        """
        left, right = x.split("*")
        self.result = int(left) * int(right)
        return self.result

    async def wait(self, seconds: float) -> str:
        """
        Waits.

        Args:
            seconds: how long.
        """
        if seconds < 0:
            raise ValueError("no time machine")
        return f"waited {seconds}"

    def hang(self, mark: str) -> str:
        """
        Hangs, the first time.

        Args:
            mark: a file that says that it was called.
        """
        if not Path(mark).exists():
            Path(mark).touch()
            time.sleep(600)
        return "back"

    def leave(self, code: int) -> str:
        """
        Ends the process.

        Args:
            code: of the process.
        """
        os._exit(code)

    def get_reward(self) -> float:
        return 0.0 if self.result is None else 0.5 + 0.5 * (str(self.result) == self._answer)


class Silent(Calculator):
    """Gives no reward."""

    get_reward = None


class NoTools:
    def reset(self) -> None: ...


class NoReset:
    def act(self, x: int) -> int:
        """
        Acts.

        Args:
            x: what.
        """
        return x


class Undescribed:
    def reset(self) -> None: ...

    def act(self, x): ...


class Unmade:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Wrong(Calculator):
    def get_reward(self) -> str:
        return "good"


class Refuses(Calculator):
    def reset(self, **row) -> str:
        raise LookupError("no such level")
