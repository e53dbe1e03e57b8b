"""The exceptions that end a run with one clear line; everything a user can cause derives from `UserError`."""

from __future__ import annotations


class PaNpuError(Exception):
    """Base of every error this package raises on purpose. Its message is one printable line, whatever is quoted in it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message if message.isprintable() else "".join(map(_printable, message)))


class UserError(PaNpuError):
    """Bad input: the message says what, where, which rule and the remedy, in one line. Programs exit with code 2."""


class ConfigError(UserError):
    """A configuration key is unknown, malformed, out of range or in conflict with another key."""


class DataError(UserError):
    """A dataset, model directory or reward function cannot be used."""


class DeadlineExceeded(PaNpuError):
    """A wait reached its deadline; the message names what was awaited, from whom, and for how long."""


class CheckpointError(PaNpuError):
    """The run's last checkpoint could not be written; what it trained since the one before is lost."""


class InvariantViolation(PaNpuError):
    """One of the invariants I1 to I6 of the architecture does not hold; the run must not continue."""


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
