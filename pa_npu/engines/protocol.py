"""What an engine is to the coordinator: the RolloutEngine protocol and the data that crosses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pa_npu.errors import PaNpuError


class EngineError(PaNpuError):
    """An engine refused a request, answered nonsense, or died; the message names the engine and what it was asked."""


class EngineGone(EngineError):
    """An engine does not answer any more, or says that it is broken: another one, or its successor, can do what was asked."""


@dataclass(frozen=True)
class Sampling:
    """How to sample a response. temperature 0 is greedy.

    stop_token_ids end a response beside the model's own end token, unless ignore_eos asks for exactly max_tokens.
    logprobs: return the log-prob of every token under the distribution it was sampled from.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = True


@dataclass(frozen=True, eq=False)
class Completion:
    """One response. tokens: int32 [R], its end token included. logprobs: float32 [R], or [0] when not asked for.

    text leaves the end token and other special tokens out. finish_reason: stop (by itself) or length (cut).
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    text: str
    finish_reason: Literal["stop", "length"]

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"


class RolloutEngine(Protocol):
    """One engine. Another inference server is one more class with these methods.

    Every method ends by its deadline: it raises DeadlineExceeded then, EngineGone when the engine dies, and EngineError when it
    refuses.
    """

    name: str
    """How logs and metrics call it: its URL."""

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int32], n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Completion]:
        """n responses; response i is what a request of one with seed + i gives, whatever else is in flight."""

    async def rpc(self, method: str, args: Sequence[Any] = (), *, deadline_s: float) -> list[Any]:
        """Call a method of the worker extension on every worker and return their results in rank order."""

    async def reset_prefix_cache(self, *, deadline_s: float) -> None:
        """Forget all cached prefixes: they belong to old weights. Nothing may be in flight."""

    async def check_health(self, *, deadline_s: float) -> None:
        """Return when the engine says that it is well, which it can also while its workers load weights."""

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Return as soon as the engine serves requests."""

    async def probe(self, *, deadline_s: float) -> None:
        """Return when the engine has generated a token: a health page says nothing about a stopped worker."""

    async def close(self) -> None:
        """Release connections, which ends all requests with EngineGone; the engine's process is the launcher's."""
