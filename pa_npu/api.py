"""The Python interface, `Run`: start a run from a script or a notebook, iterate over its records, stop it.

    with Run("configs/grpo_tiny.yaml", {"schedule.iterations": 5}, reward=brevity, train=rows) as
    run:
        for record in run:
            print(record["iteration"], record["reward_mean"])
    run.hf          the final weights, an HF directory

The launcher is a child in a session of its own, so that engines, trainers and signals of a run
never meet the caller's interpreter. Leaving the block ends the run after its iteration, with a
checkpoint and an export; an exception stops it at once. Reward functions are imported by the run's
workers, which are processes of their own; datasets are written to a file beside the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pa_npu.algorithm.rules import load_config
from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.config.yaml_source import KeyPath
from pa_npu.errors import DataError, DeadlineExceeded, PaNpuError, UserError
from pa_npu.rewards.functions import RewardInput
from pa_npu.telemetry.records import read_evaluations, read_records

_POLL_S = 0.2
_STOP_S = 60.0  # the launcher ends its processes within its own grace of some seconds
_KEPT_LINES = 40

Rows = Iterable[Mapping[str, Any]]
Reward = str | Callable[[RewardInput], Sequence[float] | Awaitable[Sequence[float]]]


class RunFailed(PaNpuError):
    """The launcher ended with an exit code other than 0. `code`, and `lines`: the last it said."""

    def __init__(self, code: int, lines: Sequence[str]) -> None:
        self.code, self.lines = code, tuple(lines)
        reason = next(
            (line for line in lines if line.startswith(("error:", "failed:"))),
            lines[-1] if lines else "",
        )
        super().__init__(f"the run ended with exit code {code}: {reason}")


class Run:
    """One run. `config`: a Config, a YAML file, or several of which later ones win; `keys`: dotted
    keys over it.

    reward: in place of reward.functions: a name as that key takes it ("math", "module:function"), a
    function of an imported module,
        or several, whose sum counts. It gets a group (prompt, answer, responses, response_tokens,
        row) and returns as many numbers.
    train, test: rows in the layouts of dataset files, such as {"question": ..., "answer": ...}; a
    `datasets.Dataset` is an iterable
        of them.
    on_line: is called with each line of the launcher; None for nobody.
    Raises UserError at once where the configuration cannot be used.
    """

    def __init__(
        self,
        config: Config | str | Path | Sequence[str | Path],
        keys: Mapping[str, Any] | None = None,
        *,
        reward: Reward | Sequence[Reward] | None = None,
        train: Rows | None = None,
        test: Rows | None = None,
        on_line: Callable[[str], None] | None = print,
    ) -> None:
        self._imports: set[str] = set()
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._started = 0.0
        self._is_stopped = False
        chosen = dict(keys or {})
        for name, rows in (("train", train), ("test", test)):
            if rows is not None:
                chosen[f"data.{name}"] = f"{_run_dir(config, chosen)}-inputs/{name}.jsonl"
        if reward is not None:
            rewards = (
                [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward
            )
            chosen["reward.functions"] = [{"name": self._name_of(function)} for function in rewards]
        self.config = _load(config, chosen)
        self.dir = Path(self.config.run.dir)
        self._inputs = Path(f"{self.config.run.dir}-inputs")
        for name, rows in (("train", train), ("test", test)):
            if rows is not None:
                _write_rows(self._inputs / f"{name}.jsonl", rows, name)

    @property
    def hf(self) -> Path:
        """The final weights as an HF directory. Raises UserError while there are none."""
        directory = self.dir / "hf"
        if (
            not (directory / "config.json").exists()
            and not (directory / "adapter_config.json").exists()
        ):
            raise UserError(
                f"Run.hf: {directory} is not there; a run writes it when it is done or ended by "
                "stop(), with checkpoint.export_hf"
            )
        return directory

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Run:
        """Start the launcher; returns at once. Raises UserError when it was started before."""
        if self._process is not None:
            raise UserError("Run.start: this run was started already; make another Run")
        self._inputs.mkdir(parents=True, exist_ok=True)
        file = self._inputs / "config.yaml"
        file.touch(mode=0o600)
        file.write_text(dump_config(self.config), encoding="utf-8")
        environment = dict(os.environ)
        package = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environment.get("PYTHONPATH"), package, *sorted(self._imports)))
        )
        self._started = time.time()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pa_npu.launcher",
                "run",
                "--on-interrupt",
                "finish",
                "--config",
                str(file),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            # an interrupt of the caller is the caller's; stop() tells the run
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name="run output", daemon=True
        )
        self._reader.start()
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the iterations' records as they are written, until the run ends.

        Raises RunFailed if it failed and was not stopped.
        """
        seen = self._started
        while True:
            ended = not self.is_running
            for record in self.records:
                if record["time"] > seen:
                    seen = record["time"]
                    yield record
            if ended:
                if not self._is_stopped:
                    self.wait()
                return
            time.sleep(_POLL_S)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, of a continued run also those before."""
        try:
            return read_records(self.dir)
        except DataError:  # there is none yet, or the last one is being written
            return []

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations of the held-out prompts, by weight version."""
        return read_evaluations(self.dir)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the run has ended.

        Raises RunFailed where that was no good end, DeadlineExceeded after `timeout_s`.
        """
        if self._process is None or self._reader is None:
            raise UserError("Run: it was not started; call start(), or use it in a `with` block")
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"the run in {self.dir} goes on after {timeout_s:g} s") from None
        self._reader.join()
        if code:
            raise RunFailed(code, list(self._lines))

    def stop(self, *, at_once: bool = False) -> None:
        """End the run after the iteration that it is in, with a checkpoint and an export (`hf`),
        and wait for its end.

        A run that trains nothing yet is stopped, as is one that has not ended within the deadlines
        of an iteration. Idempotent, and no error for a run that has ended.

        Args:
            at_once: stop it where it is; only its earlier checkpoints remain.
        """
        self._is_stopped = True
        process = self._process
        if process is not None and process.poll() is None:
            deadlines_s = (
                self.config.deadlines.border_timeout_s + 2 * self.config.deadlines.wait_timeout_s
            )
            asked = (
                [(signal.SIGTERM, _STOP_S)]
                if at_once
                else [(signal.SIGINT, deadlines_s), (signal.SIGTERM, _STOP_S)]
            )
            for number, within_s in asked:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(within_s)
                    break
            else:
                process.kill()
                process.wait()
        if self._reader is not None:
            self._reader.join()

    def _name_of(self, reward: Any) -> str:
        """Returns a reward as reward.functions names it; where its module is found is kept for the
        run.
        """
        if isinstance(reward, str):
            return reward
        module_name, name = (
            getattr(reward, "__module__", "__main__"),
            getattr(reward, "__qualname__", ""),
        )
        module = sys.modules.get(module_name)
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        file = getattr(module, "__file__", None)
        if file is None or module_name == "__main__" or value is not reward:
            raise UserError(
                f"reward: {name or repr(reward)} of {module_name} cannot be imported by the run's "
                "workers; write it at the top level of a module that you import, without a "
                "closure, or give 'module:function'"
            )
        depth = module_name.count(".") + Path(file).stem.count("__init__")
        self._imports.add(str(Path(file).resolve().parents[depth]))
        return f"{module_name}:{name}"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip("\n"))
            if self._on_line is not None:
                self._on_line(self._lines[-1])

    def __enter__(self) -> Run:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(at_once=error is not None)


def _load(config: Config | str | Path | Sequence[str | Path], keys: Mapping[str, Any]) -> Config:
    values: dict[KeyPath, Any] = {}
    files: Sequence[str | Path] = ()
    if isinstance(config, Config):
        values = {(section,): tree for section, tree in config.model_dump(mode="json").items()}
    else:
        files = [config] if isinstance(config, (str, Path)) else config
    for name, value in keys.items():
        values[tuple(name.split("."))] = (
            os.fspath(value) if isinstance(value, os.PathLike) else value
        )
    return load_config([os.path.expanduser(file) for file in files], values=values)


def _run_dir(config: Config | str | Path | Sequence[str | Path], keys: Mapping[str, Any]) -> str:
    """Returns the directory of the run; its other required keys may still be missing."""
    needed = {"data.train": "unknown", **keys}
    return _load(config, needed).run.dir


def _write_rows(file: Path, rows: Rows, name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: a row cannot be written as JSON ({error}); give rows of texts, numbers, "
            "lists and dictionaries"
        ) from None
    file.write_text(text, encoding="utf-8")
