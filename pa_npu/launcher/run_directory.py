"""The run directory: whose it is, the resolved configuration in it, and what an earlier run of the same left there."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError

CONFIG_FILE = "config.yaml"
EARLIER = "earlier"
LOCK = ".lock"

# A run that continues from a checkpoint may change these and stay the same run.
_MAY_CHANGE = ("checkpoint.", "placement.", "telemetry.", "schedule.iterations", "schedule.evaluate_every")


def check_run_directory(config: Config) -> None:
    """Raises UserError when the directory cannot be written or belongs to a run of another configuration."""
    directory = Path(config.run.dir)
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"run.dir: {existing} is a file, not a directory; choose another run.dir")
    if not _writable(existing):
        raise UserError(f"run.dir: {existing} is not writable; choose another run.dir or change its permissions")
    file = directory / CONFIG_FILE
    if not file.exists():
        return
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"run.dir: {file} cannot be read ({reason}); choose another run.dir") from None
    different = _differences(_flat(found), _flat(yaml.safe_load(dump_config(config))))
    if config.checkpoint.load:
        different = [key for key in different if not key.startswith(_MAY_CHANGE)]
    if different:
        some = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")
        raise ConfigError(
            f"run.dir: {directory} holds a run with another configuration (different: {some}); "
            f"choose another run.dir, or delete that directory"
        )


@contextlib.contextmanager
def own_run_directory(config: Config) -> Iterator[Path]:
    """Create the directory, keep other runs out of it, and write config.yaml.

    Files of an earlier run of the same configuration move to earlier/<n>, unless this run continues one of its
    checkpoints. Raises UserError when another run is at work in it.
    """
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"run.dir: another run is at work in {directory}; choose another run.dir") from None
        load = config.checkpoint.load
        if not load or directory.resolve() not in Path(load).resolve().parents:
            _set_aside(directory)
        (directory / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        yield directory


def _set_aside(directory: Path) -> None:
    if not (directory / CONFIG_FILE).exists():  # not a run's: leave what is there alone
        return
    left = [path for path in directory.iterdir() if path.name not in (CONFIG_FILE, EARLIER, LOCK)]
    if not left:
        return
    number = 1
    while (directory / EARLIER / str(number)).exists():
        number += 1
    target = directory / EARLIER / str(number)
    target.mkdir(parents=True)
    for path in left:
        shutil.move(str(path), str(target / path.name))


def _writable(directory: Path) -> bool:
    """By trying: permissions bits say nothing for root, read-only mounts and full disks."""
    probe = directory / ".pa_npu_write_probe"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError:
        return False
    return True


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
