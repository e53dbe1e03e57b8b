"""Gives prompt log-probs at the temperature that a request names, inside a vLLM worker. Imports torch only.

vLLM computes prompt log-probs from the raw logits, whatever the request's temperature is. The log-prob of a
token at another temperature does not follow from that: it needs all logits. So the runner's own method
runs once for each temperature, with the requests that ask for it, and a sampler that divides logits by it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

TEMPERATURE = "score_temperature"
"""The name under which a request asks for log-probs at a temperature (score_codec.py)."""


def follow_temperatures(worker: Any) -> bool:
    """Lets prompt log-probs follow the temperature of their request.

    Returns False if this engine's runner computes them in an unknown way.
    """
    runner: Any = worker.model_runner
    if hasattr(runner, "_pa_scores"):
        return bool(runner._pa_scores)
    sampler: Any = getattr(runner, "sampler", None)
    original: Any = getattr(runner, "_get_prompt_logprobs_dict", None)
    runner._pa_scores = (
        original is not None
        and isinstance(getattr(runner, "num_prompt_logprobs", None), dict)
        and hasattr(runner, "requests")
        and hasattr(sampler, "compute_logprobs")
    )
    if not runner._pa_scores:
        return False

    def at_temperatures(*args: Any, **kwargs: Any) -> dict[str, Any]:
        asked = runner.num_prompt_logprobs
        by_temperature: defaultdict[float, dict[str, int]] = defaultdict(dict)
        for request, count in asked.items():
            by_temperature[_temperature(runner, request)][request] = count
        if set(by_temperature) <= {1.0}:
            return dict(original(*args, **kwargs))
        logprobs_by_request: dict[str, Any] = {}
        try:
            for temperature, requests in by_temperature.items():
                # the method drops the requests that it has completed
                runner.num_prompt_logprobs = requests
                sampler.compute_logprobs = _scaled(temperature)
                logprobs_by_request |= original(*args, **kwargs)
        finally:
            del sampler.compute_logprobs  # uncovers the class's own
            left = {name for requests in by_temperature.values() for name in requests}
            for request in set(asked) - left:
                del asked[request]
            runner.num_prompt_logprobs = asked
        return logprobs_by_request

    runner._get_prompt_logprobs_dict = at_temperatures
    return True


def _scaled(temperature: float) -> Any:
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits.float() / temperature, dim=-1)

    return compute_logprobs


def _temperature(runner: Any, request: str) -> float:
    state = runner.requests.get(request)
    extra = getattr(getattr(state, "sampling_params", None), "extra_args", None) or {}
    return float(extra.get(TEMPERATURE, 1.0))
