"""The scheduler of vLLM engines on cores: which outputs wait for their request's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from pa_npu.engines.vllm.responses import KEPT
from pa_npu.engines.vllm.scheduler import KeepingScheduler


class Step:
    """A scheduler whose steps give the outputs of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, extra_args: dict[str, Any] | None) -> None:
        scheduler: Any = object.__new__(KeepingScheduler)
        scheduler.kept = {}
        parameters = SimpleNamespace(extra_args=extra_args)
        scheduler.requests = {"a": SimpleNamespace(sampling_params=parameters)}
        self.scheduler = scheduler
        monkeypatch.setattr(
            Scheduler,
            "update_from_output",
            lambda _, outputs: {0: EngineCoreOutputs(outputs=outputs)},
        )
        monkeypatch.setattr(Scheduler, "finish_requests", lambda _, ids, status: [])

    def sent(self, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
        by_client = self.scheduler.update_from_output(list(outputs))
        return by_client[0].outputs if by_client else []


def output(token: int, **fields: Any) -> EngineCoreOutput:
    logprobs = LogprobsLists(
        np.array([[token]]), np.array([[-token / 8]]), np.array([1], dtype=np.int64)
    )
    return EngineCoreOutput("a", [token], new_logprobs=logprobs, **fields)


def test_tokens_of_a_marked_request_come_together_at_its_end(monkeypatch) -> None:
    step = Step(monkeypatch, {KEPT: 1})
    assert step.sent(output(3, prefill_stats="of the prompt")) == [] == step.sent(output(4))
    (whole,) = step.sent(output(5, finish_reason=FinishReason.STOP, stop_reason=5))
    assert whole.new_token_ids == [3, 4, 5] and whole.finish_reason is FinishReason.STOP
    assert whole.stop_reason == 5 and whole.prefill_stats == "of the prompt"
    assert whole.new_logprobs.logprobs.tolist() == [[-3 / 8], [-4 / 8], [-5 / 8]]
    assert whole.new_logprobs.logprob_token_ids.tolist() == [[3], [4], [5]]
    assert whole.new_logprobs.sampled_token_ranks.tolist() == [1, 1, 1]
    assert not step.scheduler.kept


@pytest.mark.parametrize("extra_args", [None, {}, {"drawn": 7}], ids=str)
def test_tokens_of_others_come_at_once(monkeypatch, extra_args) -> None:
    step = Step(monkeypatch, extra_args)
    (first,) = step.sent(output(3))
    assert first.new_token_ids == [3] and not step.scheduler.kept


def test_an_output_with_more_than_tokens_is_sent_with_all_that_waited(monkeypatch) -> None:
    step = Step(monkeypatch, {KEPT: 1})
    assert step.sent(output(3)) == []
    (both,) = step.sent(output(4, routed_experts=np.zeros((1, 2, 2))))
    assert both.new_token_ids == [3, 4] and both.routed_experts.shape == (1, 2, 2)
    assert step.sent(output(5)) == []


def test_a_request_whose_client_has_gone_leaves_nothing(monkeypatch) -> None:
    step = Step(monkeypatch, {KEPT: 1})
    step.sent(output(3))
    step.scheduler.finish_requests(["a"], None)
    assert not step.scheduler.kept
    step.sent(output(3))
    step.scheduler.finish_requests(None, None)
    assert step.scheduler.take("a").new_token_ids == [3], "all end: what waited is sent"
    assert step.scheduler.take("a") is None


def test_a_step_that_sends_nothing_wakes_nobody(monkeypatch) -> None:
    step = Step(monkeypatch, {KEPT: 1})
    assert step.scheduler.update_from_output([output(3)]) == {}
