"""The chain: RUN/chain.jsonl, one line an iteration that says by digests what was computed.

    {"iteration": 7, "before": <digest of iteration 6's line>, ..., "digest": <of all that stands before it in this line>}

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
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.errors import DataError
from pa_npu.telemetry.records import RecordFile, drop_records, json_line

CHAIN = "chain.jsonl"

RESPONSE = np.dtype(
    [
        ("tokens", "<u4"),
        ("logprobs", "<u4"),
        ("length", "<u4"),
        ("logprob_sum", "<f4"),
        ("reward", "<f4"),
        ("advantage", "<f4"),
    ]
)
"""One response: CRC-32 of its trained tokens (int32) and of the engine's log-probs of them
(float32), their number, the log-probs' sum, and its reward and advantage as they are."""
_GROUP = np.dtype([("index", "<i4"), ("prompt", "<i8"), ("responses", "<u4")])
_LONGEST_LINE_BYTES = 64 << 20
_LARGEST_TABLE_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class GroupDigest:
    """One group as trainers get it.

    index: its dispatch index. places: (replica, slot, first response, number behind the last one)
    of each replica that trains some of it. context: of all its tokens, which of them are trained,
    the versions that wrote them, and declared columns. tokens, logprobs: of trained tokens.
    responses: RESPONSE [responses].
    """

    index: int
    prompt: int
    places: tuple[tuple[int, int, int, int], ...]
    context: bytes
    tokens: bytes
    logprobs: bytes
    responses: np.ndarray


@dataclass(frozen=True)
class Link:
    """One line.

    configuration: of the keys that make a run another run. arrangement: keys that may change bits
    and nothing else, by name. software: versions, and devices, by name. model: fingerprint of
    model.path. data: of the position in the data before the iteration. prompts, context, tokens,
    logprobs, rewards, advantages: of all groups by dispatch index; places: of their replicas and
    slots. responses: what `pack` makes of the groups. gradient_norms: float.hex of each update's.
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
    """The responses of an iteration, by dispatch index. rows: RESPONSE [all responses]; starts:
    int64 [groups], where each begins."""

    indices: np.ndarray
    prompts: np.ndarray
    starts: np.ndarray
    rows: np.ndarray

    def where(self, row: int) -> tuple[int, int]:
        """Returns the dispatch index of a row's group, and the response's number in it."""
        place = int(np.searchsorted(self.starts, row, side="right")) - 1
        return int(self.indices[place]), row - int(self.starts[place])


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_values(values: Any) -> str:
    """The digest of plain JSON values, whatever the order of their keys."""
    return digest_of(json.dumps(values, sort_keys=True).encode())


def lines_digest(lines: Sequence[str]) -> str:
    """The digest of an iteration's lines in a file of records; empty where it has none there."""
    return digest_of("\n".join(lines).encode("utf-8", "backslashreplace")) if lines else ""


def group_fields(groups: Sequence[GroupDigest]) -> dict[str, Any]:
    """The fields of a Link that follow from its groups."""
    ordered = sorted(groups, key=lambda group: group.index)
    rows = np.concatenate([group.responses for group in ordered]) if ordered else np.empty(0, RESPONSE)
    heads = np.array([(group.index, group.prompt, len(group.responses)) for group in ordered], _GROUP)
    places = sorted((*place, group.index) for group in ordered for place in group.places)
    return {
        "groups": len(ordered),
        "prompts": digest_of(heads.tobytes()),
        "context": digest_of(b"".join([group.context for group in ordered])),
        "tokens": digest_of(b"".join([group.tokens for group in ordered])),
        "logprobs": digest_of(b"".join([group.logprobs for group in ordered])),
        "rewards": digest_of(rows["reward"].tobytes()),
        "advantages": digest_of(rows["advantage"].tobytes()),
        "places": digest_of_values(places),
        "responses": pack(heads, rows),
    }


def pack(heads: np.ndarray, rows: np.ndarray) -> str:
    """heads: _GROUP [groups]. rows: RESPONSE [responses], of the groups in this order."""
    return base64.b64encode(zlib.compress(heads.tobytes() + rows.tobytes(), 1)).decode()


def unpack(text: str, groups: int, what: str) -> Responses:
    """Undoes `pack`. Raises DataError."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _LARGEST_TABLE_BYTES)
        end = groups * _GROUP.itemsize
        heads = np.frombuffer(data[:end], _GROUP, groups)
        rows = np.frombuffer(data[end:], RESPONSE)
    except (ValueError, zlib.error) as error:
        raise DataError(f"{CHAIN}: {what}: its responses cannot be read ({error}); the line is damaged") from None
    if int(heads["responses"].sum(dtype=np.int64)) != len(rows):
        raise DataError(f"{CHAIN}: {what}: {len(rows)} responses are not those of {groups} groups; the line is damaged")
    starts = np.cumsum(heads["responses"], dtype=np.int64) - heads["responses"]
    return Responses(heads["index"], heads["prompt"], starts, rows)


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
        """Writes the line of these values: all of Link's but before, digest and actual."""
        line = asdict(Link(**values, before=self._before))
        del line["digest"], line["actual"]
        line["digest"] = self._before = digest_of(json_line(line).encode())
        self._file.write(json_line(line))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ChainWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_chain(run_dir: Path | str) -> Iterator[Link]:
    """The lines in their order, one at a time. Half a line at the end, which a killed run leaves,
    is left out.

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
                        f"{path}:{number}: is longer than {_LONGEST_LINE_BYTES} bytes, so it is no line of a chain"
                    )
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({reason(error)}); give the directory of a run, which writes it with its first iteration"
        ) from None


def _link(line: bytes, where: str) -> Link:
    try:
        values = json.loads(line)
        digest = values.pop("digest")
        return msgspec.convert({**values, "digest": digest, "actual": digest_of(json_line(values).encode())}, Link)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: is no line of a chain ({error}); it was changed, or is of another release") from None
