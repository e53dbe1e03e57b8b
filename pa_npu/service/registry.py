"""What follows from the log: sessions, models with their order of requests, snapshots, saved states, and answers.

A registry changes by records alone (`apply`), so that one made of a log is the one that wrote it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pa_npu.service.log import Accepted, Begun, Dropped, Ended, Finished, Kept, Record
from pa_npu.service.wire import Refused

BASE_VERSION = 0
"""The version of the model that all slots begin with."""
VERSIONING = ("optim_step", "load_weights", "create_loaded")
"""The routes that give a model another version."""


@dataclass(eq=False)
class Future:
    """A request that was accepted, and its answer once there is one. attempts: how often it was begun."""

    request: Accepted
    answer: Finished | None = None
    attempts: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    is_retrieved: bool = False


@dataclass(eq=False)
class Model:
    """A slot. next: number of the request that is carried out next. steps: since the last Kept."""

    id: str
    owner: str
    base: str
    seed: int
    rank: int
    futures: dict[int, Future] = field(default_factory=dict)
    next: int = 0
    kept: Kept | None = None
    steps: int = 0
    version: int = BASE_VERSION
    is_unloaded: bool = False

    @property
    def runnable(self) -> Future | None:
        """Returns the request whose turn it is; None where the client has not sent it yet."""
        return self.futures.get(self.next)

    @property
    def waiting(self) -> int:
        """Returns the number of requests that are not answered."""
        return sum(future.answer is None for future in self.futures.values())


@dataclass(eq=False)
class SavedWeights:
    """Weights in a file.

    version: of these saved weights, unique on this server; the engine has it while it holds them.
    model_version: the model's when they were saved. expires_s: on the clock of the day.
    """

    path: str
    file: str
    owner: str
    model: str
    version: int
    model_version: int
    is_named: bool
    has_optimizer: bool
    expires_s: float | None = None


@dataclass(eq=False)
class SamplingSession:
    """path: of its weights; None: the base model's."""

    id: str
    owner: str
    path: str | None


class Registry:
    """All that the server knows. begun_files: those that are being written, and no record has yet."""

    def __init__(self, max_snapshots: int) -> None:
        """max_snapshots: of a model, without a name; a further one takes the oldest one's place."""
        self._max_snapshots = max_snapshots
        self.records: list[Record] = []
        self.sessions: dict[str, set[str]] = {}
        self.models: dict[str, Model] = {}
        self.weights: dict[str, SavedWeights] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self.futures: dict[str, Future] = {}
        self.last_version = BASE_VERSION
        self.begun_files: set[str] = set()

    def apply(self, record: Record) -> None:
        """Takes a record that the log has."""
        self.records.append(record)
        if isinstance(record, Accepted):
            self._accept(record)
        elif isinstance(record, Begun):
            if (future := self.futures.get(record.id)) is not None:
                future.attempts += 1
        elif isinstance(record, Finished):
            self._finish(record)
        elif isinstance(record, Kept):
            model = self.models.get(record.model)
            if model is not None:
                model.kept = record
                model.steps = 0
        elif isinstance(record, Dropped):
            self._drop(record.id)
        else:
            self._end(record.owner)

    def _accept(self, record: Accepted) -> None:
        decided = record.decided
        if (version := decided.get("version")) is not None:
            self.last_version = max(self.last_version, int(version))
        if record.route == "session":
            self.sessions[record.id] = set()
            return
        if record.route == "sampling_session":
            path = decided.get("path")
            self.sampling[record.id] = SamplingSession(
                record.id, record.owner, None if path is None else str(path)
            )
            return
        future = Future(record)
        self.futures[record.id] = future
        if record.route in ("create_model", "create_loaded"):
            self.models[record.model] = Model(
                id=record.model,
                owner=record.owner,
                base=str(decided["base"]),
                seed=int(decided["seed"]),
                rank=int(decided["rank"]),
            )
            if record.owner in self.sessions:
                self.sessions[record.owner].add(record.model)
        model = self.models.get(record.model)
        if model is not None:
            model.futures[record.seq] = future

    def _finish(self, record: Finished) -> None:
        future = self.futures.get(record.id)
        if future is None:
            return
        future.answer = record
        request = future.request
        model = self.models.get(request.model)
        if model is not None and request.route != "sample":
            model.next = request.seq + 1
            if record.error is None:
                if request.route in VERSIONING:
                    model.version = int(request.decided["version"])
                model.steps += request.route == "optim_step"
                model.is_unloaded |= request.route == "unload_model"
        if record.error is None and "file" in request.decided:
            self._save(request, record)
        future.done.set()

    def _save(self, request: Accepted, answer: Finished) -> None:
        decided = request.decided
        if "optimizer" in decided:  # a load reads a file
            return
        path = str(decided["path"])
        self.weights[path] = SavedWeights(
            path=path,
            file=str(decided["file"]),
            owner=request.owner,
            model=request.model,
            version=int(decided["version"]),
            model_version=self.models[request.model].version
            if request.model in self.models
            else -1,
            is_named=bool(decided["named"]),
            has_optimizer=request.route == "save_weights",
            expires_s=float(decided["expires_s"]) if "expires_s" in decided else None,
        )
        self._forget_snapshots(request.model)
        if "sampling_session" in decided:
            id = str(decided["sampling_session"])
            self.sampling[id] = SamplingSession(id, request.owner, path)

    def _forget_snapshots(self, model: str) -> None:
        unnamed = [
            path
            for path, saved in self.weights.items()
            if saved.model == model and not saved.is_named
        ]
        for path in unnamed[: -self._max_snapshots]:
            del self.weights[path]

    def _drop(self, id: str) -> None:
        future = self.futures.pop(id, None)
        if future is None:
            return
        model = self.models.get(future.request.model)
        if model is not None:
            model.futures.pop(future.request.seq, None)
        # whoever waits has the future
        future.answer = Finished(id, error="a request with a lower number did not come in time")
        future.done.set()

    def _end(self, owner: str) -> None:
        for name in self.sessions.pop(owner, set()):
            self.models.pop(name, None)
        for id, sampling in list(self.sampling.items()):
            if sampling.owner == owner:
                del self.sampling[id]
        for path, saved in list(self.weights.items()):
            if saved.owner == owner and not saved.is_named:
                del self.weights[path]
        for id, future in list(self.futures.items()):
            if future.request.owner == owner:
                if future.answer is None:
                    future.answer = Finished(id, error="its session has ended")
                future.done.set()
                del self.futures[id]

    # What requests ask for

    def session(self, id: str) -> set[str]:
        """Returns the models of a session. Raises Refused."""
        models = self.sessions.get(id)
        if models is None:
            raise Refused(
                f"session_id: {id[:80]!r} is no session here, or one that has ended; make a new client",
                404,
            )
        return models

    def model(self, id: str) -> Model:
        """Returns a model that has a slot. Raises Refused."""
        model = self.models.get(id)
        if model is None or model.is_unloaded:
            raise Refused(
                f"model_id: {id[:80]!r} is no model here, or one whose session has ended", 404
            )
        return model

    def saved(self, path: str, now_s: float) -> SavedWeights:
        """Returns saved weights. Raises Refused."""
        saved = self.weights.get(path)
        if saved is None or (saved.expires_s is not None and now_s > saved.expires_s):
            raise Refused(
                f"path: {path[:120]!r} is not here; it was never saved, has expired, or newer "
                "snapshots have taken its place",
                404,
            )
        return saved

    def files(self) -> set[str]:
        """Returns the files that are needed: of saved weights, kept states, and requests that a start
        would carry out again.
        """
        needed = {saved.file for saved in self.weights.values()} | self.begun_files
        for model in self.models.values():
            kept_seq = -1
            if model.kept is not None:
                needed.add(model.kept.file)
                kept_seq = model.kept.seq
            for seq, future in model.futures.items():
                if seq > kept_seq and "file" in future.request.decided:
                    needed.add(str(future.request.decided["file"]))
        return needed

    def prune(self, max_answers: int, now_s: float) -> None:
        """Forgets weights that have expired, and answers that are older than the last `max_answers`
        of their model or session and that no start would need.
        """
        for path, saved in list(self.weights.items()):
            if saved.expires_s is not None and now_s > saved.expires_s:
                del self.weights[path]
        samples: dict[str, list[str]] = {}
        for id, future in self.futures.items():
            if future.request.route == "sample" and future.answer is not None:
                samples.setdefault(future.request.owner, []).append(id)
        for ids in samples.values():
            for id in ids[:-max_answers]:
                del self.futures[id]
        for model in self.models.values():
            kept_seq = -1 if model.kept is None else model.kept.seq
            for seq in [seq for seq in model.futures if seq <= kept_seq]:
                if seq < model.next - max_answers:
                    future = model.futures.pop(seq)
                    self.futures.pop(future.request.id, None)

    def compacted(self) -> Iterator[Record]:
        """Yields the records that a later start needs: without datums that a kept state has, answers
        that nobody can ask for any more, and sessions that have ended, of which named weights stay.
        """
        ended = {record.owner for record in self.records if isinstance(record, Ended)}
        dropped = {record.id for record in self.records if isinstance(record, Dropped)}
        needed: set[str] = set()
        for record in self.records:
            if isinstance(record, Accepted):
                if record.id in dropped and record.id not in self.futures:
                    continue
                is_named = record.decided.get("named")
                if record.owner in ended or record.id in ended:
                    if not is_named:
                        continue
                elif record.id not in self.futures and record.route == "sample":
                    continue
                model = self.models.get(record.model)
                is_covered = (
                    model is not None and model.kept is not None and (record.seq <= model.kept.seq)
                )
                needed.add(record.id)
                if record.route in ("forward", "forward_backward") and is_covered:
                    yield msgspec.structs.replace(record, body=b"")
                else:
                    yield record
            elif isinstance(record, Begun):
                future = self.futures.get(record.id)
                if future is not None and future.answer is None:
                    yield record
            elif isinstance(record, Finished):
                if record.id not in needed:
                    continue
                is_kept = record.id in self.futures
                yield record if is_kept else msgspec.structs.replace(record, content=b"")
            elif isinstance(record, Kept):
                model = self.models.get(record.model)
                if model is not None and model.kept is record:
                    yield record
