"""A session: one attempt of an agent at a task, as the gateway and the environment see it; and those that are open.

    open ──requests, rewards──> limits, failures ──> ended, with an outcome
    outcome   done      the program ended, or said that it has
              turns     it asked for more turns than environment.max_turns
              tokens    the last thing it asked for did not fit any more
              time      environment.timeout_s passed since an agent had it
              output    it wrote more than agent.output_kib
              failed    the program ended with an error

What a request samples follows from the session's seed and the request's tokens, never from the time
or the order in which requests come; equal requests are told apart by their number. So a
deterministic agent gives the same session again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.agents.chat import Answer, Chat
from pa_npu.agents.openai_format import Asked, Refused
from pa_npu.agents.tree import Node, SessionTree
from pa_npu.control.tasks import cancel
from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import Generate
from pa_npu.errors import PaNpuError
from pa_npu.rewards.values import NotAReward, as_reward

_LONGEST_TOKEN = 64  # characters
# A body's largest size: so much for each token of a branch, and for what is no text of it.
_BYTES_OF_TOKEN, _OTHER_BYTES = 128, 2**16
_LONGEST_TURN_NUMBER = 9  # digits


@dataclass(frozen=True)
class Limits:
    """turns: of the policy, in all branches. prompt: tokens of a branch's first request. response:
    behind that, in a branch.
    """

    turns: int
    prompt: int
    response: int


@dataclass(frozen=True, eq=False)
class Turn:
    """An answered request. prompt_tokens: all that the policy was shown."""

    node: Node
    answer: Answer
    written: Generation
    prompt_tokens: int


@dataclass(eq=False)
class Session:
    """number: of the attempt in its group, from which its seeds follow. generate: the group's.
    task: what the agent is told.
    """

    id: str
    number: int
    task: dict[str, Any]
    generate: Generate
    chat: Chat
    limits: Limits
    tree: SessionTree = field(default_factory=SessionTree)
    outcome: str | None = None
    reward: float | None = None
    failure: PaNpuError | None = None
    was_lost: bool = False
    _asked: dict[bytes, set[int]] = field(default_factory=dict)
    _turns: int = 0
    _was_refused: bool = False
    _was_parallel: bool = False
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_rewarded(self) -> bool:
        """Whether the agent has given a reward, to the session or to a turn."""
        return self.reward is not None or any(node.reward is not None for node in self.tree.nodes)

    @property
    def last_leaf(self) -> Node:
        """The branch that was written last; where requests ran side by side, which end by chance,
        the one that was shown most.
        """
        return self.tree.most_shown if self._was_parallel else self.tree.nodes[-1]

    @property
    def is_done(self) -> bool:
        """Whether its agent has brought it to an end."""
        return self.outcome not in (None, "time", "failed")

    async def ended(self) -> None:
        """Returns when the session has an outcome, has failed or was lost."""
        await self._ended.wait()

    def end(self, outcome: str) -> None:
        """The first outcome stays.

        One that was refused for its length at the last ends with that instead of being done.
        """
        if self.outcome is None:
            self.outcome = "tokens" if outcome == "done" and self._was_refused else outcome
        self._ended.set()

    def finish(self) -> None:
        """The agent says that it has done its task, and asks for nothing more."""
        self.end("done")
        self._finished.set()

    async def finished(self, limit_s: float) -> None:
        """Returns when the agent has said so, or can no more; after limit_s in any case.

        An agent whose session has reached a limit may still give the reward of what it has done.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._finished.wait(), limit_s)

    def lose(self) -> None:
        """Nobody is at it any more, through no fault of the agent: it begins again."""
        self.was_lost = True
        self._ended.set()
        self._finished.set()

    async def close(self) -> None:
        """End it and what is under way in it."""
        self.end("failed")
        await cancel(self._running)

    def give_reward(self, reward: Any, completion: str | None) -> None:
        """The session's reward, or that of the turn that a completion's id names.

        Raises Refused.
        """
        if isinstance(reward, bool):
            raise Refused(f"reward: {reward} must be a finite number", param="reward")
        try:
            value = as_reward(reward)
        except NotAReward as error:
            raise Refused(f"reward: must be a finite number; {error}", param="reward") from None
        if completion is None:
            self.reward = value
            return
        _, session_id, place = ["", "", *completion.split("-")][-3:]
        is_number = place.isascii() and place.isdecimal() and len(place) <= _LONGEST_TURN_NUMBER
        if session_id != self.id or not is_number or not 0 < int(place) < len(self.tree.nodes):
            raise Refused(
                f"turn: {completion!r:.60} is no id of a completion of this session", param="turn"
            )
        self.tree.nodes[int(place)].reward = value

    def check_body(self, num_bytes: int) -> None:
        """Refuses a request that is longer than what a branch may hold, before it is parsed."""
        tokens = self.limits.prompt + self.limits.response
        if num_bytes > _OTHER_BYTES + _BYTES_OF_TOKEN * tokens:
            raise self._too_long(num_bytes // _BYTES_OF_TOKEN, "about")

    async def chat_turn(self, asked: Asked) -> Turn:
        """Answers a chat request. Raises Refused."""
        messages, tools = asked.messages, asked.tools
        self._check_size(_num_characters([messages, tools], self._most_characters))
        text = self.chat.render(messages, tools)
        parent, begin = self.tree.find(text)
        context = await self._encode(text[begin:], parent, templated=True)
        number, prompt_tokens, written = await self._write(parent, context, asked)
        ids = f"call_{hashlib.blake2b(number.to_bytes(8, 'little'), digest_size=4).hexdigest()}"
        answer = self.chat.answer(written, messages, tools, text, asked.stop, ids)
        return Turn(
            self._add(parent, context, text[begin:], written, answer),
            answer,
            written,
            prompt_tokens,
        )

    async def completion_turn(self, asked: Asked) -> Turn:
        """Answers a completions request, of a text or of token ids. Raises Refused."""
        prompt = asked.prompt
        if isinstance(prompt, str):
            parent, begin = self.tree.find(prompt)
            context_text = prompt[begin:]
            context = await self._encode(context_text, parent, templated=False)
        else:
            tokens = self._checked(prompt)
            parent, begin = self.tree.find_tokens(tokens)
            context = tokens[begin:]
            context_text = str(self.chat.tokenizer.decode(context.tolist()))
        _, prompt_tokens, written = await self._write(parent, context, asked)
        raw, text = self.chat.text_of(written, asked.stop)
        answer = Answer(text, {}, (raw,))
        return Turn(
            self._add(parent, context, context_text, written, answer),
            answer,
            written,
            prompt_tokens,
        )

    def _add(
        self,
        parent: Node,
        context: npt.NDArray[np.int32],
        text: str,
        written: Generation,
        answer: Answer,
    ) -> Node:
        if self.outcome is not None:
            raise self._over()
        return self.tree.add(parent, context, text, written, answer.shown)

    async def _encode(self, text: str, parent: Node, *, templated: bool) -> npt.NDArray[np.int32]:
        self._check_size(len(text))
        begins = parent is self.tree.root
        most = self.limits.prompt + self.limits.response
        tokens = await self.chat.encode_aside(
            text, begins=begins, templated=templated, max_tokens=most
        )
        if tokens is None:
            raise self._too_long(most)
        return np.asarray(tokens, np.int32)

    def _check_size(self, num_characters: int) -> None:
        """Refuses what has more tokens than any limit before it is rendered or tokenised, which
        would take long.
        """
        if num_characters > self._most_characters:
            raise self._too_long(num_characters // _LONGEST_TOKEN, "about")

    @property
    def _most_characters(self) -> int:
        return _LONGEST_TOKEN * (self.limits.prompt + self.limits.response)

    def _checked(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        if len(tokens) > self.limits.prompt + self.limits.response:
            raise self._too_long(len(tokens))
        if max(tokens) >= len(self.chat.tokenizer):
            raise Refused(f"prompt: token {max(tokens)} is none of the model's", param="prompt")
        return np.asarray(tokens, np.int32)

    async def _write(
        self, parent: Node, context: npt.NDArray[np.int32], asked: Asked
    ) -> tuple[int, int, Generation]:
        """The number that the answer's seed follows from, the tokens that the policy was shown, and
        its answer.
        """
        if self.outcome is not None:
            raise self._over()
        if self._turns >= self.limits.turns:
            self.end("turns")
            raise self._over()
        tokens = np.concatenate([self.tree.tokens(parent), context], dtype=np.int32)
        left = self._left(parent, context, tokens)
        self._turns += 1
        self._was_refused = False
        self._was_parallel |= bool(self._running)
        identity = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
        asked_before = self._asked.setdefault(identity, set())
        repeat = next(number for number in count() if number not in asked_before)
        asked_before.add(repeat)
        digest = hashlib.blake2b(identity + repeat.to_bytes(4, "little"), digest_size=8).digest()
        number = 1 + (
            int.from_bytes(digest, "little") >> 2
        )  # 0 is a group's first turn, whose samples come from one request
        task = asyncio.ensure_future(
            self.generate(
                tokens,
                sample=self.number,
                turn=number,
                max_tokens=min(left, asked.max_tokens or left),
                stop=asked.stop,
            )
        )
        self._running.add(task)
        try:
            (written,) = await task
        except asyncio.CancelledError:
            # the client has gone: when it asks again it gets what it would have got
            asked_before.discard(repeat)
            self._turns -= 1
            await cancel([task])
            if self.outcome is not None:
                raise self._over() from None
            raise
        except PaNpuError as error:
            self.failure = error
            self._ended.set()
            raise Refused(str(error), status=500) from None
        finally:
            self._running.discard(task)
        return number, len(tokens), written

    def _left(
        self, parent: Node, context: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> int:
        """How many tokens the policy may write.

        Raises Refused where there are none: agents may compact their context then.
        """
        path = parent.path
        first = len(path[0].context) if path else len(context)
        left = self.limits.response - (len(tokens) - first)
        if not len(tokens):
            raise Refused("the prompt has no tokens; give it some")
        if first > self.limits.prompt or left < 1:
            raise self._too_long(len(tokens))
        return left

    def _too_long(self, num_tokens: int, about: str = "") -> Refused:
        self._was_refused = True
        limits = self.limits
        return Refused(
            f"{f'{about} ' if about else ''}{num_tokens} tokens do not fit: a branch may begin "
            f"with {limits.prompt} (data.max_prompt_tokens) and have {limits.response} behind that "
            "(rollout.max_response_tokens)",
            code="context_length_exceeded",
            param="messages",
        )

    def _over(self) -> Refused:
        return Refused(f"this session has ended: {self.outcome}", code="session_ended")


def _num_characters(value: Any, limit: int) -> int:
    """Those of all texts in a JSON value, at least one for each thing in it; counts only until the
    limit is passed.
    """
    number, left = 0, [value]
    while left and number + len(left) <= limit:
        item = left.pop()
        number += len(item) if isinstance(item, str) else 1
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
    return number + len(left)


class Sessions:
    """Those that are open, who may use them, and those that wait for an agent to take them.

    key: the run's; a session's and a program's own follow from it. url: of the gateway, once it
    listens.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.url = ""
        self._open: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()
        self._takers: dict[str, str] = {}  # who has taken which, by the session's id
        self._useful: set[str] = set()  # takers that have ended a session
        self._offered, self._taken = asyncio.Event(), asyncio.Event()

    @staticmethod
    def new_id() -> str:
        return secrets.token_hex(8)

    def add(self, session: Session) -> None:
        self._open[session.id] = session

    async def offer(self, session: Session, patience_s: float) -> None:
        """Returns when an agent has taken it.

        Raises asyncio.TimeoutError where none has taken any for so long.
        """
        self._waiting.append(session)
        self._offered.set()
        while session in self._waiting:
            await asyncio.wait_for(self._taken.wait(), patience_s)

    async def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)
        taker = self._takers.pop(session.id, None)
        if taker is not None and session.is_done:
            self._useful.add(taker)
        if session in self._waiting:
            self._waiting.remove(session)
        await session.close()

    def find(self, session_id: str) -> Session | None:
        return self._open.get(session_id)

    async def take(self, taker: str, wait_s: float) -> Session | None:
        """The session that waits longest, given to this taker alone; None after wait_s."""
        end_s = asyncio.get_running_loop().time() + wait_s
        while not self._waiting:
            self._offered.clear()
            try:
                await asyncio.wait_for(
                    self._offered.wait(), end_s - asyncio.get_running_loop().time()
                )
            except asyncio.TimeoutError:
                return None
        session = self._waiting.popleft()
        self._takers[session.id] = taker
        self._taken.set()
        self._taken = asyncio.Event()
        return session

    def taker_ended(self, taker: str) -> bool:
        """Begins the sessions again that the taker has taken and not ended.

        Whether it has ended one since its last end.
        """
        was_useful = taker in self._useful
        self._useful.discard(taker)
        for session in [
            self._open[one]
            for one, other in self._takers.items()
            if other == taker and one in self._open
        ]:
            was_useful |= session.is_done
            if session.outcome is None:
                session.lose()
            else:
                session.finish()
        return was_useful

    def key_of(self, what: str) -> str:
        """The key of a session (`session:ID`) or of a program (`program:NUMBER`)."""
        return hmac.new(self.key.encode(), what.encode(), hashlib.sha256).hexdigest()

    def base_url(self, session: Session) -> str:
        return f"{self.url}/sessions/{session.id}/v1"
