"""How a trainer rank gets its FsdpBackend: the group joined, models loaded, sharded; and a lone process a checkpoint's policy."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.mesh import LONE_RANK
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.gloo_device import share_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pa_npu.backends.fsdp.backend import FsdpBackend
    from pa_npu.backends.fsdp.lora import Adapted
    from pa_npu.backends.fsdp.model import ScoredModel


_NEEDED = (
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
)


def changes() -> list[str]:
    """See BackendModule: nothing of another package is changed."""
    return []


def fit(config: Config, spec: ModelSpec) -> tuple[Config, list[str]]:
    """See BackendModule: by a trial.

    Raises ConfigError where torch is too old, DataError where adapters do not fit the model.
    """
    missing = [name for name in _NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise ConfigError(
            f"trainer.backend: fsdp needs FSDPModule.{missing[0]}, which torch {torch.__version__} "
            "lacks; install torch 2.10 or later"
        )
    if config.has_adapters and Path(spec.path).is_dir():
        from pa_npu.backends.fsdp.lora import check_adapters

        check_adapters(config, spec)
    if not spec.is_any:  # families with a file share prompts, as tests show
        return config, []
    from pa_npu.backends.fsdp.trial import fit

    return fit(config, spec)


def create(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    store: dist.Store,
    rank: int,
    local_rank: int,
    timeline: Timeline,
) -> FsdpBackend:
    """See BackendModule."""
    from torch.distributed.device_mesh import init_device_mesh

    from pa_npu.backends.fsdp.backend import FsdpBackend
    from pa_npu.backends.fsdp.model import ScoredModel, load_model, shard
    from pa_npu.backends.protocol import DTYPES

    platform.set_device(local_rank)
    share_device()
    if not dist.is_initialized():
        timeout_s = platform.group_timeout_s(config.deadlines.collective_timeout_s)
        dist.init_process_group(
            platform.process_group_backend,
            store=store,
            rank=rank,
            world_size=config.trainer.devices,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    device = platform.device(local_rank)
    shards = config.mesh.weight_shards
    copies = config.trainer.devices // shards
    sizes, names = (
        ((copies, shards), ("copies", "shards")) if copies > 1 else ((shards,), ("shards",))
    )
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    dtype = DTYPES[config.model.dtype]
    if config.has_adapters:
        from pa_npu.backends.fsdp.lora import ModelWithAdapters, adapted

        shared = ModelWithAdapters(config, spec)
        recompute = config.trainer.recompute == "full"
        shard(
            shared,
            mesh,
            compute=dtype,
            trained=True,
            recompute=recompute,
            trains_tower=config.model.vision == "trained",
        )
        models: dict[str, ScoredModel | Adapted] = dict(adapted(shared, config))
    else:
        models = dict(_copies(config, spec, mesh))
    for name, directory in trainer_models(config).directories.items():
        causal = load_model(directory, dtype, trust_remote_code=spec.trust_remote_code)
        teacher = ScoredModel(causal, config.attention.implementation)
        models[name] = shard(teacher, mesh, compute=dtype, trained=False, recompute=False)
    return FsdpBackend(models, mesh, config, spec, platform, device, timeline)


def _copies(config: Config, spec: ModelSpec, mesh: DeviceMesh) -> dict[str, ScoredModel]:
    """Returns the policy and the models of its shape, each with weights of its own."""
    from pa_npu.backends.fsdp.model import ScoredModel, load_model, shard
    from pa_npu.backends.protocol import DTYPES

    dtype, recompute = DTYPES[config.model.dtype], config.trainer.recompute == "full"
    models: dict[str, ScoredModel] = {}
    for name in ("policy", *trainer_models(config).copies):
        held = torch.float32 if name == "policy" else dtype
        causal = load_model(spec.path, held, trust_remote_code=spec.trust_remote_code)
        model = ScoredModel(causal, config.attention.implementation)
        for module, policy_module in zip(
            model.modules(), models.get("policy", model).modules(), strict=True
        ):
            # transformers rounds some when it loads a model in bf16
            module._buffers.update(policy_module._buffers)
        models[name] = shard(
            model,
            mesh,
            compute=dtype,
            trained=name == "policy",
            recompute=recompute,
            trains_tower=config.model.vision == "trained" and name == "policy",
        )
    return models


def export_checkpoint(
    checkpoint: Path, output: Path, model: str | None = None, merged: bool = False
) -> None:
    """See BackendModule: in the type that the policy was computed in.

    Needs the model's size in fp32 in host memory.
    """
    from pa_npu.backends.fsdp.checkpoint import MODEL, load_state
    from pa_npu.backends.fsdp.lora import ModelWithAdapters, adapted
    from pa_npu.backends.fsdp.lora_weights import Merged, write_adapters
    from pa_npu.backends.fsdp.model import ScoredModel, load_model
    from pa_npu.backends.fsdp.weights import ShardedWeights, Weights
    from pa_npu.backends.hf_directory import BUCKET_BYTES, checked_run, trained_template, write_hf
    from pa_npu.backends.protocol import DTYPES

    config, spec = checked_run(checkpoint, output, model)
    template = trained_template(checkpoint, config)
    place = LONE_RANK.place(0)
    if config.has_adapters:
        adapters = adapted(ModelWithAdapters(config, spec), config)["policy"]
        adapters.check_base(read_meta(checkpoint).base, checkpoint, None)
        weights = adapters.named_weights()
        load_state(
            {MODEL + name: weight.detach() for name, weight in weights.items()},
            checkpoint,
            alone=True,
        )
        if not merged and config.checkpoint.export_hf != "merged":
            write_adapters(adapters, config, spec, output, place, None, template)
            return
        policy: Weights = Merged(adapters)
    else:
        policy = ScoredModel(
            load_model(config.model.path, torch.float32, trust_remote_code=spec.trust_remote_code),
            config.attention.implementation,
        ).requires_grad_(False)
        load_state(
            {MODEL + name: weight for name, weight in policy.named_weights().items()},
            checkpoint,
            alone=True,
        )
    source = ShardedWeights(policy, spec, place, BUCKET_BYTES, DTYPES[config.model.dtype], None)
    write_hf(source, spec, output, place, torch.device("cpu"), config=config, template=template)
