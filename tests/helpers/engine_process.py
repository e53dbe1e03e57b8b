"""An engine of any kind as a process of a test, started with the command that a run would start it with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import DeadlineExceeded
from pa_npu.families.spec import ModelSpec
from tests.helpers.engine_subjects import MAX_PROMPT, MAX_RESPONSE, VOCAB, Subject

ROOT = Path(__file__).resolve().parents[2]
API_KEY = "key-of-this-test"
KEY = {KEY_VARIABLE: API_KEY}  # of the environment of who asks such an engine
START_S = 400.0


class EngineProcess:
    """On `model`, in a process group of its own. directory: for its log. rollout: keys of the
    configuration. trainer: trainer.backend. replaced: arguments that stand in for others. more:
    arguments behind the command's.
    """

    def __init__(
        self,
        backend: str,
        model: Path,
        directory: Path,
        rollout: dict[str, Any],
        *,
        trainer: str = "megatron",
        replaced: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        config = Config.model_validate(
            {
                "run": {"device": "cpu", "dir": str(directory)},
                "model": {"path": str(model), "dtype": "fp32"},
                "data": {"train": "none", "max_prompt_tokens": MAX_PROMPT},
                "rollout": {"backend": backend, "max_response_tokens": MAX_RESPONSE, **rollout},
                "trainer": {"backend": trainer},
            }
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.kind = engine_kind(backend)
        self.model = model
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / "engine.log"
        self._backend = backend
        command = self.kind.command(config, ModelSpec.from_config(config), 0, port)
        argv = [(replaced or {}).get(word, word) for word in command.argv]
        self._command = replace(command, argv=[*argv, *more])
        self._start()

    def subject(self) -> Subject:
        return Subject(self.kind, self._backend, self.url, API_KEY, self.model, self.restart)

    def client(self) -> Any:
        return self.kind.client(self.url, VOCAB, API_KEY)

    async def wait_ready(self) -> None:
        async with self.client() as client:
            try:
                await client.wait_ready(deadline_s=START_S)
            except DeadlineExceeded as error:
                raise AssertionError(f"{error}\n{self.log.read_text()[-3000:]}") from None

    async def restart(self) -> None:
        self.kill()
        self._start()
        await self.wait_ready()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command.argv,
                env={**os.environ, **self._command.env, **KEY},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
