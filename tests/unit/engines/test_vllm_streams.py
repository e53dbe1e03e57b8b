"""A worker's word on its sampler's random streams: how to continue one, or that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pa_npu.engines.vllm.streams import DRAWN, follow_streams

VOCABULARY = 11


def worker_of(sampler: Callable[..., Any]) -> SimpleNamespace:
    runner = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=sampler),
        requests={},
        _update_states=lambda scheduled: None,
    )
    config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    return SimpleNamespace(model_runner=runner, device="cpu", model_config=config)


def exponentials(
    logits: torch.Tensor, generators: dict[int, torch.Generator], k: None, p: None
) -> torch.Tensor:
    return torch.empty(logits.shape[1]).exponential_(generator=generators[0])


def test_a_request_begins_at_its_place_of_the_stream() -> None:
    worker = worker_of(exponentials)
    assert follow_streams(worker)
    whole, rest = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    rows = [exponentials(torch.zeros(1, VOCABULARY), {0: whole}, None, None) for _ in range(3)]
    worker.model_runner.requests["a"] = SimpleNamespace(generator=rest)
    asked = SimpleNamespace(req_id="a", sampling_params=SimpleNamespace(extra_args={DRAWN: 2}))
    worker.model_runner._update_states(SimpleNamespace(scheduled_new_reqs=[asked]))
    assert torch.equal(rows[2], exponentials(torch.zeros(1, VOCABULARY), {0: rest}, None, None))


@pytest.mark.parametrize(
    "error", [TypeError("takes 3 arguments"), RuntimeError("no kernel"), AttributeError("state")]
)
def test_a_sampler_that_raises_leaves_a_worker_that_says_it_cannot_continue(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: Any) -> torch.Tensor:
        raise error

    worker = worker_of(raises)
    assert follow_streams(worker) is False
    assert "responses cannot be continued elsewhere" in caplog.text and str(error) in caplog.text
    assert follow_streams(worker) is False, "it is asked once"
    assert caplog.text.count("cannot be continued") == 1
