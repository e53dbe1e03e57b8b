"""Carries out the requests of models: each model's in its order, models in turn, one at a time.

    model a   1 2 3 4            a1 b1 a2 a3 b2 ...   whoever has a request that is next, in turn
    model b   1 2   4 (3 is missing: 4 waits)

A request is answered by its record in the log, which is written before anybody sees it. After a
restart the state of every slot is the last one that was kept, and the requests behind it are carried
out again; answers must be the recorded ones to the bit.

A request that the trainers cannot carry out, since they lack memory or end whenever they try, is
answered with an error once. It has changed nothing, and is not carried out again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from pa_npu.errors import DataError, InvariantViolation
from pa_npu.service import commands
from pa_npu.service.commands import StartAgain, Trainers, TrainersFailed
from pa_npu.service.log import Accepted, Begun, Finished, Kept
from pa_npu.service.registry import Future, Model, Registry
from pa_npu.service.slots import GRADIENT, MEAN, SQUARE, WEIGHTS
from pa_npu.service.wire import (
    LoadWeights,
    OptimStep,
    Refused,
    read_json,
    write_json,
)

logger = logging.getLogger(__name__)
STATE = [WEIGHTS, MEAN, SQUARE, GRADIENT]
"""The parts of a slot that a state has; snapshots have the weights alone."""
_CHANGING = (
    "create_model",
    "create_loaded",
    "forward_backward",
    "optim_step",
    "load_weights",
    "unload_model",
)
"""The routes that change a slot."""
_MAX_ATTEMPTS = 2
"""So often a request may be under way when processes of the service end. One that is killed for its
need of memory cannot say so; run.restarts, which is 3, must not be used up by it.
"""


class Turns:
    """Carries out requests of all models. write: appends to the log and to the registry."""

    def __init__(
        self,
        registry: Registry,
        trainers: Trainers,
        write: Callable[..., None],
        directory: Path,
        *,
        keep_every: int,
    ) -> None:
        """directory: for files of weights. keep_every: steps between two kept states of a slot."""
        self._registry = registry
        self._trainers = trainers
        self._write = write
        self._directory = directory
        self._keep_every = keep_every
        self._news = asyncio.Event()
        self._last: str | None = None

    def notify(self) -> None:
        """Says that there is a new request, or one model fewer."""
        self._news.set()

    async def recover(self) -> None:
        """Brings every slot to where it was. Raises InvariantViolation if an answer is another one."""
        for model in list(self._registry.models.values()):
            start = 0
            if model.kept is not None:
                await self._load_kept(model, model.kept)
                start = model.kept.seq + 1
            replayed = 0
            for seq in range(start, model.next):
                future = model.futures[seq]
                has_failed = future.answer is not None and future.answer.failed
                if has_failed or future.request.route not in _CHANGING:
                    continue
                answer = await self._carry_out(model, future)
                replayed += 1
                if answer != future.answer:
                    raise InvariantViolation(
                        f"service log: request {seq} of {model.id} has another answer than before; "
                        "the model's files, this software or this machine are not those of the log"
                    )
            logger.info("%s: at request %d, %d carried out again", model.id, model.next, replayed)

    async def _load_kept(self, model: Model, kept: Kept) -> None:
        try:
            await self._trainers.ask(commands.Create(slot=model.id, seed=model.seed))
            await self._trainers.ask(commands.Load(slot=model.id, file=kept.file, optimizer=True))
        except Refused as refusal:
            raise DataError(
                f"service log: the state of {model.id} is not there: {refusal}"
            ) from None

    async def run(self) -> None:
        """Carries out requests until it is cancelled."""
        while True:
            model = self._next_model()
            if model is None:
                self._news.clear()
                if self._next_model() is None:
                    await self._news.wait()
                continue
            future = model.runnable
            assert future is not None, "it was chosen by it"
            answer, must_start_again = await self._answer(model, future)
            is_gone = model.id not in self._registry.models  # its session has ended meanwhile
            if not is_gone:
                self._write(answer)
            if must_start_again:
                raise StartAgain(f"{answer.id}: {answer.error}")
            if is_gone:
                continue
            # a file that was loaded may be gone at the next start
            was_loaded = future.request.route in ("load_weights", "create_loaded")
            if answer.error is None and (was_loaded or model.steps >= self._keep_every):
                await self._keep(model)

    def _next_model(self) -> Model | None:
        """Returns the next model in turn, behind the one that was served last."""
        names = [
            name
            for name, model in self._registry.models.items()
            if model.runnable is not None and not model.is_unloaded
        ]
        if not names:
            return None
        behind = sorted(name for name in names if self._last is None or name > self._last)
        self._last = (behind or sorted(names))[0]
        return self._registry.models[self._last]

    async def _answer(self, model: Model, future: Future) -> tuple[Finished, bool]:
        """Carries a request out for the first time. Returns its answer, and whether the trainers must
        be started again behind it.
        """
        request = future.request
        if future.attempts >= _MAX_ATTEMPTS:
            error = (
                f"{request.route}: processes of the service ended {future.attempts} times while they "
                "carried it out, and it is not tried again; too little memory is the usual reason, "
                "and logs of the trainers say more"
            )
            return Finished(request.id, error=error, failed=True), False
        self._write(Begun(request.id))
        try:
            return await self._carry_out(model, future), False
        except TrainersFailed as failure:
            answer = Finished(request.id, error=f"{request.route}: {failure}", failed=True)
            # of other changes it is not known how far they came
            is_whole = request.route == "forward_backward" or request.route not in _CHANGING
            return answer, failure.are_out_of_step or not is_whole

    async def _carry_out(self, model: Model, future: Future) -> Finished:
        """Returns the answer. Raises TrainersFailed, or as Trainers.ask."""
        request = future.request
        try:
            content = await self._content(model, request)
        except Refused as refusal:
            return Finished(request.id, error=str(refusal))
        is_json = request.route not in ("forward", "forward_backward")
        return Finished(request.id, content, is_json)

    async def _content(self, model: Model, request: Accepted) -> bytes:
        """Returns the answer to a request. Raises Refused."""
        ask, slot, decided = self._trainers.ask, model.id, request.decided
        if request.route == "create_model":
            await ask(commands.Create(slot=slot, seed=model.seed))
            return write_json({"type": "create_model", "model_id": slot})
        if request.route in ("create_loaded", "load_weights"):
            asked = read_json(request.body, LoadWeights)
            if request.route == "create_loaded":
                await ask(commands.Create(slot=slot, seed=model.seed))
            file = str(decided["file"])
            await ask(commands.Load(slot=slot, file=file, optimizer=asked.optimizer))
            return write_json({"type": "load_weights", "path": asked.path, "model_id": slot})
        if request.route in ("forward", "forward_backward"):
            return await ask(commands.Compute(slot=slot, body=request.body))
        if request.route == "optim_step":
            step = read_json(request.body, OptimStep)
            return await ask(commands.Optimize(slot=slot, adam=step.adam_params))
        if request.route == "unload_model":
            await ask(commands.Drop(slot=slot))
            return write_json({"type": "unload_model", "model_id": slot})
        parts = STATE if request.route == "save_weights" else [WEIGHTS]
        await ask(commands.Save(slot=slot, file=str(decided["file"]), parts=parts))
        if "export" in decided:
            directory = str(decided["export"])
            await ask(commands.Export(file=str(decided["file"]), directory=directory))
        answer = {"type": request.route, "path": decided["path"]}
        if "sampling_session" in decided:
            answer = {"type": request.route, "sampling_session_id": decided["sampling_session"]}
        return write_json(answer)

    async def _keep(self, model: Model) -> None:
        """Writes a slot's state into a file, from which the next start goes on."""
        before = model.kept
        seq = model.next - 1
        file = self._directory / "kept" / f"{_file_name(model.id)}-{seq}.safetensors"
        begun = self._registry.begun_files
        begun.add(str(file))
        try:
            await self._trainers.ask(commands.Save(slot=model.id, file=str(file), parts=STATE))
            self._write(Kept(model=model.id, seq=seq, file=str(file)))
        except Refused as refusal:
            logger.warning("the state of %s was not written: %s", model.id, refusal)
            return  # the one before stays, and the next step tries again
        finally:
            begun.discard(str(file))
        if before is not None:
            Path(before.file).unlink(missing_ok=True)


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name)
