"""Chooses the sizes of a run that its configuration leaves open.

load         replaces keys that are `auto`. Splits, modes, parallel sizes, recomputation and offload
             that fit are compared by prediction, as the dry run does it: with published figures of
             a usual device, and assumed lengths. The fastest is taken.
with_places  raises rollout.max_num_seqs as far as the cache allows and the iteration needs
with_share   gives an engine that sleeps the memory that its trainer leaves

The same configuration gets the same sizes each time, so a run that resumes has what it had. The
records of a run that has ended predict better than published figures (tools/plan_cluster.py).
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
from pa_npu.config.load import Places, merged, validated
from pa_npu.config.schema import Config
from pa_npu.config.words import counted, three_digits
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.planning.engine_memory import cache_tokens, wanted_tokens
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import share_left
from pa_npu.planning.prediction.divisions import MAX_SEQUENCES
from pa_npu.planning.prediction.search import Sizes, fastest
from pa_npu.planning.prediction.virtual_run import Basis, Predicted, assumed_basis
from pa_npu.planning.sizes import size_choices, size_words
from pa_npu.platform.typical import TypicalSpeed, typical_speed

AUTO = "auto"
KEYS = (
    "rollout.engines",
    "rollout.tensor_parallel",
    "trainer.devices",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.expert_parallel",
    "trainer.context_parallel",
    "trainer.recompute",
    "optimizer.offload",
    "placement.colocate",
)
_NUM_PREDICTED = 4  # combinations of each mode
_CLEARLY_FASTER = 0.9


def load(paths: Iterable[str], overrides: Sequence[str], report: Callable[[str], None]) -> Config:
    """Reads a configuration as `load_config` does, in which the keys in KEYS may be `auto`.

    `report` is called with a line that says what was chosen and why. Raises ConfigError where
    nothing fits, or where the number of devices is not known.
    """
    tree, places = merged(paths, overrides)
    auto_keys = [key for key in KEYS if _value(tree, key) == AUTO]
    if not auto_keys:
        return validated(tree, places, broken_rules)

    base = _base(tree, auto_keys, places)
    if not base.rollout.has_engines:
        raise ConfigError(
            f"{auto_keys[0]}: auto divides devices between engines and trainers, and this run has "
            "no engines (rollout.engines = 0); give a number"
        )
    check_algorithm(base)  # the models that it needs take memory
    devices = _num_devices(base, auto_keys[0]) - base.devices.num_teacher_devices
    if devices < 1:
        raise ConfigError(
            f"{auto_keys[0]}: auto has no device for engines and trainers: teachers have "
            f"{base.devices.num_teacher_devices} of {_num_devices(base, auto_keys[0])}; give more "
            "devices, or teachers fewer"
        )
    try:
        spec = _spec(base)
        typical = _typical(base)
    except UserError as error:
        raise ConfigError(f"{auto_keys[0]}: auto cannot read the model: {error}") from None

    sizes = _free_sizes(tree, auto_keys, size_choices(base, spec, devices, auto_keys))
    tried = _fastest_with_least_context(assumed_basis(base, spec, typical), sizes)
    if not tried:
        raise ConfigError(
            f"{auto_keys[0]}: auto found nothing for {counted(devices, 'device')}: "
            f"{spec.num_parameters / 1e9:.1f} billion parameters do not fit on {devices} x "
            f"{typical.name} in any sizes that may be chosen; give more devices, or leave more "
            "keys to auto"
        )

    predicted, best = tried[0]
    chosen = _chosen_values(base, best, auto_keys)
    keys = " ".join(f"{key}={_in_yaml(value)}" for key, value in chosen.items())
    line = (
        f"auto: {keys}; {size_words(best)} is predicted at "
        f"{three_digits(predicted.iteration_s)} s an "
        f"iteration on {devices} x {typical.name}"
    )
    next_best = [
        f"{size_words(config)} {three_digits(prediction.iteration_s)} s"
        for prediction, config in tried[1:3]
    ]
    if next_best:
        report(f"{line}, before {', '.join(next_best)}")
    else:
        report(f"{line}, and no other values of these keys fit")

    for key, value in chosen.items():
        section, name = _split(key)
        tree.setdefault(section, {})[name] = value
    return validated(tree, places, broken_rules)


def _fastest_with_least_context(basis: Basis, sizes: Sizes) -> list[tuple[Predicted, Config]]:
    """Returns the best combinations with the smallest context-parallel size that fits, or with one
    that is predicted to be clearly faster than all smaller ones.

    What a context group costs on devices has not been measured.
    """
    best: list[tuple[Predicted, Config]] = []
    for context in sorted(sizes.context):
        tried = fastest(basis, replace(sizes, context=(context,)), _NUM_PREDICTED)
        if not tried:
            continue
        if not best or tried[0][0].iteration_s < _CLEARLY_FASTER * best[0][0].iteration_s:
            best = tried
    return best


def _free_sizes(tree: Mapping[str, Any], auto_keys: Sequence[str], sizes: Sizes) -> Sizes:
    """Returns `sizes` with the numbers of engines and trainers, and the mode, as the tree has them.

    They are read from the tree, since the configuration that `sizes` was made from leaves them out
    (_smallest).
    """
    engines = _value(tree, "rollout.engines")
    trainers = _value(tree, "trainer.devices")
    sizes = replace(
        sizes,
        engines=None if engines == AUTO else engines,
        trainers=None if trainers == AUTO else trainers,
    )
    if "placement.colocate" in auto_keys:
        return sizes
    return replace(sizes, colocate=(bool(_value(tree, "placement.colocate")),))


def _chosen_values(base: Config, best: Config, auto_keys: Sequence[str]) -> dict[str, Any]:
    """Returns by dotted key what `best` has for the keys that were auto, and what has to follow."""
    chosen: dict[str, Any] = {}
    for key in auto_keys:
        section, name = _split(key)
        chosen[key] = getattr(getattr(best, section), name)
    set_keys = base.rollout.model_fields_set
    if best.placement.colocate and "memory_fraction" not in set_keys:
        chosen["rollout.memory_fraction"] = best.devices.memory_fraction
    # the cache of these sizes may hold fewer sequences than were given
    if "max_num_seqs" in set_keys and best.rollout.max_num_seqs < base.rollout.max_num_seqs:
        chosen["rollout.max_num_seqs"] = best.rollout.max_num_seqs
    return chosen


def _split(key: str) -> tuple[str, str]:
    """Returns the section and the name of a dotted key."""
    section, _, name = key.partition(".")
    return section, name


def _value(tree: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key, None where the tree does not have it."""
    section, name = _split(key)
    values = tree.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


_ENOUGH_DEVICES = 1_000_000  # of a node, for sizes that are not chosen yet


def _base(tree: Mapping[str, Any], auto_keys: Sequence[str], places: Places) -> Config:
    """Returns the configuration with the smallest sizes, to choose others from.

    They are validated as if a node had any number of devices: engines beside trainers may be too
    many where the same engines on the trainers' devices are not.
    """
    smallest = _smallest(tree, auto_keys)
    section = smallest.get("placement")
    if not isinstance(section, Mapping):
        return validated(smallest, places, broken_rules)
    placement = dict(section)
    devices_per_node = placement.get("devices_per_node")
    if isinstance(devices_per_node, int) and devices_per_node > 0:
        placement["devices_per_node"] = _ENOUGH_DEVICES
    indices = placement.pop("devices", None)
    base = validated({**smallest, "placement": placement}, places, broken_rules)
    update = {"devices_per_node": devices_per_node, "devices": indices}
    return base.model_copy(update={"placement": base.placement.model_copy(update=update)})


def _smallest(tree: Mapping[str, Any], auto_keys: Sequence[str]) -> dict[str, Any]:
    """Returns the tree with sizes that break no rule: a single engine, and beside it as few
    replicas as share the experts.
    """
    smallest: dict[str, Any] = {}
    for section, values in tree.items():
        smallest[section] = dict(values) if isinstance(values, Mapping) else values
    for key in {*auto_keys, "rollout.engines", "trainer.devices", "placement.colocate"}:
        section, name = _split(key)
        smallest.get(section, {}).pop(name, None)
    trainer = smallest.setdefault("trainer", {})
    parallel = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel")
    sizes = [trainer.get(name, 1) for name in parallel]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        tensor, stages, experts, context = sizes
        trainer["devices"] = math.lcm(tensor * context, experts) * stages
    return smallest


def _num_devices(config: Config, auto_key: str) -> int:
    placement = config.placement
    if placement.devices_per_node is not None:
        return placement.nnodes * placement.devices_per_node
    if placement.nnodes == 1:
        try:
            return platforms.get(config.run.device).device_count()
        except UserError:
            pass
    raise ConfigError(
        f"{auto_key}: auto needs to know how many devices there are, and they are not here; give "
        "placement.devices_per_node"
    )


def _spec(config: Config) -> ModelSpec:
    if (Path(config.model.path) / "config.json").is_file():
        return ModelSpec.from_config(config)
    return known_spec(config.model.path) or ModelSpec.from_config(config)


def _typical(config: Config) -> TypicalSpeed:
    """Returns the speeds of a usual device of the configured kind, with the memory of the devices
    of this machine.
    """
    kind = config.run.device
    has_accelerator = not (platforms.missing("cuda") and platforms.missing("npu"))
    typical = typical_speed("cpu" if kind == "auto" and not has_accelerator else kind)
    try:
        platform = platforms.get(kind)
    except UserError:
        return typical
    if platform.visible_devices_env is None:  # devices share the host's memory
        return replace(typical, memory_gib=None)
    return replace(typical, memory_gib=platform.total_memory_bytes() // 2**30)


def _in_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def with_places(
    config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool
) -> Config:
    """Returns the configuration with rollout.max_num_seqs doubled as long as the cache holds that
    many and an engine's share of an iteration needs them.

    A group keeps its places until its longest response ends. With lengths that vary, an engine with
    all places taken therefore decodes far fewer sequences than it could; twice the places were
    worth up to a third of the iteration in simulations of such lengths.

    The number stays where it was given, where engines run already (rollout.attach), and where they
    share a device with a trainer, which leaves them less cache.

    Args:
        device_bytes: memory of a device; None where it is not known.
        own_memory: whether devices have memory of their own, rather than share the host's.
    """
    rollout = config.rollout
    if not config.rollout.has_engines:
        return config
    if (
        "max_num_seqs" in rollout.model_fields_set
        or rollout.attach
        or config.devices.num_shared_engines
    ):
        return config
    if own_memory and device_bytes is None:
        return config
    cache_device_bytes = device_bytes if own_memory else None
    share = -(-work(config).sequences // rollout.engines)
    while config.rollout.max_num_seqs < share:
        doubled = 2 * config.rollout.max_num_seqs
        rollout = config.rollout.model_copy(update={"max_num_seqs": doubled})
        grown = config.model_copy(update={"rollout": rollout})
        if doubled > MAX_SEQUENCES or not _cache_suffices(grown, spec, cache_device_bytes):
            break
        config = grown
    return config


def with_share(
    config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool
) -> Config:
    """Returns the configuration with rollout.memory_fraction set, where it was not given, to what
    its trainer leaves to an engine that sleeps; arguments as for `with_places`.
    """
    if config.rollout.memory_fraction is not None or not config.devices.engines_sleep:
        return config
    if device_bytes is None or not own_memory:
        return config
    share = share_left(config, spec, device_bytes)
    if share <= 0:
        return config
    rollout = config.rollout.model_copy(update={"memory_fraction": share})
    return config.model_copy(update={"rollout": rollout})


def _cache_suffices(config: Config, spec: ModelSpec, device_bytes: int | None) -> bool:
    """Returns whether an engine's cache and its steps have room for rollout.max_num_seqs."""
    sequences = config.rollout.max_num_seqs
    if sequences > config.rollout.max_num_batched_tokens:
        return False
    return wanted_tokens(config, sequences) <= cache_tokens(config, spec, device_bytes)
