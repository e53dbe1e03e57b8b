"""`pa-npu serve` on a tiny model, and loops of clients in processes of their own, for tests.

The SDK and the cookbook are no dependencies of this package: tests/run.sh installs them beside the
environment, in .venv-tinker and .venv-cookbook; PA_NPU_TINKER and PA_NPU_COOKBOOK name other directories.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launched import ROOT, Launched

SDK = Path(os.environ.get("PA_NPU_TINKER", ROOT / ".venv-tinker"))
COOKBOOK = Path(os.environ.get("PA_NPU_COOKBOOK", ROOT / ".venv-cookbook"))
needs_sdk = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
    pytest.mark.skipif(
        not (SDK / "tinker").is_dir(), reason="needs requirements/tinker.txt in .venv-tinker"
    ),
]
needs_cookbook = pytest.mark.skipif(
    sys.version_info < (3, 11) or not (COOKBOOK / "tinker_cookbook").is_dir(),
    reason="needs Python 3.11 and requirements/cookbook.txt in .venv-cookbook",
)
HELPERS = ROOT / "tests" / "helpers"
READY_S = 300.0
LOOP_S = 400.0


class Server(Launched):
    """`pa-npu serve` on a tiny model."""

    def __init__(self, model: Path, directory: Path, **keys: Any) -> None:
        self.run = directory / "run"
        self.model = model
        named = {
            "model.path": model,
            "model.dtype": "fp32",
            "run.device": "cpu",
            "run.dir": self.run,
            "run.restarts": 10,
            "lora.rank": 8,
            "data.max_prompt_tokens": 128,
            "rollout.max_response_tokens": 64,
            "service.port": 0,
            "service.unembed": "leave_out",
            "service.checkpoint_every": 4,
            "service.slots": 16,
            **{name.replace("__", "."): value for name, value in keys.items()},
        }
        super().__init__(directory, "serve", *(f"{name}={value}" for name, value in named.items()))
        self.wait_for(lambda: "ready: " in self.output, "the service is ready", READY_S)
        self.url = self.output.split("ready: ")[1].split()[0]
        self.key = self.run / "service" / "key"

    def pid_of(self, part: str, rank: int | None = None) -> int:
        """Returns the process whose command line has `part`, not its keeper. rank: of a trainer."""
        found = [
            pid
            for pid, line in self.family().items()
            if f"-m {part}" in line and "keeper" not in line
            if rank is None or f"RANK={rank}".encode() in environment_of(pid)
        ]
        assert len(found) == 1, self.family()
        return found[0]


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@contextmanager
def served(model: Path, directory: Path, **keys: Any) -> Iterator[Server]:
    """Serves, and ends the service as Ctrl-C does, which must be clean."""
    server = Server(model, directory, **keys)
    try:
        yield server
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(30) == 0, server.output
    finally:
        server.close()


class Client:
    """A client's program in a process of its own. log: what it prints."""

    def __init__(self, argv: list[str], packages: list[Path], log: Path) -> None:
        self.log = log
        path = os.pathsep.join([*map(str, packages), os.environ.get("PYTHONPATH", "")])
        env = {
            **os.environ,
            "PYTHONPATH": path.rstrip(os.pathsep),
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as stream:
            self.popen = subprocess.Popen(
                [sys.executable, *argv], env=env, stdout=stream, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Waits for its end, which must be a good one."""
        try:
            code = self.popen.wait(LOOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise AssertionError(f"the client did not end:\n{self.last_words}") from None
        assert code == 0, self.last_words

    @property
    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Loop(Client):
    """A loop of tinker_loops.py."""

    def __init__(self, server: Server, name: str, directory: Path, **options: Any) -> None:
        self.out = directory / f"{name}-{len(list(directory.glob('*.json')))}.json"
        self.out.write_text("")
        self.steps = directory / f"{self.out.stem}.steps"
        given = [f"{key}={value}" for key, value in options.items()]
        given += [f"model={server.model}", f"steps_file={self.steps}"]
        argv = [str(HELPERS / "tinker_loops.py"), server.url, str(server.key), name, str(self.out)]
        super().__init__([*argv, *given], [SDK], directory / f"{self.out.stem}.log")

    def result(self) -> Any:
        self.wait()
        return json.loads(self.out.read_text())

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LOOP_S
        while not self.steps.exists() or int(self.steps.read_text() or -1) < step:
            assert self.popen.poll() is None, self.last_words
            assert time.monotonic() < deadline, f"step {step} did not begin"
            time.sleep(0.02)


class CookbookLoop(Client):
    """A loop of cookbook_loops.py, whose files are in a directory of its name."""

    def __init__(self, server: Server, name: str, directory: Path, **options: Any) -> None:
        self.out = directory / f"{name}-{len(list(directory.iterdir()))}"
        given = [f"{key}={value}" for key, value in options.items()]
        given += [f"model={server.model}"]
        # modules beside the program must not hide packages of the same names
        argv = ["-P", str(HELPERS / "cookbook_loops.py"), server.url, str(server.key), name]
        log = directory / f"{self.out.name}.log"
        super().__init__([*argv, str(self.out), *given], [COOKBOOK, SDK], log)

    def result(self) -> Any:
        self.wait()
        return json.loads((self.out / "seen.json").read_text())
