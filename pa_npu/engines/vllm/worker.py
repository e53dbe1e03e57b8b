"""The engine's end of a weight publish: a vLLM worker extension for collective_rpc. Imports torch and vllm only.

    VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls pa_npu.engines.vllm.worker.WorkerExtension

    pa_connect    once: join one group per pipeline stage, check that the trainer's model is the engine's
    pa_receive    per version: receive and load everything in one call between engine steps, then stamp the version; says what
                  memory was used at most since the load before
    pa_prepare    per version, instead: begin to receive it in a thread, beside the engine's steps; pa_prepared says when it is here
    pa_swap       load what was prepared, between two steps, with nothing on the wire
    pa_routes     which experts the tokens of an answered request took, on the first worker
    pa_version    the version all of whose weights are loaded; None before the first and after a failed receive
    pa_close      leave the groups

Call them without collective_rpc's own `timeout`: once one fires, vLLM hands every later reply to the wrong caller. The
deadline is `timeout_s` here and the client's own. The caller must have no request in flight during pa_receive. The prefix cache,
which still holds keys and values of the old weights after it, is not the workers': the server's guard resets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pa_npu.engines.vllm import experts, routes
from pa_npu.engines.vllm.streams import follow_streams
from pa_npu.platform.memory_peaks import ResidentPeak, device_peak_bytes, own_processes, session_leader
from pa_npu.weight_transfer.receiver import EMBEDDING, HEAD, Receiver
from pa_npu.weight_transfer.transport import WeightSyncError


class WorkerExtension:
    """Mixed into vLLM's worker class. All names start with `pa_`: vLLM refuses names that its worker already has."""

    def pa_connect(
        self,
        host: str,
        port: int,
        rank_offset: int,
        world_size: int,
        stages: list[dict[str, Any]],
        backend: str,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Join the groups of `stages` (from Publisher.manifest) as rank_offset + own worker rank."""
        self.pa_close()
        worker: Any = self
        take_logprobs_mode(worker)
        follow_streams(worker)
        experts.undo_waking(worker)
        rank = int(rank_offset) + int(worker.rank)
        self._pa_receiver = Receiver.join(
            (host, int(port)),
            stages,
            rank=rank,
            world_size=int(world_size),
            backend=backend,
            device=torch.device(worker.device),
            timeout_s=float(timeout_s),
            model=worker.model_config.hf_config.get_text_config(),
            directory=str(worker.model_config.model),
        )
        return {"rank": rank, "stages": len(stages)}

    def pa_receive(self, version: int, begins_within_s: float | None = None) -> dict[str, Any]:
        """Load weight version `version`. On any error the version is unset; connect and receive again.

        begins_within_s: as Receiver.receive; the model is made ready to load before that wait.
        """
        receiver = self._pa_get()
        received = receiver.receive(int(version), begins_within_s=begins_within_s)
        return self._pa_load(int(version), received, lambda: receiver.digests)

    def pa_prepare(self, version: int) -> dict[str, Any]:
        """Begin to receive weight version `version` into a second buffer."""
        self._pa_get().prepare(int(version))
        return {}

    def pa_prepared(self, version: int) -> dict[str, Any]:
        """{"version": None} while it is still being received. Raises what went wrong."""
        digests = self._pa_get().prepared(int(version))
        return {"version": None if digests is None else int(version), "digests": list(digests or ())}

    def pa_swap(self, version: int) -> dict[str, Any]:
        """Load weight version `version` out of the second buffer. Errors as of pa_receive."""
        received, digests = self._pa_get().take(int(version))
        return self._pa_load(int(version), received, lambda: digests)

    def _pa_load(
        self, version: int, received: Iterable[tuple[str, torch.Tensor]], digests: Callable[[], tuple[str, ...]]
    ) -> dict[str, Any]:
        """digests: of what was received, asked for when all of it has been loaded."""
        receiver = self._pa_get()
        weights = receiver.whole(received)
        start = time.perf_counter()
        worker: Any = self
        self._pa_version = None
        with _reloading(worker) as model, torch.no_grad():
            wanted = {name for name, _ in model.named_parameters()}
            if receiver.is_tied and HEAD in wanted:
                weights = with_tied_head(weights)
            loaded: set[str] | None = model.load_weights(weights)
            missing = sorted(wanted - loaded) if loaded is not None else []
        if missing:
            raise WeightSyncError(
                f"weight version {version}: the trainer sent no weights for {len(missing)} parameter(s) of the engine, "
                "the first is "
                f"{missing[0]!r}; engine and trainer must be given the same model directory"
            )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._pa_version = version
        if (recorder := routes.recorder_of(worker)) is not None:
            recorder.forget()
        return {
            "version": version,
            "seconds": time.perf_counter() - start,
            "digests": list(digests()),
            "memory": self._pa_memory(),
        }

    def pa_version(self) -> dict[str, Any]:
        """{"version": None} also means: do not generate. continues: requests begin at any place of their random streams. sleeps: it
        was started with --enable-sleep-mode. routes: the engine says which experts tokens took."""
        worker: Any = self
        return {
            "version": self.__dict__.get("_pa_version"),
            "continues": follow_streams(self),
            "sleeps": bool(getattr(worker.model_config, "enable_sleep_mode", False)),
            "routes": routes.records_routes(self),
        }

    def pa_routes(self, request: str, n: int, given: int) -> dict[str, Any]:
        """RouteRecorder.take; {} where the engine records routes by itself, and on all workers but the first, which are alike."""
        worker: Any = self
        recorder = routes.recorder_of(worker) if worker.rank == 0 else None
        return {} if recorder is None else recorder.take(request, int(n), int(given))

    def pa_close(self) -> dict[str, Any]:
        """Leave the groups, if any."""
        receiver: Receiver | None = self.__dict__.pop("_pa_receiver", None)
        if receiver is not None:
            receiver.close()
        return {}

    def _pa_memory(self) -> dict[str, int | None]:
        """Since the call before; "host" is of all the engine's processes where this worker is the first, and 0 of the others."""
        worker: Any = self
        peak = self.__dict__.setdefault("_pa_resident_peak", ResidentPeak(own_processes))
        counts = worker.rank == 0 or session_leader() is None
        return {"host": peak.take() if counts else 0, "device": device_peak_bytes(torch.device(worker.device).type)}

    def _pa_get(self) -> Receiver:
        receiver: Receiver | None = self.__dict__.get("_pa_receiver")
        if receiver is None:
            raise WeightSyncError("this engine has no connection to the trainer; call pa_connect before pa_receive")
        return receiver


def with_tied_head(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The embedding a second time, as the LM head.

    vLLM's layerwise reload unties the two for its duration and would leave a tied head as it was, which on CPU keeps a
    packed copy of the old weights: the engine would generate from new layers and an old head.
    """
    for name, tensor in weights:
        yield name, tensor
        if name == EMBEDDING:
            yield HEAD, tensor


def take_logprobs_mode(worker: Any) -> None:
    """Let the sampler report what --logprobs-mode asked for.

    vllm-ascend 0.23 to 0.25 builds its sampler without the mode, so that it would report raw log-probs, which are those of
    another distribution than the sampled one unless the temperature is 1.
    """

    mode = worker.model_config.logprobs_mode
    sampler = getattr(worker.model_runner, "sampler", None)
    for part in (sampler, getattr(sampler, "topk_topp_sampler", None)):
        if part is not None and getattr(part, "logprobs_mode", mode) != mode:
            part.logprobs_mode = mode


@contextmanager
def _reloading(worker: Any) -> Iterator[Any]:
    """The worker's model in a state in which load_weights takes HF tensors.

    vLLM packs weights for its kernels after loading (on CPU always), after which only its layerwise reload can load
    again: it puts each layer back to its HF form, loads it once complete, packs it anew and copies the result into the
    old memory. What is made meanwhile on torch's default device is on the worker's. It is finished also on failure, else the
    engine would keep tensors without memory.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    experts.undo_waking(worker)
    model = worker.model_runner.model
    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)
        experts.pack_again(model)
