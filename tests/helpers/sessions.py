"""An environment whose attempts are sessions of several samples: 3 to 7 of a prompt, by its number."""

from __future__ import annotations

from pathlib import Path

from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, Generate
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.samples.types import Sample


class Sessions(SingleTurn):
    """SingleTurn with another number of samples.

    options: `log`, a file that says when it was opened and closed, and how many samples it made in
    between.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        super().__init__(EnvironmentContext(context.tokenizer, context.max_response_tokens))
        self._log = Path(context.options["log"])
        self._is_open = False

    async def open(self) -> None:
        self._note("open")
        self._is_open = True

    async def close(self) -> None:
        self._note("close")

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        assert self._is_open, "nothing is asked of an environment before it is open"
        self._note(str(num_samples_of(prompt.prompt_id)))
        return await super().rollout(prompt, num_samples_of(prompt.prompt_id), generate)

    def _note(self, description: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{description}\n")


def num_samples_of(prompt_id: int) -> int:
    return 3 + prompt_id % 5
