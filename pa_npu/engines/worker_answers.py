"""Reads the answers of an engine's workers, and the weight version in its server's headers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.http_server import NO_VERSION, VERSION_HEADER
from pa_npu.engines.live_weights import LiveReport
from pa_npu.engines.protocol import EngineError, LoadedWeights
from pa_npu.platform.memory_peaks import MemoryPeak


def loaded_weights(results: Sequence[Mapping[str, Any]], engine: str) -> LoadedWeights:
    """Returns what an engine's workers hold.

    Raises EngineError if an answer does not have the right form.

    Args:
        results: the workers' answers, in rank order.
        engine: its name, for messages.
    """
    versions = tuple(result.get("version") for result in results)
    if not all(version is None or type(version) is int for version in versions):
        raise EngineError(
            f"engine {engine}: its workers say that they hold weight versions "
            f"{list(versions)!r:.200}"
        )
    digests = tuple(tuple(map(str, result.get("digests") or ())) for result in results)
    return LoadedWeights(
        versions=versions,
        digests=digests if any(digests) else (),
        memory=memory_peak(results),
        live=_live_reports(results, engine),
    )


def _live_reports(results: Sequence[Mapping[str, Any]], engine: str) -> tuple[LiveReport, ...]:
    """Returns the workers' reports of what they hold; empty unless all workers report."""
    answers = [result.get("live") for result in results]
    if None in answers:
        return ()
    try:
        return tuple(msgspec.convert(answer, LiveReport, strict=False) for answer in answers)
    except msgspec.ValidationError as error:
        raise EngineError(
            f"engine {engine}: its workers' report of what they hold cannot be read: {error}"
        ) from None


def memory_peak(results: Sequence[Mapping[str, Any]]) -> MemoryPeak | None:
    """Returns the engine's memory peak; None if the workers do not report it.

    The first worker reports for the host, each worker for its own device.
    """
    host: list[int] = []
    device: list[int] = []
    for result in results:
        memory = result.get("memory")
        if not isinstance(memory, dict):
            continue
        for peaks, key in ((host, "host"), (device, "device")):
            if type(memory.get(key)) is int:
                peaks.append(memory[key])
    if not host:
        return None
    return MemoryPeak(sum(host), max(device, default=None))


def recorded_by_workers(result: Mapping[str, Any]) -> list[npt.NDArray[np.uint16]]:
    """Returns the expert choices of each response from the first worker's answer to
    pa_expert_choices, flat.
    """
    of_given_tokens = base64.b64decode(result["given"], validate=True)
    of_responses = [base64.b64decode(text, validate=True) for text in result["own"]]
    return [
        np.frombuffer(of_given_tokens + expert_choices, "<u2") for expert_choices in of_responses
    ]


def stated_version(headers: Mapping[str, str]) -> int | None:
    """Returns the weight version that an answer's headers state.

    Returns None for no version, for one that changed while the answer was made, and for anything
    that is no version.
    """
    text = headers.get(VERSION_HEADER, NO_VERSION)
    is_version = text.isascii() and text.isdecimal() and len(text) < 19
    return int(text) if is_version else None
