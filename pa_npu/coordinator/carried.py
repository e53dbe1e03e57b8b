"""Groups that wait for the next update, because this one has its tokens (schedule.tokens_per_update).

They are here as they were scored. A checkpoint has them as groups in wire format, and what a record says of them as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.token_budget import Update
from pa_npu.rewards.types import RewardResult
from pa_npu.samples.types import Group, Sample


@dataclass(frozen=True, eq=False)
class Carried:
    """A group that is complete and scored."""

    prompt: Prompt
    samples: list[Sample]
    result: RewardResult

    @property
    def tokens(self) -> int:
        """Trained ones."""
        return sum(sample.num_trained for sample in self.samples)

    @property
    def version(self) -> int:
        """The oldest that generated a token."""
        return min(int(sample.versions[sample.trained].min()) for sample in self.samples)

    def group(self, iteration: int, index: int) -> Group:
        """For a checkpoint: its advantages are computed when it is trained."""
        rewards = np.asarray(self.result.total, np.float32)
        nothing = np.zeros(len(self.samples), np.float32)
        identity = {"run_seed": 0, "iteration": iteration, "index": index, "prompt_id": self.prompt.prompt_id}
        return Group.of_samples(self.samples, rewards, nothing, **identity)

    def told(self) -> dict[str, Any]:
        """The rest of it, as JSON."""
        return {
            "prompt": self.prompt.text,
            "prompt_tokens": self.prompt.tokens.tolist(),
            "answer": self.prompt.answer,
            "source": self.prompt.source,
            "texts": [sample.text for sample in self.samples],
            "functions": {name: values.tolist() for name, values in self.result.functions.items()},
            "correct": [bool(value) for value in self.result.correct],
            "errors": list(self.result.errors),
        }

    @classmethod
    def restored(cls, group: Group, told: dict[str, Any]) -> Carried:
        """What `group` and `told` gave. The prompt's row is not there: its rewards are known."""
        tokens = np.asarray(told["prompt_tokens"], np.int32)
        prompt = Prompt(group.prompt_id, tokens, told["answer"], told["prompt"], {}, told["source"])
        ends = np.cumsum(group.lengths)[:-1]
        columns = [np.split(part, ends) for part in (group.tokens, group.trained, group.logprobs, group.versions)]
        samples = [
            Sample(tokens, trained, logprobs, versions, bool(finished), text)
            for tokens, trained, logprobs, versions, finished, text in zip(
                *columns, group.finished, told["texts"], strict=True
            )
        ]
        functions = {name: np.asarray(values, np.float32) for name, values in told["functions"].items()}
        correct = np.asarray(told["correct"], np.bool_)
        return cls(prompt, samples, RewardResult(group.rewards.copy(), functions, correct, tuple(told["errors"])))


@dataclass
class Share:
    """What one update takes of the groups that were carried to it and of its iteration's own, while those are generated.

    told: is given the number of groups of the update, once, as soon as it is known.
    """

    carried: Sequence[Carried]
    update: Update
    told: Callable[[int], None]
    _is_told: bool = False

    def tell_size(self) -> None:
        """Say how many groups there are, if that is known by now and has not been said."""
        if self.update.size is not None and not self._is_told:
            self._is_told = True
            self.told(self.update.size)
