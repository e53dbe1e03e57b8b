"""A transformers engine beside the Megatron trainer, with weights and log-probs of its own.

What is between them is the rounding of two implementations, in fp32 and in bf16. 32 responses an
iteration, the fewest that anyone trains with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.trainer.agreement import Agreement
from tests.helpers.backend import make_learner
from tests.helpers.groups import with_trained
from tests.helpers.megatron import model_config
from tests.helpers.policies import probe_plan
from tests.helpers.shelf import shelf_iterator
from tools.groups import group_of_responses

from pa_npu.trainer.loop import Consumed, consume  # isort: skip

GROUPS, RESPONSES, TOKENS, PROBE_TOKENS = 4, 8, 16, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NONE = DifferenceSums()

Change = Callable[[list[Group]], list[Group]]


class Engine:
    """Samples with the weights of an HF directory, times `scale`, at `temperature`.

    exponent: of the distribution that tokens are drawn from, of which log-probs do not tell.
    """

    def __init__(
        self,
        directory: Path,
        dtype: str,
        *,
        scale: float = 1.0,
        temperature: float = 1.0,
        exponent: float = 1.0,
    ) -> None:
        self._exponent = exponent
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
        self._temperature = temperature
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(scale)

    def group(
        self,
        iteration: int,
        version: int,
        index: int,
        responses: int = RESPONSES,
        tokens: int = TOKENS,
    ) -> Group:
        (group,) = self.groups(iteration, version, [index], responses, tokens)
        return group

    @torch.no_grad()
    def groups(
        self,
        iteration: int,
        version: int,
        indices: Sequence[int],
        responses: int = RESPONSES,
        tokens: int = TOKENS,
    ) -> list[Group]:
        """Samples all groups in one batch, each with a generator of its own."""
        rngs = [np.random.default_rng((iteration, index)) for index in indices]
        prompts = [rng.integers(3, 128, 5) for rng in rngs]
        generators = [torch.Generator().manual_seed(1000 * iteration + index) for index in indices]
        sequences = newest = torch.from_numpy(np.repeat(np.stack(prompts), responses, axis=0))
        cache = None
        for _ in range(tokens):
            answer = self._model(newest, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            logits = answer.logits[:, -1].float() / self._temperature
            distributions = (self._exponent * logits).softmax(-1).split(responses)
            drawn = zip(distributions, generators, strict=True)
            newest = torch.cat(
                [torch.multinomial(one, 1, generator=generator) for one, generator in drawn]
            )
            sequences = torch.cat([sequences, newest], dim=1)
        # the log-probs are of one pass over whole sequences, whose rounding this test knows
        table = (self._model(sequences).logits[:, :-1].float() / self._temperature).log_softmax(-1)
        logprobs = table.gather(-1, sequences[:, 1:, None])[:, prompts[0].size - 1 :, 0]
        return [
            group_of_responses(
                iteration=iteration,
                version=version,
                index=index,
                prompt_id=index,
                prompt_tokens=prompt.astype(np.int32),
                response_tokens=written.reshape(-1).numpy().astype(np.int32),
                response_lengths=np.full(responses, tokens, np.int32),
                logprobs=output.reshape(-1).numpy(),
                rewards=np.zeros(responses, np.float32),
                advantages=rng.standard_normal(responses).astype(np.float32),
                finished=np.zeros(responses, np.uint8),
            )
            for index, rng, prompt, written, output in zip(
                indices,
                rngs,
                prompts,
                sequences[:, prompts[0].size :].split(responses),
                logprobs.split(responses),
                strict=True,
            )
        ]


class Run:
    """A trainer rank's loop, with engines in the same process."""

    def __init__(
        self, model: Path, directory: Path, dtype: str = "fp32", **sections: dict[str, Any]
    ) -> None:
        self.directory, self.dtype = directory, dtype
        self.config = configuration(model, directory, dtype, **sections)
        self.learner, self.stage = make_learner(self.config)
        self.agreement = Agreement(self.config, self.learner, probe_plan(self.config))

    def iteration(
        self,
        number: int,
        engine: Engine,
        version: int | None = None,
        change: Change = lambda groups: groups,
    ) -> Consumed:
        """version: that of the engine's weights."""
        version = number if version is None else version
        groups = change(engine.groups(number, version, range(GROUPS), tokens=self.tokens))
        freshness = Freshness(self.config.schedule.max_staleness)
        microbatches = shelf_iterator(groups, number, responses=RESPONSES, freshness=freshness)

        def measure(share: MicrobatchIterator) -> None:
            self.agreement.measure(number, share.first)

        def judge(first: DifferenceSums, place: str) -> None:
            self.agreement.check_probe(number, first, where=place)

        rides = judge if self.agreement.probes_ride else None
        updates = self.config.schedule.updates_per_iteration
        consumed = consume(self.learner, microbatches, updates, measure, rides)
        self.agreement.check_trained(
            number, consumed.exact, consumed.aged, (len(groups), len(groups))
        )
        return consumed

    @property
    def tokens(self) -> int:
        return self.config.rollout.max_response_tokens

    def probe(self, version: int, engine: Engine) -> DifferenceSums:
        group = engine.group(
            version,
            version,
            99,
            responses=probe_plan(self.config).num_responses,
            tokens=PROBE_TOKENS,
        )
        return self.agreement.check_requests(
            version, build_microbatches(group, group.num_samples, True, 1)
        )

    def exported(self, name: str) -> Path:
        self.learner.backend.export(self.directory / name)
        return self.directory / name


def configuration(
    model: Path, directory: Path, dtype: str = "fp32", **sections: dict[str, Any]
) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype},
        "run": {"dir": str(directory)},
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": TOKENS},
        "schedule": {"prompts_per_iteration": GROUPS},
        "optimizer": {"learning_rate": 1e-3},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return model_config(model, **base)


def trained(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """`change` of every group's log-probs, [responses, tokens]."""

    def changed(group: Group) -> Group:
        actual = group.logprobs[group.trained].reshape(group.num_samples, -1)
        return with_trained(group, logprobs=change(actual).reshape(-1).astype(np.float32))

    return lambda groups: [changed(group) for group in groups]
