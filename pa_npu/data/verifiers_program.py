"""What runs in the interpreter that has verifiers: makes rows of tasksets, or plays their episodes.

    python -P verifiers_program.py rows            {"environment", "max_rows"} on stdin; a JSON row
                                                   a line on stdout
    python -P verifiers_program.py play OPTIONS    takes tasks from the gateway until the run ends.
                                                   OPTIONS: a file with {"environments",
                                                   "sessions_at_once", "timeout_s"}

An environment is what a file of verifiers' own has: {"env": ..., "select": ...}, or the path of
such a file (TOML or JSON). verifiers' harness runs the agent's program, whose requests go to the
session's URL, and verifiers' rewards are the session's.

This file needs verifiers 0.4 and the standard library, and nothing of pa_npu.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

ROW_COLUMN = "verifiers"
UNBOUNDED_ROWS = 1000  # of a taskset that makes tasks for ever
# An interception server of verifiers keeps a client of some 100 KiB for each endpoint, and every
# session is one. So servers are closed after this many.
SESSIONS_PER_SERVING = 128
TASK_WAIT_S = 30
REQUEST_TIMEOUT_S = 60.0
REQUEST_ATTEMPTS = 3  # a busy machine may lose a connection
PAUSE_S = 0.5  # between two attempts
NO_KEY_VARIABLE = "PA_NPU_NO_KEY"  # of no value: the session's key is in headers


def load_environment(environment: Any) -> Any:
    """Returns verifiers' environment and its selected tasks, as (Env, Taskset)."""
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils import loaders

    if isinstance(environment, str):
        environment = _read_file(Path(environment))
    if unknown := sorted(set(environment) - {"env", "select"}):
        raise ValueError(
            f"an environment has env and select, not {', '.join(unknown)}, which the run decides; "
            "remove it"
        )
    env = loaders.load_environment(loaders.resolve_env_config(environment.get("env")))
    selected = env.taskset.select(SelectConfig.model_validate(environment.get("select") or {}))
    return env, selected


def _read_file(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    # verifiers needs Python 3.11, which has this module
    return importlib.import_module("tomllib").loads(text)


def refuse_other_agents(env: Any) -> None:
    """Raises ValueError if several agents of an environment would be played by the policy."""
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(env.config)
    played = [name for name, agent in agents.items() if agent.client is None]
    if len(played) != 1:
        raise ValueError(
            f"the policy would play {len(played)} of its agents ({', '.join(agents)}), and plays "
            "one; give each other one a client of its own (env.NAME.client)"
        )


def rows(environment: Any, max_rows: int | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each task: its question, its answer if it has one, and its number and key."""
    env, selected = load_environment(environment)
    refuse_other_agents(env)
    limit = max_rows
    if limit is None and not selected.bounded:
        limit = UNBOUNDED_ROWS
    for number, task in enumerate(itertools.islice(selected, limit)):
        data = task.data
        texts = [text for text in (data.system_prompt, data.prompt_text) if text]
        row: dict[str, Any] = {
            # what the policy is shown is the harness's to say; this is for limits and logs
            "question": "\n\n".join(texts) or data.description or data.name or task.key,
            ROW_COLUMN: {"number": number, "key": task.key},
        }
        answer = getattr(data, "answer", None)
        if isinstance(answer, (str, int, float)):
            row["answer"] = str(answer)
        yield row


_serving: set[asyncio.Task[None]] = set()  # a loop keeps no task alive


class Serving:
    """An environment whose servers run, for some sessions. Its task ends when they have."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_begun = 0
        self._num_open = 0
        self._is_last = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _serving.add(task := asyncio.create_task(self._serve()))
        task.add_done_callback(_serving.discard)

    async def _serve(self) -> None:
        try:
            async with self.env.serving():
                self._ready.set_result(None)
                await self._is_last.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                return
            raise

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        self.num_begun += 1
        self._num_open += 1
        try:
            await asyncio.shield(self._ready)
            yield self.env
        finally:
            self._num_open -= 1
            if self.num_begun >= SESSIONS_PER_SERVING and not self._num_open:
                self._is_last.set()


class Player:
    """Plays episodes of one environment. environment: as in the module's docstring."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._loading = threading.Lock()
        self._tasks: list[Any] = []
        self._more: Iterator[Any] | None = None
        self._serving: Serving | None = None
        self._starting = asyncio.Lock()

    async def play(self, task: dict[str, Any], session: dict[str, Any], timeout_s: float) -> Any:
        """Returns the episode of verifiers for a task of the gateway.

        task: the column of its row. session: of the gateway, with `base_url` and `api_key`.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext

        key = session["api_key"]
        client = EvalClientConfig(
            base_url=session["base_url"],
            api_key_var=NO_KEY_VARIABLE,
            # a dialect replaces one of them by the client's own
            headers={"Authorization": f"Bearer {key}", "x-api-key": key},
        )
        context = ModelContext(model="policy", client=client)
        chosen = await asyncio.to_thread(self._task, task["number"], task["key"])
        async with (await self._current()).session() as env:
            slot = env.slots(chosen)[0]
            return await asyncio.wait_for(env.run_slot(slot, context), timeout_s)

    async def _current(self) -> Serving:
        async with self._starting:
            if self._serving is None or self._serving.num_begun >= SESSIONS_PER_SERVING:
                env, _ = await asyncio.to_thread(load_environment, self._environment)
                self._serving = Serving(env)
            return self._serving

    def _task(self, number: int, key: str) -> Any:
        """Returns a task by its place among the selected ones. Raises ValueError if it is another
        than when the rows were made."""
        with self._loading:
            if self._more is None:
                env, selected = load_environment(self._environment)
                refuse_other_agents(env)
                self._more = iter(selected)
            missing = number + 1 - len(self._tasks)
            self._tasks += itertools.islice(self._more, max(0, missing))
            if number >= len(self._tasks) or self._tasks[number].key != key:
                raise ValueError(
                    f"task {number} of the taskset is another one than when the rows were made; "
                    "let its `load` yield the same tasks each time"
                )
            return self._tasks[number]


def reward_of(episode: Any) -> float | None:
    """Returns the reward of an episode, None if it failed.

    Raises ValueError if several runs of agents were trained, to which rewards could not be told.
    """
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) > 1:
        raise ValueError(
            f"an episode has {len(trained)} runs of agents that train the policy, and one reward; "
            "use an environment that runs one"
        )
    if not episode.ok or not trained:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            print(f"{errors[-1].type}: {errors[-1].message}", file=sys.stderr, flush=True)
        return None
    return float(trained[0].reward)


class SessionEnded(Exception):
    """The session has ended by a limit of the run."""


class Gateway:
    """The run's gateway, as the program's variables name it."""

    def __init__(self) -> None:
        self.url = os.environ["GATEWAY_URL"]
        self._key = os.environ.pop("OPENAI_API_KEY")  # not for what the harness starts
        self._program = os.environ.get("PROGRAM", "")

    async def next_task(self) -> dict[str, Any] | None:
        headers = {"x-program": self._program}
        url = f"{self.url}/tasks?wait_s={TASK_WAIT_S}"
        taken: dict[str, Any] = await asyncio.to_thread(_request, url, self._key, None, headers)
        return None if taken["task"] is None else taken

    async def end(self, session: dict[str, Any], reward: float | None) -> None:
        """Gives the session's reward and ends it; None ends it as failed."""
        url = f"{self.url}/sessions/{session['session']}"
        key = session["api_key"]
        with contextlib.suppress(SessionEnded):
            if reward is not None:
                await asyncio.to_thread(_request, f"{url}/reward", key, {"reward": reward})
            await asyncio.to_thread(_request, f"{url}/end", key, {"failed": reward is None})


def _request(
    url: str, key: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
) -> Any:
    """Returns the JSON that a request answers. body: None sends a GET.

    Sends the request again if its connection was lost: no request has a second effect.
    """
    headers = {**(headers or {}), "Authorization": f"Bearer {key}"}
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url, data, headers)
    attempt = 1
    while True:
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            if error.code == 404:
                raise SessionEnded(text) from None
            raise RuntimeError(f"{url}: {error.code}: {text[:300]}") from None
        except OSError:
            if attempt == REQUEST_ATTEMPTS:
                raise
            attempt += 1
            time.sleep(PAUSE_S)


async def play(options: dict[str, Any]) -> None:
    """Plays tasks until the gateway has gone. An error ends the program."""
    gateway = Gateway()
    players = {name: Player(value) for name, value in options["environments"].items()}
    room = asyncio.Semaphore(options["sessions_at_once"])

    async def work(session: dict[str, Any]) -> None:
        column = session["task"]["row"][ROW_COLUMN]
        reward = None
        try:
            player = players[column["environment"]]
            with contextlib.suppress(asyncio.TimeoutError):
                episode = await player.play(column, session, options["timeout_s"])
                reward = reward_of(episode)
            await gateway.end(session, reward)
        except Exception as error:
            end_program(error)
        room.release()

    working: set[asyncio.Task[None]] = set()
    while True:
        await room.acquire()
        while (session := await gateway.next_task()) is None:
            pass
        working.add(task := asyncio.create_task(work(session)))
        task.add_done_callback(working.discard)


def end_program(error: Exception) -> NoReturn:
    """Ends the program with the error in one line, without waiting for threads that wait for a task.

    The sessions that it had begin again, and what it started ends with it.
    """
    line = " ".join(f"{type(error).__name__}: {error}".split())
    print(line[:2000], file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    if sys.argv[1] == "rows":
        request = json.load(sys.stdin)
        output, sys.stdout = sys.stdout, sys.stderr  # tasksets may print
        for row in rows(request["environment"], request["max_rows"]):
            output.write(json.dumps(row) + "\n")
        return
    # harnesses start uv, which may stand beside this interpreter
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    os.environ["PATH"] = os.pathsep.join(path)
    options = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    asyncio.run(play(options))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        end_program(error)
