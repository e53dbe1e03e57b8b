"""Checks of engines that are attached or start alone, and of the trackers' libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from pa_npu.config.schema import Config
from pa_npu.engines.registry import check_engine_keys, distributions, engine_kind
from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.checks.machine import check_ports, num_devices
from pa_npu.launcher.checks.model import check_model_files
from pa_npu.launcher.engine_key import engine_key
from pa_npu.launcher.placement import Placement, available_cores, place
from pa_npu.platform.base import Platform
from pa_npu.telemetry.tracker_libraries import TRACKERS


def check_engines(config: Config, platform: Platform) -> Placement:
    """Checks what engines without a run need; returns their places."""
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
    return place(config, num_devices(platform), available_cores())


def check_attached(config: Config) -> None:
    """Checks that every attached engine answers and serves this model."""
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
    """Checks that the libraries of trackers are installed, in versions that this package calls.

    Nothing is sent anywhere: a tracker that cannot be reached never ends a run.
    """
    requirements = {tracker: TRACKERS[tracker][1] for tracker in config.telemetry.trackers}
    names = tuple(Requirement(requirement).name for requirement in requirements.values())
    installed = distributions(None, names)
    for tracker, requirement in requirements.items():
        problem = _requirement_problem(requirement, installed)
        if problem is not None:
            raise ConfigError(
                f"telemetry.trackers: {tracker} {problem} in {sys.executable}; pip install "
                f"'pa_npu[{tracker}]', or take it off the list"
            )


def _requirement_problem(requirement: str, installed: Mapping[str, str]) -> str | None:
    """Returns why a requirement is not met by the installed versions, or None."""
    parsed = Requirement(requirement)
    version = installed.get(parsed.name)
    if version is None:
        return "is not installed"
    if not parsed.specifier.contains(version, prereleases=True):
        return f"is there as {version}, not as {requirement}"
    return None
