"""What the service tells the trainer ranks, and what they answer: one command after another over the run's store.

    service/command/N        Command, read by every rank
    service/answer/N/RANK    Answer

Every rank carries out every command in the same order, as collectives need it. Trainers and service
are started together, and again together if one of them ends, so that numbers begin at 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import DeadlineExceeded, InvariantViolation, PaNpuError
from pa_npu.service.wire import AdamParameters, Refused

_WAIT_S = 60.0


class TrainersFailed(PaNpuError):
    """A command was not carried out for a reason that is not in it, such as too little memory.

    are_out_of_step: whether trainers cannot go on, since some wait for others in a collective.
    """

    def __init__(self, reason: str, *, are_out_of_step: bool) -> None:
        super().__init__(reason)
        self.are_out_of_step = are_out_of_step


class StartAgain(PaNpuError):
    """Trainers must be started anew, behind a request that has been answered with its error."""


STARTS_AGAIN = 75
"""Exit code of a service that ends with StartAgain. The start that follows has no such request to
carry out again, and is not counted by run.restarts.
"""


class Create(msgspec.Struct, tag=True):
    """Makes a slot. seed: of fresh adapters."""

    slot: str
    seed: int


class Drop(msgspec.Struct, tag=True):
    slot: str


class Compute(msgspec.Struct, tag=True):
    """A call of forward, or forward and backward. body: as the client sent it, already checked."""

    slot: str
    body: bytes


class Optimize(msgspec.Struct, tag=True):
    slot: str
    adam: AdamParameters


class Save(msgspec.Struct, tag=True):
    """Writes parts of a slot into a file; answered with the digest of its weights."""

    slot: str
    file: str
    parts: list[str]


class Load(msgspec.Struct, tag=True):
    slot: str
    file: str
    optimizer: bool


class Publish(msgspec.Struct, tag=True):
    """Sends a file's weights to the engine as `version`, in the groups of `epoch`; answered with the
    digests of what was sent.
    """

    file: str
    version: int
    epoch: int
    workers: int


class Probe(msgspec.Struct, tag=True):
    """Compares log-probs of responses that the engine wrote as `version` with those of a file's
    weights; answered with nothing, or with the difference in words.

    prompt: its tokens. tokens, logprobs: of each response.
    """

    file: str
    version: int
    prompt: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]


class Export(msgspec.Struct, tag=True):
    """Writes a file's weights as a directory that other programs load: of peft, or of the whole model."""

    file: str
    directory: str


Command = Create | Drop | Compute | Optimize | Save | Load | Publish | Probe | Export


class Answer(msgspec.Struct):
    """content: what the command asks for. Where it is not done, the reason in words: refused, for
    what the command asks; failed, for what the trainers lack; broken, for an invariant. seconds:
    that it took.
    """

    content: bytes = b""
    refused: str | None = None
    failed: str | None = None
    broken: str | None = None
    seconds: float = 0.0


class Ready(msgspec.Struct):
    """A rank's first words. Of the rank that sends weights, which is the first, also manifest: of its
    publisher, name and content; backend: of its groups.
    """

    vocab_size: int
    base: str
    software: str
    manifest_name: str = ""
    manifest: dict[str, Any] = {}
    backend: str = ""


def ready_key(rank: int) -> str:
    return f"service/ready/{rank}"


def command_key(number: int) -> str:
    return f"service/command/{number}"


def answer_key(number: int, rank: int) -> str:
    return f"service/answer/{number}/{rank}"


class Trainers:
    """The service's end. Commands are sent one at a time; whoever comes first waits least."""

    def __init__(self, channel: StoreChannel, ranks: int, deadline_s: float) -> None:
        """deadline_s: of one command. Close it."""
        self._channel = channel
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._number = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainers")

    def wait_ready(self, limit_s: float) -> Ready:
        """Waits for all ranks, and returns what the first one says. Raises DeadlineExceeded."""
        answers = [
            self._channel.wait_bytes(ready_key(rank), limit_s, f"trainer rank {rank} to be ready")
            for rank in range(self._ranks)
        ]
        return msgspec.msgpack.decode(answers[0], type=Ready)

    async def ask(self, command: Command) -> bytes:
        """Returns what a command is answered with.

        Raises Refused with the trainers' reason, TrainersFailed, DeadlineExceeded, or
        InvariantViolation.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            # not cancelled with its caller: numbers must stay in step with the trainers'
            return await asyncio.shield(loop.run_in_executor(self._thread, self._ask, command))

    def _ask(self, command: Command) -> bytes:
        number = self._number
        self._number += 1
        self._channel.put_bytes(command_key(number), msgspec.msgpack.encode(command))
        name = type(command).__name__.lower()
        answers = []
        for rank in range(self._ranks):
            key = answer_key(number, rank)
            data = self._channel.wait_bytes(
                key, self._deadline_s, f"trainer rank {rank} to answer {name}"
            )
            self._channel.delete(key)
            answers.append(msgspec.msgpack.decode(data, type=Answer))
        self._channel.delete(command_key(number))
        for answer in answers:
            if answer.broken is not None:
                raise InvariantViolation(answer.broken)
            if answer.failed is not None:
                raise TrainersFailed(answer.failed, are_out_of_step=self._ranks > 1)
            if answer.refused is not None:
                raise Refused(answer.refused)
        return answers[0].content

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Commands:
    """A trainer rank's end."""

    def __init__(self, channel: StoreChannel, rank: int, num_ranks: int) -> None:
        self._channel = channel
        self._rank = rank
        self._num_ranks = num_ranks
        self._number = 0

    def announce(self, ready: Ready) -> None:
        self._channel.put_bytes(ready_key(self._rank), msgspec.msgpack.encode(ready))

    def next(self) -> Command:
        """Waits for the next command, for as long as the store is there."""
        while True:
            try:
                key = command_key(self._number)
                data = self._channel.wait_bytes(key, _WAIT_S, "the service to ask for something")
            except DeadlineExceeded:
                continue
            command: Command = msgspec.msgpack.decode(data, type=Command)
            self._begun_s = time.perf_counter()
            return command

    def answer(self, answer: Answer) -> None:
        self._put(answer, [self._rank])

    def fail(self, reason: str) -> None:
        """Answers in the place of all ranks: the others may wait for this one in a collective."""
        self._put(Answer(failed=reason), range(self._num_ranks))

    def _put(self, answer: Answer, ranks: Iterable[int]) -> None:
        answer.seconds = time.perf_counter() - self._begun_s
        for rank in ranks:
            self._channel.put_bytes(answer_key(self._number, rank), msgspec.msgpack.encode(answer))
        self._number += 1
