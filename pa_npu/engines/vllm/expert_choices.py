"""Records the experts that a mixture's routers choose inside a vLLM worker. Imports torch only.

A token's expert choices are kept at the slot of the KV cache that has its key and value. So they
are those of the pass that computed these: a cached prefix has the expert choices of the request
that computed it, and a preempted request those of its second computation. The expert choices of a
request are copied when it ends, before a step can overwrite its slots. Those of a request that a
step leaves out, which may have been preempted, are copied at once.

Releases with Model Runner V2 record expert choices themselves (--enable-return-routed-experts), and
answer with them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch

ASKED = "expert_choices"
"""The name under which a request asks for its expert choices."""
_NONE = -1  # 65535 of 16 bits


def records_expert_choices(worker: Any) -> bool:
    """Returns whether this engine can report which experts tokens took.

    It records them itself, or its routers can be watched; this starts watching them.
    """
    settings = getattr(worker, "vllm_config", None)
    output_config = getattr(settings, "aux_output_config", None) or getattr(
        settings, "model_config", None
    )
    if getattr(output_config, "enable_return_routed_experts", False):
        return True
    return recorder_of(worker) is not None


def recorder_of(worker: Any) -> VllmExpertChoiceRecorder | None:
    """Returns the worker's recorder, made at the first call.

    Returns None if routers cannot be watched: in captured graphs, and in other runners.
    """
    runner = worker.model_runner
    if not hasattr(runner, "_pa_expert_choices"):
        model = getattr(runner, "model", None)
        routers: list[Any] = []
        if model is not None:
            routers = list({id(router): router for router in _routers(model)}.values())
        groups = getattr(getattr(runner, "kv_cache_config", None), "kv_cache_groups", ())
        watched = bool(routers) and len(groups) == 1 and worker.model_config.enforce_eager
        watched = watched and all(hasattr(runner, name) for name in ("requests", "input_batch"))
        runner._pa_expert_choices = VllmExpertChoiceRecorder(runner, routers) if watched else None
    recorder: VllmExpertChoiceRecorder | None = runner._pa_expert_choices
    return recorder


def _routers(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        router = getattr(module, "router", None)
        if hasattr(router, "set_capture_fn"):
            yield router


class VllmExpertChoiceRecorder:
    """Watches the steps of `runner`, vLLM's first model runner.

    Call its methods between steps.
    """

    def __init__(self, runner: Any, routers: list[Any]) -> None:
        cache = runner.kv_cache_config
        self._runner = runner
        self._num_layers = len(routers)
        self._block_size = int(cache.kv_cache_groups[0].kv_cache_spec.block_size)
        self._num_slots = int(cache.num_blocks) * self._block_size
        self._slots: torch.Tensor | None = None  # int16 [slots, layers, experts per token]
        self._rows: dict[int, torch.Tensor] = {}  # experts of the step's tokens, by layer
        self._ends: dict[str, int] = {}  # tokens that each request in the runner has computed
        self._aside: dict[str, torch.Tensor] = {}  # of requests that a step left out
        self._ended: dict[str, torch.Tensor] = {}
        for layer, router in enumerate(routers):
            router.set_capture_fn(
                lambda ids, layer=layer: self._rows.__setitem__(layer, ids.clone())
            )
        execute = runner.execute_model

        def execute_and_note(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._before(scheduled)
            result = execute(scheduled, *args, **kwargs)
            self._after(scheduled)
            return result

        runner.execute_model = execute_and_note

    def forget(self) -> None:
        """Forgets the requests that nobody has asked about; nothing is in flight."""
        self._ended.clear()

    def pop_expert_choices(self, request: str, n: int, num_given: int) -> dict[str, Any]:
        """Returns the expert choices of the n responses of an API request that has ended.

        "given" has those of the tokens that the request gave, once; "own" those of each response.
        Each is base64 of 16-bit ids [tokens, layers, experts per token], empty if unknown.

        Args:
            request: the answer's id.
            n: number of responses.
            num_given: tokens of the prompt and of the beginning of the response.
        """
        responses = [
            self._pop(f"{request}-0" if n == 1 else f"{number}_{request}-0") for number in range(n)
        ]
        prompt = max((rows[:num_given] for rows in responses), key=len)
        return {"given": _text(prompt), "own": [_text(rows[num_given:]) for rows in responses]}

    def _pop(self, prefix: str) -> torch.Tensor:
        """Returns the expert choices of a request, and forgets them if it has ended.

        `prefix`: of the engine's own name for the request, which ends in random characters.
        """
        names = (*self._ended, *self._ends)
        name = next((name for name in names if name.startswith(prefix)), None)
        if name is None:
            return torch.empty(0, dtype=torch.int16)
        return self._ended.pop(name) if name in self._ended else self._held(name)

    def _before(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            state = self._runner.requests.get(name)
            extra_args = getattr(getattr(state, "sampling_params", None), "extra_args", None)
            if name in self._ends and extra_args and extra_args.get(ASKED):
                self._ended[name] = self._held(name)
            self._ends.pop(name, None)
            self._aside.pop(name, None)
        for name in self._ends.keys() - scheduled.num_scheduled_tokens.keys() - self._aside.keys():
            self._aside[name] = self._held(name)
        for source, target in getattr(scheduled, "kv_cache_block_copies", None) or ():
            if self._slots is not None:
                blocks = self._slots.view(-1, self._block_size, *self._slots.shape[1:])
                blocks[target] = blocks[source]
        self._rows.clear()

    def _after(self, scheduled: Any) -> None:
        slots: list[int] = []
        for name in self._runner.input_batch.req_ids:  # in the order of the step's rows
            count = scheduled.num_scheduled_tokens.get(name, 0)
            if count:
                first = int(self._runner.requests[name].num_computed_tokens)
                slots += self._slots_of(name, first, first + count)
                self._ends[name] = first + count
                self._aside.pop(name, None)
        if not slots:
            return
        if self._slots is None:
            if not self._rows:
                return
            per_token = next(iter(self._rows.values())).shape[1]
            self._slots = torch.full(
                (self._num_slots, self._num_layers, per_token), _NONE, dtype=torch.int16
            )
        complete = len(self._rows) == self._num_layers and all(
            len(rows) >= len(slots) for rows in self._rows.values()
        )
        if complete:
            step = torch.stack(
                [self._rows[layer][: len(slots)] for layer in range(self._num_layers)], 1
            )
            self._slots[torch.tensor(slots)] = step.to("cpu", torch.int16)
        else:  # never what an earlier step left there
            self._slots[torch.tensor(slots)] = _NONE

    def _held(self, name: str) -> torch.Tensor:
        """Returns the expert choices of all tokens that a request in the runner has computed."""
        if name in self._aside:
            return self._aside[name]
        if self._slots is None:
            return torch.empty(0, dtype=torch.int16)
        return self._slots[torch.tensor(self._slots_of(name, 0, self._ends[name]))]

    def _slots_of(self, name: str, first: int, last: int) -> list[int]:
        blocks = self._runner.requests[name].block_ids[0]
        size = self._block_size
        return [blocks[place // size] * size + place % size for place in range(first, last)]


def _text(rows: torch.Tensor) -> str:
    return base64.b64encode(rows.contiguous().numpy().tobytes()).decode()
