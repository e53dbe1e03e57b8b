"""Repeats iterations of a run from a checkpoint, in a directory of their own, and compares the chains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pa_npu import platform
from pa_npu.checkpoints import directories
from pa_npu.checkpoints.directories import CHECKPOINTS
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import DataError, PaNpuError, UserError
from pa_npu.launcher.diff import report
from pa_npu.launcher.run_directory import CONFIG_FILE
from pa_npu.telemetry.chain import CHAIN, read_chain
from pa_npu.telemetry.chain_comparison import compare_chains

OUTPUT = "replay.log"
_LOOK_EVERY_S = 0.5
_STOP_S = 60.0  # the launcher's own limits for its processes are below


class ReplayFailed(PaNpuError):
    """The repetition did not come to its end."""


def replay(run_dir: Path, span: str, work: str | None, overrides: Sequence[str]) -> int:
    """Repeats `span`, "A:B", prints how it compares, and returns the exit code.

    Raises UserError, ReplayFailed.
    """
    begin, end = _span(run_dir, span)
    config = load_config([str(run_dir / CONFIG_FILE)])
    checkpoint = _checkpoint(run_dir, begin, config.checkpoint.load)
    if work is not None:
        directory = Path(work)
        if directory.exists():
            raise UserError(f"--work: {directory} exists already; name a new directory")
        directory.mkdir(parents=True)
    else:
        directory = Path(tempfile.mkdtemp(prefix="pa_npu_replay_"))
    scratch = directory / "run"
    settings = _settings(config, checkpoint, scratch, end)
    kind = config.run.device
    if kind in platform.KINDS and platform.missing(kind) is not None:
        print(f"no {kind} here: the repetition takes the devices that are")
        settings.append("run.device=auto")
    settings += overrides
    print(
        f"repeating iterations {begin} to {end - 1}; what the repetition says is in "
        f"{directory / OUTPUT}",
        flush=True,
    )
    _run(
        run_dir,
        settings,
        directory,
        ReplayProgress(scratch, begin, end),
        must_stop=not _ends_by_itself(config),
    )
    comparison = compare_chains(read_chain(run_dir), read_chain(scratch), begin, end)
    if comparison.iterations < end - begin and comparison.verdict in ("equal", "rounding"):
        raise ReplayFailed(
            f"the repetition has {comparison.iterations} of {end - begin} iterations; see "
            f"{directory}"
        )
    code, lines = report(comparison, run_dir, scratch)
    print("\n".join(lines))
    if work is None and code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"the repetition is kept in {directory}")
    return code


def _span(run_dir: Path, span: str) -> tuple[int, int]:
    begin, separator, end = span.partition(":")
    if not separator or not begin.isdecimal() or not end.isdecimal() or int(begin) >= int(end):
        raise UserError(
            f"--replay: {span!r:.40} is not A:B with A below B, such as 4:8, which repeats "
            "iterations 4 to 7"
        )
    iterations = [link.iteration for link in read_chain(run_dir)]
    if not iterations or int(begin) < iterations[0] or int(end) > iterations[-1] + 1:
        has = f"{iterations[0]} to {iterations[-1]}" if iterations else "none"
        raise UserError(
            f"--replay: {span}: {run_dir / CHAIN} has iterations {has}; choose within them"
        )
    return int(begin), int(end)


def _checkpoint(run_dir: Path, version: int, loaded: str | None) -> Path | None:
    """Returns the checkpoint from which the repetition continues; None for the model that the run
    began with.

    loaded: the checkpoint that the run itself went on from at last, which may be another run's.
    """
    parent = run_dir / CHECKPOINTS
    for path in (parent / directories.directory_name(version), *([Path(loaded)] if loaded else [])):
        if directories.version_of(path) == version and directories.problem(path) is None:
            return path.resolve()
    if version == 0:
        return None
    complete = [str(directories.version_of(path)) for path in directories.complete(parent)]
    has = ", ".join(complete) or "none"
    raise DataError(
        f"--replay: {run_dir} has no complete checkpoint of version {version}; begin at one that "
        f"it has ({has}), or at 0; checkpoint.every and keep_last decide which a run keeps"
    )


def _settings(config: Config, checkpoint: Path | None, scratch: Path, end: int) -> list[str]:
    """Returns the keys in which the repetition differs from the run; none changes what is computed."""
    settings = [
        f"run.dir={scratch}",
        f"checkpoint.load={'null' if checkpoint is None else checkpoint}",
        "checkpoint.resume=null",
        "checkpoint.keep_last=0",
        "checkpoint.keep_best=0",
        "checkpoint.export_hf=false",
        "telemetry.samples=all",
        "telemetry.trackers=[]",
        "telemetry.profile_iterations=[]",
        "schedule.compare_iterations=0",
        "rollout.attach=[]",
        "placement.port=0",
        "agent.port=null",
    ]
    if config.publish.divergence is None:  # else it decides which versions are published
        settings += ["data.test=null", "evaluate.sets={}", "schedule.evaluate_every=0"]
    if _ends_by_itself(config):
        settings.append(f"schedule.iterations={end}")
    return settings


def _ends_by_itself(config: Config) -> bool:
    """Returns whether a run of fewer iterations does the same until then; a rate that decays
    depends on their number.
    """
    return config.optimizer.decay == "constant" and config.publish.divergence is None


class ReplayProgress:
    """Says which iterations of a span a run has done. run_dir: the run's, which need not be there
    yet.
    """

    def __init__(self, run_dir: Path, begin: int, end: int) -> None:
        self._chain = run_dir / CHAIN
        self._size = 0
        self._begin = begin
        self._end = end
        self._next = begin

    def look(self) -> bool:
        """Prints a line for each iteration that is done since the last look.

        Returns whether all are.
        """
        size = self._chain.stat().st_size if self._chain.is_file() else 0
        if size != self._size:
            self._size = size
            for link in read_chain(self._chain.parent):
                if self._next <= link.iteration < self._end:
                    count = f"{link.iteration + 1 - self._begin} of {self._end - self._begin}"
                    print(f"repeated iteration {link.iteration} ({count})", flush=True)
                    self._next = link.iteration + 1
        return self._next == self._end


def _run(
    run_dir: Path,
    settings: Sequence[str],
    directory: Path,
    progress: ReplayProgress,
    must_stop: bool,
) -> None:
    """Starts the launcher as a user would, and waits for its end.

    must_stop: whether the run goes on after the span and is to be stopped; else it ends by itself,
    with a last checkpoint.
    """
    command = [
        sys.executable,
        "-m",
        "pa_npu.launcher",
        "run",
        "--config",
        str(run_dir / CONFIG_FILE),
        *settings,
    ]
    stopped = False
    with (directory / OUTPUT).open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            # the run has deadlines of its own for all it waits for
            while launcher.poll() is None and not stopped:
                time.sleep(_LOOK_EVERY_S)
                is_done = progress.look()
                stopped = must_stop and is_done and launcher.poll() is None
            progress.look()
        finally:
            _stop(launcher)
    if launcher.returncode and not stopped:
        lines = (directory / OUTPUT).read_text(errors="replace").strip().splitlines()
        raise ReplayFailed(
            f"the repetition ended with exit code {launcher.returncode}: "
            f"{lines[-1] if lines else 'it said nothing'}; see {directory / OUTPUT}"
        )


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, which ends its processes, also if it is killed."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
