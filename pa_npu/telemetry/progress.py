"""The progress line: one aligned line per iteration, and the estimate of the time that is left."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# The launcher relays the coordinator's lines that start with this to the console.
PREFIX = "| "
# The median of a few iterations follows growing response lengths and ignores a checkpoint or
# evaluation in between.
_RECENT_ITERATIONS = 8


def progress_line(record: Mapping[str, Any], total_iterations: int, eta_s: float | None) -> str:
    """Returns one line for an iteration's record. Every field keeps its width, and shows `-` where
    the run does not have it.

    The iteration has the number that it has in files and in the viewer, from 0. The brackets hold
    how many are done.

    | iteration  2 ( 3/20) | reward  0.512 acc 0.481 | loss  0.0123 KL  0.00012 entropy  1.234 grad   0.451 | ...

    Where samples are rows of data, the line has the epoch and no rewards.
    """
    width = len(str(total_iterations))

    def show(key: str, layout: str, scale: float = 1.0) -> str:
        value = record.get(key)
        if value is None:
            return "-".rjust(int(layout.partition(".")[0]))
        return f"{value * scale:{layout}}"

    number = (
        f"iteration {record['iteration']:{width}d} "
        f"({record['iteration'] + 1:{width}d}/{total_iterations})"
    )
    if "rows" in record:
        fields = [
            number,
            f"epoch {show('epoch', '6.2f')} rows {show('rows', '5.0f')}",
            f"loss {show('loss', '8.4f')} entropy {show('entropy', '6.3f')} grad "
            f"{show('grad_norm', '7.3f')} rate {show('learning_rate', '9.2e')}",
            *_preferences(record),
            f"tokens/s {show('tokens_per_s', '8.0f')}",
            f"idle trainer {show('trainer_idle', '3.0f', 100)}%",
            f"ETA {format_duration(eta_s):>7}",
        ]
        return PREFIX + " | ".join(fields)
    if "device_idle" in record:
        idle = f"idle device {show('device_idle', '3.0f', 100)}%"
    else:
        idle = (
            f"idle trainer {show('trainer_idle', '3.0f', 100)}% "
            f"engine {show('engine_idle', '3.0f', 100)}%"
        )
    fields = [
        number,
        f"reward {show('reward_mean', '6.3f')} acc {show('accuracy', '5.3f')}",
        f"loss {show('loss', '8.4f')} KL {show('kl', '8.5f')} entropy {show('entropy', '6.3f')} "
        f"grad {show('grad_norm', '7.3f')}",
        f"length {show('response_length_mean', '6.1f')}",
        f"TPSPD {show('tpspd', '8.1f')}",
        idle,
        f"publish {show('publish_s', '6.2f')} s",
        f"ETA {format_duration(eta_s):>7}",
    ]
    return PREFIX + " | ".join(fields)


def _preferences(record: Mapping[str, Any]) -> list[str]:
    """Returns how well the policy tells the answers of pairs apart; nothing for other rows."""
    margin = record.get("preference_margin")
    accuracy = record.get("preference_accuracy")
    if margin is None or accuracy is None:
        return []
    return [f"margin {margin:8.4f} acc {accuracy:5.3f}"]


# Fields of the line, by their first word, in the order in which a narrow terminal can do without
# them.
_LEAVE_OUT = ("publish", "loss", "length", "TPSPD", "idle", "reward", "epoch", "margin", "tokens/s")
_SEPARATOR = " | "


def fitted(line: str, columns: int) -> str:
    """Returns a progress line without the fields that do not fit into so many columns. Other lines
    are returned unchanged.
    """
    fields = line.split(_SEPARATOR)
    if not fields[0].startswith("iteration ") or len(fields) == 1:
        return line
    for name in _LEAVE_OUT:
        if len(_SEPARATOR.join(fields)) <= columns:
            break
        fields = [field for field in fields if not field.startswith(f"{name} ")]
    return _SEPARATOR.join(fields)


def remaining_s(iteration_seconds: Sequence[float], total_iterations: int) -> float | None:
    """Returns the seconds that are left, from those of the iterations done so far; None before the
    first.
    """
    if not iteration_seconds:
        return None
    recent = statistics.median(iteration_seconds[-_RECENT_ITERATIONS:])
    return recent * (total_iterations - len(iteration_seconds))


def format_duration(seconds: float | None) -> str:
    """Returns a duration as `42s`, `5m07s`, `3h05m` or `2d04h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    minutes = whole // 60
    hours = whole // 3600
    days = whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    if minutes:
        return f"{minutes}m{whole % 60:02d}s"
    return f"{whole}s"
