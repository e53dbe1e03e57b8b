"""The protocol of environments: one method that turns a prompt into samples."""

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
from pa_npu.vision.images import ShownImage


class EnvironmentFailed(PaNpuError):
    """An environment raised, or returned something that is not a sample.

    The message names the environment, the group, and the place in its code.
    """


class Generate(ABC):
    """Lets the policy write continuations for one group.

    The same arguments give the same tokens, whichever engine answers and however often.
    """

    num_trained: int | None = None
    """How many tokens the group's samples train in all. An environment that knows the number from
    its turns sets it, and it is checked (I2).
    """

    @cached_property
    def counted(self) -> Counter[str]:
        """Numbers that the environment counts for the group.

        metrics.jsonl has their sums over an iteration under `environment`.
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
        images: Sequence[ShownImage] | None = None,
    ) -> list[Generation]:
        """Writes `n` continuations of `tokens`. Requests may run in parallel.

        Args:
            sample: number in the group of the first continuation's sample; the other samples have
                the next numbers.
            turn: number of the turn in these samples, from 0.
            max_tokens: limit of each continuation; None stands for rollout.max_response_tokens.
            stop: texts that end a continuation. The tokens that complete such a text are kept.
            images: all that `tokens` show; None stands for those of the prompt, if `tokens` begin
                with it.

        Every generation's `version` is the weight version that wrote it. Raises ValueError if `n`
        or max_tokens is below 1.
        """


class Environment(Protocol):
    """Turns prompts into samples. environment.name=module:Class names a class of your own.

    The class is made with an EnvironmentContext. It may have further methods:

    - `async open()` and `async close()` are called once, before the first rollout and after the
      last (registry.opened). They manage resources of a run, such as a server, a pool of processes
      or a connection to another program that writes the samples.
    - `async trial(prompt)` is called once before a run, and raises ConfigError if the environment
      cannot work.
    """

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        """Returns the samples of num_samples attempts at a prompt, in order.

        An attempt may give several samples, such as those of sub-agents or of a compacted context,
        or none; the group needs at least one. Algorithms that need exactly num_samples refuse other
        groups with an error (algorithm.rules.needs_whole_groups). A continuation is trained as a
        whole, once, or not at all; a class that trains parts of continuations on purpose sets
        `trains_whole_answers = False`. A class that declares `trains_in_context = True` has it
        checked that a continuation stands behind the very tokens that it continued. The prompt's
        images are attached to samples that begin with the prompt; a class that attaches all images
        itself sets `shows_own_images = True`.

        The method runs in the coordinator's event loop together with all other groups. Wait with
        `await`, and give blocking work to a thread or a process. The environment's own work has
        time limits (environments/time_limit.py); beyond them the run ends with an error. Results
        that depend on anything but the arguments, such as a clock, make a run irreproducible.
        """


@dataclass(frozen=True)
class EnvironmentContext:
    """The arguments that an environment is made with.

    tokenizer: the model's, of transformers.
    max_response_tokens: limit of the tokens behind the prompt, over all turns.
    max_turns: limit of the policy's turns.
    timeout_s: limit of the environment's own work in one turn.
    options: environment.options.
    config: the run's; None for an environment that is made by hand.
    sessions: of the run's gateway (agents.open_sessions.Sessions); None if the run serves none.
    observations: weights of what is shown, by role (environment.observations).
    observation_component: of the loss that trains these tokens; 0 where none are trained.
    """

    tokenizer: Any
    max_response_tokens: int
    max_turns: int = 1
    timeout_s: float = 10.0
    options: Mapping[str, Any] = dataclass_field(default_factory=dict)
    config: Config | None = None
    sessions: Any = None
    observations: Mapping[str, float] = dataclass_field(default_factory=dict)
    observation_component: int = 0

    def show(self, sample: SampleBuilder, tokens: npt.NDArray[np.int32], role: str) -> None:
        """Appends tokens of the environment to a sample, which are trained if
        environment.observations gives their role a weight.
        """
        weight = self.observations.get(role)
        if weight is None or not self.observation_component:
            sample.show(tokens)
        else:
            sample.show(tokens, component=self.observation_component, weight=weight)

    def refuse_options(self, environment: str, known: Sequence[str] = ()) -> None:
        """Raises ConfigError if environment.options has a key that the environment does not know."""
        for name in self.options:
            if name not in known:
                valid = ", ".join(known) or "none"
                raise ConfigError(
                    f"environment.options: {name!r} is unknown to {environment}, whose options are "
                    f"{valid}; remove it"
                )


def write(sample: SampleBuilder, generation: Generation) -> None:
    """Appends a generation's tokens to a sample, with the columns that the engine filled."""
    sample.write(generation.tokens, generation.logprobs, generation.written_by, generation.columns)
