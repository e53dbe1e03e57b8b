"""The exceptions that end a run with one clear line; everything a user can cause derives from `UserError`."""

from __future__ import annotations

import logging
import re

# What stands between a user and the machine in a URL; a port with a path behind it is none.
_URL_PASSWORD = re.compile(r"(://[^\s/@:\"']*:)(?!\d{1,5}[/,])[^\s\"'<>]*(?=@)")


class PaNpuError(Exception):
    """Base of every error this package raises on purpose. Its message is one printable line,
    whatever is quoted in it.

    A password in a URL is not part of it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_URL_PASSWORD.sub(r"\1(not shown)", printable(message)))


class UserError(PaNpuError):
    """Bad input: the message says what, where, which rule and the remedy, in one line.

    Programs exit with code 2.
    """


class ConfigError(UserError):
    """A configuration key is unknown, malformed, out of range or in conflict with another key."""


class DataError(UserError):
    """A dataset, model directory or reward function cannot be used."""


class DeadlineExceeded(PaNpuError):
    """A wait reached its deadline; the message names what was awaited, from whom, and for how long."""


class CheckpointError(PaNpuError):
    """The run's last checkpoint could not be written; what it trained since the one before is lost."""


class ExportError(PaNpuError):
    """The HF directory could not be written; nothing of it carries the final name."""


class InvariantViolation(PaNpuError):
    """One of the invariants I1 to I7 of the architecture does not hold; the run must not continue."""


def printable(text: str) -> str:
    """Returns the text with escapes for line ends, control characters and all else that a console
    or page would obey.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


HIGHLIGHT = ("\x1b[32m", "\x1b[0m")
"""What a terminal shows in green stands between these two; `plain` leaves them out."""


def plain(text: str) -> str:
    """Returns the text without HIGHLIGHT, for files and for what is no terminal."""
    begin, end = HIGHLIGHT
    return text.replace(begin, "").replace(end, "")


FAILED = 1
BAD_INPUT = 2
MUST_NOT_CONTINUE = 3


def exit_code(error: PaNpuError, logger: logging.Logger) -> int:
    """Logs the error in one line and returns the exit code of a process of a run that ends with it.

    1: another attempt may succeed. 2 (bad input) and 3 (an invariant is broken, the disk is full)
    end the run.
    """
    if isinstance(error, UserError):
        logger.error("%s", error)
        return BAD_INPUT
    logger.error("%s: %s", type(error).__name__, error)
    ends_the_run = isinstance(error, (InvariantViolation, CheckpointError, ExportError))
    return MUST_NOT_CONTINUE if ends_the_run else FAILED
