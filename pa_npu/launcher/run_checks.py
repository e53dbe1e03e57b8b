"""Everything that can be wrong with a run's surroundings, checked before anything starts: one clear line each.

Rules inside the configuration are pa_npu.config's; these need the disk, the devices, the ports or
an interpreter.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.requirements import Requirement

from pa_npu import platform as platforms
from pa_npu.agents.parser_trial import check_tool_parser
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trial import check_algorithm
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.coordinator.environment_trial import check_environment
from pa_npu.engines.registry import check_engine_keys, distributions, engine_kind
from pa_npu.errors import ConfigError, DataError, UserError
from pa_npu.families.model_directory import (
    check_end_tokens,
    check_plain_files,
    check_tokenizer,
    check_weights,
    end_tokens_line,
    load_tokenizer,
)
from pa_npu.families.peft_directory import AdapterShape, check_adapters
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.engine_key import engine_key
from pa_npu.launcher.machine_limits import check_limits
from pa_npu.launcher.placement import (
    Placement,
    available_cores,
    engine_ports,
    place,
    place_extra_engine,
    place_nodes,
    port_problem,
    settle_on_node,
    visible_devices,
)
from pa_npu.launcher.run_directory import check_checkpoint, check_run_directory, resolve_resume
from pa_npu.launcher.trainer_versions import trainer_problems
from pa_npu.planning.automatic import with_places, with_share
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import adapter_parameters, without_adapters
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.shortages import shortages
from pa_npu.platform.base import Platform
from pa_npu.platform.vendor_tools import busy_devices
from pa_npu.rewards.functions import needs_answers
from pa_npu.telemetry.tracker_libraries import TRACKERS

if TYPE_CHECKING:
    from pa_npu.data.prompts import Prompt, PromptSet
    from pa_npu.data.row_sets import RowSet

T = TypeVar("T")

_EVERYWHERE = ("0.0.0.0", "::")  # as placement.host


@dataclass
class Findings:
    """Findings of the checks. notes: faults that a dry run forgives, because they depend on this
    machine alone.

    placement: of this machine, where the run is on it alone; placements: of all nodes.
    device_bytes: memory of a device, None where unknown. own_memory: whether devices have any; else
    (cpu) it is the host's.
    num_rows: of data.train, where samples are rows; None where they were not read.
    """

    spec: ModelSpec | None = None
    platform: Platform | None = None
    placement: Placement | None = None
    placements: list[Placement] = field(default_factory=list)
    device_bytes: int | None = None
    own_memory: bool = True
    num_rows: int | None = None
    counts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def prepare(
    config: Config,
    say: Callable[[str], None] = lambda line: None,
    *,
    forgive: bool = False,
    device_memory_gib: float | None = None,
) -> tuple[Config, Findings]:
    """The configuration that would run, with device, checkpoint and places settled, and what the
    checks found.

    The same for a run, its plan and the doctor. say: hears from which checkpoint it goes on.
    forgive, device_memory_gib: as check_surroundings. Raises UserError at the first check that
    fails.
    """
    config = resolve_resume(config, say)
    platform: Platform | None = None
    with contextlib.suppress(UserError) if forgive else contextlib.nullcontext():
        config, platform = resolve_device(config)
    findings = check_surroundings(
        config, platform, forgive=forgive, device_memory_gib=device_memory_gib
    )
    config = settle_places(config, findings)
    if not forgive:
        engine_key(config)
    return config, findings


def resolve_device(config: Config) -> tuple[Config, Platform]:
    """The configuration with run.device=auto replaced, so that all processes agree; raises
    UserError if it is not here.
    """
    platform = platforms.get(config.run.device)
    run = config.run.model_copy(update={"device": platform.name})
    return config.model_copy(update={"run": run}), platform


def check_surroundings(
    config: Config,
    platform: Platform | None,
    *,
    forgive: bool = False,
    device_memory_gib: float | None = None,
) -> Findings:
    """Run all checks; raises UserError at the first that fails. `config` has its device resolved.

    forgive (dry run): what is merely absent from this machine becomes a note instead.
    device_memory_gib: the memory to plan with, instead of that of the devices here.
    """
    findings = Findings(platform=platform)
    check_algorithm(config)  # first, since its models are counted
    if config.placement.cluster == "ray":
        findings.placements = place_nodes(config)
    _find_memory(findings, config, device_memory_gib)

    def local(check: Callable[[], T], *files: str | None) -> T | None:
        """A check that depends on this machine; with files, on their being here at all."""
        absent = not files or any(not Path(file).exists() for file in files if file)
        try:
            return check()
        except UserError as error:
            if not (forgive and absent):
                raise
            findings.notes.append(str(error))
            return None

    if platform is None:
        reason = platforms.missing(config.run.device)
        findings.notes.append(f"run.device: {config.run.device} cannot be used: {reason}")
    elif config.placement.cluster == "local":
        findings.placement = local(lambda: place(config, _num_devices(platform), available_cores()))
        findings.placements = [findings.placement] if findings.placement else []
    findings.spec = local(lambda: check_model_files(config), config.model.path)
    if findings.spec is None:
        findings.spec = _planned_model(config, findings)
    if config.has_adapters:
        local(lambda: check_adapters(config), config.model.adapter)
    check_memory(config, findings)
    path, trusted = config.model.path, config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trusted) if Path(path).is_dir() else None
    backend_module(config.trainer.backend)
    if build_algorithm(config).samples_from == "rows":
        if tokenizer is not None:
            _check_rows(config, findings, tokenizer, local)
            config = with_epochs(config, findings)
    else:
        sample = None if tokenizer is None else _check_data(config, findings, tokenizer, local)
        findings.counts += check_rewards(config, sample, ask_judge=not forgive)
        if tokenizer is not None:
            check_tool_parser(config)
            check_environment(config, sample)
    if config.rollout.has_engines:
        check_engine_keys(config, findings.spec)
        interpreter_check = engine_kind(config.rollout.backend).check
        local(
            lambda: check_attached(config) if config.rollout.attach else interpreter_check(config)
        )
    engines = findings.placement.engines if findings.placement else ()
    local(lambda: check_ports(config, engines))
    local(lambda: check_trackers(config))
    changed = local(lambda: check_checkpoint(config))
    findings.notes += [changed] if changed else []
    local(lambda: check_run_directory(config))
    here = findings.placement or Placement((), (), (), ())
    local(lambda: check_limits(config, 1 + len(here.engines) + len(here.ranks)))
    if config.placement.host in _EVERYWHERE:
        findings.notes.append(
            f"placement.host: {config.placement.host} opens the run's store, without a password, "
            "on every address of this machine; name one address of a private network "
            "(docs/security.md)"
        )
    if platform is not None:
        findings.notes += [f"versions: {problem}" for problem in trainer_problems(platform.name)]
        findings.notes += device_notes(platform, findings.placement) if findings.placement else []
        if findings.placement and not forgive:  # who plans measures nothing yet
            findings.notes += core_notes(config, platform, len(available_cores()))
    return findings


def _check_data(
    config: Config, findings: Findings, tokenizer: Any, local: Callable[..., Any]
) -> Prompt | None:
    """Check all datasets and held-out sets with the tokenizer, and count them; returns a prompt to
    try rewards and tools on.

    local: runs a check of which this machine may lack the files.
    """
    from pa_npu.data.prompts import first_prompt_lines

    sample: Prompt | None = None
    if findings.spec is not None:
        check_tokenizer(findings.spec, tokenizer)
        if not config.rollout.ignore_eos:
            findings.counts.append(end_tokens_line(findings.spec, tokenizer))
    loaded = local(
        lambda: check_training(tokenizer, config), *(one.path for one in config.data.datasets)
    )
    for number, dataset in enumerate(config.data.datasets):
        findings.counts.append(
            f"{config.data.key_of(number)}: {loaded[number].summary if loaded else 'not here'}"
        )
        if len(config.data.datasets) > 1:
            findings.counts[-1] += (
                f"; {dataset.called}, {config.data.shares[number]:.1%} of the prompts"
            )
    for name, held_out in config.evaluate.all_sets(config.data.test).items():
        prompts = local(lambda name=name: check_held_out(name, tokenizer, config), held_out.path)
        findings.counts.append(
            f"{config.evaluate.key_of(name)}: {prompts.summary if prompts else 'not here'}"
        )
        sample = sample or (prompts.prompts[0] if prompts else None)
    if loaded:
        sample = loaded[0].prompts[0]
        findings.counts += first_prompt_lines(sample, tokenizer)
    return sample


def _check_rows(
    config: Config, findings: Findings, tokenizer: Any, local: Callable[..., Any]
) -> None:
    """Check all datasets and held-out sets whose rows are trained as they are, count them, and show
    what of the first row is trained.

    local: runs a check of which this machine may lack the files.
    """
    from pa_npu.data.row_sets import first_row_lines, load_held_out_rows

    if findings.spec is not None:
        check_tokenizer(findings.spec, tokenizer)
    files = [dataset.path for dataset in config.data.datasets]
    loaded = local(lambda: check_training_rows(tokenizer, config), *files)
    for number in range(len(config.data.datasets)):
        summary = loaded[number].summary if loaded else "not here"
        findings.counts.append(f"{config.data.key_of(number)}: {summary}")
    held_out = config.evaluate.all_sets(config.data.test)
    sets = local(
        lambda: load_held_out_rows(config, tokenizer), *(one.path for one in held_out.values())
    )
    for name in held_out:
        summary = sets[name].summary if sets else "not here"
        findings.counts.append(f"{config.evaluate.key_of(name)}: {summary}")
    if loaded:
        findings.num_rows = sum(len(rows.rows) for rows in loaded)
        findings.counts += first_row_lines(loaded[0].rows[0], tokenizer)


def with_epochs(config: Config, findings: Findings) -> Config:
    """The configuration with the iterations that schedule.epochs makes, once rows are counted."""
    schedule, num_rows = config.schedule, findings.num_rows
    if schedule.epochs is None or num_rows is None:
        return config
    rows = schedule.prompts_per_iteration * config.rollout.responses_per_prompt
    iterations = max(1, math.ceil(schedule.epochs * num_rows / rows))
    changed = schedule.model_copy(update={"iterations": iterations})
    return config.model_copy(update={"schedule": changed})


def settle_places(config: Config, findings: Findings) -> Config:
    """The configuration as the training backend needs it for this model, and sizes of engines that
    were not given; what they became is among the counts."""
    config = with_epochs(config, findings)
    if config.schedule.epochs is not None and findings.num_rows is not None:
        findings.counts.append(
            f"schedule.iterations: {config.schedule.iterations}, which are "
            f"{config.schedule.epochs:g} epochs of {counted(findings.num_rows, 'row')}"
        )
    if findings.spec is None:
        return config
    config, found = backend_module(config.trainer.backend).fit(config, findings.spec)
    findings.counts += [
        *found,
        *_adapter_lines(config, findings.spec),
        *without_adapters(config, findings.spec),
    ]
    known = (findings.spec, findings.device_bytes, findings.own_memory)
    settled = with_share(config, *known)
    if settled is not config:
        findings.counts.append(
            f"rollout.memory_fraction: {settled.devices.memory_fraction:g}, which trainers leave "
            "while "
            "devices decode"
        )
    config, settled = settled, with_places(settled, *known)
    if settled is not config:
        findings.counts.append(
            f"rollout.max_num_seqs: {settled.rollout.max_num_seqs}, since the KV cache holds so "
            "many sequences at their longest"
        )
    return settled


def _adapter_lines(config: Config, spec: ModelSpec) -> list[str]:
    """How much of the model adapters train; nothing where all weights are trained."""
    if not config.has_adapters:
        return []
    rank, trained = AdapterShape.from_config(config).rank, adapter_parameters(config, spec)
    share = trained / spec.num_parameters
    return [
        f"adapters (LoRA): rank {rank}, {trained:,} trained parameters beside "
        f"{spec.num_parameters:,} ({share:.2%})"
    ]


def check_share(
    config: Config, platform: Platform, node: int, extra_engine: int | None = None
) -> Placement:
    """The checks of devices, memory and engines on a cluster's node; returns what of the run it
    gets.

    extra_engine: the index of the only thing that it gets, where the node came later.
    """
    share = (
        place_nodes(config)[node]
        if extra_engine is None
        else place_extra_engine(config, extra_engine)
    )
    share = settle_on_node(config, share, _num_devices(platform), available_cores())
    check_limits(config, len(share.engines) + len(share.ranks))
    findings = Findings(spec=ModelSpec.from_config(config), platform=platform)
    _find_memory(findings, config, None)
    check_memory(config, findings)
    if share.engines and not config.rollout.attach:
        engine_kind(config.rollout.backend).check(config)
    return share


def _find_memory(findings: Findings, config: Config, device_memory_gib: float | None) -> None:
    """Memory of a device: as given, else of the devices here, else of the usual device of that
    kind, with a note.
    """
    platform = findings.platform
    if platform is not None:
        findings.own_memory = platform.visible_devices_env is not None
        findings.device_bytes = platform.total_memory_bytes()
    else:
        typical = platforms.typical_memory(config.run.device)
        if typical is not None:
            name, findings.device_bytes = typical
            if device_memory_gib is None:
                findings.notes.append(
                    f"memory is that of {name}, {findings.device_bytes / 2**30:.0f} GiB; "
                    "--device-memory-gib plans with another"
                )
    if device_memory_gib is not None:
        findings.device_bytes = int(device_memory_gib * 2**30)


def _planned_model(config: Config, findings: Findings) -> ModelSpec | None:
    """A model that is not here, by its name; its rules hold all the same."""
    spec = known_spec(config.model.path)
    if spec is not None:
        check_model(config, spec)
        findings.notes.append(
            f"model.path: planned with the published shape of {Path(config.model.path).name}"
        )
    return spec


def check_memory(config: Config, findings: Findings) -> None:
    """Raises ConfigError where the run certainly does not fit into its devices; notes where it
    probably does not.
    """
    if findings.spec is None or findings.device_bytes is None:
        return
    for shortage in shortages(config, findings.spec, findings.device_bytes, findings.own_memory):
        if shortage.fatal:
            raise ConfigError(shortage.line())
        findings.notes.append(shortage.line())


def check_engines(config: Config, platform: Platform) -> Placement:
    """The checks that engines without a run need; returns their places."""
    if not config.rollout.has_engines:
        raise ConfigError(
            "rollout.engines: 0, so that there are none to start; set it to 1 or more"
        )
    if config.rollout.attach:
        raise ConfigError(
            "rollout.attach: these engines are to be started, not attached; remove the key"
        )
    if config.placement.cluster != "local":
        raise ConfigError(
            "placement.cluster: engines alone are started on this machine only; set it to local"
        )
    check_engine_keys(config, check_model_files(config))
    engine_kind(config.rollout.backend).check(config)
    check_ports(config, range(config.rollout.engines))
    return place(config, _num_devices(platform), available_cores())


def check_model_files(config: Config) -> ModelSpec:
    """The model can be read, is supported, divides as configured, and its files say the same."""
    spec = ModelSpec.from_config(config)
    check_model(config, spec)
    check_plain_files(spec.path)
    check_weights(spec)
    check_end_tokens(spec)
    return spec


def check_training(tokenizer: Any, config: Config) -> list[PromptSet]:
    """Read data.train as the coordinator will."""
    from pa_npu.data.prompts import load_training
    from pa_npu.rewards.check import check_row_tests

    loaded = load_training(config.data, tokenizer, needs_answers(config.reward, config.environment))
    first_id = 0
    for number, (prompts, share) in enumerate(zip(loaded, config.data.shares, strict=True)):
        check_row_tests(config, prompts, config.data.key_of(number), first_id)
        first_id += prompts.num_read
        wanted = math.ceil(share * config.schedule.prompts_per_iteration)
        if len(prompts.prompts) < wanted:
            part = "" if share == 1 else f", of which its weight makes {wanted} its own"
            raise DataError(
                f"{config.data.key_of(number)}: {prompts.path} has "
                f"{counted(len(prompts.prompts), 'prompt')} for schedule.prompts_per_iteration = "
                f"{config.schedule.prompts_per_iteration}{part}, so that an iteration would hold "
                "some twice; lower it or give more prompts"
            )
    return loaded


def check_training_rows(tokenizer: Any, config: Config) -> list[RowSet]:
    """Read data.train as a coordinator without engines will."""
    from pa_npu.data.row_sets import load_training_rows

    loaded = load_training_rows(config, tokenizer)
    of_iteration = config.schedule.prompts_per_iteration * config.rollout.responses_per_prompt
    for number, (rows, share) in enumerate(zip(loaded, config.data.shares, strict=True)):
        if len(rows.rows) < math.ceil(share * of_iteration):
            raise DataError(
                f"{config.data.key_of(number)}: {rows.path} has {counted(len(rows.rows), 'row')} "
                f"for the {math.ceil(share * of_iteration)} of an iteration "
                "(schedule.prompts_per_iteration x rollout.responses_per_prompt), so that it would "
                "hold some twice; lower one of these or give more rows"
            )
    return loaded


def check_held_out(name: str, tokenizer: Any, config: Config) -> PromptSet:
    """Read a held-out set as the coordinator will."""
    from pa_npu.data.prompts import load_prompts
    from pa_npu.rewards.check import check_row_tests

    dataset, key = config.evaluate.all_sets(config.data.test)[name], config.evaluate.key_of(name)
    prompts = load_prompts(
        dataset,
        tokenizer,
        config.data,
        key,
        needs_answer=needs_answers(config.reward, config.environment),
    )
    check_row_tests(config, prompts, key)
    return prompts


def check_rewards(config: Config, sample: Prompt | None, ask_judge: bool = True) -> list[str]:
    """Every reward function can be built, tried in a worker as the run will use it: user code may
    do anything.

    Returns the lines that the run begins with.

    sample: a prompt of the dataset, for which they are called once. ask_judge: also the judge
    (reward.judge), over the network.
    """
    from pa_npu.rewards.check import check_reward_functions, sample_group

    size = config.rollout.responses_per_prompt
    group = sample_group(sample.text, sample.answer, sample.row, size) if sample else None
    # a judge's scores are kept in run.dir, which a run that is refused has not
    with tempfile.TemporaryDirectory(prefix="pa_npu-check-") as directory:
        tried = config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
        return check_reward_functions(tried, group, ask_judge)


def check_attached(config: Config) -> None:
    """Every attached engine answers and serves this model."""
    key = engine_key(config)
    for url in config.rollout.attach:
        try:
            model = engine_kind(config.rollout.backend).served_model(url, key)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"rollout.attach: {url} does not answer as an engine ({error}); start it with "
                f"pa-npu engines and use the keys that this prints, or remove rollout.attach"
            ) from None
        if Path(model).resolve() != Path(config.model.path).resolve():
            raise UserError(
                f"rollout.attach: {url} serves {model}, not {config.model.path}; give both the "
                "same model.path"
            )


def check_trackers(config: Config) -> None:
    """The libraries of trackers are there, in versions that they are used by.

    Nothing is sent anywhere: a tracker that cannot be reached never ends a run."""
    wanted = {name: Requirement(TRACKERS[name][1]) for name in config.telemetry.trackers}
    names = tuple(requirement.name for requirement in wanted.values())
    found = distributions(None, names)
    for tracker, requirement in wanted.items():
        version = found.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            has = (
                "is not installed"
                if version is None
                else f"is there as {version}, not as {TRACKERS[tracker][1]}"
            )
            raise ConfigError(
                f"telemetry.trackers: {tracker} {has} in {sys.executable}; pip install "
                f"'pa_npu[{tracker}]', or take it off the list"
            )


def device_notes(platform: Platform, placement: Placement) -> list[str]:
    """Devices of the placement that other processes use already, where the vendor's tool can tell."""
    busy = busy_devices(platform.name) if platform.visible_devices_env else {}
    if not busy:
        return []
    engines = [index for engine in placement.engine_devices for index in engine]
    # shared engines have trainers' devices
    indices = list(dict.fromkeys([*engines, *placement.trainer_devices]))
    variable = platform.visible_devices_env
    physical = visible_devices(variable, indices, os.environ).get(variable or "", "").split(",")
    return [
        f"device {name} is in use: {busy[int(name)]}; end these processes, or choose others with "
        "placement.devices"
        for name in physical
        if name.isdecimal() and int(name) in busy
    ]


def core_notes(config: Config, platform: Platform, num_cores: int) -> list[str]:
    """A note where engines and trainer ranks have to take turns on cores.

    The coordinator is not counted: it takes a few percent of a core.
    """
    num_processes = config.devices.num_devices
    if platform.visible_devices_env is not None or num_processes <= num_cores:
        return []
    return [
        f"run.device: {num_processes} processes (engines and trainer ranks) share "
        f"{counted(num_cores, 'core')} and take turns on them, so that seconds and idle ratios say "
        f"little; give the run {num_processes} cores to measure it"
    ]


def check_ports(config: Config, engines: Sequence[int], *, has_store: bool = True) -> None:
    """The address and the fixed ports of this machine, which has these engines of the run.
    has_store: it hosts the store.
    """
    placement = config.placement
    problem = port_problem(placement.address, 0)
    if problem:
        raise ConfigError(
            f"placement.host: cannot listen on {placement.address} ({problem}); use an address of "
            "this machine"
        )
    if not placement.port:
        return
    wanted = [placement.port] if has_store else []
    if not config.rollout.attach:
        wanted += engine_ports(config, engines)
    for port in wanted:
        problem = port_problem(placement.address, port)
        if problem:
            raise ConfigError(
                f"placement.port: port {port} of {placement.address} cannot be used ({problem}); "
                f"choose another, or 0 for a free one"
            )


def _num_devices(platform: Platform) -> int | None:
    return None if platform.visible_devices_env is None else platform.device_count()
