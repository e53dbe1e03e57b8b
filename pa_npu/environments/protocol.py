"""The Environment protocol: one method that turns a prompt into samples, and what it is given to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation
from pa_npu.errors import ConfigError, PaNpuError
from pa_npu.samples.types import Sample, SampleBuilder


class EnvironmentFailed(PaNpuError):
    """An environment raised, or returned what is no sample; the message names it, the group, and
    the place in its code.
    """


class Generate(ABC):
    """Lets the policy write.

    The same arguments give the same tokens, whatever engine answers and however often it is asked.
    """

    num_trained: int | None = None
    """How many tokens the group's samples train in all, where the environment knows that from the
    turns and sets it (I2).
    """

    @cached_property
    def counted(self) -> Counter[str]:
        """Numbers that the environment counts of the group; metrics.jsonl has their sums of an
        iteration under `environment`.
        """
        return Counter()

    @abstractmethod
    async def __call__(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        n: int = 1,
        sample: int = 0,
        turn: int = 0,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Writes `n` continuations of `tokens`. Requests may run at the same time.

        Args:
            sample: number in the group of the first continuation's sample; those of the others
            follow.
            turn: of these samples, from 0.
            max_tokens: of each; None is rollout.max_response_tokens.
            stop: texts that end a continuation, which keeps the tokens that complete one.
        Every generation's `version` is the weight version that wrote it. Raises ValueError for
        fewer than one, or than one token.
        """


class Environment(Protocol):
    """How a prompt becomes samples. A class of your own: environment.name=module:Class, made with
    an EnvironmentContext.

    It may have `async open()` and `async close()`, for what it needs during a run
    (registry.opened): a server, a pool of processes, a connection to another program that writes
    the samples. They are called once, before the first rollout and after the last. It may have
    `async def trial(prompt)`, which is called once before a run and raises ConfigError for what it
    cannot work with.
    """

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        """The samples of a prompt, in order: num_samples attempts at it.

        An attempt may be several samples, such as those of sub-agents or of a context that was
        compacted, and one that came to nothing may be none; one sample at least is needed. What
        depends on exactly num_samples of them refuses others in one line
        (algorithm.rules.needs_whole_groups). A continuation is trained as a whole, once, or not at
        all; a class that trains parts of some on purpose says `trains_whole_answers = False`.

        Runs in the coordinator's event loop beside all other groups: wait with `await`, and give
        what blocks to a thread or a process. Its own work has limits (environments/time_limit.py),
        beyond which the run ends and says where it stood. What does not follow from its arguments,
        such as a clock, makes runs that cannot be repeated.
        """


@dataclass(frozen=True)
class EnvironmentContext:
    """The arguments that an environment is made with.

    tokenizer: the model's, of transformers. max_response_tokens: most tokens behind the prompt,
    over all turns. max_turns: most turns of the policy. timeout_s: of the environment's own work in
    one turn. options: environment.options.
    config: the run's; None where an environment is made by hand.
    """

    tokenizer: Any
    max_response_tokens: int
    max_turns: int = 1
    timeout_s: float = 10.0
    options: Mapping[str, Any] = dataclass_field(default_factory=dict)
    config: Config | None = None

    def refuse_options(self, environment: str, known: Sequence[str] = ()) -> None:
        """Raises ConfigError where environment.options has a key that the environment does not
        read.
        """
        for name in self.options:
            if name not in known:
                wanted = f"one of {', '.join(known)}" if known else "none"
                raise ConfigError(
                    f"environment.options: {name!r} is unknown to {environment}, which has "
                    f"{wanted}; remove it"
                )


def write(sample: SampleBuilder, generation: Generation) -> None:
    """Adds what the policy wrote to a sample, with the columns that the engine filled."""
    sample.write(generation.tokens, generation.logprobs, generation.written_by, generation.columns)
