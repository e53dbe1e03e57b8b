"""A scheduler for vLLM's engine that keeps a request's tokens until it ends, for requests that ask for it.

vLLM's engine sends the API server every token of every request as it is sampled. The server wakes
for each step, decodes the message, and looks at each token, though nobody reads a rollout before
its end. On a core that engine and server share, this takes a tenth of an iteration. A request that
carries KEPT (`vllm_xargs`) gets its tokens in one message when it ends or is cut. All others, such
as streamed answers and requests with stop texts, which the server looks for, are as before.

Used by `--scheduler-cls pa_npu.engines.vllm.scheduler.KeepingScheduler`, inside the engine's
process. It extends the scheduler without asynchronous scheduling, the only one of engines on CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists

from pa_npu.engines.vllm.responses import KEPT

_JOINED = frozenset({"request_id", "new_token_ids", "new_logprobs", "stop_reason", "prefill_stats"})
"""Fields of an output that parts of a response may have. Outputs with others are not kept."""


class KeepingScheduler(Scheduler):
    """vLLM's scheduler, whose outputs for requests with KEPT come together at their end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, list[EngineCoreOutput]] = {}
        """Outputs that were not sent yet, by request."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        by_client = super().update_from_output(*args, **kwargs)
        for client, message in list(by_client.items()):
            message.outputs = [
                whole for output in message.outputs if (whole := self._whole(output)) is not None
            ]
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del by_client[client]
        return by_client

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)
        if request_ids is not None:  # their client has gone; where all end, the rest is sent
            for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
                self.kept.pop(request_id, None)
        return finished

    def take(self, request_id: str) -> EngineCoreOutput | None:
        """Returns what was not sent of a request; None if there is nothing."""
        parts = self.kept.pop(request_id, None)
        return None if parts is None else join(parts)

    def _whole(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Returns what is to be sent now: the output and all that was kept before it, or None."""
        parts = self.kept.get(output.request_id)
        if not self._may_wait(output):
            return output if parts is None else join([*self.kept.pop(output.request_id), output])
        if parts is None:
            self.kept[output.request_id] = [output]
        else:
            parts.append(output)
        return None

    def _may_wait(self, output: EngineCoreOutput) -> bool:
        if output.finish_reason is not None:
            return False
        request = self.requests.get(output.request_id)
        parameters = None if request is None else request.sampling_params
        if parameters is None or KEPT not in (parameters.extra_args or {}):
            return False
        return all(getattr(output, name) is default for name, default in _DEFAULTS)


_EMPTY = EngineCoreOutput("", [])
# None, or a small integer, which is one object in Python
_DEFAULTS = [
    (name, getattr(_EMPTY, name))
    for name in EngineCoreOutput.__struct_fields__
    if name not in _JOINED
]


def join(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Returns one output with the tokens and log-probs of all parts; its other fields are the last's."""
    first, last = parts[0], parts[-1]
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    if logprobs:
        last.new_logprobs = LogprobsLists(
            np.concatenate([part.logprob_token_ids for part in logprobs]),
            np.concatenate([part.logprobs for part in logprobs]),
            np.concatenate([part.sampled_token_ranks for part in logprobs]),
        )
    if last.prefill_stats is None:
        last.prefill_stats = first.prefill_stats
    return last


def _send_kept_tokens_first() -> None:
    """Lets an engine that cuts all requests send what it has of them.

    vLLM answers such requests by itself, without the scheduler. A release that does it elsewhere
    ends a kept request without tokens, which are then sampled again.
    """
    send: Any = getattr(EngineCoreProc, "_send_finish_outputs_to_client", None)
    if send is None:
        return

    @functools.wraps(send)
    def send_all(self: Any, req_ids: Iterable[str], client_index: int, finish_reason: Any) -> None:
        rest = []
        if isinstance(self.scheduler, KeepingScheduler):
            kept = [self.scheduler.take(request_id) for request_id in req_ids]
            rest = [output for output in kept if output is not None]
        if rest:
            self.output_queue.put_nowait((client_index, EngineCoreOutputs(outputs=rest)))
        send(self, req_ids, client_index, finish_reason)

    EngineCoreProc._send_finish_outputs_to_client = send_all


_send_kept_tokens_first()
