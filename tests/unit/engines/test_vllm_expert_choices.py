"""Expert choices inside a vLLM worker lie by slots of its KV cache, and no slot holds a wrong one:
not after a cached prefix, a preemption or an end.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.engines.vllm.expert_choices import recorder_of, records_expert_choices

BLOCK, LAYERS, TAKEN = 4, 2, 2


class Router(torch.nn.Module):
    capture: Any = None

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()


class Runner:
    """The part of vLLM's first model runner that is read; experts tell the token and the step's
    number.
    """

    def __init__(self) -> None:
        self.model = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        spec = SimpleNamespace(block_size=BLOCK)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=16
        )
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.number = 0
        self.silent = False

    def execute_model(self, scheduled: Any) -> str:
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        self.input_batch.req_ids = [
            name for name in self.requests if name in scheduled.num_scheduled_tokens
        ]
        rows = []
        for name in self.input_batch.req_ids:
            blocks, first = scheduled.places[name]
            self.requests[name].block_ids, self.requests[name].num_computed_tokens = (
                (blocks,),
                first,
            )
            count = scheduled.num_scheduled_tokens[name]
            rows += self.requests[name].tokens[first : first + count]
        # token, and in which step
        ids = torch.tensor(rows)[:, None] + torch.tensor([0, 100 * self.number])
        for layer, one in enumerate(self.model):
            if not self.silent:
                # padded
                one.router.capture(torch.cat([ids + layer, torch.zeros(3, TAKEN, dtype=ids.dtype)]))
        self.number += 1
        return "done"


class Engine:
    def __init__(self) -> None:
        self.runner = Runner()
        model_config = SimpleNamespace(enforce_eager=True)
        self.worker = SimpleNamespace(
            rank=0,
            model_runner=self.runner,
            model_config=model_config,
            vllm_config=SimpleNamespace(model_config=None),
        )
        assert records_expert_choices(self.worker)
        recorder = recorder_of(self.worker)
        assert recorder is not None and recorder_of(self.worker) is recorder
        self.recorder = recorder

    def request(self, name: str, tokens: list[int], asks: bool = True) -> None:
        extra = {"expert_choices": 1} if asks else None
        self.runner.requests[name] = SimpleNamespace(
            tokens=tokens,
            block_ids=([],),
            num_computed_tokens=0,
            sampling_params=SimpleNamespace(extra_args=extra),
        )

    def step(self, finished: tuple[str, ...] = (), **places: tuple[list[int], int, int]) -> None:
        """places: of each scheduled request its blocks, its first token of the step and how many."""
        scheduled = SimpleNamespace(
            finished_req_ids=set(finished),
            num_scheduled_tokens={name: count for name, (_, _, count) in places.items()},
            places={name: (blocks, first) for name, (blocks, first, _) in places.items()},
        )
        assert self.runner.execute_model(scheduled) == "done"

    def take(
        self, request: str, n: int = 1, arguments: int = 0
    ) -> tuple[list[Any], list[list[Any]]]:
        """(those given, those of each response): token and step of every token, after a look at the
        second layer.
        """
        actual = self.recorder.pop_expert_choices(request, n, arguments)

        def read(text: str) -> list[Any]:
            rows = np.frombuffer(base64.b64decode(text), np.int16).reshape(-1, LAYERS, TAKEN)
            assert all((row[1] == row[0] + 1).all() or (row == -1).all() for row in rows)
            return [(int(row[0, 0]), (int(row[0, 1]) - int(row[0, 0])) // 100) for row in rows]

        return read(actual["given"]), [read(own) for own in actual["own"]]


def test_a_cached_prefix_has_the_expert_choices_of_the_pass_that_computed_it() -> None:
    """Two responses of one request: the second finds the prompt's first block in the cache; another
    request finds it too.
    """
    engine = Engine()
    tokens = [10, 11, 12, 13, 14, 15, 16]
    engine.request("0_r-0-ab", tokens)
    engine.request("1_r-0-cd", [*tokens[:5], 25, 26])
    engine.step(**{"0_r-0-ab": ([3, 5], 0, 5), "1_r-0-cd": ([3, 7], 4, 1)})
    engine.step(**{"0_r-0-ab": ([3, 5], 5, 1), "1_r-0-cd": ([3, 7], 5, 1)})
    # the second ends; the first goes on in the step in which a third request gets the second's
    # block
    engine.request("s-0-ef", [10, 11, 12, 13, 34, 35])
    engine.step(("1_r-0-cd",), **{"0_r-0-ab": ([3, 5], 6, 1), "s-0-ef": ([3, 7], 4, 2)})
    prompt, (first, second) = engine.take("r", 2, 5)
    assert prompt == [(10, 0), (11, 0), (12, 0), (13, 0), (14, 0)]
    assert first == [(15, 1), (16, 2)] and second == [(25, 1)]
    inputs, (own,) = engine.take("s", 1, 4)
    assert inputs == [(10, 0), (11, 0), (12, 0), (13, 0)] and own == [(34, 2), (35, 2)]


def test_a_preempted_request_has_what_it_computed_again_or_what_it_had_when_it_was_left_out() -> (
    None
):
    engine = Engine()
    for name, start in (("a-0-x", 10), ("b-0-x", 20), ("c-0-x", 30)):
        engine.request(name, list(range(start, start + 8)))
    engine.step(**{"a-0-x": ([1], 0, 3), "b-0-x": ([2], 0, 3), "c-0-x": ([4], 0, 3)})
    engine.step(**{"a-0-x": ([1], 3, 1)})  # b and c are preempted: their blocks are free
    # a writes where b was; c is computed again
    engine.step(**{"a-0-x": ([1, 2, 4], 4, 2), "c-0-x": ([6], 0, 4)})
    # b is aborted while it waits, and a writes on
    engine.step(("b-0-x",), **{"a-0-x": ([1, 2, 4], 6, 1)})
    assert engine.take("b")[1] == [[(20, 0), (21, 0), (22, 0)]], (
        "what lies in its blocks is another's"
    )
    assert engine.take("c")[1] == [[(30, 2), (31, 2), (32, 2), (33, 2)]]
    assert engine.take("a")[1] == [[(10, 0), (11, 0), (12, 0), (13, 1), (14, 2), (15, 2), (16, 3)]]


def test_who_does_not_ask_leaves_nothing_and_a_load_forgets_those_that_nobody_fetched() -> None:
    engine = Engine()
    engine.request("a-0-x", [10, 11], asks=False)
    engine.request("b-0-x", [20, 21])
    engine.step(**{"a-0-x": ([1], 0, 2), "b-0-x": ([2], 0, 2)})
    engine.request("c-0-x", [30])
    engine.step(("a-0-x", "b-0-x"), **{"c-0-x": ([3], 0, 1)})
    assert engine.take("a")[1] == [[]]
    engine.recorder.forget()
    assert engine.take("b")[1] == [[]] and engine.take("c")[1] == [[(30, 1)]]


def test_a_step_whose_routers_said_nothing_leaves_none_and_not_those_of_an_earlier_one() -> None:
    engine = Engine()
    engine.request("a-0-x", [10, 11])
    engine.step(**{"a-0-x": ([1], 0, 2)})
    engine.request("b-0-x", [20, 21])
    engine.runner.silent = True
    engine.step(("a-0-x",), **{"b-0-x": ([1], 0, 2)})
    actual = np.frombuffer(
        base64.b64decode(engine.recorder.pop_expert_choices("b", 1, 0)["own"][0]), np.int16
    )
    assert (actual == -1).all() and len(actual) == 2 * LAYERS * TAKEN


@pytest.mark.parametrize("change", ["graphs", "groups", "dense", "runner"])
def test_an_engine_whose_routers_cannot_be_watched_says_so(change: str) -> None:
    runner = Runner()
    worker = SimpleNamespace(
        model_runner=runner,
        model_config=SimpleNamespace(enforce_eager=change != "graphs"),
        vllm_config=SimpleNamespace(model_config=None),
    )
    if change == "groups":
        runner.kv_cache_config.kv_cache_groups *= 2
    if change == "dense":
        runner.model = torch.nn.ModuleList()
    if change == "runner":
        del runner.requests
    assert not records_expert_choices(worker)
    worker.vllm_config.aux_output_config = SimpleNamespace(enable_return_routed_experts=True)
    assert records_expert_choices(worker), "its own flag"
