"""A run's checkpoints over time: when one is due, its write beside training, its completion by all ranks, its failure.

    at_border(v):  an earlier write is done on all ranks? ─> complete it (index, name, retention)
                   version v is due? ─> plan it with all ranks and begin to write; training goes on meanwhile
    finish(n):     wait for the write in progress; save the last version if that is not it

The ranks agree after each part that can fail on some of them. A failed checkpoint costs the run
nothing but a line and `checkpoint_failed` in the record; its files go, the earlier checkpoints
stay, and the next one is tried when it is due. Only when the last version cannot be saved, the run
ends with CheckpointError.
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
from pa_npu.checkpoints.provenance import config_digest, config_tree, model_fingerprint, shared_tree
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
_FULL_BYTES = 2**20  # what is left of a full disk where small files still fit


class PlannedSave(Protocol):
    """This rank's share of a checkpoint, with the weights as they were when it was planned."""

    description: dict[str, Any]
    """Fields of CheckpointMeta: the backend's own, to which SavedState adds the others that
    describe the state.
    """

    def write(self) -> Sequence[str]:
        """Write this rank's files, alone, possibly in a forked process; returns their names."""

    def release(self) -> None:
        """Drop the data, which a forked process has."""

    def complete(self) -> None:
        """When all ranks have written: make the files a checkpoint that `load` reads.

        A rank does its part alone.
        """


class SavedState(Protocol):
    """The state that is saved and restored: a training backend, as far as checkpoints know it."""

    def plan_save(self, directory: Path) -> PlannedSave:
        """Agree on what each rank writes into `directory` of the state as it is."""

    def load(self, directory: Path) -> int:
        """Restore a checkpoint and return its weight version."""


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
    """One rank's part; every public method is collective. saved: the last version that has a
    complete checkpoint.
    """

    def __init__(
        self,
        config: Config,
        backend: SavedState,
        data_position: Callable[[int], dict[str, Any]],
        timeline: Timeline,
        ahead: Callable[[int], Sequence[AheadIteration]] = lambda version: (),
    ) -> None:
        """data_position: TrainingStream.state() before the iteration of a version. ahead: what was
        produced before it for later versions; rank 0 writes it."""
        self._config = config
        self._backend = backend
        self._data_position = data_position
        self._timeline = timeline
        self._ahead = ahead
        self._parent = Path(config.run.dir) / store.CHECKPOINTS
        self._saving: _Saving | None = None
        self._why = ""  # of the last failure
        self._completed: tuple[int, str] | None = (
            None  # on rank 0: a version, and its digest, that no report has named yet
        )
        self.saved: int | None = None

    def load(self) -> int:
        """Restore checkpoint.load, if any; returns the version to go on with.

        Raises UserError on all ranks when its files are not what was written, as any rank finds.
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
        """Complete what is written, begin what is due."""
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
        """Save the last version unless that is done.

        Raises CheckpointError on all ranks when it cannot be saved.
        """
        with self._timeline.span("checkpoint", version=version):
            self._complete(wait=True)
            if self.saved != version:
                self._begin(version)
                self._complete(wait=True)
        if self.saved != version:
            raise CheckpointError(
                f"the last checkpoint, of version {version}, could not be written ({self._why}); "
                f"free space, or fix permissions, in {self._parent} and continue with "
                f"checkpoint.resume=auto (usable: {self._usable()})"
            )

    def _begin(self, version: int) -> int | None:
        """Plan and start to write; returns the version when it has failed."""
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
            store.note_digests(
                directory, dist.get_rank(), [*write_ahead(directory, ahead), *plan.write()]
            )

        def start() -> None:
            nonlocal writer
            writer = Forked(write, self._config.wait_timeout_s)
            plan.release()

        reasons = _together(start)
        if reasons or writer is None:
            return self._failed(version, reasons, writer)
        self._saving = _Saving(version, data, directory, plan, writer, began_s)
        return None

    def _complete(self, *, wait: bool) -> int | None:
        """Give the checkpoint in progress its name if all ranks have written, or once they have;
        returns one that failed.
        """
        saving = self._saving
        if saving is None:
            return None
        while True:
            try:
                mine = "" if saving.writer.poll() else _RUNNING
            except WriteFailed as failure:
                mine = str(failure)
            said = _gather(mine)
            if all(word in ("", _RUNNING) for word in said) and _RUNNING in said:
                if not wait:
                    return None
                time.sleep(_POLL_S)
                continue
            break
        self._saving = None
        reasons = {rank: word for rank, word in enumerate(said) if word not in ("", _RUNNING)}
        if not reasons:
            reasons = _together(lambda: self._name(saving))
        if reasons:
            return self._failed(saving.version, reasons, saving.writer)
        self.saved = saving.version
        self._timeline.complete(
            "checkpoint write", saving.began_s, now(), "checkpoint", version=saving.version
        )
        return None

    def _name(self, saving: _Saving) -> None:
        saving.plan.complete()
        if dist.get_rank() != 0:
            return
        config = self._config
        found = store.collect_digests(saving.directory, dist.get_world_size())
        meta = store.CheckpointMeta(
            version=saving.version,
            data=saving.data,
            seed=config.run.seed,
            model={"path": config.model.path, "fingerprint": model_fingerprint(config.model.path)},
            config=shared_tree(config_tree(config)),
            config_digest=config_digest(config),
            chat_template=kept_template(config.data),
            files=store.list_files(saving.directory),
            digests=found,
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
        accuracy = {
            entry["version"]: float(entry["best_by"] if "best_by" in entry else entry["accuracy"])
            for entry in evaluations
        }
        for path in store.superfluous(self._parent, options.keep_last, options.keep_best, accuracy):
            store.delete(path)
            logger.info("deleted checkpoint %s (checkpoint.keep_last, keep_best)", path)

    def _failed(self, version: int, reasons: dict[int, str], writer: Forked | None = None) -> int:
        if writer is not None:
            writer.cancel()
        _gather("")  # no rank writes any more
        self._why = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        # torch's writer does not say it
        if _is_full(self._parent) and os.strerror(errno.ENOSPC) not in self._why:
            self._why += f"; {os.strerror(errno.ENOSPC)}"
        if dist.get_rank() == 0:
            store.abandon(self._parent, version)
            logger.error(
                "checkpoint %s could not be written (%s); the run goes on, and the next one is "
                "tried when it is due; usable: %s",
                self._parent / store.directory_name(version),
                self._why,
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
    """Run on all ranks, of which none goes on where one has met a UserError."""
    values, mine = [], ""
    try:
        values.append(action())
    except UserError as error:
        mine = str(error)
    if failed := [word for word in _gather(mine) if word]:
        raise DataError(mine or failed[0])
    return values[0]


def _together(action: Callable[[], None]) -> dict[int, str]:
    """Run on all ranks; the reasons of those where it failed, known to all."""
    reason = ""
    try:
        action()
    except (OSError, WriteFailed) as error:
        reason = root_cause(error) if isinstance(error, OSError) else str(error)
    return {rank: word for rank, word in enumerate(_gather(reason)) if word}


def _gather(word: str) -> list[str]:
    """Every rank's word, cut to a fixed length, on all ranks."""
    data = word.encode()[:_REASON_BYTES]
    mine = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    all_words = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_words, mine)
    return [bytes(words.tolist()).rstrip(b"\0").decode(errors="replace") for words in all_words]
