"""vLLM's worker on a paced device.

PACED_ENGINE=step_s,sequence_s,prompt_token_s    rollout.extra_args=[--worker-cls,tools.paced.engine.PacedWorker]
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tools.paced.device import Device


class PacedWorker(CPUWorker):
    """Its steps take step_s + sequence_s x sequences + prompt_token_s x tokens of prompts."""

    pa_device = Device()
    pa_sequences: frozenset[str] = frozenset()  # of the step before

    def execute_model(self, scheduler_output: Any) -> Any:
        tokens = scheduler_output.num_scheduled_tokens
        begin_s = self.pa_device.begins(not self.pa_sequences.isdisjoint(tokens))
        self.pa_sequences = frozenset(tokens)
        output = super().execute_model(scheduler_output)
        if tokens:
            self.pa_device.ends(begin_s, step_seconds(tokens.values()))
        return output


def step_seconds(tokens: Collection[int]) -> float:
    """Seconds of a step that computes so many tokens of each sequence: one if it decodes, more if
    its prompt is new.
    """
    step_s, sequence_s, prompt_token_s = map(float, os.environ["PACED_ENGINE"].split(","))
    return step_s + sequence_s * len(tokens) + prompt_token_s * (sum(tokens) - len(tokens))
