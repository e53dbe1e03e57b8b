"""`pa-npu verify RUN [--replay A:B]`: whether a run is what its chain says, by files or by repetition.

pa-npu verify runs/mine                   compare the chain with the run's files
pa-npu verify runs/mine --replay 4:8      and repeat iterations 4 to 7 from the checkpoint of version 4

Exit codes: 0 all holds; 1 something does not, which is named; 2 bad input; 3 undecided, because the
replay had reason to differ by rounding and a response came out with other tokens.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.checkpoints import directories
from pa_npu.checkpoints.directories import CHECKPOINTS, version_of
from pa_npu.checkpoints.provenance import config_tree, model_fingerprint, trained_configuration
from pa_npu.config.load import load_config
from pa_npu.config.plain_file import open_plain, reason
from pa_npu.config.words import counted
from pa_npu.errors import DataError, UserError
from pa_npu.launcher.run_directory import CONFIG_FILE
from pa_npu.launcher.subcommands import refuse
from pa_npu.telemetry.chain import (
    CHAIN,
    ChainLink,
    digest_of_values,
    fault,
    lines_digest,
    read_chain,
)
from pa_npu.telemetry.records import METRICS, iterations_of
from pa_npu.telemetry.sample_store import read_samples, sample_iterations

HOLDS = 0
BROKEN = 1
_SAMPLES = "samples.jsonl"


class Violation(Exception):
    """Something that does not hold, in one line."""


def verify_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = __doc__
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--replay",
        metavar="A:B",
        help="repeat iterations A to B - 1 from the checkpoint of version A, and compare",
    )
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="with --replay: new directory of the repetition, which is then kept",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="with --replay: other keys of the repetition",
    )


def verify(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares, prints, and returns the exit code. Raises UserError."""
    overrides = [*options.overrides, *rest]
    if not options.replay:
        refuse(overrides)
        if options.work:
            raise UserError("command line: --work is for --replay A:B; add it, or remove --work")
    refuse([argument for argument in overrides if argument.startswith("-") or "=" not in argument])
    run_dir = Path(options.run)
    code = check(run_dir)
    if code != HOLDS or not options.replay:
        return code
    from pa_npu.launcher.replay import replay

    return replay(run_dir, options.replay, options.work, overrides)


def check(run_dir: Path) -> int:
    """Prints what was compared, and what does not hold; returns the exit code. Raises DataError
    where there is no chain."""
    checked = CheckedRun(run_dir)
    try:
        for line in checked.lines():
            print(line, flush=True)
    except Violation as violation:
        print(f"does not hold: {violation}")
        return BROKEN
    for note in checked.notes:
        print(f"note: {note}")
    print(f"{run_dir}: all of it holds; its newest line has the digest {checked.newest}")
    return HOLDS


@dataclass
class CheckedRun:
    """Compares a run's chain with its files, one kind of file after another.

    newest: the digest of the last line. notes: what could not be compared, and why.
    """

    run_dir: Path
    newest: str = ""
    notes: list[str] = field(default_factory=list)
    _first: int = 0
    _last: int = 0

    def lines(self) -> Iterator[str]:
        """Yields one line for each kind of file that agrees. Raises Violation at the first thing
        that does not hold.
        """
        yield self._chain()
        yield self._configuration()
        yield self._records(METRICS, "record")
        yield self._records(_SAMPLES, "samples")
        yield self._kept_samples()
        yield self._checkpoints()

    def _links(self) -> Iterator[ChainLink]:
        return read_chain(self.run_dir)

    def _chain(self) -> str:
        before: ChainLink | None = None
        for link in self._links():
            if problem := fault(before, link):
                raise Violation(f"{CHAIN}: {problem}")
            if before is None:
                self._first = link.iteration
            before = link
        if before is None:
            raise DataError(
                f"{self.run_dir / CHAIN}: has no whole line yet; wait for the first iteration's end"
            )
        self.newest = before.digest
        self._last = before.iteration
        count = counted(self._last - self._first + 1, "line")
        return (
            f"chain: {count}, iterations {self._first} to {self._last}, each naming the one before"
        )

    def _configuration(self) -> str:
        config = load_config([str(self.run_dir / CONFIG_FILE)])
        last = next(link for link in self._links() if link.iteration == self._last)
        if digest_of_values(trained_configuration(config_tree(config))) != last.configuration:
            raise Violation(
                f"{CONFIG_FILE}: its keys are not those that iteration {self._last} was trained "
                "with"
            )
        try:
            fingerprint = model_fingerprint(config.model.path)
        except OSError as error:
            self.notes.append(f"the model that the run began with is not compared: {reason(error)}")
        else:
            if fingerprint != last.model:
                raise Violation(
                    f"model.path: {config.model.path} is not the model that the run began with"
                )
        return f"{CONFIG_FILE}: as the chain says"

    def _records(self, name: str, field_name: str) -> str:
        """Compares the lines of a file of records, by iteration, with the digests in this field of
        the chain."""
        links = self._links()
        path = self.run_dir / name
        count = 0
        records = _lines_by_iteration(path)
        following = next(records, None)
        for link in links:
            expected = getattr(link, field_name)
            if following is not None and following[0] < link.iteration:
                raise Violation(
                    f"{name}: a line of iteration {following[0]} is out of order, or not of this "
                    "chain"
                )
            lines: list[str] = []
            if following is not None and following[0] == link.iteration:
                lines = following[1]
                following = next(records, None)
            if lines_digest(lines) != expected:
                fault = (
                    "is not what was written" if lines else "is missing, or could not be written"
                )
                raise Violation(f"{name}: iteration {link.iteration} {fault}")
            count += len(lines)
        # a run may end between an iteration's record and its line in the chain
        if following is not None and (
            following[0] > self._last + 1 or next(records, None) is not None
        ):
            raise Violation(
                f"{name}: has iterations that are not in the chain, from {following[0]} on"
            )
        return f"{name}: {counted(count, 'line')} as written"

    def _kept_samples(self) -> str:
        kept = set(sample_iterations(self.run_dir))
        count = 0
        for link in self._links():
            if link.iteration in kept:
                rows = read_samples(self.run_dir, link.iteration)
                _check_samples(link, rows)
                count += len(rows)
        return (
            f"samples: {counted(count, 'response')} with tokens, log-probs, rewards and "
            "advantages of the chain"
        )

    def _checkpoints(self) -> str:
        sealed: dict[int, str] = {}
        for link in self._links():
            sealed.update({int(version): digest for version, digest in link.checkpoints.items()})
        parent = self.run_dir / CHECKPOINTS
        count = 0
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            version = version_of(path)
            if version is None:
                continue
            if wrong := directories.problem(path) or directories.content_problem(path):
                raise Violation(f"checkpoint {path}: {wrong}")
            meta = directories.read_meta(path)
            if sealed.get(version, meta.digest) != meta.digest:
                raise Violation(
                    f"checkpoint {path}: it is whole, but not the one that the run wrote"
                )
            if version not in sealed:
                self.notes.append(
                    f"{path.name} was completed after the chain's last line: compared with its own "
                    "digests alone"
                )
            count += 1
        return f"checkpoints: {count}, every file as written"


def _lines_by_iteration(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the lines of a file of records, those of an iteration together; half a line at the end
    is left out.
    """
    if not path.is_file():
        return
    iteration = -1
    lines: list[str] = []
    try:
        with open_plain(path) as file:
            for number, text in iterations_of(file):
                if number != iteration and lines:
                    yield iteration, lines
                    lines = []
                iteration = number
                lines.append(text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason(error)})") from None
    if lines:
        yield iteration, lines


def _check_samples(link: ChainLink, rows: Sequence[dict[str, Any]]) -> None:
    """Compares kept responses with the chain's. Raises Violation."""
    table = link.table()
    place_of = {int(index): place for place, index in enumerate(table.indices)}
    for row in rows:
        where = (
            f"samples: iteration {link.iteration}, group {row['index']}, response {row['response']}"
        )
        place = place_of.get(row["index"])
        number = -1 if place is None else int(table.starts[place]) + row["response"]
        if not 0 <= number < table.size or table.where(number) != (row["index"], row["response"]):
            raise Violation(f"{where}: the chain has no such response")
        expected = {name: column[number] for name, column in table.rows.items()}
        arrays = {
            "tokens": np.asarray(row["tokens"], "<i4"),
            "logprobs": np.asarray(row["logprobs"], "<f4"),
        }
        for name, values in arrays.items():
            if len(values) != expected["length"] or zlib.crc32(values.tobytes()) != expected[name]:
                raise Violation(f"{where}: its {name} are not those that were trained")
        for name in ("reward", "advantage"):
            value = np.float32(row[name])
            if value.tobytes() != expected[name].tobytes():
                raise Violation(
                    f"{where}: its {name} is {value!s}, and {expected[name]!s} was trained"
                )
