"""Devices that take as long as asked and no core: a real engine and a real trainer that sleep for the rest of a given time.

Where a machine has fewer cores than a run has processes, these take each other's time, and no measurement tells that from the
schedule's. Here vLLM schedules, samples and loads weights, and Megatron trains, a model so small that either takes a fraction of a
core; each decode step and each microbatch then lasts as long as a device of the given speed would need. Everything else is a run's.

    rollout.extra_args=[--worker-cls,tools.paced_devices.PacedWorker]    with PACED_ENGINE=step_s,sequence_s,prompt_token_s
    trainer.backend=tools.paced_devices:BACKEND                          with PACED_TRAINER=token_s

A device that goes on with what it has works without a gap: what vLLM does between two steps, and Megatron between two microbatches,
happens beside it, as on devices that compute by themselves.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pa_npu.backends.protocol import MicrobatchSource, ProbeResult, TrainBackend, TrainedResponse
    from pa_npu.samples.group_source import Traffic
    from pa_npu.samples.microbatch import Microbatch

ENGINE_SPEED, TRAINER_SPEED = "PACED_ENGINE", "PACED_TRAINER"
# A trainer that waited for longer had nothing to do.
_WAITED_S = 0.002


class Device:
    """The clock of a device."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def begins(self, goes_on: bool) -> float:
        """Now, or when the work before ended if it goes on."""
        return self._free_s if goes_on else time.monotonic()

    def ends(self, begin_s: float, seconds: float) -> None:
        """Returns when `seconds` have passed since begin_s, or at once where more have."""
        now = time.monotonic()
        self._free_s = max(begin_s + seconds, now)
        time.sleep(self._free_s - now)


def step_seconds(tokens: list[int], step_s: float, sequence_s: float, prompt_token_s: float) -> float:
    """Of a step that computes so many tokens of each sequence: one where it decodes, more where a prompt is new."""
    return step_s + sequence_s * len(tokens) + prompt_token_s * sum(count - 1 for count in tokens)


def __getattr__(name: str) -> Any:
    """PacedWorker, made when vLLM asks for it: trainers have no vLLM."""
    if name == "PacedWorker":
        return _worker_class()
    raise AttributeError(name)


@functools.cache
def _worker_class() -> type:
    from vllm.v1.worker.cpu_worker import CPUWorker

    class PacedWorker(CPUWorker):
        """vLLM's worker, whose steps take step_s + sequence_s x sequences + prompt_token_s x tokens of prompts."""

        pa_device = Device()
        pa_speed = tuple(float(text) for text in os.environ.get(ENGINE_SPEED, "0,0,0").split(","))
        pa_sequences: frozenset[str] = frozenset()  # of the step before

        def execute_model(self, scheduler_output: Any) -> Any:
            tokens = scheduler_output.num_scheduled_tokens
            begin_s = self.pa_device.begins(not self.pa_sequences.isdisjoint(tokens))
            self.pa_sequences = frozenset(tokens)
            output = super().execute_model(scheduler_output)
            if tokens:
                self.pa_device.ends(begin_s, step_seconds(list(tokens.values()), *self.pa_speed))
            return output

    return PacedWorker


class PacedMicrobatches:
    """Microbatches each of which is followed by the next one no sooner than its tokens take at token_s."""

    def __init__(self, source: MicrobatchSource, token_s: float) -> None:
        self._source, self._token_s = source, token_s
        self._device = Device()
        self._begin_s, self._seconds = 0.0, 0.0
        self._goes_on = False

    @property
    def waited_s(self) -> float:
        return self._source.waited_s

    @property
    def is_last(self) -> bool:
        return self._source.is_last

    @property
    def traffic(self) -> Traffic:
        return self._source.traffic

    def settle(self) -> int:
        return self._source.settle()

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        if self._seconds:
            self._device.ends(self._begin_s, self._seconds)
            self._seconds = 0.0
        waited_s = self._source.waited_s
        microbatch = next(self._source)
        goes_on = self._goes_on and self._source.waited_s - waited_s < _WAITED_S
        self._begin_s, self._goes_on = self._device.begins(goes_on), True
        self._seconds = self._token_s * microbatch.num_sample_tokens
        return microbatch


class _PacedBackend:
    """A backend whose `accumulate` takes as long as asked; all else is the backend's."""

    def __init__(self, backend: TrainBackend) -> None:
        self._backend = backend
        self._token_s = float(os.environ.get(TRAINER_SPEED, "0"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(
        self, microbatches: MicrobatchSource, judge_first: Callable[[ProbeResult], None] | None = None
    ) -> list[TrainedResponse]:
        return self._backend.accumulate(PacedMicrobatches(microbatches, self._token_s), judge_first)


class _PacedMegatron:
    """trainer.backend: a BackendModule."""

    def changes(self) -> list[str]:
        from pa_npu.backends.megatron import factory

        return [*factory.changes(), f"microbatches take {os.environ.get(TRAINER_SPEED, '0')} s per token"]

    def create(self, *args: Any, **kwargs: Any) -> _PacedBackend:
        from pa_npu.backends.megatron import factory

        return _PacedBackend(factory.create(*args, **kwargs))

    def export_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        from pa_npu.backends.megatron import factory

        factory.export_checkpoint(*args, **kwargs)


BACKEND = _PacedMegatron()
