"""Reports of nodes, before anything starts there, and the comparison of those that must agree in a run.

Each node answers for itself (`inspect_node`), the launcher compares (`node_problem`). The launcher first leaves a token in the run
directory, which every node must find there: that is how a directory is known to be shared.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pa_npu import __version__
from pa_npu.checkpoints.provenance import model_fingerprint
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.run_checks import check_ports, device_notes
from pa_npu.launcher.trainer_versions import installed_versions, trainer_problems
from pa_npu.platform.base import Platform

TOKEN_FILE = ".nodes"


@dataclass(frozen=True)
class NodeReport:
    """problem: what keeps this node from taking part. notes: what is unusual. model: a fingerprint of model.path's files.

    address: where the node's processes listen. ports: of its engines, in the order of its share; empty where there is a problem.
    """

    host: str
    address: str
    model: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    notes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        return self.address if self.host == self.address else f"{self.address} ({self.host})"


def leave_token(config: Config) -> str:
    """On the launcher's machine: write a fresh token into run.dir and return it."""
    directory, token = Path(config.run.dir), secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TOKEN_FILE).write_text(token, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.dir: {directory} cannot be written ({error.strerror}); choose another run.dir") from None
    return token


def all_versions() -> dict[str, str]:
    """Returns the versions that must be the same on all nodes."""
    return {"pa_npu": __version__, **installed_versions()}


def inspect_node(config: Config, platform: Platform, share: Placement, node: int, token: str) -> NodeReport:
    """Report on this node; `share` is what the run has on it. The config has this node's address.

    Raises PaNpuError with what keeps it from taking part.
    """
    _check_directory(config, node, token)
    check_ports(config, share.engines, has_store=False)
    model = Path(config.model.path)
    return NodeReport(
        host=socket.gethostname(),
        address=config.placement.address,
        model=model_fingerprint(model) if (model / "config.json").is_file() else "",
        versions=all_versions(),
        notes=[*trainer_problems(platform.name), *device_notes(platform, share)],
    )


def node_problem(report: NodeReport, own: NodeReport) -> str | None:
    """Why this node cannot take part beside the launcher's machine, whose report is `own`; one line."""
    who = f"node {report.name}"
    if report.problem:
        return f"{who}: {report.problem}"
    if line := differing_versions(report.versions, own.versions):
        return f"{who}: {line}"
    if report.model != own.model:
        return (
            f"{who}: model.path: {report.model or 'not there'}, but {own.model or 'none'} on the launcher's machine; give all "
            f"nodes the same model"
        )
    return None


def differing_versions(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first package that a node has in another version than the launcher's machine."""
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name, "not installed"), here.get(name, "not installed")
        if one != other:
            return f"{name} is {one}, but {other} on the launcher's machine; install the same on all nodes"
    return None


def _check_directory(config: Config, node: int, token: str) -> None:
    directory = Path(config.run.dir)
    try:
        seen = (directory / TOKEN_FILE).read_text(encoding="utf-8")
        probe = directory / f".node-{node}"
        probe.write_text(token, encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"run.dir: {directory} is not shared or not writable here ({error.strerror}); use a directory of all nodes"
        ) from None
    if seen != token:
        raise UserError(
            f"run.dir: {directory} is another directory than the launcher's; use one on a shared file system"
        )
