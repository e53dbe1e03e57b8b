"""The probe of a service: an engine that has loaded a snapshot computes the log-probs that the trainers compute of it (I5).

    sampler   publish, digests compared     16 responses by the engine, with log-probs
    trainers                                the same tokens by the snapshot's weights: within the limits?

Digests say what arrived, a probe what the engine computes with it. Limits are those of a run's probes
(pa_npu.trainer.agreement), and so are the keys: publish.probe_tokens, noise_margin, probe_tolerance,
only_logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.backends.protocol import TrainBackend
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.publish.probes import MIN_RESPONSES, ProbePlan
from pa_npu.samples.microbatch import Microbatch
from pa_npu.service.datums import DEFAULT_TOKENS, microbatches
from pa_npu.service.losses import OF_CALL, loss_named
from pa_npu.service.ranks import Ranks
from pa_npu.service.wire import Datum
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.comparison import LogprobComparison


class Probes:
    """Judges probes on a trainer rank, and records each in RUN/agreement."""

    def __init__(self, config: Config, backend: TrainBackend, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        plan = ProbePlan(
            num_tokens=config.publish.probe_tokens, num_responses=MIN_RESPONSES, rides=False
        )
        self._agreement = Agreement(config, LogprobComparison(config, backend), plan)

    def difference(
        self,
        version: int,
        prompt: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> str | None:
        """Returns how the engine's log-probs of responses differ from those of the weights that the
        backend has, in words; None where they agree. Collective.
        """
        data = []
        for response, values in zip(tokens, logprobs, strict=True):
            data.append(_datum(prompt, response, values))
        try:
            self._agreement.check_alone(version, self._microbatches(data))
        except InvariantViolation as error:
            return str(error)
        return None

    def _microbatches(self, data: Sequence[Datum]) -> list[Microbatch]:
        loss, _ = loss_named("importance_sampling", {})
        packed = microbatches(
            data,
            loss,
            max_tokens=self._config.microbatch.budget or DEFAULT_TOKENS,
            shared=False,  # every token of every response is compared
            pad_multiple=self._config.trainer.pad_multiple,
            share=self._ranks.share,
        )
        compared = []
        for microbatch in packed:
            columns = microbatch.columns
            written = columns[f"{OF_CALL}advantages"] > 0
            values = columns[f"{OF_CALL}logprobs"]
            compared.append(
                replace(microbatch, columns={**columns, "logprobs": values, "written": written})
            )
        return compared


def _datum(prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float]) -> Datum:
    """Returns a response behind its prompt; advantages mark what the engine wrote."""
    tokens = np.array([*prompt, *response], np.int32)
    values = np.zeros(len(tokens) - 1, np.float32)
    written = np.zeros(len(tokens) - 1, np.float32)
    values[len(prompt) - 1 :] = logprobs
    written[len(prompt) - 1 :] = 1.0
    inputs: dict[str, npt.NDArray[Any]] = {
        "target_tokens": tokens[1:].astype(np.int64),
        "logprobs": values,
        "advantages": written,
    }
    return Datum(tokens[:-1], inputs)
