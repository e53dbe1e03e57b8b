"""RolloutService: what other programs ask of a running coordinator, without the HTTP around it (http_api.py).

    prompts   are answered by the run's engines, environment and rewards, beside the run's own; their groups wait for tasks
    groups    of these prompts, or copies of the run's own; each task gets each group once, and the columns that it names
    work      the run's own prompts, written elsewhere (environment.name=clients)

Prompts are answered between two publishes: what is in flight when weights change begins again under the new ones, so a group is of
one version. Waiting prompts and groups are in memory and end with the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.config.schema import Config
from pa_npu.control.tasks import cancel
from pa_npu.coordinator.episode import GroupGenerate, Rewards, ScoredGroup, run_episode, score
from pa_npu.coordinator.service.messages import PutPrompts, TakeGroups, WrittenSample
from pa_npu.coordinator.service.pause import Pause
from pa_npu.coordinator.variants import Variant
from pa_npu.data.prompts import Prompt, load_prompts
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.clients import FromClients, Work
from pa_npu.environments.protocol import Environment
from pa_npu.errors import DataError, PaNpuError, UserError
from pa_npu.samples.data_module import DataModule, Task
from pa_npu.samples.group import IDENTITY, PER_SAMPLE, PER_TOKEN, Group
from pa_npu.samples.seeds import group_seed
from pa_npu.samples.types import Sample, SampleBuilder, group_lengths

logger = logging.getLogger(__name__)

# Beside all iterations of training and evaluation, whose groups have seeds of their own.
_SEED_ITERATION = 2**61
_MOST_WAITING, _MOST_GROUPS, _MOST_TASKS = 4096, 1024, 64
_ABOUT = "about"  # identity and texts, JSON
COLUMNS = (_ABOUT, *PER_TOKEN, *PER_SAMPLE)
_ATTEMPTS = 3  # of a prompt, where engines fail


@dataclass(frozen=True)
class Asked:
    """A client's prompt."""

    row: int
    prompt: Prompt
    samples: int
    attempts: int = 0


class RolloutService(Variant):
    """One coordinator's. tokenizer: renders prompts as those of datasets. work: what training a group costs, as in Producer."""

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        environment: Environment,
        rewards: Rewards,
        sampling: Sampling,
        tokenizer: Any,
        work: Callable[[int, Sequence[int]], float],
    ) -> None:
        self._config = config
        self._pool = pool
        self._environment = environment
        self._rewards = rewards
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._work = work
        self.pause = Pause(config.trainer.wait_timeout_s / 2)
        self._rows = count()
        self._waiting: deque[Asked] = deque()
        self._running: dict[asyncio.Task[None], Asked] = {}
        self._groups = {"prompts": DataModule(COLUMNS), "run": DataModule(COLUMNS)}
        self._lost = {"prompts": 0, "run": 0, "failed": 0}
        self._changed = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None
        self._version: int | None = None
        self._iteration: int | None = None

    # the coordinator's side

    def published(self, version: int) -> None:
        """Engines hold `version`: prompts are answered from here on."""
        self._version = version
        self._dispatcher = asyncio.create_task(self._dispatch(), name=f"prompts of clients by version {version}")

    async def quiet(self) -> None:
        """Engines write nothing for clients until `published`; what was in flight waits again, in front."""
        if self._dispatcher is not None:
            await cancel([self._dispatcher])
            self._dispatcher = None
        begun = sorted(self._running.values(), key=lambda asked: -asked.row)
        tasks, self._running = list(self._running), {}
        await cancel(tasks)
        self._waiting.extendleft(begun)

    async def before_admit(self) -> None:
        """The run's own groups wait while a client has paused it."""
        await self.pause.passed()

    def delivered(self, group: Group, scored: ScoredGroup) -> None:
        """One of the run's own groups goes to those who asked for them, as it goes to the trainers."""
        self._iteration = group.iteration
        if self._groups["run"].tasks:
            self._keep("run", next(self._rows), group, scored)

    # the clients' side

    def state(self) -> dict[str, Any]:
        clients = self._environment.state if isinstance(self._environment, FromClients) else None
        return {
            "weights_version": self._version,
            "iteration": self._iteration,
            "iterations": self._config.schedule.iterations,
            "paused_s": self.pause.left_s,
            "engines": len(self._pool.engines),
            "prompts": {
                "waiting": len(self._waiting),
                "generating": len(self._running),
                "failed": self._lost["failed"],
            },
            "groups": {name: {**rows.state(), "lost": self._lost[name]} for name, rows in self._groups.items()},
            "work": clients,
        }

    def put_prompts(self, asked: PutPrompts) -> list[int]:
        """Their rows, in order. Raises UserError for what is no prompt, and when too many wait."""
        if isinstance(self._environment, FromClients):
            raise UserError("prompts: with environment.name=clients the engines are the clients'; take work instead")
        if len(self._waiting) + len(asked.prompts) > _MOST_WAITING:
            raise UserError(
                f"prompts: {len(self._waiting)} wait already, and at most {_MOST_WAITING} may; take groups first"
            )
        prompts = self._rendered(asked.prompts)
        size = asked.samples or self._config.rollout.responses_per_prompt
        found = [Asked(next(self._rows), prompt, size) for prompt in prompts]
        self._waiting.extend(found)
        self._changed.set()
        return [one.row for one in found]

    async def take_groups(self, asked: TakeGroups) -> list[dict[str, Any]]:
        """Up to `most` groups that the task has not had, after at most wait_s. Raises PaNpuError."""
        rows = self._groups[asked.source]
        if asked.task not in rows.tasks and len(rows.tasks) >= _MOST_TASKS:
            raise UserError(f"task: there are {_MOST_TASKS} already; use one of them")
        rows.add_task(Task(asked.task, asked.columns, asked.policy))
        end_s = time.monotonic() + asked.wait_s
        while not rows.ready(asked.task) and (left_s := end_s - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except asyncio.TimeoutError:
                break
        taken = rows.take(asked.task, asked.most, asked.consumer)
        return [
            {"id": row, **{name: _plain(name, value) for name, value in cells.items()}}
            for row, cells in zip(taken, rows.fetch(asked.task, taken), strict=True)
        ]

    async def take_work(self, most: int, wait_s: float) -> dict[str, Any]:
        """Prompts of the run for a client to write samples of, and by which version."""
        work = await self._clients().take(most, wait_s)
        return {"version": self._version, "work": [self._described(one) for one in work]}

    def put_samples(self, number: int, written: Sequence[WrittenSample]) -> None:
        """What a client has written. Raises UserError, and the work still waits for its samples then."""
        clients = self._clients()
        work = clients.find(number)
        clients.answer(number, [self._sample(work, one, place) for place, one in enumerate(written)])

    def give_back(self, number: int) -> None:
        """A client will not write these samples."""
        self._clients().give_back(number)

    def _clients(self) -> FromClients:
        if not isinstance(self._environment, FromClients):
            raise UserError(
                "work: this run's own engines write its samples; set environment.name=clients to do it elsewhere"
            )
        return self._environment

    def _described(self, work: Work) -> dict[str, Any]:
        return {
            "id": work.number,
            "prompt_id": work.prompt.prompt_id,
            "tokens": work.prompt.tokens.tolist(),
            "text": work.prompt.text,
            "samples": work.num_samples,
            "max_tokens": self._sampling.max_tokens,
            "temperature": self._sampling.temperature,
        }

    def _sample(self, work: Work, written: WrittenSample, place: int) -> Sample:
        what = f"work {work.number}, sample {place}"
        if written.version != self._version:
            raise UserError(
                f"{what}: version {written.version} wrote it, but version {self._version} is trained; write it again"
            )
        if len(written.logprobs) != len(written.tokens):
            raise UserError(
                f"{what}: {len(written.logprobs)} log-probs for {len(written.tokens)} tokens; give one each"
            )
        if len(written.tokens) > self._sampling.max_tokens:
            raise UserError(
                f"{what}: {len(written.tokens)} tokens; rollout.max_response_tokens = {self._sampling.max_tokens}"
            )
        if max(written.tokens) >= len(self._tokenizer):
            raise UserError(
                f"{what}: token {max(written.tokens)} is outside of the vocabulary of {len(self._tokenizer)}"
            )
        logprobs = np.asarray(written.logprobs, np.float32)
        if not np.isfinite(logprobs).all() or (logprobs > 0).any():
            raise UserError(f"{what}: log-probs must be finite and at most 0")
        if written.reward is not None and not np.isfinite(written.reward):
            raise UserError(f"{what}: reward must be finite")
        sample = SampleBuilder(work.prompt.tokens)
        sample.write(np.asarray(written.tokens, np.int32), logprobs, written.version)
        return sample.finish(written.finished, written.text, written.reward)

    def _rendered(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Prompt]:
        """As a dataset's, by the code that reads datasets."""
        with tempfile.TemporaryDirectory(prefix="pa_npu-") as directory:
            file = Path(directory) / "prompts"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            try:
                data = self._config.data.model_copy(update={"max_test_rows": None})
                prompts = load_prompts(str(file), self._tokenizer, data, "prompts")
            except DataError as error:
                raise UserError(str(error).replace(str(file), "prompts")) from None
        if len(prompts) != len(rows):
            raise UserError(f"prompts: {len(rows) - len(prompts)} are longer than data.max_prompt_tokens; shorten them")
        return prompts

    async def _dispatch(self) -> None:
        """Prompts to engines as these have room, until cancelled."""
        while True:
            await self.pause.passed()
            if not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            asked = self._waiting[0]
            tokens = asked.samples * (len(asked.prompt.tokens) + self._sampling.max_tokens)
            try:
                lease = await self._pool.admit(asked.samples, tokens, self._window, self._config.engine_wait_s)
            except PaNpuError as error:  # the run's own admission meets the same, and ends it if need be
                logger.warning("prompts of clients wait for the next weights: %s", error)
                return
            self._waiting.popleft()
            session = self._pool.session(
                lease,
                self._window,
                deadline_s=self._config.rollout.request_timeout_s,
                again_deadline_s=self._config.engine_wait_s,
                what=f"prompt {asked.row} of a client",
            )
            task = asyncio.create_task(self._answer(asked, session), name=f"prompt {asked.row} of a client")
            self._running[task] = asked
            task.add_done_callback(lambda done: self._running.pop(done, None))

    async def _answer(self, asked: Asked, session: Any) -> None:
        seed = group_seed(self._config.run.seed, _SEED_ITERATION, asked.row)
        try:
            with session:
                generate = GroupGenerate(session, seed, self._sampling)
                samples = await run_episode(self._environment, asked.prompt, asked.samples, generate)
            scored = await score(self._rewards, asked.prompt, samples)
        except PaNpuError as error:  # a client's prompt ends no run
            logger.warning("prompt %d of a client: %s", asked.row, error)
            if asked.attempts + 1 < _ATTEMPTS:
                self._waiting.append(Asked(asked.row, asked.prompt, asked.samples, asked.attempts + 1))
            else:
                self._lost["failed"] += 1
            self._changed.set()
            return
        kind = self._config.algorithm.advantage
        advantages = group_advantages(scored.rewards, "centred" if kind == "batch-std" else kind)
        group = scored.group(self._config.run.seed, self._version or 0, 0, advantages)
        self._keep("prompts", asked.row, group, scored)

    def _keep(self, source: str, row: int, group: Group, scored: ScoredGroup) -> None:
        rows = self._groups[source]
        while len(rows.rows) >= _MOST_GROUPS:
            rows.drop(rows.rows[0])
            self._lost[source] += 1
        about = {
            **{name: getattr(group, name) for name in IDENTITY},
            "prompt": scored.prompt.text,
            "answer": scored.prompt.answer,
            "responses": [sample.text for sample in scored.samples],
        }
        cells = {name: getattr(group, name) for name in (*PER_TOKEN, *PER_SAMPLE)}
        cells[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        rows.write(row, cells, cost=self._work(*group_lengths(scored.samples)), age=float(group.version_range[0]))
        self._changed.set()

    def _window(self, _: str) -> int:
        return self._config.rollout.max_num_seqs


def _plain(name: str, value: np.ndarray) -> Any:
    return json.loads(value.tobytes()) if name == _ABOUT else value.tolist()
