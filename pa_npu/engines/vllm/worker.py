"""The engine's end of a weight publish: a vLLM worker extension for collective_rpc. Imports torch and vllm only.

    VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls pa_npu.engines.vllm.worker.WorkerExtension

    pa_connect    once: join one group per pipeline stage, check that the trainer's model is the engine's
    pa_receive    per version: receive and load everything in one call between engine steps, then stamp the version
    pa_version    the version all of whose weights are loaded; None before the first and after a failed receive
    pa_close      leave the groups

Call them without collective_rpc's own `timeout`: once one fires, vLLM hands every later reply to the wrong caller. The
deadline is `timeout_s` here and the client's own. The caller must have no request in flight during pa_receive and must
reset the prefix cache after it, which still holds keys and values of the old weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.publish import transport
from pa_npu.publish.progress import Progress

# Broadcasts posted ahead of the one being loaded, so that the wire does not wait for the loader.
_AHEAD = 2
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
        rank = int(rank_offset) + int(worker.rank)
        manifests = [transport.Manifest.from_json(stage["manifest"]) for stage in stages]
        check_model(manifests, worker.model_config.hf_config.get_text_config())
        take_logprobs_mode(worker)
        groups = [
            transport.join_group(
                host,
                int(port),
                stage["name"],
                rank=rank,
                size=int(world_size),
                backend=backend,
                timeout_s=float(timeout_s),
                describe=f"engine worker {rank} receives from trainer stage {manifest.stage}",
            )
            for stage, manifest in zip(stages, manifests, strict=True)
        ]
        abandonments = [transport.Abandonment(host, int(port), stage["name"]) for stage in stages]
        device = torch.device(worker.device)
        self._pa_receiver = Receiver(manifests, groups, rank, device, float(timeout_s), abandonments)
        return {"rank": rank, "stages": len(groups)}

    def pa_receive(self, version: int) -> dict[str, Any]:
        """Load weight version `version`. On any error the version is unset; connect and receive again."""
        receiver = self._pa_get()
        start = time.perf_counter()
        worker: Any = self
        self._pa_version = None
        with _reloading(worker) as model, torch.no_grad():
            wanted = {name for name, _ in model.named_parameters()}
            weights = receiver.receive(int(version))
            if receiver.is_tied and _HEAD in wanted:
                weights = with_tied_head(weights)
            loaded: set[str] | None = model.load_weights(weights)
            missing = sorted(wanted - loaded) if loaded is not None else []
        if missing:
            raise transport.WeightSyncError(
                f"weight version {version}: the trainer sent no weights for {len(missing)} parameter(s) of the engine, "
                "the first is "
                f"{missing[0]!r}; engine and trainer must be given the same model directory"
            )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._pa_version = int(version)
        return {"version": int(version), "bytes": receiver.num_bytes, "seconds": time.perf_counter() - start}

    def pa_version(self) -> dict[str, Any]:
        """{"version": None} also means: do not generate."""
        return {"version": self.__dict__.get("_pa_version")}

    def pa_close(self) -> dict[str, Any]:
        """Leave the groups, if any."""
        receiver: Receiver | None = self.__dict__.pop("_pa_receiver", None)
        if receiver is not None:
            receiver.close()
        return {}

    def _pa_get(self) -> Receiver:
        receiver: Receiver | None = self.__dict__.get("_pa_receiver")
        if receiver is None:
            raise transport.WeightSyncError(
                "this engine has no connection to the trainer; call pa_connect before pa_receive"
            )
        return receiver


@dataclass(frozen=True)
class Message:
    """One broadcast of a stage: its header (no bucket) or one bucket; `buffer` is filled once it has arrived."""

    manifest: transport.Manifest
    assembler: transport.Assembler
    bucket: transport.Bucket | None
    buffer: torch.Tensor
    name: str


class Receiver:
    """Reads the buckets of all stages, in stage order, and puts the HF tensors together. Knows nothing of vLLM."""

    def __init__(
        self,
        manifests: list[transport.Manifest],
        groups: list[dist.ProcessGroup],
        rank: int,
        device: torch.device,
        timeout_s: float,
        abandonments: list[transport.Abandonment] | None = None,
    ) -> None:
        self._manifests = manifests
        self._abandonments = abandonments or []
        self._groups = groups
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._progress = Progress(groups, rank)
        self._unfinished = False  # broadcasts may be pending

    @property
    def num_bytes(self) -> int:
        return sum(manifest.num_bytes for manifest in self._manifests)

    @property
    def is_tied(self) -> bool:
        """Whether the LM head is the embedding, so that the trainer sends no head."""
        return all(_HEAD not in manifest.shapes for manifest in self._manifests)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) of all weights. Each tensor may be kept: buffers are not used again."""
        deadline = transport.Deadline(self._timeout_s, self._given_up)
        self._unfinished = True
        self._progress.begin(version)
        for message in self._messages(version, deadline):
            if message.bucket is None:
                self._check_header(message.buffer, message.manifest, version)
            else:
                yield from message.assembler.take(message.bucket, message.buffer)
        self._unfinished = False

    def close(self) -> None:
        for group in self._groups:
            (transport.drop_group if self._unfinished else transport.leave_group)(group)
        self._groups = []

    def _given_up(self) -> str | None:
        return next((reason for one in self._abandonments if (reason := one.reason())), None)

    def _messages(self, version: int, deadline: transport.Deadline) -> Iterator[Message]:
        """Header and buckets of each stage, in the order they are sent, always with the next ones already posted."""
        pending: deque[tuple[dist.Work, Message]] = deque()
        for group, manifest in zip(self._groups, self._manifests, strict=True):
            assembler = transport.Assembler(manifest)
            buckets: list[transport.Bucket | None] = [None, *manifest.buckets]
            for index, bucket in enumerate(buckets):
                if len(pending) > _AHEAD:
                    yield self._arrived(*pending.popleft(), version, deadline)
                if bucket is None:
                    name = f"stage {manifest.stage}, header"
                    buffer = torch.empty(2, dtype=torch.int64, device=self._device)
                else:
                    name = f"stage {manifest.stage}, bucket {index} of {len(manifest.buckets)} ({bucket.summary})"
                    buffer = assembler.buffer(bucket, self._device)
                pending.append((transport.broadcast(group, buffer), Message(manifest, assembler, bucket, buffer, name)))
        while pending:
            yield self._arrived(*pending.popleft(), version, deadline)

    def _arrived(self, work: dist.Work, message: Message, version: int, deadline: transport.Deadline) -> Message:
        transport.wait(
            work,
            deadline,
            f"engine worker {self._rank} waits for weight version {version}, {message.name}",
            "check in the trainer's logs that the leader of this stage is alive and publishing, or raise "
            "publish.timeout_s",
            meanwhile=self._progress.beat,
        )
        self._progress.arrived(self._manifests.index(message.manifest))
        return message

    def _check_header(self, header: torch.Tensor, manifest: transport.Manifest, version: int) -> None:
        sent_version, digest = header.tolist()
        if sent_version != version:
            raise transport.WeightSyncError(
                f"trainer stage {manifest.stage} sent weight version {sent_version} to engine worker {self._rank}, "
                "which was asked to "
                f"load version {version}; publishes and pa_receive calls must come in the same order"
            )
        if digest != manifest.digest:
            raise transport.WeightSyncError(
                f"trainer stage {manifest.stage} sends other buckets than the manifest that engine worker {self._rank} "
                "was given; "
                f"call pa_connect with the manifest of this run"
            )


def with_tied_head(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The embedding a second time, as the LM head.

    vLLM's layerwise reload unties the two for its duration and would leave a tied head as it was, which on CPU keeps a
    packed copy of the old weights: the engine would generate from new layers and an old head.
    """
    for name, tensor in weights:
        yield name, tensor
        if name == _EMBEDDING:
            yield _HEAD, tensor


def check_model(manifests: list[transport.Manifest], hf_config: Any) -> None:
    """Raises WeightSyncError unless trainer and engine hold the same model and no tensor comes from two stages."""
    names = [name for manifest in manifests for name in manifest.shapes]
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise transport.WeightSyncError(
            f"weight tensor {twice} is announced by two trainer stages; give each stage's manifest once"
        )
    for manifest in manifests:
        for key, value in manifest.model.items():
            if int(getattr(hf_config, key, value)) != value:
                raise transport.WeightSyncError(
                    f"trainer stage {manifest.stage} has {key}={value}, the engine's model {getattr(hf_config, key)}; "
                    f"engine and trainer must be given the same model directory"
                )


def take_logprobs_mode(worker: Any) -> None:
    """Let the sampler report what --logprobs-mode asked for.

    vllm-ascend 0.18 to 0.25 builds its sampler without the mode, so that it would report raw log-probs, which are those of
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
    old memory. vLLM 0.18 makes a layer's memory while it loads, on torch's default device, which must be the worker's until
    the end; 0.23 remembers it. It is finished also on failure, else the engine would keep tensors without memory.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.model
    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)
