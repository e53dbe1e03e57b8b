"""How a trainer rank gets its MegatronBackend, and a lone process a checkpoint's policy: prepared, joined, built and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.backends.megatron.patches.table import PATCHES, prepare
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.telemetry.timeline import Timeline

if TYPE_CHECKING:  # importing these imports megatron, which works only in a prepared process
    from pa_npu.backends.megatron.backend import MegatronBackend
    from pa_npu.backends.megatron.stage import TriModel


def changes() -> list[str]:
    """See BackendModule."""
    return [patch.line() for patch in PATCHES]


def fit(config: Config, spec: ModelSpec) -> tuple[Config, list[str]]:
    """See BackendModule: what does not fit breaks a rule."""
    return config, []


def create(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    store: dist.Store,
    rank: int,
    local_rank: int,
    timeline: Timeline,
) -> MegatronBackend:
    """See BackendModule."""
    prepare(platform.name)
    from pa_npu.backends.megatron.backend import MegatronBackend
    from pa_npu.backends.megatron.parallel import initialise_parallel

    initialise_parallel(config, platform, store, rank, local_rank)
    stage = load_stage(config, spec, platform)
    return MegatronBackend(stage, config, spec, platform, platform.device(local_rank), timeline)


def load_stage(config: Config, spec: ModelSpec, platform: Platform) -> TriModel:
    """This rank's pipeline stage with the HF weights in policy and reference, and those of their
    directories in teachers; the old policy is copied at every publish.
    """
    from pa_npu.backends.megatron.stage import build_stage
    from pa_npu.backends.megatron.weights.hf_map import load_hf

    models = trainer_models(config)
    teachers = {name: ModelSpec.read(path) for name, path in models.directories.items()}
    stage = build_stage(
        spec,
        config,
        platform,
        frozen=models.computed,
        keeps_published=models.keeps_published,
        other_specs=teachers,
    )
    for name, model in stage.gpts().items():
        if name != "old":
            load_hf(model, teachers.get(name, spec))
    return stage


def export_checkpoint(
    checkpoint: Path, output: Path, model: str | None = None, merged: bool = False
) -> None:
    """See BackendModule: in the type that the policy was trained in, whatever parallel sizes the
    checkpoint was written at.

    Needs the model's size in host memory. Raises as checked_run does; ExportError when it cannot be
    written.
    """
    from pa_npu.backends.hf_directory import checked_run, trained_template

    config, spec = checked_run(checkpoint, output, model)
    platform = platforms.get("cpu")
    prepare(platform.name)
    from pa_npu.backends.megatron.checkpoint import load_policy_only
    from pa_npu.backends.megatron.parallel import initialise_parallel, shutdown_parallel
    from pa_npu.backends.megatron.stage import build_stage
    from pa_npu.backends.megatron.weights.buckets import export_hf

    place = initialise_parallel(config, platform, dist.HashStore(), rank=0)
    try:
        stage = build_stage(spec, config, platform)
        load_policy_only(stage, checkpoint)
        template = trained_template(checkpoint, config)
        export_hf(stage.policy, spec, output, place, config=config, template=template)
    finally:
        shutdown_parallel()
