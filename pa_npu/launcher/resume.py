"""Which checkpoint a run continues from: resolved once by the launcher, so that all its processes agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pa_npu.checkpoints import directories as store
from pa_npu.checkpoints.provenance import check_continuation, model_fingerprint
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError


def resolve_resume(
    config: Config,
    say: Callable[[str], None],
    *,
    restart: bool = False,
    damaged: Mapping[Path, str] | None = None,
) -> Config:
    """The configuration with checkpoint.load set to the newest complete checkpoint of run.dir.

    Only with checkpoint.resume=auto, or where `restart` says that this run itself begins again. Without any checkpoint the
    configuration stays as it is: the run begins with checkpoint.load, or from the beginning. `say` hears, in one line, of the one
    that was chosen and of newer ones that are damaged, to which `damaged` adds. Reads only.
    """
    if config.checkpoint.resume != "auto" and not restart:
        return config
    directory = checkpoints_directory(config)
    found, skipped = store.newest(directory, damaged)
    if found is None:
        if directory.is_dir() or restart:  # on a first run there is nothing to tell
            begin = config.checkpoint.load or "the beginning"
            say(f"{skipped}no complete checkpoint in {directory}: the run starts from {begin}")
        return config
    say(f"{skipped}the run continues from {found}")
    checkpoint = config.checkpoint.model_copy(update={"load": str(found)})
    return config.model_copy(update={"checkpoint": checkpoint})


def checkpoints_directory(config: Config) -> Path:
    return Path(config.run.dir) / store.CHECKPOINTS


def continues_own_run(config: Config) -> bool:
    """Whether the run goes on with a checkpoint of its own directory, so that records and logs go on too."""
    load = config.checkpoint.load
    return bool(load) and checkpoints_directory(config).resolve() == Path(str(load)).resolve().parent


def check_checkpoint(config: Config) -> str | None:
    """Raises UserError when checkpoint.load cannot be continued with this configuration; returns what differs, in words."""
    load = config.checkpoint.load
    if load is None:
        return None
    if not Path(load).is_dir():
        raise ConfigError(f"checkpoint.load: {load} is not a directory; give one written as .../iteration_NNNNNN")
    meta = store.read_meta(Path(load))
    if meta.version > config.schedule.iterations:
        raise ConfigError(
            f"checkpoint.load: {load} is after {meta.version} iterations, more than schedule.iterations = "
            f"{config.schedule.iterations}; raise schedule.iterations"
        )
    if meta.model["fingerprint"] != model_fingerprint(config.model.path):
        raise ConfigError(
            f"model.path: {config.model.path} is not the model that {load} began with ({meta.model['path']}), which gives the "
            f"shape and the reference; name that one"
        )
    return check_continuation(meta.config, config, load)
