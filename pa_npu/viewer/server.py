"""The page of a run: served with its data on loopback, read only, or written as one HTML file.

The server answers this machine only, and only under a loopback name. So it refuses the page of
another site whose name points to this machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pa_npu.config.plain_file import reason
from pa_npu.errors import UserError
from pa_npu.viewer.questions import question_versions
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.shelf import Shelf

MAX_EXPORT_BYTES = 48 << 20
EXPORTED_LOG_BYTES = 32 << 10
LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})
PAGE = Path(__file__).with_name("page")
SCRIPTS = (
    "dom.js",
    "data.js",
    "axis.js",
    "charts.js",
    "chat.js",
    "runs.js",
    "curves.js",
    "chain.js",
    "overview.js",
    "groups.js",
    "samples.js",
    "timeline.js",
    "evaluation.js",
    "questions.js",
    "configuration.js",
    "processes.js",
    "app.js",
)
MAX_COMPARED = 6
_SIZES = {
    "samples": 1,
    "timeline": 1,
    "group": 2,
    "peers": 2,
    "columns": 2,
    "questions": 2,
    "question": 3,
}
"""How many numbers follow a name in a path."""


def answer(runs: Sequence[RunDirectory], path: str) -> Any:
    """Returns the data at a path as plain values; None where there is none.

    Paths are run, compare, chain, log/NAME, image/DIGEST, columns/FIRST/LAST, timeline/ITERATION,
    samples/ITERATION, group/ITERATION/GROUP, peers/ITERATION/GROUP (other runs' answers to a
    group's prompt), questions/VERSION/BEFORE, question/VERSION/SET/QUESTION.

    runs: the run that is viewed, then those that it is compared with.
    """
    run = runs[0]
    kind, _, rest = path.partition("/")
    if kind == "run" and not rest:
        return run.overview()
    if kind == "compare" and not rest:
        return [peer.overview() for peer in runs[1:]]
    if kind == "chain" and not rest:
        return run.chain(runs[1:])
    if kind == "image":
        return run.image(rest)
    if kind == "log":
        log = run.log(rest)
        return None if log is None else {"name": rest, "text": log}
    numbers = _numbers(rest)
    if kind not in _SIZES or numbers is None or len(numbers) != _SIZES[kind]:
        return None
    if kind == "peers":
        return _peers(runs, *numbers)
    if kind == "question":
        return _question(runs, *numbers)
    methods: dict[str, Callable[..., Any]] = {
        "samples": run.samples,
        "timeline": run.timeline,
        "group": run.group,
        "columns": run.columns_between,
        "questions": run.questions,
    }
    return methods[kind](*numbers)


def _numbers(path: str) -> list[int] | None:
    parts = path.split("/")
    if all(part.isascii() and part.isdecimal() and len(part) < 11 for part in parts):
        return [int(part) for part in parts]
    return None


def _peers(runs: Sequence[RunDirectory], iteration: int, group: int) -> list[dict[str, Any]] | None:
    """Returns the other runs' answers to a group's prompt, as far as they kept it."""
    viewed = runs[0].group(iteration, group)
    if viewed is None:
        return None
    peers = []
    for run in runs[1:]:
        answers = run.same_prompt(iteration, viewed["prompt"])
        if answers is not None:
            peers.append({"run": run.name, **answers})
    return peers


def _question(
    runs: Sequence[RunDirectory], version: int, place: int, question: int
) -> dict[str, Any] | None:
    """Returns the answers to a question, and as its `peers` those of the other runs: of the same
    version, or of their last one.
    """
    viewed = runs[0].question(version, place, question)
    if viewed is None:
        return None
    peers = []
    for run in runs[1:]:
        versions = question_versions(run.directory)
        if not versions:
            continue
        answers = run.question(version if version in versions else versions[-1], place, question)
        if answers is None or answers["set"] != viewed["set"]:
            continue
        if answers["prompt"] == viewed["prompt"]:
            peers.append({"run": run.name, **answers})
    return {**viewed, "peers": peers}


def export(runs: Sequence[RunDirectory], file: Path) -> str:
    """Writes the page with its data to `file`, the newest iterations before older ones.

    Returns in words what was left out to limit the size of the file; empty where it has all.
    """
    data: dict[str, Any] = {name: answer(runs, name) for name in ("run", "compare", "chain")}
    for process in data["run"]["processes"]:
        if process["log"]:
            text = runs[0].log(process["log"], EXPORTED_LOG_BYTES)
            data[f"log/{process['log']}"] = {"name": process["log"], "text": text}
    room = _Room(MAX_EXPORT_BYTES - len(_json(data)))
    _export_questions(runs, data, room)
    left_out = _export_iterations(runs, data, room, "timeline")
    left_out += _export_iterations(runs, data, room, "samples")
    write_page(file, data)
    return left_out


def _export_iterations(
    runs: Sequence[RunDirectory], data: dict[str, Any], room: _Room, kind: str
) -> str:
    """Adds the timelines or the samples of as many iterations as there is room for.

    Returns in words how many were left out; empty where none were.
    """
    key = f"{kind.removesuffix('s')}_iterations"
    iterations = data["run"][key]
    exported = []
    for iteration in reversed(iterations):
        paths = [f"{kind}/{iteration}"]
        if kind == "samples":
            for group in runs[0].samples(iteration)["groups"]:
                place = f"{iteration}/{group['index']}"
                paths += [f"group/{place}", f"peers/{place}"]
                whole = runs[0].group(iteration, group["index"]) or {}
                paths += [f"image/{digest}" for digest in whole.get("images", ())]
        if not room.add(data, {path: answer(runs, path) for path in paths}):
            break
        exported.append(iteration)
    data["run"][key] = sorted(exported)
    num_left_out = len(iterations) - len(exported)
    if not num_left_out:
        return ""
    return f"; {kind} of the {num_left_out} oldest iterations left out"


def _export_questions(runs: Sequence[RunDirectory], data: dict[str, Any], room: _Room) -> None:
    """Adds the comparison of the last evaluation with the first and with the one before it, and the
    answers to the questions whose result changed.
    """
    versions = data["run"]["question_versions"]
    for before in dict.fromkeys([*versions[:1], *versions[-2:-1]]):
        last = versions[-1]
        if before == last:
            continue
        path = f"questions/{last}/{before}"
        comparison = answer(runs, path)
        if comparison is None or not room.add(data, {path: comparison}):
            continue
        for place, questions in enumerate(comparison["sets"]):
            for question, _, value_before, value in questions["rows"]:
                if value_before is None or value_before == value:
                    continue
                paths = [f"question/{version}/{place}/{question}" for version in (last, before)]
                missing = [path for path in paths if path not in data]
                if not room.add(data, {path: answer(runs, path) for path in missing}):
                    return


def export_table(shelf: Shelf, file: Path) -> None:
    """Writes the table of a folder's runs to `file`."""
    write_page(file, {"runs": shelf.table()})


def write_page(file: Path, data: dict[str, Any]) -> None:
    """Writes the page with its data; raises UserError where the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(json.loads(_json(data))), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--export {file}: cannot be written ({error.strerror}); choose another file"
        ) from None


_NOTHING = object()  # an answer that is JSON's null


class _Room:
    """The bytes that are left for an exported page."""

    def __init__(self, left_bytes: int) -> None:
        self._left_bytes = left_bytes

    def add(self, data: dict[str, Any], more: dict[str, Any]) -> bool:
        """Adds all of `more` to `data`, or nothing where it does not fit; then nothing fits later."""
        self._left_bytes -= len(_json(more))
        if self._left_bytes < 0:
            return False
        data.update(more)
        return True


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=str)


class ViewServer(ThreadingHTTPServer):
    """Serves a run, compared with others, or a folder of runs. Port 0 stands for a free port.

    A folder's / is the table, and /NAME/ the page of a run, compared with others by ?with=OTHER,
    which may be repeated. Raises UserError where the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[RunDirectory] | Shelf, port: int = 0) -> None:
        self.shelf = runs if isinstance(runs, Shelf) else None
        self.runs: tuple[RunDirectory, ...] = () if isinstance(runs, Shelf) else tuple(runs)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot be listened on ({error.strerror}); choose another"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports an error, unless the page was closed while it was answered."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def find(self, path: str, query: str) -> tuple[Sequence[RunDirectory], str]:
        """Returns the runs that a path is about, and the path within them; no runs for the folder's
        page.
        """
        if self.shelf is None:
            return self.runs, path
        name, slash, rest = path.partition("/")
        run = self.shelf.open(unquote(name)) if slash else None
        if run is None:
            return (), path
        runs = [run]
        for peer_name in parse_qs(query).get("with", [])[:MAX_COMPARED]:
            peer = self.shelf.open(peer_name)
            if peer is not None and peer is not run:
                runs.append(peer)
        return runs, rest


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    timeout = 30

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        if (host[0] or host[2]) not in NAMES:
            return self._send(403, "text/plain", b"only 127.0.0.1 and localhost are served\n")
        try:
            parts = urlsplit(self.path)
            runs, path = self.server.find(parts.path.removeprefix("/"), parts.query)
            if path == "":
                return self._send(200, "text/html; charset=utf-8", page().encode())
            if not path.startswith("api/"):
                return self._send(404, "text/plain", b"not found\n")
            data = self._data(runs, path.removeprefix("api/"), parts.query)
        except ConnectionError:
            raise  # the page was closed
        except (OSError, UserError, ValueError) as error:
            # the directory or its disk is gone, or the address is none
            return self._send(503, "text/plain", f"cannot be read ({reason(error)})\n".encode())
        if data is None:
            return self._send(404, "application/json", b"null")
        self._send(200, "application/json", b"null" if data is _NOTHING else _json(data).encode())

    def _data(self, runs: Sequence[RunDirectory], name: str, query: str) -> Any:
        if not runs and self.server.shelf is not None:  # the folder's page
            if name == "run":
                return _NOTHING
            return self.server.shelf.table() if name == "runs" else None
        if name == "run" and parse_qs(query).get("stamp") == [runs[0].stamp()]:
            return _NOTHING  # the page has the newest data
        return answer(runs, name)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Logs nothing: requests are not worth a line."""


def page(data: dict[str, Any] | None = None) -> str:
    """Returns the page as one HTML text with its style and script, which loads nothing else.

    A policy in the page allows exactly this style and this script, by their hashes, and no address
    but its server's. So texts that a model wrote stay texts, and an exported page requests nothing.

    data: by path, the server's answers, for an exported page; None for a page that asks a server.
    """
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    scripts = [(PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n' + "\n".join(scripts)
    connect = "'self'" if data is None else "'none'"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    for mark, text in (
        ("{{policy}}", policy),
        ("{{style}}", style),
        ("{{script}}", script),
        ("{{data}}", embedded(data)),
    ):
        html = html.replace(mark, text, 1)
    return html


def embedded(data: Any) -> str:
    """Returns JSON for a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
