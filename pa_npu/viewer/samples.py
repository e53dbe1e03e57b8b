"""Kept samples for the page: an iteration in short, a group whole, peers' answers to a prompt.

An iteration may hold thousands of responses. So the list cuts their texts, tokens are read only for
the group that is opened, and the search for a prompt in another run ends after a while.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError
from pa_npu.telemetry.sample_store import read_prompts, read_samples, sample_iterations
from pa_npu.viewer.values import entries, index, mapping, number, text

MAX_RESPONSES = 20_000
MAX_TEXT = 8 << 20
"""Characters of an iteration's list, prompts and responses together."""
SEARCH_S = 3.0
MAX_IMAGES = 64
"""Images of a group that are shown."""
_SHARED = ("index", "prompt_id", "prompt", "prompt_tokens", "answer", "errors")
_IN_SHORT = (
    *_SHARED,
    "response",
    "text",
    "finish_reason",
    "version",
    "reward",
    "rewards",
    "advantage",
    "correct",
    "length",
)


def samples_in_short(run_dir: Path, iteration: int) -> dict[str, Any]:
    """Returns the kept groups of an iteration.

    cut: characters to which texts were cut; None where they are whole.
    left_out: number of responses beyond MAX_RESPONSES.
    error: why the samples cannot be read; None where they can.
    """
    samples: dict[str, Any] = {
        "iteration": iteration,
        "groups": [],
        "error": None,
        "cut": None,
        "left_out": 0,
    }
    if iteration not in sample_iterations(run_dir):
        return samples
    try:
        rows = read_samples(run_dir, iteration, columns=_IN_SHORT)
    except DataError as error:
        samples["error"] = str(error)
        return samples
    samples["left_out"] = max(0, len(rows) - MAX_RESPONSES)
    rows = rows[:MAX_RESPONSES]
    samples["groups"] = _groups(rows)
    if sum(len(text(row, "text")) + len(text(row, "prompt")) for row in rows) > MAX_TEXT:
        cut = max(100, MAX_TEXT // (2 * len(rows)))
        samples["cut"] = cut
        for group in samples["groups"]:
            group["prompt"] = group["prompt"][-cut:]
            for response in group["responses"]:
                response["text"] = response["text"][:cut]
    return samples


def whole_group(run_dir: Path, iteration: int, number_of_group: int) -> dict[str, Any] | None:
    """Returns a group with its tokens, their log-probs and its sessions; None where there is none."""
    if iteration not in sample_iterations(run_dir):
        return None
    try:
        groups = _groups(read_samples(run_dir, iteration, group=number_of_group))
    except DataError:
        return None
    return groups[0] if groups else None


def same_prompt(run_dir: Path, iteration: int, prompt: str) -> dict[str, Any] | None:
    """Returns {iteration, group} with a run's answers to a prompt; None where none were found.

    The iterations nearest to `iteration` are searched first.
    """
    deadline_s = time.monotonic() + SEARCH_S
    for candidate in sorted(sample_iterations(run_dir), key=lambda kept: abs(kept - iteration)):
        if time.monotonic() > deadline_s:
            break
        try:
            prompts = read_prompts(run_dir, candidate)
        except DataError:
            continue
        if prompt in prompts:
            group = whole_group(run_dir, candidate, prompts[prompt])
            return {"iteration": candidate, "group": group}
    return None


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups of rows, which are in the order of groups and responses."""
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        place = index(row, "index")
        if place is None:
            continue
        group = groups.setdefault(place, _empty_group(place, row))
        shown = [digest for digest in _images(row) if digest not in group["images"]]
        group["images"] = [*group["images"], *shown][:MAX_IMAGES]
        _add_branch(group["sessions"], entries(row, "turns"), len(group["responses"]))
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
        "images": [],
        "responses": [],
        "sessions": [],
    }


def _images(row: Mapping[str, Any]) -> list[str]:
    """Returns the digests of the images that a sample shows, as far as a list has them."""
    attachments = [entry for entry in entries(row, "attachments") if isinstance(entry, Mapping)]
    shown = [text(entry, "digest") for entry in attachments if text(entry, "name") == "pixels"]
    return list(dict.fromkeys(shown))[:MAX_IMAGES]


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    tokens = entries(row, "tokens") or entries(row, "logprobs")
    rewards = mapping(row, "rewards")
    response: dict[str, Any] = {
        "response": index(row, "response"),
        "text": text(row, "text"),
        "finish_reason": text(row, "finish_reason"),
        "version": index(row, "version"),
        "reward": number(row, "reward"),
        "rewards": {str(name): number(rewards, name) for name in rewards},
        # rows of data, and what a teacher alone judges, have a reward of 0 that nobody gave
        "rewarded": bool(rewards) or bool(number(row, "reward")),
        "advantage": number(row, "advantage"),
        "correct": row.get("correct") is True,
        "length": index(row, "length") if "length" in row else len(tokens),
    }
    pieces = entries(row, "pieces")
    logprobs = entries(row, "logprobs")
    if pieces and len(pieces) == len(logprobs):
        response["pieces"] = [piece if isinstance(piece, str) else "" for piece in pieces]
        response["logprobs"] = _rounded(logprobs)
        trained = entries(row, "trainer_logprobs")
        response["trainer_logprobs"] = _rounded(trained) if len(trained) == len(pieces) else None
    response["stretches"] = [
        {"text": text(stretch, "text"), "weight": number(stretch, "weight") or 0.0}
        for stretch in entries(row, "stretches")
        if isinstance(stretch, Mapping)
    ]
    return response


def _rounded(values: Sequence[Any]) -> list[float]:
    return [round(number({"value": value}, "value") or 0.0, 7) for value in values]


def _add_branch(sessions: list[dict[str, Any]], turns: Sequence[Any], response: int) -> None:
    """Adds the turns of a response, a branch, to the trees of a group's sessions.

    The turns of a tree are in the order in which they are drawn. `responses` of a turn are the
    branches that hold it. The turn's tokens are those from `start` to `end` of the response that
    trains it.
    """
    parent: int | None = None
    start = 0
    for turn in turns:
        if not isinstance(turn, Mapping):  # this program has not written the record
            continue
        place = index(turn, "number")
        written = index(turn, "written")
        if place is None or written is None:
            continue
        session = index(turn, "session")
        if not sessions or sessions[-1]["session"] != session:
            sessions.append({"session": session, "turns": []})
        tree = sessions[-1]["turns"]
        node = next((node for node in tree if node["number"] == place), None)
        if node is None:
            node = {
                "number": place,
                "parent": parent,
                "shown": text(turn, "shown"),
                "reward": number(turn, "reward"),
                "responses": [],
            }
            tree.append(node)
        if turn.get("trained") is True:
            node |= {"response": response, "start": start, "end": start + written}
            start += written
        node["responses"].append(response)
        parent = place
