"""The run directory: whose it is, the checkpoint in it that a run continues from, and what an earlier run of the same left there.

The launcher resolves the checkpoint once, so that all processes of the run agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pa_npu.checkpoints import directories
from pa_npu.checkpoints.directories import CHECKPOINTS, META_FILE, clean, version_of
from pa_npu.checkpoints.provenance import (
    changes_the_run,
    check_continuation,
    differences,
    model_fingerprint,
)
from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.config.yaml_source import read_yaml
from pa_npu.engines.http_server import KEY_FILE
from pa_npu.errors import ConfigError, UserError
from pa_npu.telemetry.records import read_evaluations

CONFIG_FILE = "config.yaml"
EARLIER = "earlier"
HF_DIRECTORY = "hf"
LOCK = ".lock"
_DIRECTORIES = (
    CHECKPOINTS,
    EARLIER,
    HF_DIRECTORY,
    "logs",
    "timeline",
    "samples",
    "profile",
    "tensorboard",
    "evaluations",
)
_FILES = (
    LOCK,
    KEY_FILE,
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
    "runs_on.json",
    "teachers.json",
    "gateway.json",
)
_LOGS = "logs"


def resolve_resume(
    config: Config,
    report: Callable[[str], None],
    *,
    restart: bool = False,
    damaged: Mapping[Path, str] | None = None,
) -> Config:
    """Returns the configuration with checkpoint.load set to the newest complete checkpoint of
    run.dir. Writes nothing.

    Without any checkpoint the configuration stays as it is: the run begins with checkpoint.load, or
    from the beginning. So it does without checkpoint.resume=auto, unless `restart`.

    Args:
        report: gets one line about the checkpoint that was chosen, and newer damaged ones.
        restart: whether this run itself begins again.
        damaged: further damaged checkpoints, with what is wrong with each.
    """
    if config.checkpoint.resume != "auto" and not restart:
        return config
    directory = checkpoints_directory(config)
    newest, skipped = directories.newest(directory, damaged)
    if newest is None:
        if directory.is_dir() or restart:  # on a first run there is nothing to tell
            begin = config.checkpoint.load or "the beginning"
            report(f"{skipped}no complete checkpoint in {directory}: the run starts from {begin}")
        return config
    report(f"{skipped}the run continues from {newest}")
    checkpoint = config.checkpoint.model_copy(update={"load": str(newest)})
    return config.model_copy(update={"checkpoint": checkpoint})


def checkpoints_directory(config: Config) -> Path:
    return Path(config.run.dir) / CHECKPOINTS


def continues_own_run(config: Config) -> bool:
    """Returns whether the run continues from a checkpoint of its own directory, so that records
    and logs continue too.
    """
    load = config.checkpoint.load
    if not load:
        return False
    return checkpoints_directory(config).resolve() == Path(load).resolve().parent


def check_checkpoint(config: Config) -> str | None:
    """Returns what differs from the configuration of checkpoint.load, in words; None where there is
    nothing to say.

    Raises UserError where the run cannot continue from it with this configuration.
    """
    load = config.checkpoint.load
    if load is None:
        return None
    if not Path(load).is_dir():
        raise ConfigError(
            f"checkpoint.load: {load} is not a directory; give one written as .../iteration_NNNNNN"
        )
    meta = directories.read_meta(Path(load))
    if meta.version > config.schedule.iterations:
        raise ConfigError(
            f"checkpoint.load: {load} is after {meta.version} iterations, more than "
            f"schedule.iterations = {config.schedule.iterations}; raise schedule.iterations"
        )
    if meta.model["fingerprint"] != model_fingerprint(config.model.path):
        raise ConfigError(
            f"model.path: {config.model.path} is not the model that {load} began with "
            f"({meta.model['path']}), which gives the shape and the reference; name that one"
        )
    changed = check_continuation(meta.config, config, load)
    for name, teacher in config.teacher.items():
        key = f"teacher.{name}"
        if (
            teacher.model is None
        ):  # a server's is known by what it says (coordinator/scoring_teachers.py)
            continue
        if meta.model.get(key) != model_fingerprint(teacher.model):
            raise ConfigError(
                f"{key}.model: {teacher.model} is not the teacher that {load} learnt from, or has "
                "changed since; name that one, or begin another run"
            )
    return changed


def check_run_directory(config: Config) -> None:
    """Raises UserError when the directory cannot be written or belongs to a run of another
    configuration.
    """
    directory = Path(config.run.dir)
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"run.dir: {existing} is a file, not a directory; choose another run.dir")
    if not _writable(existing):
        raise UserError(
            f"run.dir: {existing} is not writable; choose another run.dir or change its permissions"
        )
    file = directory / CONFIG_FILE
    _check_kinds(directory)
    if not file.exists():
        return
    try:
        written, _ = read_yaml(str(file))
    except ConfigError as error:
        raise ConfigError(
            f"run.dir: {str(error).rpartition('; ')[0]}; choose another run.dir"
        ) from None
    changed = changes_the_run(differences(written, config), continues=continues_own_run(config))
    if not changed:
        return
    keys = ", ".join(changed[:3])
    if len(changed) > 3:
        keys += ", ..."
    newest, _ = directories.newest(checkpoints_directory(config))
    remedy = "choose another run.dir"
    if newest:
        remedy += f" (run.dir=NEW checkpoint.load={newest} goes on from its newest checkpoint)"
    raise ConfigError(
        f"run.dir: {directory} holds a run with another configuration (different: {keys}); "
        f"{remedy}, or delete that directory"
    )


def done_line(config: Config) -> str | None:
    """Returns the line that the run which `config` continues has nothing left to do; None where it
    has.

    Its last version is saved, evaluated where there are questions, and exported behind the
    checkpoint.
    """
    load = config.checkpoint.load
    if not load or not continues_own_run(config):
        return None
    last = config.schedule.iterations
    if config.schedule.epochs is not None:
        saved = directories.read_meta(Path(load)).config.get("schedule", {})
        if saved.get("epochs") != config.schedule.epochs:
            return None
        last = saved["iterations"]  # as the rows made it
    if version_of(Path(load)) != last:
        return None
    directory = Path(config.run.dir)
    if config.evaluate.all_sets(config.data.test) and all(
        record["version"] != last for record in read_evaluations(directory)
    ):
        return None
    if config.checkpoint.export_hf and not _is_exported_behind(
        directory / HF_DIRECTORY, Path(load)
    ):
        return None
    weights = ""
    if config.checkpoint.export_hf:
        weights = f", and its final weights are in {directory / HF_DIRECTORY}"
    return (
        f"the run in {directory} is done: its {counted(last, 'iteration')} are trained (checkpoint "
        f"{load}){weights}; more schedule.iterations continue it"
    )


def _is_exported_behind(exported: Path, checkpoint: Path) -> bool:
    """Returns whether there are final weights, written later than the checkpoint: those of an
    earlier end are another version's.
    """
    files = [
        file
        for name in ("config.json", "adapter_config.json")
        if (file := exported / name).exists()
    ]
    written_s = (checkpoint / META_FILE).stat().st_mtime
    return any(file.stat().st_mtime >= written_s for file in files)


def hint_to_continue(config: Config) -> str:
    """Says how a run that was stopped or has failed goes on, and what is lost."""
    newest, _ = directories.newest(checkpoints_directory(config))
    if newest is None:
        return (
            "no checkpoint was written: the same command starts from the beginning; "
            "checkpoint.every=N saves every N iterations, and --on-interrupt finish what is "
            "trained when Ctrl-C comes"
        )
    done = f"{version_of(newest)} of {counted(config.schedule.iterations, 'iteration')}"
    return f"to go on from {newest} ({done}): the same command with checkpoint.resume=auto"


def _check_kinds(directory: Path) -> None:
    """Refuses a directory where a file that the run writes exists as another kind, such as a
    directory.
    """
    for name, has_kind, kind in (
        *((name, Path.is_file, "regular file") for name in _FILES),
        *((name, Path.is_dir, "directory") for name in _DIRECTORIES),
    ):
        path = directory / name
        if os.path.lexists(path) and not has_kind(path):
            raise UserError(
                f"run.dir: {path} is no {kind}, which the run needs there; remove it, or choose "
                "another run.dir"
            )
    logs = directory / _LOGS
    for path in sorted(logs.glob("*.log")) if logs.is_dir() else ():
        if not path.is_file():
            raise UserError(
                f"run.dir: {path} is no regular file, which the run needs there; remove it, or "
                "choose another run.dir"
            )


@contextlib.contextmanager
def own_run_directory(config: Config, print_line: Callable[[str], None] = print) -> Iterator[Path]:
    """Create the directory, keep other runs out of it, and write config.yaml.

    Files of an earlier run of the same configuration move to earlier/<n>; where this run continues
    one of its checkpoints, only those that are newer. `print_line` gets a line about all that was tidied up. Raises
    UserError when another run is at work in it.
    """
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"run.dir: another run is at work in {directory}; choose another run.dir"
            ) from None
        if not continues_own_run(config) and (target := _set_aside(directory)):
            begin = config.checkpoint.load or "the beginning"
            print_line(
                f"{directory} held a run of this configuration, which moves to {target}; this run "
                f"starts from {begin} (checkpoint.resume=auto continues a run)"
            )
        begin_attempt(config, print_line)
        yield directory


def begin_attempt(config: Config, print_line: Callable[[str], None]) -> None:
    """Make the directory ready for processes that start with `config`; call it while none runs.

    Half-written checkpoints are removed. Checkpoints newer than the one that is continued would be
    taken for this run's later on, so they move to earlier/<n>.
    """
    directory = Path(config.run.dir)
    checkpoints = checkpoints_directory(config)
    for line in clean(checkpoints):
        print_line(line)
    if continues_own_run(config):
        first = version_of(Path(str(config.checkpoint.load))) or 0
        newer = sorted(path for path in checkpoints.iterdir() if (version_of(path) or 0) > first)
        for path in newer:
            print_line(
                f"checkpoint {path} is newer than what the run continues from and moves to earlier/"
            )
        _move_to_earlier(directory, newer)
    _write(directory / CONFIG_FILE, dump_config(config))


def _write(file: Path, text: str) -> None:
    """All of it or nothing: on a full disk the file of before stays, without which the run could
    not go on later.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        # its owner's alone: values of the engines' environment are in it
        with open(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as stream:
            stream.write(text)
        partial.replace(file)
    except OSError as error:
        raise UserError(
            f"run.dir: {file} cannot be written ({error.strerror}); make room, or choose another "
            "run.dir"
        ) from None


def _set_aside(directory: Path) -> Path | None:
    """Moves what an earlier run left to earlier/<n>, which it returns; None where the directory was
    no run's, or had nothing.
    """
    if not (directory / CONFIG_FILE).exists():
        return None
    kept = (CONFIG_FILE, EARLIER, LOCK)
    return _move_to_earlier(
        directory, [path for path in directory.iterdir() if path.name not in kept]
    )


def _move_to_earlier(directory: Path, paths: Sequence[Path]) -> Path | None:
    if not paths:
        return None
    number = 1
    while (directory / EARLIER / str(number)).exists():
        number += 1
    target = directory / EARLIER / str(number)
    for path in paths:
        destination = target / path.relative_to(directory)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(path), str(destination))
    return target


def _writable(directory: Path) -> bool:
    """Tries to write: permission bits say nothing for root, read-only mounts and full disks."""
    probe = directory / ".pa_npu_write_probe"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError:
        return False
    return True
