"""The page of a run: served with its data on loopback, to read only, or written as one HTML file.

Only this machine is answered, and only under a loopback name: a page of another site that has its
name point here is refused.
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
    """The data at a path, plain values; None where there is none. runs: the one that is viewed,
    then those it is compared with.

    run, compare, chain, log/NAME, columns/FIRST/LAST, timeline/ITERATION, samples/ITERATION,
    group/ITERATION/GROUP, peers/ITERATION/GROUP (other runs' answers to a group's prompt),
    questions/VERSION/BEFORE, question/VERSION/SET/QUESTION.
    """
    run = runs[0]
    kind, _, rest = path.partition("/")
    if kind == "run" and not rest:
        return run.overview()
    if kind == "compare" and not rest:
        return [other.overview() for other in runs[1:]]
    if kind == "chain" and not rest:
        return run.chain(runs[1:])
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
    """What the other runs answered to a group's prompt, as far as they kept it."""
    asked = runs[0].group(iteration, group)
    if asked is None:
        return None
    answers = [(other.name, other.same_prompt(iteration, asked["prompt"])) for other in runs[1:]]
    return [{"run": name, **peer} for name, peer in answers if peer is not None]


def _question(
    runs: Sequence[RunDirectory], version: int, place: int, question: int
) -> dict[str, Any] | None:
    """The answers to a question, and those of the other runs' same version, or of their last one."""
    asked = runs[0].question(version, place, question)
    if asked is None:
        return None
    peers = []
    for other in runs[1:]:
        kept = question_versions(other.directory)
        if kept:
            known = version if version in kept else kept[-1]
            peer = other.question(known, place, question)
            if peer is not None and (peer["set"], peer["prompt"]) == (
                asked["set"],
                asked["prompt"],
            ):
                peers.append({"run": other.name, **peer})
    return {**asked, "peers": peers}


def export(runs: Sequence[RunDirectory], file: Path) -> str:
    """Writes the file; returns what was left out for its size, in words, or nothing.

    The newest iterations come first.
    """
    data: dict[str, Any] = {name: answer(runs, name) for name in ("run", "compare", "chain")}
    for process in data["run"]["processes"]:
        if process["log"]:
            text = runs[0].log(process["log"], EXPORTED_LOG_BYTES)
            data[f"log/{process['log']}"] = {"name": process["log"], "text": text}
    room = _Room(MAX_EXPORT_BYTES - len(_json(data)))
    _export_questions(runs, data, room)
    left_out = {}
    for kind in ("timeline", "samples"):
        wanted = data["run"][f"{kind.removesuffix('s')}_iterations"]
        kept = []
        for iteration in reversed(wanted):
            paths = [f"{kind}/{iteration}"]
            if kind == "samples":
                groups = [group["index"] for group in runs[0].samples(iteration)["groups"]]
                paths += [
                    f"{name}/{iteration}/{group}" for group in groups for name in ("group", "peers")
                ]
            if not room.add(data, {path: answer(runs, path) for path in paths}):
                break
            kept.append(iteration)
        data["run"][f"{kind.removesuffix('s')}_iterations"] = sorted(kept)
        if len(kept) < len(wanted):
            left_out[kind] = len(wanted) - len(kept)
    write_page(file, data)
    return "".join(
        f"; {kind} of the {count} oldest iterations left out" for kind, count in left_out.items()
    )


def _export_questions(runs: Sequence[RunDirectory], data: dict[str, Any], room: _Room) -> None:
    """The last evaluation against the first and against the one before, with the answers to what
    was gained and lost.
    """
    versions = data["run"]["question_versions"]
    for before in dict.fromkeys([*versions[:1], *versions[-2:-1]]):
        last = versions[-1]
        compared = answer(runs, f"questions/{last}/{before}")
        if (
            before == last
            or compared is None
            or not room.add(data, {f"questions/{last}/{before}": compared})
        ):
            continue
        for place, questions in enumerate(compared["sets"]):
            changed = [
                row[0] for row in questions["rows"] if row[2] is not None and row[2] != row[3]
            ]
            for question in changed:
                paths = [f"question/{version}/{place}/{question}" for version in (last, before)]
                if not room.add(
                    data, {path: answer(runs, path) for path in paths if path not in data}
                ):
                    return


def export_table(shelf: Shelf, file: Path) -> None:
    """Writes the table of a folder's runs."""
    write_page(file, {"runs": shelf.table()})


def write_page(file: Path, data: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(json.loads(_json(data))), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--export {file}: cannot be written ({error.strerror}); choose another file"
        ) from None


_NOTHING = object()


class _Room:
    """Bytes that are left for an exported page."""

    def __init__(self, left: int) -> None:
        self._left = left

    def add(self, data: dict[str, Any], more: dict[str, Any]) -> bool:
        """Adds all of it, or nothing where there is no room; then there is none for anything else."""
        self._left -= len(_json(more))
        if self._left < 0:
            return False
        data.update(more)
        return True


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=str)


class ViewServer(ThreadingHTTPServer):
    """Serves runs, the first of them compared with the others, or a folder of runs. port 0 takes a
    free one.

    Of a folder, / is the table, and /NAME/ the page of a run; ?with=OTHER (several times) compares
    it. Raises UserError where the port is taken.
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
        """A page that is closed while it is answered is not worth a word."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def find(self, path: str, query: str) -> tuple[Sequence[RunDirectory], str]:
        """The runs that a path is about and the path within them; of a folder's own page there are
        none.
        """
        if self.shelf is None:
            return self.runs, path
        name, slash, rest = path.partition("/")
        run = self.shelf.open(unquote(name)) if slash else None
        if run is None:
            return (), path
        wanted = parse_qs(query).get("with", [])[:MAX_COMPARED]
        others = [
            other
            for other in map(self.shelf.open, wanted)
            if other is not None and other is not run
        ]
        return (run, *others), rest


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
        except (
            OSError,
            UserError,
            ValueError,
        ) as error:  # a directory is gone, or its disk; or it is no address
            return self._send(503, "text/plain", f"cannot be read ({reason(error)})\n".encode())
        if data is None:
            return self._send(404, "application/json", b"null")
        self._send(200, "application/json", b"null" if data is _NOTHING else _json(data).encode())

    def _data(self, runs: Sequence[RunDirectory], name: str, query: str) -> Any:
        if not runs and self.server.shelf is not None:  # the folder's own page
            if name == "run":
                return _NOTHING
            return self.server.shelf.table() if name == "runs" else None
        if name == "run" and parse_qs(query).get("stamp") == [runs[0].stamp()]:
            return _NOTHING  # nothing is new
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
        """Requests are not worth a line."""


def page(data: dict[str, Any] | None = None) -> str:
    """The page as one HTML text: markup, style and script in one, nothing loaded from anywhere.

    A policy in the page itself allows exactly this style and this script, by their hashes, and no
    address but its own server; so texts that a model wrote cannot become anything else, and an
    exported page asks for nothing at all. data: what the server would answer, by path, for a page
    without one (exported); None for a page that asks a server.
    """
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join(
        (PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS
    )
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
    """JSON that can stand in a script element: no text in it can end the element or begin a
    comment.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
