"""Iterations that were produced ahead of training, as a checkpoint stores them.

With schedule.max_staleness = k a checkpoint of version v has iterations v to v + k - 1. The weights
that generated them are gone, so a resumed run trains these very groups. They are one safetensors
file: the wire format of every group as bytes under "iteration/number", with number = slot *
replicas + replica, and the coordinator's further values as JSON in its header. There is no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from pa_npu.errors import DataError

AHEAD_FILE = "ahead.safetensors"
_HEADER = "iterations"


@dataclass(frozen=True)
class AheadIteration:
    """One iteration.

    numbers, samples: of Produced.
    data: TrainingStream.state() after it.
    groups: wire format, by number.
    """

    iteration: int
    numbers: dict[str, Any]
    samples: list[dict[str, Any]]
    data: dict[str, Any]
    groups: Sequence[bytes]


def write_ahead(directory: Path, iterations: Sequence[AheadIteration]) -> list[str]:
    """Writes the file; returns its name in a list, or an empty list if there are no iterations.

    Raises OSError.
    """
    if not iterations:
        return []
    header = [
        {
            "iteration": ahead.iteration,
            "numbers": ahead.numbers,
            "samples": ahead.samples,
            "data": ahead.data,
        }
        for ahead in iterations
    ]
    tensors = {}
    for ahead in iterations:
        for number, group in enumerate(ahead.groups):
            tensors[f"{ahead.iteration}/{number}"] = np.frombuffer(group, np.uint8)
    save_file(tensors, directory / AHEAD_FILE, metadata={_HEADER: json.dumps(header)})
    return [AHEAD_FILE]


def read_ahead(directory: Path) -> list[AheadIteration]:
    """Returns the iterations in order; none if the checkpoint has no such file.

    Raises DataError if it is damaged.
    """
    file = directory / AHEAD_FILE
    if not file.exists():
        return []
    iterations = []
    try:
        with safetensors.safe_open(str(file), "numpy") as opened:
            names = set(opened.keys())
            for entry in json.loads(opened.metadata()[_HEADER]):
                count = sum(name.startswith(f"{entry['iteration']}/") for name in names)
                groups = [
                    opened.get_tensor(f"{entry['iteration']}/{number}").tobytes()
                    for number in range(count)
                ]
                iterations.append(AheadIteration(**entry, groups=groups))
    except (OSError, ValueError, LookupError, TypeError, safetensors.SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{file}: what was produced ahead of this checkpoint cannot be read ({reason}); take "
            "an earlier checkpoint"
        ) from error
    return sorted(iterations, key=lambda ahead: ahead.iteration)
