"""Everything that can be wrong with a run's surroundings, checked before anything starts: one clear line each.

The order of the checks is here; the checks are in `checks/`, by subject. Rules inside the
configuration are pa_npu.config's; these need the disk, the devices, the ports or an interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pa_npu import platform as platforms
from pa_npu.agents.parser_trial import check_tool_parser
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trial import check_algorithm
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.coordinator.environment_trial import check_environment
from pa_npu.engines.registry import check_engine_keys, engine_kind
from pa_npu.errors import UserError
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.families.peft_directory import check_adapters
from pa_npu.launcher.checks.data import check_prompts, check_rewards, check_rows, with_epochs
from pa_npu.launcher.checks.engines import check_attached, check_trackers
from pa_npu.launcher.checks.findings import Findings, LocalChecks
from pa_npu.launcher.checks.machine import (
    address_notes,
    check_ports,
    core_notes,
    device_notes,
    find_memory,
    num_devices,
    resolve_device,
)
from pa_npu.launcher.checks.model import (
    adapter_lines,
    check_memory,
    check_model_files,
    check_teacher_servers,
    check_teacher_vocabularies,
    check_teachers,
    planned_model,
    teacher_directories,
    vision_lines,
)
from pa_npu.launcher.engine_key import engine_key
from pa_npu.launcher.machine_limits import check_limits
from pa_npu.launcher.placement import available_cores, place, place_nodes
from pa_npu.launcher.run_directory import check_checkpoint, check_run_directory, resolve_resume
from pa_npu.launcher.trainer_versions import trainer_problems
from pa_npu.planning.automatic import with_places, with_share
from pa_npu.planning.memory import without_adapters
from pa_npu.planning.model_rules import settled_rule
from pa_npu.planning.teachers import engine_teacher_specs, teacher_engine_config
from pa_npu.platform.base import Platform


def prepare(
    config: Config,
    report: Callable[[str], None] = lambda line: None,
    *,
    forgive: bool = False,
    device_memory_gib: float | None = None,
) -> tuple[Config, Findings]:
    """Returns the configuration that would run, with device, checkpoint and places settled, and
    what the checks found. It is the same for a run, its plan and the doctor.

    Args:
        report: gets the line that says from which checkpoint the run continues.
        forgive, device_memory_gib: as for check_surroundings.

    Raises UserError at the first check that fails.
    """
    config = resolve_resume(config, report)
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


def check_surroundings(
    config: Config,
    platform: Platform | None,
    *,
    forgive: bool = False,
    device_memory_gib: float | None = None,
) -> Findings:
    """Runs all checks. `config` has its device resolved.

    Args:
        platform: None where the configured kind of device is not on this machine.
        forgive: what is merely absent from this machine becomes a note, as for a plan.
        device_memory_gib: the memory to plan with, instead of that of the devices here.

    Raises UserError at the first check that fails.
    """
    findings = Findings(platform=platform)
    local = LocalChecks(findings, forgive)
    check_algorithm(config)  # first, since its models are counted
    _check_places(config, findings, local)
    find_memory(findings, config, device_memory_gib)

    findings.spec = planned_model(config, findings) if forgive else check_model_files(config)
    if config.has_adapters:
        local.run(partial(check_adapters, config), config.model.adapter)
    directories = teacher_directories(config)
    local.run(partial(check_teachers, config, findings.spec), *directories.values())
    check_memory(config, findings)
    backend_module(config.trainer.backend)

    config = _check_samples(config, findings, local)
    if config.rollout.has_engines:
        check_engine_keys(config, findings.spec)
        check = (
            check_attached if config.rollout.attach else engine_kind(config.rollout.backend).check
        )
        local.run(partial(check, config))
    for name, teacher in config.teacher.items():
        if teacher.place == "engines":
            teacher_config = teacher_engine_config(config, name)
            spec = engine_teacher_specs(config)[name]
            check_engine_keys(teacher_config, spec)
            local.run(partial(engine_kind(teacher_config.rollout.backend).check, teacher_config))
    _check_machine(config, findings, local)
    return findings


def _check_places(config: Config, findings: Findings, local: LocalChecks) -> None:
    """Sets the places of engines and trainers."""
    platform = findings.platform
    if config.placement.cluster == "ray":
        findings.placements = place_nodes(config)
    if platform is None:
        reason = platforms.missing(config.run.device)
        findings.notes.append(f"run.device: {config.run.device} cannot be used: {reason}")
    elif config.placement.cluster == "local":
        findings.placement = local.run(
            partial(place, config, num_devices(platform), available_cores())
        )
        findings.placements = [findings.placement] if findings.placement else []


def _check_samples(config: Config, findings: Findings, local: LocalChecks) -> Config:
    """Checks data, rewards and the environment. Returns the configuration with the iterations that
    its rows make.
    """
    path = config.model.path
    tokenizer = None
    if Path(path).is_dir():
        tokenizer = load_tokenizer(path, config.model.trust_remote_code)
        check_teacher_vocabularies(config, tokenizer)

    if build_algorithm(config).samples_from == "rows":
        if tokenizer is None:
            return config
        check_rows(config, findings, tokenizer, local)
        return with_epochs(config, findings)

    sample = None
    if tokenizer is not None:
        sample = check_prompts(config, findings, tokenizer, local)
    findings.counts += check_rewards(config, sample, ask_judge=not local.forgive)
    if tokenizer is not None:
        check_tool_parser(config)
        check_environment(config, sample)
        local.run(partial(check_teacher_servers, config, findings, tokenizer))
    return config


def _check_machine(config: Config, findings: Findings, local: LocalChecks) -> None:
    """Checks ports, trackers, the checkpoint, the run's directory, the machine's limits and the
    versions of libraries.
    """
    placement = findings.placement
    num_engines = len(placement.engines) if placement else 0
    num_ranks = len(placement.ranks) if placement else 0
    num_teachers = len(placement.teachers) if placement else 0

    local.run(partial(check_ports, config, placement.engines if placement else ()))
    local.run(partial(check_trackers, config))
    changed = local.run(partial(check_checkpoint, config))
    if changed:
        findings.notes.append(changed)
    local.run(partial(check_run_directory, config))
    local.run(
        partial(check_limits, config, 1 + num_engines + num_ranks + num_teachers)
    )  # 1: the coordinator
    findings.notes += address_notes(config)

    platform = findings.platform
    if platform is None:
        return
    findings.notes += [f"versions: {problem}" for problem in trainer_problems(platform.name)]
    if placement is None:
        return
    findings.notes += device_notes(platform, placement)
    if not local.forgive:  # a plan measures nothing yet
        findings.notes += core_notes(config, platform, len(available_cores()))


def settle_places(config: Config, findings: Findings) -> Config:
    """Returns the configuration as the training backend needs it for this model, with the sizes of
    engines that were not given. Adds what they became to the counts.
    """
    config = with_epochs(config, findings)
    if config.schedule.epochs is not None and findings.num_rows is not None:
        findings.counts.append(
            f"schedule.iterations: {config.schedule.iterations}, which are "
            f"{config.schedule.epochs:g} epochs of {counted(findings.num_rows, 'row')}"
        )
    spec = findings.spec
    if spec is None:
        return config
    config = settled_rule(config, spec)
    config, lines = backend_module(config.trainer.backend).fit(config, spec)
    findings.counts += lines
    findings.counts += adapter_lines(config, spec)
    findings.counts += vision_lines(config, spec)
    findings.counts += without_adapters(config, spec)

    with_fraction = with_share(config, spec, findings.device_bytes, findings.own_memory)
    if with_fraction is not config:
        findings.counts.append(
            f"rollout.memory_fraction: {with_fraction.devices.memory_fraction:g}, which trainers leave "
            "while devices decode"
        )
    settled = with_places(with_fraction, spec, findings.device_bytes, findings.own_memory)
    if settled is not with_fraction:
        findings.counts.append(
            f"rollout.max_num_seqs: {settled.rollout.max_num_seqs}, since the KV cache holds so "
            "many sequences at their longest"
        )
    return settled
