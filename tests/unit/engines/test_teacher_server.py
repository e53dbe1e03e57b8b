"""A teacher's server is tried before the run: what it cannot do is one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from pa_npu.engines.client import EngineClient
from pa_npu.engines.protocol import Scoring
from pa_npu.engines.teacher_server import server_key, server_url, try_server
from pa_npu.errors import DataError, UserError

ROWS = [np.array([3, 4, 5], np.int32), np.array([3, 9], np.int32)]
USUAL = Scoring(1.0, 3)
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Tokenizer:
    """Token 7 is w7."""

    def __len__(self) -> int:
        return 100

    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [f"w{token}" for token in tokens]


def scores(body: dict[str, Any], text: str = "w") -> tuple[int, Any]:
    places: list[Any] = [None]
    for token in body["prompt"][1:]:
        output = {number: -5.0 - number for number in range(20, 20 + body["prompt_logprobs"])}
        output[token] = -0.5
        places.append(
            {
                str(number): {"logprob": logprob, "decoded_token": f"{text}{number}"}
                for number, logprob in output.items()
            }
        )
    return 200, {"choices": [{"text": "x", "prompt_logprobs": places}]}


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    servers = []

    def start(answer: Answer, models: Any = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, models or {"data": [{"id": "teacher"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*answer(body))

            def _send(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, name="teacher's server")
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def tried(url: str, scoring: Scoring = USUAL) -> None:
    try_server(url, "teacher.large", rows=ROWS, scoring=scoring, tokenizer=Tokenizer())


def test_a_server_that_scores_the_rows_as_the_policy_reads_them_passes(serve: Any) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return scores(body)

    tried(serve(answer) + "/v1/")
    assert [body["prompt"] for body in asked[::2]] == [row.tolist() for row in ROWS]
    assert {body["model"] for body in asked} == {"teacher"}


@pytest.mark.parametrize(
    ("answer", "scoring", "line"),
    [
        (lambda body: (200, {"choices": [{"text": "x"}]}), Scoring(), "no prompt_logprobs"),
        (lambda body: (400, {"error": "no such field"}), Scoring(), "answered 400: .*no such"),
        (lambda body: scores(body, "v"), Scoring(), r"token 4 \(place 1 .*'v4' there and 'w4'"),
        (lambda body: scores({**body, "prompt_logprobs": 1}), Scoring(1.0, 3), "max-logprobs 3"),
        (lambda body: (404, {}), Scoring(0.7), "gives log-probs at temperature 1 only"),
    ],
)
def test_a_server_that_cannot_teach_is_one_line(
    serve: Any, answer: Answer, scoring: Scoring, line: str
) -> None:
    with pytest.raises(UserError, match=line) as refused:
        tried(serve(answer), scoring)
    assert str(refused.value).startswith("teacher.large.url: ")


def test_no_server_and_one_without_models_are_one_line(serve: Any) -> None:
    with pytest.raises(UserError, match="does not answer as a server with vLLM's interface"):
        tried("http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"does not answer as a server .*IndexError|list index"):
        tried(serve(scores, {"data": []}))


def test_the_key_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", "k")
    assert server_key() == "k" and server_url("http://h:1/v1/") == "http://h:1"
    monkeypatch.setenv("TEACHER_API_KEY", "k\n")
    with pytest.raises(DataError, match=r"TEACHER_API_KEY: .*line end"):
        server_key()


def test_a_teachers_server_never_gets_the_engines_key(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the engines'")
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    client = EngineClient("http://h:1", 10, server_key())
    assert "Authorization" not in client._headers
    assert EngineClient("http://h:1", 10)._headers["Authorization"] == "Bearer the engines'"
    tried(serve(scores))
