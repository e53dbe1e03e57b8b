"""Checks of a machine: its kind of device, devices in use, memory, cores, address and ports."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pa_npu import platform as platforms
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.findings import Findings
from pa_npu.launcher.checks.model import check_memory
from pa_npu.launcher.machine_limits import check_limits
from pa_npu.launcher.placement import (
    Placement,
    available_cores,
    engine_ports,
    place_extra_engine,
    place_nodes,
    port_problem,
    settle_on_node,
    visible_devices,
)
from pa_npu.platform.base import Platform
from pa_npu.platform.vendor_tools import busy_devices

_ALL_ADDRESSES = ("0.0.0.0", "::")  # as placement.host


def resolve_device(config: Config) -> tuple[Config, Platform]:
    """Returns the configuration with run.device=auto replaced, so that all processes agree, and
    the platform.

    Raises UserError if the device is not on this machine.
    """
    platform = platforms.get(config.run.device)
    run = config.run.model_copy(update={"device": platform.name})
    return config.model_copy(update={"run": run}), platform


def num_devices(platform: Platform) -> int | None:
    """Returns the number of devices of this machine; None for cores, which are no devices."""
    return None if platform.visible_devices_env is None else platform.device_count()


def find_memory(findings: Findings, config: Config, device_memory_gib: float | None) -> None:
    """Sets the memory of a device: as given, else of the devices here, else of the usual device of
    that kind, with a note.
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


def check_share(
    config: Config, platform: Platform, node: int, extra_engine: int | None = None
) -> Placement:
    """Checks devices, memory and engines on a cluster's node; returns what of the run it gets.

    extra_engine: the index of the only thing that it gets, where the node came later.
    """
    if extra_engine is None:
        share = place_nodes(config)[node]
    else:
        share = place_extra_engine(config, extra_engine)
    share = settle_on_node(config, share, num_devices(platform), available_cores())
    check_limits(config, len(share.engines) + len(share.ranks))
    findings = Findings(spec=ModelSpec.from_config(config), platform=platform)
    find_memory(findings, config, None)
    check_memory(config, findings)
    if share.engines and not config.rollout.attach:
        engine_kind(config.rollout.backend).check(config)
    return share


def device_notes(platform: Platform, placement: Placement) -> list[str]:
    """Names devices of the placement that other processes use already, where the vendor's tool can
    tell.
    """
    variable = platform.visible_devices_env
    if variable is None:
        return []
    users = busy_devices(platform.name)
    if not users:
        return []
    indices = list(dict.fromkeys(placement.used))  # shared engines have trainers' devices
    physical = visible_devices(variable, indices, os.environ).get(variable, "").split(",")
    return [
        f"device {name} is in use: {users[int(name)]}; end these processes, or choose others with "
        "placement.devices"
        for name in physical
        if name.isdecimal() and int(name) in users
    ]


def core_notes(config: Config, platform: Platform, num_cores: int) -> list[str]:
    """Returns a note where engines and trainer ranks have to take turns on cores.

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


def address_notes(config: Config) -> list[str]:
    """Returns a note where the run's store is open to every network of this machine."""
    if config.placement.host not in _ALL_ADDRESSES:
        return []
    return [
        f"placement.host: {config.placement.host} opens the run's store, without a password, "
        "on every address of this machine; name one address of a private network "
        "(docs/security.md)"
    ]


def check_ports(config: Config, engines: Sequence[int], *, has_store: bool = True) -> None:
    """Checks the address and the fixed ports of this machine.

    engines: indices of the run's engines on this machine.
    has_store: whether this machine hosts the store.
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
    ports = [placement.port] if has_store else []
    if not config.rollout.attach:
        ports += engine_ports(config, engines)
    for port in ports:
        problem = port_problem(placement.address, port)
        if problem:
            raise ConfigError(
                f"placement.port: port {port} of {placement.address} cannot be used ({problem}); "
                f"choose another, or 0 for a free one"
            )
