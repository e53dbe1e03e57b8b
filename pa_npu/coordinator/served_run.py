"""ServedRun: what a gateway with a port of its own (agent.port) offers beside sessions, for the run's key.

    POST /v1/chat/completions, /v1/completions    a sample of the version that the engines hold,
                                                  which trains nothing; with echo and logprobs also
                                                  the log-probs of given tokens
    GET  /v1/models, /v1/models/policy            the model, and that version
    POST /groups                                  copies of the run's groups, by columns; each task
                                                  gets each group once

Samples are written between two publishes: what is in flight when weights change begins again under
the new ones. Copies are in memory, the newest of them, and end with the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from pa_npu.agents.chat import Chat, ChatAnswer
from pa_npu.agents.gateway import CHAT_FIELDS, TEXT_FIELDS, Gateway, read_json, send_answer
from pa_npu.agents.images import SessionImages
from pa_npu.agents.openai_format import (
    AgentRequest,
    AgentRequestRefused,
    SamplingRules,
    events,
    models,
    named_model,
    read_request,
    whole_answer,
)
from pa_npu.config.schema import Config
from pa_npu.control.tasks import cancel
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.features import Feature
from pa_npu.engines.echo import echo_logprobs
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import NO_TOKENS, Generation, Sampling, Scores, Scoring
from pa_npu.errors import PaNpuError
from pa_npu.samples.attachments import described
from pa_npu.samples.group import IDENTITY, PER_SAMPLE, PER_TOKEN, Group
from pa_npu.samples.seeds import group_seed
from pa_npu.vision.family import read_vision
from pa_npu.vision.images import ShownImage

T = TypeVar("T")
# Beside all iterations of training and evaluation, whose groups have seeds of their own.
_SEED_ITERATION = 2**61
_MOST_GROUPS = 1024
_NO_LOGPROBS: npt.NDArray[np.float32] = np.zeros(0, np.float32)
_MOST_TASKS = 64
_ABOUT = "about"  # identity and texts
_FOLLOWING = ("trained", "written")
"""Columns that follow from others (`Group.trained`, `Group.written`), for trainers outside."""


class TakeGroups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /groups. policy: in order of arrival, or those of the oldest weights first."""

    task: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    columns: tuple[str, ...]
    policy: Literal["order", "age"] = "order"
    max_groups: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


@dataclass(frozen=True, eq=False)
class _Kept:
    row: int
    group: Group
    about: dict[str, Any]

    def column(self, name: str) -> Any:
        if name == _ABOUT:
            return self.about
        if name in (*PER_TOKEN, *_FOLLOWING, *PER_SAMPLE):
            return getattr(self.group, name).tolist()
        for column, values in self.group.columns.items():
            if column.name == name:
                return values.tolist()
        run_columns = ", ".join(column.name for column in self.group.columns)
        known = ", ".join((_ABOUT, *PER_TOKEN, *_FOLLOWING, *PER_SAMPLE)) + (
            f", {run_columns}" if run_columns else ""
        )
        raise AgentRequestRefused(
            f"columns: {name!r:.40} is unknown; there are {known}", param="columns"
        )


@dataclass(eq=False)
class _Task:
    """taken: rows that it has had."""

    asked: tuple[str, ...]
    taken: set[int] = field(default_factory=set)


@dataclass(eq=False, repr=False)
class ServedRun(Feature):
    """The run of one coordinator, as the gateway sees it. sampling: the run's, for what a request
    leaves out.
    """

    config: Config
    pool: EnginePool
    sampling: Sampling
    tokenizer: InitVar[Any]

    def __post_init__(self, tokenizer: Any) -> None:
        self._chat = Chat(self.config, tokenizer)
        self._rows = count()
        self._requests = count()
        self._kept: deque[_Kept] = deque(maxlen=_MOST_GROUPS)
        self._tasks: dict[str, _Task] = {}
        self._arrived = asyncio.Event()
        self._version: int | None = None
        self._holds = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self._admitting = asyncio.Lock()

    @cached_property
    def _placeholder(self) -> int | None:
        """The token that stands for an image; None for a model without."""
        vision = read_vision(self.config.model.path)
        return None if vision is None else vision.image_token

    # the coordinator's side

    @property
    def is_running(self) -> bool:
        """Always true: a request may come at any time."""
        return True

    async def make_way(self, version: int) -> None:
        """Ends all samples in flight; none is written until `engines_hold`."""
        self._holds.clear()
        await cancel(self._running)

    def engines_hold(self, version: int) -> None:
        """Lets samples be written by `version`, which the engines hold."""
        self._version = version
        self._holds.set()

    def delivered(self, group: Group, scored: ScoredGroup) -> None:
        """One of the run's groups goes to those who ask for them, as it goes to the trainers."""
        about = {name: getattr(group, name) for name in IDENTITY}
        about |= {"prompt": scored.prompt.text, "answer": scored.prompt.answer}
        about["responses"] = [sample.text for sample in scored.samples]
        if group.placeholders:
            about["attachments"] = [described(sample.placeholders) for sample in scored.samples]
            # images of a thousand groups would fill the memory
            group = replace(group, placeholders=())
        self._kept.append(_Kept(next(self._rows), group, about))
        self._arrived.set()

    # the others' side

    def routes(self, app: web.Application, gateway: Gateway) -> None:
        """Adds its paths to the gateway's."""

        def guarded(handler: Any) -> Any:
            async def handle(request: web.Request) -> web.StreamResponse:
                gateway.authorise(request)
                answer: web.StreamResponse = await handler(request)
                return answer

            return handle

        app.router.add_get("/v1/models", guarded(self._models))
        app.router.add_get("/v1/models/{model}", guarded(self._model))
        app.router.add_post("/v1/chat/completions", guarded(self._chat_completion))
        app.router.add_post("/v1/completions", guarded(self._completion))
        app.router.add_post("/groups", guarded(self._groups))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models(self._version))

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(named_model(request.match_info["model"], self._version))

    async def _chat_completion(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, CHAT_FIELDS)
        rendered = self._chat.rendered(asked.messages, asked.tools)
        text = rendered.text
        encoded = self._chat.encode(text, begins=True, templated=True)
        session_images = SessionImages(self._chat)
        files = []
        if rendered.images:
            files = await asyncio.to_thread(session_images.read, rendered.images)
        tokens, images = session_images.expanded(text, encoded, rendered.places, files)
        number = next(self._requests)
        written = [
            (
                self._chat.answer(
                    generation,
                    asked.messages,
                    asked.tools,
                    text,
                    asked.stop,
                    f"call_{number}_{place}_",
                ),
                generation,
            )
            for place, generation in enumerate(await self._sample(tokens, asked, number, images))
        ]
        answer = whole_answer(self._chat, f"chatcmpl-{number}", written, tokens, asked)
        return await send_answer(request, answer, _stream(answer, asked))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, TEXT_FIELDS)
        prompts = asked.prompts
        if len(prompts) > 1 and asked.stream:
            raise AgentRequestRefused("stream: one prompt at a time", param="stream")
        whole = [await self._complete(prompt, asked) for prompt in prompts]
        answer = whole[0]
        for further in whole[1:]:
            answer["choices"] += further["choices"]
            answer["weight_version"] = max(answer["weight_version"], further["weight_version"])
            for name, number in further["usage"].items():
                answer["usage"][name] += number
        for number, choice in enumerate(answer["choices"]):
            choice["index"] = number
        return await send_answer(request, answer, _stream(answer, asked))

    async def _complete(self, prompt: str | list[int], asked: AgentRequest) -> dict[str, Any]:
        """Returns the answer to one prompt."""
        tokens = (
            self._chat.encode(prompt, begins=True, templated=False)
            if isinstance(prompt, str)
            else prompt
        )
        if max(tokens, default=0) >= len(self._chat.tokenizer):
            raise AgentRequestRefused(
                f"prompt: token {max(tokens)} is not in the model's vocabulary", param="prompt"
            )
        if self._placeholder in tokens:
            raise AgentRequestRefused(
                f"token {self._placeholder} stands for an image, which this endpoint does not take",
                param="prompt",
            )
        number = next(self._requests)
        scores = await self._score(tokens, asked)
        generations = [Generation(NO_TOKENS, _NO_LOGPROBS, "", "length", self._version)]
        if asked.max_tokens != 0:
            generations = await self._sample(tokens, asked, number)
        written = [
            (ChatAnswer(self._chat.decode_answer(generation, asked.stop)[1], {}, ()), generation)
            for generation in generations
        ]
        answer = whole_answer(self._chat, f"cmpl-{number}", written, tokens, asked)
        if asked.echo:
            for choice, generation in zip(answer["choices"], generations, strict=True):
                self._echo(choice, tokens, generation, scores)
        return answer

    def _echo(
        self,
        choice: dict[str, Any],
        prompt: Sequence[int],
        generation: Generation,
        scores: Scores | None,
    ) -> None:
        """Puts the prompt, and its log-probs where they were asked for, before what was written."""

        def decode(tokens: Sequence[int]) -> str:
            return str(self._chat.tokenizer.decode(list(tokens)))

        choice["text"] = decode(prompt) + choice["text"]
        if scores is None:
            return
        likely = [
            list(zip(numbers, logprobs, strict=False))
            for numbers, logprobs in zip(
                scores.choices[1:].tolist(), scores.choice_logprobs[1:].tolist(), strict=True
            )
        ]
        tokens = [*prompt, *generation.tokens.tolist()]
        logprobs = [*scores.logprobs[1:].tolist(), *generation.logprobs.tolist()]
        choice["logprobs"] = echo_logprobs(decode, tokens, logprobs, likely)

    async def _read(self, request: web.Request, fields: Sequence[str]) -> AgentRequest:
        body = await read_json(request)
        rules = SamplingRules(
            temperature=self.sampling.temperature,
            template_options=self.config.data.template_options,
        )
        return read_request(body, rules=rules, endpoint_fields=fields, free=True)

    async def _score(self, tokens: Sequence[int], asked: AgentRequest) -> Scores | None:
        """Returns the scores of a prompt that is echoed with log-probs; None for all others."""
        if not (asked.echo and asked.logprobs):
            return None
        scoring = Scoring(num_choices=asked.num_logprobs)
        if len(tokens) < 2:  # its one token follows from nothing
            return Scores(
                np.zeros(len(tokens), np.float32),
                np.zeros((len(tokens), 0), np.int32),
                np.zeros((len(tokens), 0), np.float32),
            )
        self._room_behind(tokens)
        array = np.asarray(tokens, np.int32)

        async def score() -> Scores:
            with await self._session(1, len(tokens)) as session:
                return await session.score(array, scoring)

        return await self._by_one_version(score, "scores")

    async def _sample(
        self,
        tokens: Sequence[int],
        asked: AgentRequest,
        number: int,
        images: Sequence[ShownImage] = (),
    ) -> list[Generation]:
        left = self._room_behind(tokens)
        sampling = replace(
            self.sampling,
            max_tokens=min(left, asked.max_tokens or left),
            temperature=self.sampling.temperature
            if asked.temperature is None
            else asked.temperature,
            top_p=asked.top_p,
            stop=asked.stop,
        )
        seed = (
            group_seed(self.config.run.seed, _SEED_ITERATION, number)
            if asked.seed is None
            else asked.seed
        )
        prompt = np.asarray(tokens, np.int32)

        async def write() -> list[Generation]:
            num_tokens = asked.n * (len(prompt) + sampling.max_tokens)
            with await self._session(asked.n, num_tokens) as session:
                return await session.generate(prompt, asked.n, seed, sampling, images)

        return await self._by_one_version(write, f"sample {number}")

    def _room_behind(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens may be written behind these. Raises RequestRefused."""
        longest = self.config.data.max_prompt_tokens + self.sampling.max_tokens
        left = min(longest - len(tokens), self.sampling.max_tokens)
        if not tokens or left < 1:
            line = (
                f"{len(tokens)} tokens; a prompt has at least one, and with its answer at most "
                f"{longest}"
            )
            raise AgentRequestRefused(line, code="context_length_exceeded", param="prompt")
        return left

    async def _by_one_version(self, call: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Does what `call` does, again where weights change meanwhile."""
        while True:
            try:
                await asyncio.wait_for(self._holds.wait(), self.config.deadlines.wait_timeout_s)
            except asyncio.TimeoutError:
                raise AgentRequestRefused(
                    "the engines wait for weights; try later", status=503
                ) from None
            task = asyncio.create_task(call(), name=name)
            self._running.add(task)
            try:
                await asyncio.wait({task})
            finally:
                self._running.discard(task)
                await cancel([task])
            if not task.cancelled():
                try:
                    return task.result()
                except PaNpuError as error:  # a sample for others ends no run
                    raise AgentRequestRefused(str(error), status=503) from None

    async def _session(self, sequences: int, tokens: int) -> GroupSession:
        """Returns a session with room for so many sequences."""
        async with self._admitting:
            lease = await self.pool.admit(
                sequences, tokens, self._window, self.config.deadlines.engine_wait_s
            )
        return GroupSession(
            self.pool,
            lease,
            self._window,
            deadline_s=self.config.rollout.request_timeout_s,
            again_deadline_s=self.config.deadlines.engine_wait_s,
            label="a sample for another program",
        )

    def _window(self, _: str) -> int:
        return self.config.rollout.max_num_seqs

    async def _groups(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.convert(await read_json(request), TakeGroups)
        except msgspec.ValidationError as error:
            raise AgentRequestRefused(str(error)) from None
        if asked.task not in self._tasks and len(self._tasks) >= _MOST_TASKS:
            raise AgentRequestRefused(
                f"task: there are {_MOST_TASKS} already; use one of them", param="task"
            )
        task = self._tasks.get(asked.task, _Task(asked.columns))
        if task.asked != asked.columns:
            raise AgentRequestRefused(
                f"task: {asked.task} takes {list(task.asked)}; give another set another name",
                param="task",
            )
        end_s = asyncio.get_running_loop().time() + asked.wait_s
        while not (new := [kept for kept in self._kept if kept.row not in task.taken]):
            self._arrived.clear()
            try:
                await asyncio.wait_for(
                    self._arrived.wait(), end_s - asyncio.get_running_loop().time()
                )
            except asyncio.TimeoutError:
                break
        if asked.policy == "age":
            new.sort(key=lambda kept: (kept.group.version_range[0], kept.row))
        copies = [
            {"id": kept.row, **{name: kept.column(name) for name in asked.columns}}
            for kept in new[: asked.max_groups]
        ]
        task.taken = {kept.row for kept in self._kept if kept.row in task.taken} | {
            copy["id"] for copy in copies
        }
        self._tasks[asked.task] = task
        body = await asyncio.to_thread(msgspec.json.encode, {"groups": copies})
        return web.Response(body=body, content_type="application/json")


def _stream(answer: dict[str, Any], asked: AgentRequest) -> Iterable[bytes] | None:
    return events(answer, asked.usage) if asked.stream else None
