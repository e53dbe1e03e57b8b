"""Kept samples: RUN/samples/iteration_NNNNNN.parquet with one row per response, tokens and their log-probs included.

`pandas.read_parquet("RUN/samples")` and `datasets.load_dataset("parquet", data_dir="RUN/samples")`
read all iterations. The trainers put their log-probs of the same tokens into RUN/samples_trainer,
one file per iteration and rank; `read_samples` joins them. A file that cannot be written costs its
rows, never the run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.errors import DataError
from pa_npu.telemetry.records import attempt, note_lost

SAMPLES_IN_SHORT = 2
"""Groups of an iteration that samples.jsonl and trackers' tables hold, of those that are kept."""
SAMPLES_DIRECTORY = "samples"
TRAINER_DIRECTORY = "samples_trainer"
_FILE = re.compile(r"iteration_(\d{6,10})(?:\.\w+)?\.parquet")


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of a row of data with one weight."""

    tokens: Sequence[int]
    weight: float


@dataclass(frozen=True)
class KeptResponse:
    """One response of a group that was trained. Lists have one entry per token that the policy
    wrote.

    index: the group's dispatch index in the iteration; response: the response's number in it.
    tokens: ids; logprobs: of the distribution that the engine sampled from. rewards: of each
    function, unweighted; reward: their weighted sum. advantage: as trained. version: of the newest
    weights that wrote a token. errors: of reward functions, for the whole group.
    turns: of a branch of a session, as samples.types.SampleTurn has them. attachments: of the
    sample's placeholder tokens, as samples.attachments.described has them, without values.
    stretches: of a row of data, which no policy wrote: all its tokens, each stretch with the
    weight that its tokens are trained with; 0: they are not trained.
    """

    iteration: int
    index: int
    response: int
    prompt_id: int
    prompt: str
    prompt_tokens: int
    answer: str
    text: str
    finish_reason: Literal["stop", "length"]
    version: int
    reward: float
    rewards: dict[str, float]
    advantage: float
    correct: bool
    errors: tuple[str, ...]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    turns: Sequence[Mapping[str, Any]] = ()
    attachments: Sequence[Mapping[str, Any]] = ()
    stretches: Sequence[Stretch] = ()


def reward_names(rows: Sequence[KeptResponse]) -> list[str]:
    """Returns the names of all rewards in the rows, in the order in which they come first.

    Groups may differ: agents reward some, reward functions the others.
    """
    return list(dict.fromkeys(name for row in rows for name in row.rewards))


def kept_groups(setting: int | Literal["all"]) -> float:
    """Returns how many groups of an iteration telemetry.samples keeps: those with the lowest
    numbers.
    """
    return float("inf") if setting == "all" else setting


class _Tables:
    """Writes a directory's files in a thread of its own.

    Owner closes it, which waits for what is being written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def submit(self, name: str, table: Callable[[], tuple[list[dict[str, Any]], Any]]) -> None:
        """table: makes the rows and their schema, in the thread."""
        self._thread.submit(self._write, name, table)

    def _write(self, name: str, table: Callable[[], tuple[list[dict[str, Any]], Any]]) -> None:
        try:
            write_table(self.directory / name, *table())
        except Exception as error:  # whatever the disk or the library does to a record
            note_lost(self.directory, error)


class SampleStore(_Tables):
    """Writes the coordinator's files.

    first_iteration: files of it and later ones, of an earlier attempt, are removed. piece: the text
    of one token.
    """

    def __init__(
        self, run_dir: Path | str, first_iteration: int, piece: Callable[[int], str]
    ) -> None:
        super().__init__(Path(run_dir) / SAMPLES_DIRECTORY)
        self._piece = functools.cache(piece)
        for directory in (self.directory, Path(run_dir) / TRAINER_DIRECTORY):
            for number, file in _files(directory):
                if number >= first_iteration:
                    attempt(file, file.unlink)

    def write(self, iteration: int, rows: Sequence[KeptResponse]) -> None:
        """All kept responses of an iteration; returns at once."""
        if rows:
            kept = list(rows)
            self.submit(
                _file(iteration),
                lambda: ([self._row(row) for row in kept], _schema(reward_names(kept))),
            )

    def _row(self, row: KeptResponse) -> dict[str, Any]:
        stretches = [
            {"text": self._text(stretch.tokens), "weight": stretch.weight}
            for stretch in row.stretches
        ]
        pieces = [self._piece(token) for token in row.tokens]
        return {**asdict(row), "pieces": pieces, "stretches": stretches}

    def _text(self, tokens: Sequence[int]) -> str:
        return "".join(self._piece(token) for token in tokens)


class TrainerLogprobs(_Tables):
    """Adds one trainer rank's log-probs to the kept samples: of their tokens, under the weights
    that wrote them.

    groups: as kept_groups. Tensors stay on the device until `write`, and training does not wait for
    the disk.
    """

    def __init__(self, run_dir: Path | str, rank: int, groups: float) -> None:
        super().__init__(Path(run_dir) / TRAINER_DIRECTORY)
        self._rank = rank
        self._groups = groups
        self._iteration = -1
        self._rows: list[tuple[int, int, Any]] = []

    def add(
        self,
        iteration: int,
        sources: Sequence[tuple[int, int]],
        lengths: Sequence[int],
        logprobs: Any,
    ) -> None:
        """One microbatch. sources: (group, response) of each sample; lengths: its tokens; logprobs:
        float [sum of lengths].
        """
        if iteration != self._iteration:
            self._iteration = iteration
            self._rows = []
        end = 0
        for (index, response), length in zip(sources, lengths, strict=True):
            start = end
            end = end + length
            if index < self._groups:
                self._rows.append((index, response, logprobs[start:end].detach().clone()))

    def write(self) -> None:
        """Writes the log-probs that were added for this iteration so far."""
        if not self._rows:
            return
        rows = [
            {"index": index, "response": response, "logprobs": values.float().cpu().tolist()}
            for index, response, values in self._rows
        ]
        self.submit(_file(self._iteration, f".rank{self._rank}"), lambda: (rows, _trainer_schema()))


def sample_iterations(run_dir: Path | str) -> list[int]:
    """Iterations of which samples were kept."""
    return sorted({number for number, _ in _files(Path(run_dir) / SAMPLES_DIRECTORY)})


def read_samples(
    run_dir: Path | str,
    iteration: int,
    *,
    group: int | None = None,
    columns: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Returns the rows of an iteration as plain values, by group and response; with
    `trainer_logprobs`, None where there are none.

    group: its rows alone. columns: as read_table has them.
    Raises DataError where the file cannot be read.
    """
    only = None if group is None else ("index", group)
    rows = read_table(
        Path(run_dir) / SAMPLES_DIRECTORY / _file(iteration), columns=columns, only=only
    )
    if columns is None:
        trained: dict[tuple[int, int], Any] = {}
        for number, file in _files(Path(run_dir) / TRAINER_DIRECTORY):
            if number == iteration:
                for row in read_table(file, only=only):
                    trained[_place(row)] = row.get("logprobs")
        for row in rows:
            trainer_logprobs = trained.get(_place(row))
            logprobs = row.get("logprobs")
            equal = (
                isinstance(trainer_logprobs, list)
                and isinstance(logprobs, list)
                and len(trainer_logprobs) == len(logprobs)
            )
            row["trainer_logprobs"] = trainer_logprobs if equal else None
    for row in rows:
        # the table has every name that any of its groups was rewarded by
        if isinstance(row.get("rewards"), dict):
            row["rewards"] = {
                name: value for name, value in row["rewards"].items() if value is not None
            }
    return sorted(rows, key=_place)


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the group and the response; a row without them, which this program has not written,
    comes first.
    """
    index, response = (row.get(name) for name in ("index", "response"))
    return index if isinstance(index, int) else -1, response if isinstance(response, int) else -1


def read_prompts(run_dir: Path | str, iteration: int) -> dict[str, int]:
    """Prompt to group of an iteration. Raises DataError."""
    file = Path(run_dir) / SAMPLES_DIRECTORY / _file(iteration)
    rows = read_table(file, columns=("index", "prompt"))
    return {
        str(row.get("prompt")): row["index"] for row in rows if isinstance(row.get("index"), int)
    }


def _file(iteration: int, part: str = "") -> str:
    return f"iteration_{iteration:06d}{part}.parquet"


def _files(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(directory.glob("*")):
        if match := _FILE.fullmatch(path.name):
            yield int(match[1]), path


def _schema(rewards: Sequence[str]) -> Any:
    import pyarrow as pa  # a third of a second, which only who writes or reads samples spends

    plain = {"int": pa.int32(), "str": pa.string(), "float": pa.float32(), "bool": pa.bool_()}
    turn = [(name, pa.int32()) for name in ("session", "number", "written")]
    turn += [("shown", pa.string()), ("trained", pa.bool_()), ("reward", pa.float32())]
    attachment = [("start", pa.int32()), ("length", pa.int32()), ("shape", pa.list_(pa.int64()))]
    attachment += [(name, pa.string()) for name in ("name", "dtype", "digest")]
    others = {
        "prompt_id": pa.int64(),
        "finish_reason": pa.string(),
        "rewards": pa.struct([(name, pa.float32()) for name in rewards]),
        "errors": pa.list_(pa.string()),
        "tokens": pa.list_(pa.int32()),
        "pieces": pa.list_(pa.string()),
        "logprobs": pa.list_(pa.float32()),
        "turns": pa.list_(pa.struct(turn)),
        "attachments": pa.list_(pa.struct(attachment)),
        "stretches": pa.list_(pa.struct([("text", pa.string()), ("weight", pa.float32())])),
    }
    columns = {field.name: plain.get(str(field.type)) for field in fields(KeptResponse)} | others
    if not rewards:
        del columns["rewards"]  # a file cannot hold a structure without fields
    return pa.schema(columns)


def _trainer_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [("index", pa.int32()), ("response", pa.int32()), ("logprobs", pa.list_(pa.float32()))]
    )


def write_table(path: Path, rows: list[dict[str, Any]], schema: Any) -> None:
    """All of the file or nothing."""
    import pyarrow as pa
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        pyarrow.parquet.write_table(
            pa.Table.from_pylist(_encodable(rows), schema), partial, compression="zstd"
        )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encodable(value: Any) -> Any:
    """Returns the same without half surrogates, which a tokenizer may give and UTF-8 cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        return [_encodable(item) for item in value]
    return value


def read_table(
    path: Path, *, columns: Sequence[str] | None = None, only: tuple[str, int] | None = None
) -> list[dict[str, Any]]:
    """Returns the rows of a file. Raises DataError where it cannot be read.

    columns: these alone, as far as the file has them; `length` is the number of a row's tokens.
    only: a column, and the value that it has in the rows that are wanted.
    """
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet

    try:
        with open_plain(path) as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            names = parquet.schema_arrow.names
            counted = columns is not None and "length" in columns and "tokens" in names
            wanted = None if columns is None else [name for name in columns if name in names]
            if wanted is not None and counted:
                wanted.append("tokens")
            table = parquet.read(columns=wanted)
            if only is not None and only[0] in names:
                table = table.filter(compute.equal(table[only[0]], only[1]))
            if counted:
                lengths = compute.list_value_length(table["tokens"])
                table = table.drop(["tokens"]).append_column("length", lengths)
            rows: list[dict[str, Any]] = table.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); remove the file") from None
    return rows
