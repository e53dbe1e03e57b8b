"""The check of trackers before a run: their libraries are there, in versions that they are used by."""

from __future__ import annotations

import sys

from packaging.requirements import Requirement

from pa_npu.config.schema import Config
from pa_npu.engines.interpreter import distributions
from pa_npu.errors import ConfigError
from pa_npu.telemetry.trackers.protocol import REQUIREMENTS


def check_trackers(config: Config) -> None:
    """Raises ConfigError in one line. Nothing is sent anywhere: a tracker that cannot be reached never ends a run."""
    telemetry = config.telemetry
    wanted = {name: Requirement(REQUIREMENTS[name]) for name in telemetry.trackers}
    names = tuple(requirement.name for requirement in wanted.values())
    found = distributions(telemetry.tracker_python, names, "telemetry.tracker_python")
    python = telemetry.tracker_python or sys.executable
    for tracker, requirement in wanted.items():
        version = found.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            has = "is not installed" if version is None else f"is there as {version}, not as {REQUIREMENTS[tracker]}"
            raise ConfigError(
                f"telemetry.trackers: {tracker} {has} in {python}; pip install 'pa_npu[{tracker}]', name an interpreter "
                f"that has it in telemetry.tracker_python, or take it off the list"
            )
