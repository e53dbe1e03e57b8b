"""An OpenAI-compatible server on a local port that answers as a test says, and notes what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """The server's answer. text: as the message of a chat completion; body: in its place. hold: an
    event it waits for before.
    """

    text: str | None = "Score: 7"
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None


@dataclass
class FakeJudge:
    """asked: (user message, headers, body) of every request, in order. most_at_once: requests that
    were there together.
    """

    answer: Callable[[str, int], Answer]
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    now: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def fake_judge(answer: Callable[[str, int], Answer]) -> Iterator[FakeJudge]:
    """answer: from the user message, and how often it was asked before."""
    judge = FakeJudge(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = body["messages"][-1]["content"]
            with judge.lock:
                before = sum(message == another for another, _, _ in judge.asked)
                judge.asked.append((message, dict(self.headers), body | {"path": self.path}))
                judge.now += 1
                judge.most_at_once = max(judge.most_at_once, judge.now)
            actual = judge.answer(message, before)
            if actual.hold is not None:
                actual.hold.wait(30)
            with judge.lock:
                judge.now -= 1
            data = actual.body
            if data is None:
                data = json.dumps({"choices": [{"message": {"content": actual.text}}]}).encode()
            try:
                self.send_response(actual.status)
                for name, value in {"Content-Length": str(len(data)), **actual.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client has given up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, name="fake judge", daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
