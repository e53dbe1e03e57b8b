"""A run's checkpoints over time: when one is due, its write in the background, its completion.

    at_border(v):  an earlier write is done on all ranks? ─> completes it (index, name, retention)
                   version v is due? ─> plans it with all ranks and begins to write, while training
                                        runs
    finish(n):     waits for the write in progress; saves the last version if that is another one

The ranks agree after each part that can fail on some of them. A failed checkpoint costs the run
nothing but a line and `checkpoint_failed` in the record. Its files are removed, the earlier
checkpoints stay, and the next one is tried when it is due. Only if the last version cannot be
saved, the run ends with CheckpointError.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from pa_npu.checkpoints import directories as store
from pa_npu.checkpoints.ahead import AheadIteration, write_ahead
from pa_npu.checkpoints.provenance import config_digest, config_tree, fingerprints, shared_tree
from pa_npu.checkpoints.writer import Forked, WriteFailed, root_cause
from pa_npu.config.schema import Config
from pa_npu.control.messages import CheckpointReport
from pa_npu.data.prompt_format import kept_template
from pa_npu.errors import CheckpointError, DataError, UserError
from pa_npu.telemetry.records import read_evaluations
from pa_npu.telemetry.timeline import Timeline, now

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_REASON_BYTES = 400
_RUNNING = "running"
_FULL_BYTES = 2**20  # free on a full disk on which small files still fit


class PlannedSave(Protocol):
    """This rank's share of a checkpoint, with the weights of the time of planning."""

    description: dict[str, Any]
    """Fields of CheckpointMeta that describe the state: the backend's, and those of SavedState."""

    def write(self) -> Sequence[str]:
        """Writes this rank's files, alone, possibly in a forked process; returns their names."""

    def release(self) -> None:
        """Drops the data, which a forked process has."""

    def complete(self) -> None:
        """Makes the files a checkpoint that `load` reads, once all ranks have written.

        A rank does its part alone.
        """


class SavedState(Protocol):
    """A training backend, as far as checkpoints know it."""

    def plan_save(self, directory: Path) -> PlannedSave:
        """Agrees with all ranks on the files that each writes into `directory` of the state."""

    def load(self, directory: Path) -> int:
        """Restores a checkpoint and returns its weight version."""


@dataclass
class _Saving:
    """A checkpoint between its plan and its completion."""

    version: int
    data: dict[str, Any]
    directory: Path
    plan: PlannedSave
    writer: Forked
    began_s: float


class Checkpointing:
    """One rank's part of checkpointing; every public method is collective.

    saved: the last version with a complete checkpoint.
    """

    def __init__(
        self,
        config: Config,
        backend: SavedState,
        data_position: Callable[[int], dict[str, Any]],
        timeline: Timeline,
        ahead: Callable[[int], Sequence[AheadIteration]] = lambda version: (),
    ) -> None:
        """Begins without a write.

        Args:
            config: of the run.
            backend: whose state is saved.
            data_position: returns TrainingStream.state() before the iteration of a version.
            timeline: of this rank.
            ahead: returns what was produced for later versions before a version; rank 0 writes it.
        """
        self._config = config
        self._backend = backend
        self._data_position = data_position
        self._timeline = timeline
        self._ahead = ahead
        self._parent = Path(config.run.dir) / store.CHECKPOINTS
        self._saving: _Saving | None = None
        self._failure = ""  # the last one
        # On rank 0, a version and its digest that no report has named yet.
        self._completed: tuple[int, str] | None = None
        self.saved: int | None = None

    def load(self) -> int:
        """Restores checkpoint.load, if it is set; returns the version to continue with.

        Raises UserError on all ranks if any rank finds a file that is not what was written.
        """
        if not self._config.checkpoint.load:
            return 0
        directory = Path(self._config.checkpoint.load)
        _all_or_none(lambda: store.check_files(directory, dist.get_rank(), dist.get_world_size()))
        version = _all_or_none(lambda: self._backend.load(directory))
        if directory.resolve().parent == self._parent.resolve():
            self.saved = version
        return version

    def at_border(self, version: int) -> CheckpointReport:
        """Completes the write in progress, and begins one that is due."""
        every = self._config.checkpoint.every
        due = bool(every) and version % every == 0
        if not due and self._saving is None:
            return CheckpointReport()
        start = time.perf_counter()
        with self._timeline.span("checkpoint", version=version):
            failed = self._complete(wait=due)
            if due:
                failed = self._begin(version) or failed
        completed, digest = self._completed or (None, None)
        self._completed = None
        return CheckpointReport(time.perf_counter() - start, failed, completed, digest)

    def finish(self, version: int) -> None:
        """Saves the last version unless that is done.

        Raises CheckpointError on all ranks if it cannot be saved.
        """
        with self._timeline.span("checkpoint", version=version):
            self._complete(wait=True)
            if self.saved != version:
                self._begin(version)
                self._complete(wait=True)
        if self.saved != version:
            raise CheckpointError(
                f"the last checkpoint, of version {version}, could not be written ({self._failure}); "
                f"free space, or fix permissions, in {self._parent} and continue with "
                f"checkpoint.resume=auto (usable: {self._usable()})"
            )

    def _begin(self, version: int) -> int | None:
        """Plans a checkpoint and starts its write; returns the version if that has failed."""
        data = self._data_position(version)

        def prepare() -> None:
            if dist.get_rank() == 0:
                store.start(self._parent, version)

        if reasons := _together(prepare):
            return self._failed(version, reasons)
        directory = store.incomplete(self._parent, version)
        ahead = self._ahead(version) if dist.get_rank() == 0 else ()
        began_s = now()
        plan = self._backend.plan_save(directory)
        writer: Forked | None = None

        def write() -> None:
            names = [*write_ahead(directory, ahead), *plan.write()]
            store.note_digests(directory, dist.get_rank(), names)

        def start() -> None:
            nonlocal writer
            writer = Forked(write, self._config.deadlines.wait_timeout_s)
            plan.release()

        reasons = _together(start)
        if reasons or writer is None:
            return self._failed(version, reasons, writer)
        self._saving = _Saving(version, data, directory, plan, writer, began_s)
        return None

    def _complete(self, *, wait: bool) -> int | None:
        """Gives the checkpoint in progress its name if all ranks have written.

        `wait`: waits until they have. Returns its version if it failed.
        """
        saving = self._saving
        if saving is None:
            return None
        while True:
            try:
                mine = "" if saving.writer.poll() else _RUNNING
            except WriteFailed as failure:
                mine = str(failure)
            states = _gather(mine)
            if all(state in ("", _RUNNING) for state in states) and _RUNNING in states:
                if not wait:
                    return None
                time.sleep(_POLL_S)
                continue
            break
        self._saving = None
        reasons = {rank: state for rank, state in enumerate(states) if state not in ("", _RUNNING)}
        if not reasons:
            reasons = _together(lambda: self._finish_files(saving))
        if reasons:
            return self._failed(saving.version, reasons, saving.writer)
        self.saved = saving.version
        self._timeline.complete(
            "checkpoint write", saving.began_s, now(), "checkpoint", version=saving.version
        )
        return None

    def _finish_files(self, saving: _Saving) -> None:
        saving.plan.complete()
        if dist.get_rank() != 0:
            return
        config = self._config
        digests = store.collect_digests(saving.directory, dist.get_world_size())
        meta = store.CheckpointMeta(
            version=saving.version,
            data=saving.data,
            seed=config.run.seed,
            model=fingerprints(config),
            config=shared_tree(config_tree(config)),
            config_digest=config_digest(config),
            chat_template=kept_template(config.data),
            files=store.list_files(saving.directory),
            digests=digests,
            **saving.plan.description,
        )
        final = store.commit(saving.directory, meta)
        self._completed = saving.version, meta.digest
        logger.info(
            "saved checkpoint %s, %.2f s after its beginning", final, now() - saving.began_s
        )
        try:
            self._retain()
        except (OSError, DataError) as error:
            logger.warning("no earlier checkpoint is deleted this time: %s", error)

    def _retain(self) -> None:
        options = self._config.checkpoint
        if not options.keep_last:
            return
        evaluations = read_evaluations(self._config.run.dir) if options.keep_best else []
        accuracy = {}
        for entry in evaluations:
            best_by = entry["best_by"] if "best_by" in entry else entry["accuracy"]
            accuracy[entry["version"]] = float(best_by)
        for path in store.superfluous(self._parent, options.keep_last, options.keep_best, accuracy):
            store.delete(path)
            logger.info("deleted checkpoint %s (checkpoint.keep_last, keep_best)", path)

    def _failed(self, version: int, reasons: dict[int, str], writer: Forked | None = None) -> int:
        if writer is not None:
            writer.cancel()
        _gather("")  # no rank writes any more
        self._failure = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        # torch's writer does not mention a full disk.
        if _is_full(self._parent) and os.strerror(errno.ENOSPC) not in self._failure:
            self._failure += f"; {os.strerror(errno.ENOSPC)}"
        if dist.get_rank() == 0:
            store.abandon(self._parent, version)
            logger.error(
                "checkpoint %s could not be written (%s); the run goes on, and the next one is "
                "tried when it is due; usable: %s",
                self._parent / store.directory_name(version),
                self._failure,
                self._usable(),
            )
        return version

    def _usable(self) -> str:
        complete = store.complete(self._parent)
        return str(complete[-1]) if complete else "none"


def _is_full(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < _FULL_BYTES
    except OSError:
        return False


def _all_or_none(action: Callable[[], T]) -> T:
    """Runs an action on all ranks; raises DataError on all if one has met a UserError."""
    values: list[T] = []
    mine = ""
    try:
        values.append(action())
    except UserError as error:
        mine = str(error)
    failures = [reason for reason in _gather(mine) if reason]
    if failures:
        raise DataError(mine or failures[0])
    return values[0]


def _together(action: Callable[[], None]) -> dict[int, str]:
    """Runs an action on all ranks; returns the reasons of those where it failed, on all ranks."""
    reason = ""
    try:
        action()
    except (OSError, WriteFailed) as error:
        reason = root_cause(error) if isinstance(error, OSError) else str(error)
    return {rank: text for rank, text in enumerate(_gather(reason)) if text}


def _gather(text: str) -> list[str]:
    """Returns the texts of all ranks, each cut to a fixed length, on all ranks."""
    data = text.encode()[:_REASON_BYTES]
    mine = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, mine)
    return [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in texts]
