"""Kept samples for the page: an iteration in short, one group whole, and other runs' answers to the same prompt.

An iteration may hold thousands of responses. So texts are cut in the list, tokens are read of the
group alone that is opened, and the search for a prompt in another run ends after a while.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError
from pa_npu.telemetry.sample_store import read_prompts, read_samples, sample_iterations
from pa_npu.viewer.values import entries, index, number, text

MAX_RESPONSES = 20_000
MAX_TEXT = 8 << 20
"""Characters of an iteration's list, prompts and responses together."""
SEARCH_S = 3.0
_SHARED = ("index", "prompt_id", "prompt", "prompt_tokens", "answer", "errors")
_IN_SHORT = (
    *(*_SHARED, "response", "text", "finish_reason", "version"),
    *("reward", "rewards", "advantage", "correct", "length"),
)


def samples_in_short(run_dir: Path, iteration: int) -> dict[str, Any]:
    """The kept groups of an iteration, their texts cut where they are many; `error`: why they
    cannot be read.
    """
    if iteration not in sample_iterations(run_dir):
        return {"iteration": iteration, "groups": [], "error": None, "cut": None, "left_out": 0}
    try:
        rows = read_samples(run_dir, iteration, columns=_IN_SHORT)
    except DataError as error:
        return {
            "iteration": iteration,
            "groups": [],
            "error": str(error),
            "cut": None,
            "left_out": 0,
        }
    left_out = max(0, len(rows) - MAX_RESPONSES)
    rows = rows[:MAX_RESPONSES]
    whole = sum(len(text(row, "text")) for row in rows) + sum(
        len(text(row, "prompt")) for row in rows
    )
    cut = None if whole <= MAX_TEXT else max(100, MAX_TEXT // (2 * len(rows)))
    groups = _groups(rows)
    for group in groups:
        group["prompt"] = group["prompt"][-cut:] if cut else group["prompt"]
        for response in group["responses"]:
            response["text"] = response["text"][:cut]
    return {
        "iteration": iteration,
        "groups": groups,
        "error": None,
        "cut": cut,
        "left_out": left_out,
    }


def whole_group(run_dir: Path, iteration: int, number_of_group: int) -> dict[str, Any] | None:
    """A group with its tokens, their log-probs and its sessions; None where there is none."""
    if iteration not in sample_iterations(run_dir):
        return None
    try:
        groups = _groups(read_samples(run_dir, iteration, group=number_of_group))
    except DataError:
        return None
    return groups[0] if groups else None


def same_prompt(run_dir: Path, iteration: int, prompt: str) -> dict[str, Any] | None:
    """The newest answers of a run to a prompt: {iteration, group}.

    The iterations next to `iteration` are looked at first.
    """
    deadline_s = time.monotonic() + SEARCH_S
    for candidate in sorted(sample_iterations(run_dir), key=lambda known: abs(known - iteration)):
        if time.monotonic() > deadline_s:
            break
        try:
            prompts = read_prompts(run_dir, candidate)
        except DataError:
            continue
        if prompt in prompts:
            return {
                "iteration": candidate,
                "group": whole_group(run_dir, candidate, prompts[prompt]),
            }
    return None


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """rows: in the order of groups and responses, as anybody may have written them."""
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        place = index(row, "index")
        if place is None:
            continue
        group = groups.setdefault(place, _empty_group(place, row))
        _grow(group["sessions"], entries(row, "turns"), len(group["responses"]))
        group["responses"].append(_response(row))
    return list(groups.values())


def _empty_group(place: int, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": place,
        "prompt_id": index(row, "prompt_id"),
        "prompt": text(row, "prompt"),
        "prompt_tokens": index(row, "prompt_tokens"),
        "answer": text(row, "answer"),
        "errors": [error for error in entries(row, "errors") if isinstance(error, str)],
        "responses": [],
        "sessions": [],
    }


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    tokens = entries(row, "tokens") or entries(row, "logprobs")
    rewards = row.get("rewards")
    names = rewards if isinstance(rewards, dict) else {}
    response: dict[str, Any] = {
        "response": index(row, "response"),
        "text": text(row, "text"),
        "finish_reason": text(row, "finish_reason"),
        "version": index(row, "version"),
        "reward": number(row, "reward"),
        "rewards": {str(name): number(names, name) for name in names},
        "advantage": number(row, "advantage"),
        "correct": row.get("correct") is True,
        "length": index(row, "length") if "length" in row else len(tokens),
    }
    pieces, logprobs = entries(row, "pieces"), entries(row, "logprobs")
    if pieces and len(pieces) == len(logprobs):
        response["pieces"] = [piece if isinstance(piece, str) else "" for piece in pieces]
        response["logprobs"] = _rounded(logprobs)
        trained = entries(row, "trainer_logprobs")
        response["trainer_logprobs"] = _rounded(trained) if len(trained) == len(pieces) else None
    return response


def _rounded(values: Sequence[Any]) -> list[float]:
    return [round(number({"value": value}, "value") or 0.0, 7) for value in values]


def _grow(
    sessions: list[dict[str, Any]], turns: Sequence[Mapping[str, Any]], response: int
) -> None:
    """Adds a branch to the trees of a group's sessions, whose turns are in the order in which they
    are drawn.

    A turn's tokens are those of the response that trains it, from `start` to `end`; responses: the
    branches that hold it.
    """
    parent: int | None = None
    start = 0
    for turn in turns:
        if not isinstance(turn, Mapping):  # a record that this program has not written
            continue
        place, written, session = (
            index(turn, "number"),
            index(turn, "written"),
            index(turn, "session"),
        )
        if place is None or written is None:
            continue
        if not sessions or sessions[-1]["session"] != session:
            sessions.append({"session": session, "turns": []})
        known = next((other for other in sessions[-1]["turns"] if other["number"] == place), None)
        if known is None:
            known = {
                "number": place,
                "parent": parent,
                "shown": text(turn, "shown"),
                "reward": number(turn, "reward"),
                "responses": [],
            }
            sessions[-1]["turns"].append(known)
        if turn.get("trained") is True:
            known |= {"response": response, "start": start, "end": start + written}
            start += written
        known["responses"].append(response)
        parent = place
