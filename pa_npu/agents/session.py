"""A session: one attempt of an agent at a task, as the gateway and the environment see it.

    open ──requests, rewards──> limits, failures ──> ended, with an outcome
    outcome   done      the program ended, or the agent reported that its task is done
              turns     the agent asked for more turns than environment.max_turns
              tokens    the agent's last request did not fit any more
              time      environment.timeout_s passed since an agent got the task
              output    the program wrote more than agent.output_kib
              failed    the program ended with an error

The seed of an answer follows from the session's seed and the request's tokens, never from the time
or the order of requests; equal requests are distinguished by their number. A deterministic agent
therefore repeats its session exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.agents.chat import Chat, ChatAnswer
from pa_npu.agents.images import SessionImages
from pa_npu.agents.openai_format import AgentRequest, AgentRequestRefused, SamplingRules
from pa_npu.agents.tree import SessionTree, TurnNode
from pa_npu.control.tasks import cancel
from pa_npu.data.messages import is_image_part
from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import Generate
from pa_npu.errors import PaNpuError
from pa_npu.rewards.values import NotAReward, as_reward
from pa_npu.vision.images import ShownImage

_LONGEST_TOKEN = 64  # characters
# A body may have so many bytes for each token of a branch, and so many for everything else.
_BYTES_PER_TOKEN = 128
_OTHER_BYTES = 2**16
_LONGEST_TURN_NUMBER = 9  # digits


@dataclass(frozen=True)
class SessionLimits:
    """The limits of a session.

    turns: the policy's, in all branches.
    prompt: tokens of a branch's first request.
    response: tokens of a branch behind its first request.
    """

    turns: int
    prompt: int
    response: int

    @property
    def branch(self) -> int:
        """Tokens of a whole branch."""
        return self.prompt + self.response


@dataclass(frozen=True, eq=False)
class AnsweredTurn:
    """An answered request.

    prompt: int32 [P], the tokens that the policy was shown.
    """

    node: TurnNode
    answer: ChatAnswer
    written: Generation
    prompt: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Request:
    """A request as the policy is shown it: context behind an answered one.

    context, text, images: as in TurnNode. rendered: the whole request as text.
    """

    parent: TurnNode
    context: npt.NDArray[np.int32]
    text: str
    rendered: str
    images: tuple[ShownImage, ...] = ()


@dataclass(eq=False)
class Session:
    """One attempt at a task.

    number: of the attempt in its group; seeds follow from it.
    task: the JSON object that the agent gets.
    generate: the group's.
    failure: an error of the run that ended the session.
    was_lost: whoever worked at it has gone, through no fault of the agent.
    as_sampled: the fields of its requests that were served as the run samples all the same.
    conversations: the messages up to each answer that a later request may continue by its id.
    """

    id: str
    number: int
    task: dict[str, Any]
    generate: Generate
    chat: Chat
    limits: SessionLimits
    rules: SamplingRules = field(default_factory=SamplingRules)
    tree: SessionTree = field(default_factory=SessionTree)
    outcome: str | None = None
    reward: float | None = None
    failure: PaNpuError | None = None
    was_lost: bool = False
    as_sampled: set[str] = field(default_factory=set)
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _images: SessionImages = field(init=False)
    _repeats: dict[bytes, set[int]] = field(default_factory=dict)
    _turns: int = 0
    _was_refused: bool = False
    _was_parallel: bool = False
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._images = SessionImages(self.chat)

    @property
    def is_rewarded(self) -> bool:
        """Returns whether the agent has given a reward, to the session or to a turn."""
        return self.reward is not None or any(node.reward is not None for node in self.tree.nodes)

    @property
    def last_leaf(self) -> TurnNode:
        """The leaf of the session's last branch.

        If requests ran in parallel, chance decides which ends last. The last branch is then the one
        with the longest last request.
        """
        return self.tree.longest_leaf if self._was_parallel else self.tree.nodes[-1]

    @property
    def is_done(self) -> bool:
        """Returns whether the agent has brought the session to an end."""
        return self.outcome not in (None, "time", "failed")

    async def ended(self) -> None:
        """Waits until the session has an outcome, has failed or was lost."""
        await self._ended.wait()

    def end(self, outcome: str) -> None:
        """Ends the session; only the first outcome counts.

        `done` becomes `tokens` if the last request was refused for its length.
        """
        if self.outcome is None:
            self.outcome = "tokens" if outcome == "done" and self._was_refused else outcome
        self._ended.set()

    def finish(self, *, failed: bool = False) -> None:
        """Ends the session because its agent reported that its task is done, or has failed.

        A task that failed because the last request was too long has ended at that limit.
        """
        self.end("failed" if failed and not self._was_refused else "done")
        self._finished.set()

    async def finished(self, limit_s: float) -> None:
        """Waits until the agent has reported its end, or can no longer do so; at most limit_s.

        After a limit has ended its session, an agent may still give the reward of its work.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._finished.wait(), limit_s)

    def lose(self) -> None:
        """Ends the session as lost, so that it begins again."""
        self.was_lost = True
        self._ended.set()
        self._finished.set()

    async def close(self) -> None:
        """Ends the session and cancels its requests."""
        self.end("failed")
        await cancel(self._running)

    def give_reward(self, reward: Any, completion: str | None) -> None:
        """Sets the reward of the turn that a completion's id names; None sets the session's.

        Raises RequestRefused for a reward that is not a finite number, or an unknown id.
        """
        if isinstance(reward, bool):
            raise AgentRequestRefused(f"reward: {reward} must be a finite number", param="reward")
        try:
            value = as_reward(reward)
        except NotAReward as error:
            raise AgentRequestRefused(
                f"reward: must be a finite number; {error}", param="reward"
            ) from None
        if completion is None:
            self.reward = value
            return
        _, session_id, number = ["", "", *completion.split("-")][-3:]
        is_number = number.isascii() and number.isdecimal() and len(number) <= _LONGEST_TURN_NUMBER
        if session_id != self.id or not is_number or not 0 < int(number) < len(self.tree.nodes):
            raise AgentRequestRefused(
                f"turn: {completion!r:.60} is no id of a completion of this session", param="turn"
            )
        self.tree.nodes[int(number)].reward = value

    def check_body(self, num_bytes: int) -> None:
        """Raises RequestRefused for a body that is longer than any branch, before it is parsed. A
        body with images may be as long as the gateway takes.
        """
        if self._images.are_read:
            return
        if num_bytes > _OTHER_BYTES + _BYTES_PER_TOKEN * self.limits.branch:
            raise self._too_long(num_bytes // _BYTES_PER_TOKEN, "about")

    async def chat_turn(self, request: AgentRequest) -> AnsweredTurn:
        """Answers a chat request. Raises RequestRefused."""
        messages = request.messages
        tools = request.tools
        asked = await self._chat_request(request)
        number, prompt, written = await self._generate(asked, request)
        ids = f"call_{hashlib.blake2b(number.to_bytes(8, 'little'), digest_size=4).hexdigest()}"
        answer = self.chat.answer(written, messages, tools, asked.rendered, request.stop, ids)
        node = self._add(asked, written, answer)
        return AnsweredTurn(node, answer, written, prompt)

    async def _chat_request(self, request: AgentRequest) -> _Request:
        """Returns the context that a chat request adds. Raises RequestRefused."""
        messages = request.messages
        tools = request.tools
        self._check_size(_num_characters([messages, tools], self._max_characters))
        rendered = self.chat.rendered(messages, tools)
        images = []
        if rendered.images:
            images = await asyncio.to_thread(self._images.read, rendered.images)
        digests = [file.digest for file, _ in images]
        parent, begin = self.tree.find(
            rendered.text, list(zip(rendered.places, digests, strict=True))
        )
        text = rendered.text[begin:]
        tokens = await self._encode(text, parent, templated=True)
        new = [number for number, place in enumerate(rendered.places) if place >= begin]
        places = [rendered.places[number] - begin for number in new]
        whole, shown = self._images.expanded(
            text, tokens, places, [images[number] for number in new]
        )
        context = np.asarray(whole, np.int32)
        return _Request(parent, context, text, rendered.text, shown)

    async def completion_turn(self, request: AgentRequest) -> AnsweredTurn:
        """Answers a completions request, of a text or of token ids. Raises RequestRefused."""
        asked = request.prompt
        if isinstance(asked, str):
            parent, begin = self.tree.find(asked)
            context_text = asked[begin:]
            encoded = await self._encode(context_text, parent, templated=False)
            context = np.asarray(encoded, np.int32)
        else:
            tokens = self._token_array(asked)
            parent, begin = self.tree.find_tokens(tokens)
            context = tokens[begin:]
            context_text = str(self.chat.tokenizer.decode(context.tolist()))
        if self.chat.has_placeholder(context.tolist()):
            raise AgentRequestRefused(
                "prompt: it has the placeholder of an image, which a prompt cannot hold; send "
                "messages to /v1/chat/completions",
                param="prompt",
            )
        continued = _Request(parent, context, context_text, context_text)
        _, prompt, written = await self._generate(continued, request)
        raw, text = self.chat.decode_answer(written, request.stop)
        answer = ChatAnswer(text, {}, (raw,))
        node = self._add(continued, written, answer)
        return AnsweredTurn(node, answer, written, prompt)

    async def count_tokens(self, request: AgentRequest) -> int:
        """Returns how many tokens a chat request would show to the policy. Raises RequestRefused."""
        asked = await self._chat_request(request)
        return len(self.tree.tokens(asked.parent)) + len(asked.context)

    def _add(self, asked: _Request, written: Generation, answer: ChatAnswer) -> TurnNode:
        if self.outcome is not None:
            raise self._has_ended()
        return self.tree.add(
            asked.parent, asked.context, asked.text, written, answer.shown, asked.images
        )

    async def _encode(self, text: str, parent: TurnNode, *, templated: bool) -> list[int]:
        self._check_size(len(text))
        max_tokens = self.limits.branch
        tokens = await self.chat.encode_in_background(
            text, begins=parent is self.tree.root, templated=templated, max_tokens=max_tokens
        )
        if tokens is None:
            raise self._too_long(max_tokens)
        return tokens

    def _check_size(self, num_characters: int) -> None:
        """Raises RequestRefused for a request that has certainly too many tokens.

        Rendering and tokenising such a request would take long.
        """
        if num_characters > self._max_characters:
            raise self._too_long(num_characters // _LONGEST_TOKEN, "about")

    @property
    def _max_characters(self) -> int:
        return _LONGEST_TOKEN * self.limits.branch

    def _token_array(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """Returns a request's token ids as an array. Raises RequestRefused."""
        if len(tokens) > self.limits.branch:
            raise self._too_long(len(tokens))
        if max(tokens) >= len(self.chat.tokenizer):
            raise AgentRequestRefused(
                f"prompt: token {max(tokens)} is not in the model's vocabulary", param="prompt"
            )
        return np.asarray(tokens, np.int32)

    async def _generate(
        self, asked: _Request, request: AgentRequest
    ) -> tuple[int, npt.NDArray[np.int32], Generation]:
        """Lets the policy answer a request.

        Returns the number from which the answer's seed follows, the tokens that the policy was
        shown, and its answer.
        """
        if self.outcome is not None:
            raise self._has_ended()
        if self._turns >= self.limits.turns:
            self.end("turns")
            raise self._has_ended()
        before = self.tree.tokens(asked.parent)
        tokens = np.concatenate([before, asked.context], dtype=np.int32)
        left = self._tokens_left(asked.parent, asked.context, tokens)
        images = self.tree.images(asked.parent)
        images += [image.moved(len(before)) for image in asked.images]
        self._turns += 1
        self.as_sampled.update(request.as_sampled)
        self._was_refused = False
        self._was_parallel |= bool(self._running)

        digests = b"".join(image.file.digest for image in images)
        identity = hashlib.blake2b(tokens.tobytes() + digests, digest_size=16).digest()
        repeats = self._repeats.setdefault(identity, set())
        repeat = next(number for number in count() if number not in repeats)
        repeats.add(repeat)
        digest = hashlib.blake2b(identity + repeat.to_bytes(4, "little"), digest_size=8).digest()
        # number 0 is a group's first turn, whose samples come from one request
        number = 1 + (int.from_bytes(digest, "little") >> 2)
        task = asyncio.ensure_future(
            self.generate(
                tokens,
                sample=self.number,
                turn=number,
                max_tokens=min(left, request.max_tokens or left),
                stop=request.stop,
                images=images,
            )
        )
        self._running.add(task)
        try:
            (written,) = await task
        except asyncio.CancelledError:
            # the client has gone: if it repeats the request, it gets the same answer
            repeats.discard(repeat)
            self._turns -= 1
            await cancel([task])
            if self.outcome is not None:
                raise self._has_ended() from None
            raise
        except PaNpuError as error:
            self.failure = error
            self._ended.set()
            raise AgentRequestRefused(str(error), status=500) from None
        finally:
            self._running.discard(task)
        return number, tokens, written

    def _tokens_left(
        self, parent: TurnNode, context: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> int:
        """Returns how many tokens the policy may write.

        Raises RequestRefused if there are none; the agent may then compact its context.
        """
        path = parent.path
        first = len(path[0].context) if path else len(context)
        left = self.limits.response - (len(tokens) - first)
        if not len(tokens):
            raise AgentRequestRefused("the prompt has no tokens; give it some")
        if first > self.limits.prompt or left < 1:
            raise self._too_long(len(tokens))
        return left

    def _too_long(self, num_tokens: int, about: str = "") -> AgentRequestRefused:
        self._was_refused = True
        limits = self.limits
        number = f"{about} {num_tokens}".lstrip()
        return AgentRequestRefused(
            f"{number} tokens do not fit: a branch may begin with {limits.prompt} "
            f"(data.max_prompt_tokens) and have {limits.response} behind that "
            "(rollout.max_response_tokens)",
            code="context_length_exceeded",
            param="messages",
        )

    def _has_ended(self) -> AgentRequestRefused:
        return AgentRequestRefused(f"this session has ended: {self.outcome}", code="session_ended")


def _num_characters(value: Any, limit: int) -> int:
    """Counts the characters of all texts in a JSON value, and one for each other item in it. An image
    is one item: how many tokens it has follows from its size.

    Stops counting once the limit is exceeded.
    """
    number = 0
    left = [value]
    while left and number + len(left) <= limit:
        item = left.pop()
        number += len(item) if isinstance(item, str) else 1
        if is_image_part(item):
            continue
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
    return number + len(left)
