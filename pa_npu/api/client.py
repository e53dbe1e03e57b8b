"""Client: the coordinator's API in Python, for other trainers, other data sources and other engines (docs/services.md).

    client = Client.of_run("runs/mine")
    client.put_prompts([{"question": "1 + 1?", "answer": "2"}])
    groups = client.get_groups("my trainer", columns=["tokens", "trained", "advantages"], wait_s=30)

Standard library only; every call ends by its deadline, and what goes wrong is an ApiError of one line.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pa_npu.errors import PaNpuError, UserError

_MOST_BYTES = 2**29
_CHUNK_BYTES = 2**20


class ApiError(PaNpuError):
    """The coordinator refused a request, or did not answer. status: of HTTP; None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """url: http://HOST:PORT. key: the run's. timeout_s: of a call, on top of what it asks the coordinator to wait."""

    def __init__(self, url: str, key: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise UserError(f"url: {url!r} is not http://HOST:PORT; RUN/api.json names it")
        self._host, self._port = parts.hostname, parts.port
        self._key = key
        self._timeout_s = timeout_s

    @classmethod
    def of_run(cls, directory: Path | str, timeout_s: float = 30.0) -> Client:
        """Of a run on this machine or file system that is going on. Raises UserError."""
        try:
            url = json.loads((Path(directory) / "api.json").read_text(encoding="utf-8"))["url"]
            key = (Path(directory) / "api_key").read_text(encoding="utf-8").strip()
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{directory}: no API is served there ({error}); start the run with placement.api_port, and wait until it is up"
            ) from None
        return cls(url, key, timeout_s)

    def state(self) -> dict[str, Any]:
        """What the run does: weights_version, iteration, paused_s, prompts, groups, work."""
        return self._call("GET", "/v1/state")

    def weights_version(self) -> int | None:
        """The version that engines hold; None before the first."""
        version: int | None = self.state()["weights_version"]
        return version

    def pause(self, for_s: float) -> None:
        """Dispatch no further groups for so long, or until `resume`; what is in flight ends."""
        self._call("POST", "/v1/pause", {"for_s": for_s})

    def resume(self) -> None:
        self._call("POST", "/v1/resume")

    def put_prompts(self, prompts: Sequence[Mapping[str, Any]], samples: int | None = None) -> list[int]:
        """Have the run's engines answer these rows with `samples` responses each, and its rewards score them; returns ids."""
        body = {"prompts": list(prompts), **({} if samples is None else {"samples": samples})}
        ids: list[int] = self._call("POST", "/v1/prompts", body)["ids"]
        return ids

    def get_groups(
        self,
        task: str,
        columns: Sequence[str],
        *,
        source: str = "prompts",
        policy: str = "order",
        consumer: int = 0,
        most: int = 8,
        wait_s: float = 0.0,
    ) -> list[dict[str, Any]]:
        """Up to `most` groups that the task has not had yet; none after wait_s (at most 60).

        source: `prompts`, answers to put_prompts, or `run`, copies of what the run trains, from the task's first call on. policy:
        order, age, or balanced among several `consumer`s.
        """
        body = {
            "task": task,
            "columns": list(columns),
            "source": source,
            "policy": policy,
            "consumer": consumer,
            "most": most,
            "wait_s": wait_s,
        }
        groups: list[dict[str, Any]] = self._call("POST", "/v1/groups", body, wait_s)["groups"]
        return groups

    def take_work(self, most: int = 1, wait_s: float = 0.0) -> dict[str, Any]:
        """{"version", "work"}: prompts of the run that want samples of the weights of `version` (environment.name=clients)."""
        return self._call("POST", "/v1/tasks", {"most": most, "wait_s": wait_s}, wait_s)

    def put_samples(self, work: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """The samples of work that was taken: each {"tokens", "logprobs", "version"} and "text", "finished", "reward"."""
        self._call("PUT", f"/v1/tasks/{work}", {"samples": list(samples)})

    def give_back(self, work: int) -> None:
        """Let somebody else write the samples of work that was taken."""
        self._call("DELETE", f"/v1/tasks/{work}")

    def _call(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> dict[str, Any]:
        end_s = time.monotonic() + self._timeout_s + wait_s
        where = f"{method} http://{self._host}:{self._port}{path}"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s + wait_s)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            data = bytearray()
            while chunk := reply.read(_CHUNK_BYTES):
                data += chunk
                if len(data) > _MOST_BYTES or time.monotonic() > end_s:
                    raise ApiError(
                        f"{where}: no complete answer within {self._timeout_s + wait_s:g} s and {_MOST_BYTES} bytes"
                    )
            found = json.loads(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"{where}: no answer ({type(error).__name__}: {error}); does the run go on?") from None
        finally:
            connection.close()
        if reply.status != 200:
            raise ApiError(f"{where}: {found.get('error', reply.reason)}", reply.status)
        answer: dict[str, Any] = found
        return answer
