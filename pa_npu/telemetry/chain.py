"""The chain: RUN/chain.jsonl, one line an iteration that says by digests what was computed.

    {"iteration": 7, "before": <digest of iteration 6's line>, ..., "digest": <of all that stands
    before it in this line>}

A line has digests of the configuration and of where the data stood, the software's versions,
digests of the groups that were trained, the gradient norms' bits, and digests of the weights before
and after. Two runs that did the same have equal values in all of these; the digests of the
iteration's records and checkpoints tell whether the run's other files are those that it wrote. No
line has a secret, a prompt or a response: `responses` holds a few numbers of each response, which
tell where two runs part.

Digests are BLAKE2b of 16 bytes. Whoever can write the directory can make a whole chain anew: it
shows accidents and changes of single files. To show more, keep the newest line's digest elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.errors import DataError
from pa_npu.telemetry.records import RecordFile, drop_records

CHAIN = "chain.jsonl"
_FILES_OF_A_RUN = ("config.yaml", "metrics.jsonl", "logs")

NUMBERS = {
    "tokens": "<u4",
    "logprobs": "<u4",
    "length": "<u4",
    "logprob_sum": "<f4",
    "reward": "<f4",
    "advantage": "<f4",
}
"""The numbers of a response, each of 4 bytes: CRC-32 of its trained tokens (int32) and of the
engine's log-probs of them (float32), how many there are, the log-probs' sum, its reward and
advantage."""
_ROWS = {name: row for row, name in enumerate(NUMBERS)}
_LONGEST_LINE_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class GroupDigest:
    """One group as trainers get it.

    index: its dispatch index. places: (replica, slot, first response, number behind the last one)
    of each replica that trains some of it. context: of all its tokens, which of them are trained,
    the versions that wrote them, and declared columns. tokens, logprobs: of trained tokens.
    responses: the bits of their NUMBERS, uint32 [numbers, responses].
    """

    index: int
    prompt: int
    places: tuple[tuple[int, int, int, int], ...]
    context: bytes
    tokens: bytes
    logprobs: bytes
    responses: np.ndarray


@dataclass(frozen=True)
class ChainLink:
    """One line.

    configuration: of the keys that make a run another run. arrangement: keys that may change bits
    and nothing else, by name. software: versions, and devices, by name. model: fingerprint of
    model.path. data: of the position in the data before the iteration. prompts, context, tokens,
    logprobs, rewards, advantages: of all groups by dispatch index; places: of their replicas and
    slots. responses: numbers of each response, see `table`. gradient_norms: float.hex of each
    update's.
    weights_before, weights_after: of all ranks' shares, hence comparable between equal layouts of
    trainers; empty where no trainer said it. record, samples: of the iteration's lines in
    metrics.jsonl and samples.jsonl. checkpoints: by version, the digest in pa_npu.json of those
    completed during the iteration, and of the one that a run went on from with it. digest: as the
    line has it; actual: that of the line's other values, which a reader computes.
    """

    iteration: int
    before: str
    configuration: str
    arrangement: dict[str, Any]
    software: dict[str, str]
    model: str
    data: str
    groups: int
    prompts: str
    context: str
    tokens: str
    logprobs: str
    rewards: str
    advantages: str
    places: str
    responses: str
    gradient_norms: tuple[str, ...]
    weights_before: str
    weights_after: str
    record: str
    samples: str
    checkpoints: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    actual: str = ""

    def table(self) -> Responses:
        """Raises DataError where `responses` is damaged."""
        return unpack(self.responses, self.groups, f"iteration {self.iteration}")


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses of an iteration. indices, prompts: of groups, by dispatch index; starts: the
    row
    of each group's first response; all int64 [groups]. rows: NUMBERS, each [responses]."""

    indices: np.ndarray
    prompts: np.ndarray
    starts: np.ndarray
    rows: Mapping[str, np.ndarray]

    @property
    def size(self) -> int:
        return len(self.rows["length"])

    def where(self, row: int) -> tuple[int, int]:
        """Returns the dispatch index of a row's group, and the response's number in it."""
        place = int(np.searchsorted(self.starts, row, side="right")) - 1
        return int(self.indices[place]), row - int(self.starts[place])


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_values(values: Any) -> str:
    """Returns the digest of plain JSON values, whatever the order of their keys."""
    return digest_of(json.dumps(values, sort_keys=True).encode())


def lines_digest(lines: Sequence[str]) -> str:
    """Returns the digest of an iteration's lines in a file of records; empty where it has none
    there.
    """
    return digest_of("\n".join(lines).encode("utf-8", "backslashreplace")) if lines else ""


def group_fields(groups: Sequence[GroupDigest]) -> dict[str, Any]:
    """Returns the fields of a ChainLink that follow from its groups."""
    ordered = sorted(groups, key=lambda group: group.index)
    heads = np.array(
        [(group.index, group.prompt, group.responses.shape[1]) for group in ordered], "<i8"
    )
    heads = heads.reshape(-1, 3).T
    none = np.empty((len(NUMBERS), 0), "<u4")
    numbers = np.concatenate([none, *(group.responses for group in ordered)], axis=1)
    places = sorted([(*place, group.index) for group in ordered for place in group.places])
    return {
        "groups": len(ordered),
        "prompts": digest_of(heads.tobytes()),
        "context": digest_of(b"".join([group.context for group in ordered])),
        "tokens": digest_of(b"".join([group.tokens for group in ordered])),
        "logprobs": digest_of(b"".join([group.logprobs for group in ordered])),
        "rewards": digest_of(numbers[_ROWS["reward"]].tobytes()),
        "advantages": digest_of(numbers[_ROWS["advantage"]].tobytes()),
        "places": digest_of(np.array(places, "<i8").tobytes()),
        "responses": base64.b64encode(heads.tobytes() + numbers.tobytes()).decode(),
    }


def unpack(text: str, groups: int, link: str) -> Responses:
    """Returns the responses in a ChainLink's field. Raises DataError."""
    try:
        data = base64.b64decode(text, validate=True)
        end = 3 * groups * np.dtype("<i8").itemsize
        indices, prompts, sizes = np.frombuffer(data[:end], "<i8", 3 * groups).reshape(3, groups)
        numbers = np.frombuffer(data[end:], "<u4").reshape(len(NUMBERS), -1)
    except ValueError as error:
        raise DataError(
            f"{CHAIN}: {link}: its responses cannot be read ({error}); the line is damaged"
        ) from None
    if (sizes < 1).any() or int(sizes.sum()) != numbers.shape[1]:
        raise DataError(
            f"{CHAIN}: {link}: {numbers.shape[1]} responses are not those of {groups} groups; the "
            "line is damaged"
        )
    rows = {name: numbers[row].view(NUMBERS[name]) for name, row in _ROWS.items()}
    return Responses(indices, prompts, np.cumsum(sizes) - sizes, rows)


class ChainWriter:
    """Appends lines; owner closes it.

    first_iteration: lines of it and later ones, which an earlier attempt wrote after the checkpoint
    that the run goes on from, are removed, so that the chain reads like that of a run that was
    never interrupted (I6); so is half a line at the end.
    """

    def __init__(self, run_dir: Path | str, first_iteration: int) -> None:
        path = Path(run_dir) / CHAIN
        drop_records(path, "iteration", first_iteration)
        self._before = ""
        if path.is_file():
            for link in read_chain(run_dir):
                self._before = link.digest
        self._file = RecordFile(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes the line of these values: all of ChainLink's but before, digest and actual."""
        line = asdict(ChainLink(**values, before=self._before))
        del line["digest"], line["actual"]
        text = json.dumps(line)
        self._before = digest_of(text.encode())
        self._file.write(f'{text[:-1]}, "digest": "{self._before}"}}')

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ChainWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_chain(run_dir: Path | str) -> Iterator[ChainLink]:
    """Yields the lines in their order, one at a time. Half a line at the end, which a killed run
    leaves, is left out.

    Raises DataError with file:line where there is no chain, or a line that is none.
    """
    path = Path(run_dir) / CHAIN
    try:
        with open_plain(path) as file:
            number = 0
            while line := file.readline(_LONGEST_LINE_BYTES):
                number += 1
                if line.endswith(b"\n"):
                    yield _link(line, f"{path}:{number}")
                elif len(line) == _LONGEST_LINE_BYTES:
                    raise DataError(
                        f"{path}:{number}: is longer than {_LONGEST_LINE_BYTES} bytes, so it is no "
                        "line of a chain"
                    )
    except OSError as error:
        raise DataError(_no_chain(Path(run_dir), error)) from None


def _no_chain(run_dir: Path, error: OSError) -> str:
    """Says why the chain of a run cannot be read: mostly because the directory is none of a run."""
    remedy = "give the directory of a run, as in runs/grpo_tiny"
    if not run_dir.exists():
        return f"{run_dir}: does not exist; {remedy}"
    if not run_dir.is_dir():
        return f"{run_dir}: is not a directory; {remedy}"
    if (run_dir / CHAIN).exists():
        return f"{run_dir / CHAIN}: cannot be read ({reason(error)}); make it a readable file"
    if any((run_dir / name).exists() for name in _FILES_OF_A_RUN):
        return (
            f"{run_dir}: this run has no {CHAIN} yet, which is written with the first iteration; "
            "wait for it, or give another run"
        )
    runs = sorted(file.parent.name for file in run_dir.glob(f"*/{CHAIN}"))
    if runs:
        return f"{run_dir}: is a folder of runs, not a run; give one of them, as in {run_dir / runs[-1]}"
    return f"{run_dir}: is no run directory, since it holds none of {', '.join(_FILES_OF_A_RUN)}; {remedy}"


def fault(before: ChainLink | None, link: ChainLink) -> str:
    """Why a line cannot stand where it does, in words; empty if it can.

    before: the line before it, None at the beginning of the chain.
    """
    if link.digest != link.actual:
        return f"the line of iteration {link.iteration} is not the one that was written"
    if before is None:
        return f"lines before iteration {link.iteration} are missing" if link.before else ""
    if link.iteration != before.iteration + 1:
        return f"iteration {link.iteration} stands behind iteration {before.iteration}"
    if link.before != before.digest:
        return f"the line of iteration {link.iteration} names another line before it"
    if link.configuration != before.configuration or link.model != before.model:
        return f"from iteration {link.iteration} on it is of another configuration or model"
    same_layout = link.arrangement == before.arrangement
    if same_layout and link.weights_before != before.weights_after:
        return (
            f"iteration {link.iteration} begins with other weights than iteration "
            f"{before.iteration} ended with"
        )
    return ""


def _link(line: bytes, where: str) -> ChainLink:
    try:
        values = json.loads(line)
        digest = values.pop("digest")
        return msgspec.convert(
            {**values, "digest": digest, "actual": digest_of(json.dumps(values).encode())},
            ChainLink,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{where}: is no line of a chain ({error}); it was changed, or is of another release"
        ) from None
