"""A transformers engine in a process that need not import: it can be killed, and a publish goes on without it.

python -m tests.helpers.forked_engine JOB.json      {"model": directory, "url": file to write its URL to, "key": its API key}
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from tests.helpers.engine_subjects import MAX_PROMPT, MAX_RESPONSE
from tests.helpers.preloaded import Rank, start_rank

KEY = "key-of-this-test"
START_S = 120.0


class ForkedEngine:
    """directory: for its files, its own."""

    def __init__(self, model: Path, directory: Path) -> None:
        directory.mkdir()
        self.log, self._url = directory / "engine.log", directory / "url"
        job = directory / "job.json"
        job.write_text(json.dumps({"model": str(model), "url": str(self._url), "key": KEY}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process: Rank = start_rank(
            "tests.helpers.forked_engine", str(job), environment, self.log
        )

    def url(self) -> str:
        """Once it serves."""
        deadline = time.monotonic() + START_S
        while not self._url.exists():
            assert time.monotonic() < deadline and self._process.poll() is None, (
                self.log.read_text()[-3000:]
            )
            time.sleep(0.02)
        return self._url.read_text()

    def kill(self) -> None:
        self._process.kill()


def main(job_file: str) -> None:
    import torch

    from pa_npu.engines.transformers.server import load_server, serving

    job = json.loads(Path(job_file).read_text())

    async def serve() -> None:
        limits = (MAX_PROMPT + MAX_RESPONSE, 8)
        server = load_server(job["model"], "fp32", torch.device("cpu"), job["key"], *limits)
        async with serving(server, "127.0.0.1", 0) as url:
            written = Path(job["url"] + ".new")
            written.write_text(url)
            written.rename(job["url"])
            await asyncio.Event().wait()

    asyncio.run(serve())
