"""The agent's side of a run, in one file without dependencies: copy it beside your agent, into any environment.

    # one program per task (agent.command without agent.programs)
    from agent_client import session_from_environment

    session = session_from_environment()
    client = openai.OpenAI()                     # or anthropic.Anthropic(): both read their variables
    ...
    session.give_reward(1.0)

    # a program that stays and works on several tasks at once (agent.programs)
    from agent_client import serve

    def work(session):                           # returns the session's reward
        with openai.OpenAI(base_url=session.openai_url, api_key=session.api_key) as client:
            ...
        return 1.0

    async def work(session):                     # or this, with an event loop for each session
        async with openai.AsyncOpenAI(base_url=session.openai_url, ...) as client:
            ...
        return 1.0

    serve(work, sessions_at_once=16)

    # an agent that runs elsewhere, on the run's own key (agent.command unset)
    serve(work, sessions_at_once=16, gateway=gateway_of_run("runs/agents"))

It needs Python 3.8 and nothing else. docs/agents.md describes the requests that it sends.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUEST_TIMEOUT_S = 60.0
TASK_WAIT_S = 30  # for which the gateway holds a request for a task
REQUEST_ATTEMPTS = 3  # a busy machine may lose a connection
PAUSE_S = 0.5  # between two attempts


class SessionEnded(Exception):
    """The session has ended meanwhile, by a limit of the run or because the run has ended."""


@dataclass(frozen=True)
class Gateway:
    """Where tasks come from. key: the run's or a program's. program: its number, as the run gave it."""

    url: str
    key: str
    program: str = ""


@dataclass(frozen=True)
class Session:
    """One attempt at a task.

    task: `row` (the dataset's row), `answer`, `prompt` (rendered) and `prompt_id`.
    url: the session's.
    api_key: for the session alone.
    """

    task: dict[str, Any]
    url: str
    api_key: str

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return self.url + "/v1"

    @property
    def anthropic_url(self) -> str:
        """The base URL for Anthropic's clients, which append /v1/messages."""
        return self.url

    def give_reward(self, reward: float, turn: str | None = None) -> None:
        """Sets the session's reward, or that of the turn with this id of a completion.

        Raises SessionEnded if it is too late.
        """
        _request(self.url + "/reward", self.api_key, {"reward": reward, "turn": turn})

    def end(self, failed: bool = False) -> None:
        """Says that the task is done, or has failed. Only a program that stays needs to."""
        _request(self.url + "/end", self.api_key, {"failed": failed})


def session_from_environment() -> Session:
    """Returns the session for which this program was started. Raises KeyError without one."""
    text = os.environ.get("TASK")
    if text is None:  # a long task is in a file only
        text = Path(os.environ["TASK_FILE"]).read_text(encoding="utf-8")
    return Session(json.loads(text), os.environ["SESSION_URL"], os.environ["OPENAI_API_KEY"])


def gateway_from_environment() -> Gateway:
    """Returns the gateway of the run that started this program. Raises KeyError without one."""
    return Gateway(
        os.environ["GATEWAY_URL"], os.environ["OPENAI_API_KEY"], os.environ.get("PROGRAM", "")
    )


def gateway_of_run(run_dir: str) -> Gateway:
    """Returns the gateway of the run in a directory. Raises OSError if it serves none now."""
    directory = Path(run_dir)
    url = json.loads((directory / "gateway.json").read_text(encoding="utf-8"))["url"]
    return Gateway(url, (directory / "api_key").read_text(encoding="utf-8").strip())


def tasks(gateway: Gateway) -> Iterator[Session]:
    """Yields sessions as the run has tasks, until the run ends.

    Raises OSError if there is no gateway from the beginning.
    """
    url = f"{gateway.url}/tasks?wait_s={TASK_WAIT_S}"
    was_there = False
    while True:
        try:
            taken = _request(url, gateway.key, None, {"x-program": gateway.program})
        except OSError:
            if was_there:  # it has gone with its run
                return
            raise
        was_there = True
        if taken["task"] is not None:
            session_url = taken["base_url"][: -len("/v1")]
            yield Session(taken["task"], session_url, taken["api_key"])


def serve(
    work: Callable[[Session], float | Coroutine[Any, Any, float | None] | None],
    sessions_at_once: int = 1,
    gateway: Gateway | None = None,
) -> None:
    """Works on tasks until the run ends.

    work: has one session, and returns its reward; None gives none. It is called by several threads.
    If it is an `async def`, each session has an event loop of its own. Use this for asynchronous
    clients, and close them (`async with`): whichever thread collects one that is left open closes
    its connections in the loop of another thread, whose session may then wait for ever.
    gateway: that of the run which started this program, if it is not given.
    Raises the first error that `work` raises. The program should then end: the run begins the
    sessions again that it had taken, with a new program.
    """
    source = gateway_from_environment() if gateway is None else gateway
    ends: queue.Queue[BaseException | None] = queue.Queue()

    def work_on_tasks() -> None:
        try:
            for session in tasks(source):
                _work_on(session, work)
        except BaseException as error:
            ends.put(error)
        else:
            ends.put(None)

    for _ in range(sessions_at_once):
        # threads of a program that ends are not waited for
        threading.Thread(target=work_on_tasks, daemon=True).start()
    for _ in range(sessions_at_once):
        error = ends.get()
        if error is not None:
            raise error


def _work_on(
    session: Session, work: Callable[[Session], float | Coroutine[Any, Any, float | None] | None]
) -> None:
    try:
        reward = work(session)
        if isinstance(reward, Coroutine):
            reward = asyncio.run(reward)
        if reward is not None:
            session.give_reward(reward)
        session.end()
    except SessionEnded:
        pass  # what was written until then is judged


def _request(
    url: str, key: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
) -> Any:
    """Returns the JSON that a request answers. body: None sends a GET.

    Sends the request again if its connection was lost: no request has a second effect.
    Raises OSError if there is no gateway.
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
