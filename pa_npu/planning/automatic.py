"""Sizes of a run that were not given: those that are `auto` (load), and what an engine holds (with_places, with_share).

auto: splits, modes, parallel sizes, recomputation and offload that fit are compared by prediction,
and the fastest is taken, by published figures of a usual device and assumed lengths, as the dry run
does. A run that has ended knows better (tools/plan_cluster.py). The same configuration gets the
same sizes each time, so that a run that goes on has what it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pa_npu import platform as platforms
from pa_npu.algorithm.rules import broken_rules
from pa_npu.algorithm.trial import check_algorithm
from pa_npu.config.load import merged, validated
from pa_npu.config.schema import Config
from pa_npu.config.words import three_digits
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import cache_tokens, left_share, wanted_tokens
from pa_npu.planning.prediction.divisions import MOST_SEQS
from pa_npu.planning.prediction.search import fastest
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.planning.sizes import choices_of, size_words
from pa_npu.platform.typical import typical_speed

AUTO = "auto"
KEYS = (
    "rollout.engines",
    "rollout.tensor_parallel",
    "trainer.devices",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.expert_parallel",
    "trainer.recompute",
    "optimizer.offload",
    "placement.colocate",
)
_PREDICTED = 4  # of each mode


def load(paths: Iterable[str], overrides: Sequence[str], say: Callable[[str], None]) -> Config:
    """Read a configuration as `load_config` does, in which KEYS may be auto. say: hears what was
    chosen and why.

    Raises ConfigError where nothing fits, or where nobody says how many devices there are.
    """
    tree, places = merged(paths, overrides)
    asked = [key for key in KEYS if _section(tree, key).get(_name(key)) == AUTO]
    if not asked:
        return validated(tree, places, broken_rules)
    given = {key: _section(tree, key).get(_name(key)) for key in KEYS if key not in asked}
    base = validated(_without(tree, asked), places, broken_rules)
    if not base.has_engines:
        raise ConfigError(
            f"{asked[0]}: auto divides devices between engines and trainers, and this run has no "
            "engines (rollout.engines = 0); give a number"
        )
    check_algorithm(base)  # whose models are counted
    devices = _num_devices(base, asked[0])
    try:
        spec, typical = _spec(base), _typical(base)
    except UserError as error:
        raise ConfigError(f"{asked[0]}: auto cannot read the model: {error}") from None
    basis = assumed_basis(base, spec, typical)
    sizes = choices_of(base, spec, devices, asked)
    sizes = replace(
        sizes, engines=given.get("rollout.engines"), trainers=given.get("trainer.devices")
    )
    if "placement.colocate" not in asked:
        sizes = replace(sizes, colocate=(bool(given.get("placement.colocate")),))
    tried = fastest(basis, sizes, _PREDICTED)
    if not tried:
        raise ConfigError(
            f"{asked[0]}: auto found nothing for {devices} devices: "
            f"{spec.num_parameters / 1e9:.1f} billion parameters do not fit on {devices} x "
            f"{typical.name} in any sizes that may be chosen; give more devices, or leave more "
            "keys to auto"
        )
    predicted, best = tried[0]
    chosen = {key: getattr(getattr(best, key.partition(".")[0]), _name(key)) for key in asked}
    if best.placement.colocate and "memory_fraction" not in base.rollout.model_fields_set:
        chosen |= {"rollout.memory_fraction": best.memory_fraction}
    if (
        best.rollout.max_num_seqs < base.rollout.max_num_seqs
        and "max_num_seqs" in base.rollout.model_fields_set
    ):
        # what the cache of these sizes holds
        chosen |= {"rollout.max_num_seqs": best.rollout.max_num_seqs}
    others = ", ".join(
        f"{size_words(config)} {three_digits(found.iteration_s)} s" for found, config in tried[1:3]
    )
    keys = " ".join(f"{key}={_shown(value)}" for key, value in chosen.items())
    say(
        f"auto: {keys}; {size_words(best)} is predicted at {three_digits(predicted.iteration_s)} s an "
        f"iteration on {devices} x {typical.name}"
        + (f", before {others}" if others else ", and nothing else fits")
    )
    for key, value in chosen.items():
        tree.setdefault(key.partition(".")[0], {})[_name(key)] = value
    return validated(tree, places, broken_rules)


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = tree.get(key.partition(".")[0])
    return section if isinstance(section, Mapping) else {}


def _name(key: str) -> str:
    return key.partition(".")[2]


def _without(tree: Mapping[str, Any], asked: Sequence[str]) -> dict[str, Any]:
    """The tree with sizes that go together: of a single engine, and beside it as few replicas as
    share the experts.
    """
    left = {
        section: dict(values) if isinstance(values, Mapping) else values
        for section, values in tree.items()
    }
    for key in {*asked, "rollout.engines", "trainer.devices", "placement.colocate"}:
        left.get(key.partition(".")[0], {}).pop(_name(key), None)
    trainer = left.setdefault("trainer", {})
    sizes = [
        trainer.get(key, 1) for key in ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    ]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        tensor, stages, experts = sizes
        trainer["devices"] = math.lcm(tensor, experts) * stages
    return left


def _num_devices(config: Config, asked: str) -> int:
    placement = config.placement
    if placement.devices_per_node is not None:
        return placement.nnodes * placement.devices_per_node
    if placement.nnodes == 1:
        try:
            return platforms.get(config.run.device).device_count()
        except UserError:
            pass
    raise ConfigError(
        f"{asked}: auto needs to know how many devices there are, and they are not here; give "
        "placement.devices_per_node"
    )


def _spec(config: Config) -> ModelSpec:
    known = (
        None
        if (Path(config.model.path) / "config.json").is_file()
        else known_spec(config.model.path)
    )
    return known or ModelSpec.from_config(config)


def _typical(config: Config) -> Any:
    """Speeds of a usual device of the kind, with the memory of the devices that are here."""
    kind = config.run.device
    typical = typical_speed(
        "cpu" if kind == "auto" and platforms.missing("cuda") and platforms.missing("npu") else kind
    )
    try:
        platform = platforms.get(kind)
    except UserError:
        return typical
    own = platform.visible_devices_env is not None
    return replace(typical, memory_gib=platform.total_memory_bytes() // 2**30 if own else None)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def with_places(
    config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool
) -> Config:
    """The configuration with max_num_seqs doubled while the cache holds it and an engine's share of
    an iteration needs it.

    A group keeps its places until its longest response ends, so with lengths that vary an engine
    whose places all are taken decodes far fewer sequences than it could; twice the places were
    worth up to a third of the iteration in simulations of such lengths.

    device_bytes: memory of a device, None where unknown. own_memory: whether it is the device's
    own. Not where engines run already (rollout.attach) or share a device with a trainer, which
    leaves their cache less.
    """
    rollout = config.rollout
    if not config.has_engines:
        return config
    if "max_num_seqs" in rollout.model_fields_set or rollout.attach or config.num_shared_engines:
        return config
    if own_memory and device_bytes is None:
        return config
    share = -(-work(config).sequences // rollout.engines)
    while rollout.max_num_seqs < share:
        other = rollout.model_copy(update={"max_num_seqs": 2 * rollout.max_num_seqs})
        grown = config.model_copy(update={"rollout": other})
        if other.max_num_seqs > MOST_SEQS or not _holds(
            grown, spec, device_bytes if own_memory else None
        ):
            break
        config, rollout = grown, other
    return config


def with_share(
    config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool
) -> Config:
    """The configuration in which an engine that sleeps has what its trainer leaves as the device
    decodes; arguments as above.
    """
    if config.rollout.memory_fraction is not None or not config.engines_sleep:
        return config
    if (
        device_bytes is None
        or not own_memory
        or (share := left_share(config, spec, device_bytes)) <= 0
    ):
        return config
    rollout = config.rollout.model_copy(update={"memory_fraction": share})
    return config.model_copy(update={"rollout": rollout})


def _holds(config: Config, spec: ModelSpec, device_bytes: int | None) -> bool:
    most = config.rollout.max_num_seqs
    held = wanted_tokens(config, most) <= cache_tokens(config, spec, device_bytes)
    return held and most <= config.rollout.max_num_batched_tokens
