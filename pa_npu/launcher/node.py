"""What one node of a run reports before anything starts, and what must agree among the nodes.

Each node answers for itself (`inspect_node`), the head compares (`node_problems`); a report is plain data, so that it can
travel as JSON. The head first leaves a token in the run directory, which every node must find there.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.errors import PaNpuError, UserError
from pa_npu.launcher.checks import check_ports, device_notes
from pa_npu.launcher.placement import Placement, port_problem
from pa_npu.launcher.versions import trainer_problems
from pa_npu.platform.base import Platform

TOKEN_FILE = ".nodes"


@dataclass(frozen=True)
class NodeReport:
    """problems: what keeps this node from taking part. notes: what is unusual. model: a fingerprint of model.path's files."""

    node: int
    host: str
    model: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def leave_token(config: Config) -> str:
    """On the head: write a fresh token into run.dir and return it."""
    directory, token = Path(config.run.dir), secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TOKEN_FILE).write_text(token, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.dir: {directory} cannot be written ({error.strerror}); choose another run.dir") from None
    return token


def inspect_node(
    config: Config,
    platform: Platform,
    placement: Placement,
    node: int,
    token: str,
    ports: Sequence[int] | None = None,
) -> NodeReport:
    """Everything that can be wrong with this node; `placement` is its share. ports: of its engines, where they are settled."""
    found = (_shared_directory(config, node, token), _ports(config, placement, ports or ()))
    problems = [problem for problem in found if problem]
    return NodeReport(
        node=node,
        host=socket.gethostname(),
        model=_model_fingerprint(Path(config.model.path)),
        problems=problems,
        notes=[*trainer_problems(platform.name), *device_notes(platform, placement)],
    )


def node_problems(reports: Sequence[NodeReport]) -> list[str]:
    """One line per problem, with its node; nodes that see another model than the head are one."""
    lines = [f"node {report.node} ({report.host}): {problem}" for report in reports for problem in report.problems]
    head = min(reports, key=lambda report: report.node)
    lines += [
        f"node {report.node} ({report.host}): model.path: {report.model or 'not there'}, but node {head.node} ({head.host}) has "
        f"{head.model or 'none'}; give all nodes the same model"
        for report in reports
        if report.model != head.model
    ]
    return lines


def _shared_directory(config: Config, node: int, token: str) -> str | None:
    directory = Path(config.run.dir)
    try:
        seen = (directory / TOKEN_FILE).read_text(encoding="utf-8")
        probe = directory / f".node-{node}"
        probe.write_text(token, encoding="utf-8")
        probe.unlink()
    except OSError as error:
        return (
            f"run.dir: {directory} is not shared or not writable here ({error.strerror}); use a directory of all nodes"
        )
    if seen != token:
        return f"run.dir: {directory} is another directory than the head's; use one on a shared file system"
    return None


def _ports(config: Config, placement: Placement, settled: Sequence[int]) -> str | None:
    try:
        check_ports(config, placement.engines)
    except PaNpuError as error:
        return str(error)
    address = config.placement.address
    taken = ((port, problem) for port in settled if (problem := port_problem(address, port)))
    for port, problem in taken:
        return f"port {port} of {address}, an engine's, cannot be used ({problem}); end the process that has it"
    return None


def _model_fingerprint(directory: Path) -> str:
    """Of config.json's content and the weight files' names and sizes; empty where there is no model."""
    config = directory / "config.json"
    if not config.is_file():
        return ""
    digest = hashlib.sha256(config.read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
