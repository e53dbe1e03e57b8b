"""The page of a run: served with its data on loopback, to read only, or written as one HTML file.

Only this machine is answered, and only under a loopback name: a page of another site that has its name point here is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pa_npu.errors import UserError
from pa_npu.viewer.chain import chain_view
from pa_npu.viewer.run import RunDirectory

LARGEST_BYTES = 48 << 20  # of an exported page
EXPORTED_LOG_BYTES = 32 << 10
LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})
PAGE = Path(__file__).with_name("page")
SCRIPTS = (
    "dom.js",
    "data.js",
    "charts.js",
    "overview.js",
    "samples.js",
    "timeline.js",
    "evaluation.js",
    "configuration.js",
    "processes.js",
    "app.js",
)


def answer(runs: Sequence[RunDirectory], path: str) -> Any:
    """The data at a path, plain values; None where there is none. runs: the one that is viewed, then those it is compared with.

    run, samples/N, timeline/N, log/NAME, compare, chain.
    """
    run = runs[0]
    kind, _, which = path.partition("/")
    if kind == "run" and not which:
        return run.overview()
    if kind == "compare" and not which:
        return [other.overview() for other in runs[1:]]
    if kind == "chain" and not which:
        return chain_view(runs[0].directory, [other.directory for other in runs[1:]])
    if kind == "log" and (text := run.log(which)) is not None:
        return {"name": which, "text": text}
    if kind in ("samples", "timeline") and which.isascii() and which.isdigit() and len(which) < 11:
        return run.samples(int(which)) if kind == "samples" else run.timeline(int(which))
    return None


def export(runs: Sequence[RunDirectory], file: Path) -> str:
    """Writes the file; returns what was left out for its size, in words, or nothing. The newest iterations come first."""
    data: dict[str, Any] = {name: answer(runs, name) for name in ("run", "compare", "chain")}
    for process in data["run"]["processes"]:
        if process["log"]:
            data[f"log/{process['log']}"] = {
                "name": process["log"],
                "text": runs[0].log(process["log"], EXPORTED_LOG_BYTES),
            }
    room = LARGEST_BYTES - len(json.dumps(data, default=str))
    left_out = {}
    for kind in ("timeline", "samples"):
        wanted = data["run"][f"{kind.removesuffix('s')}_iterations"]
        kept = []
        for iteration in reversed(wanted):
            name = f"{kind}/{iteration}"
            found = answer(runs, name)
            room -= len(json.dumps(found, default=str))
            if room < 0:
                break
            data[name] = found
            kept.append(iteration)
        data["run"][f"{kind.removesuffix('s')}_iterations"] = sorted(kept)
        if len(kept) < len(wanted):
            left_out[kind] = len(wanted) - len(kept)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(json.loads(json.dumps(data, default=str))), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--export {file}: cannot be written ({error.strerror}); choose another file") from None
    return "".join(f"; {kind} of the {count} oldest iterations left out" for kind, count in left_out.items())


class ViewServer(ThreadingHTTPServer):
    """port 0 takes a free one. Raises UserError where the port is taken."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunDirectory], port: int = 0) -> None:
        self.runs = runs
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: cannot be listened on ({error.strerror}); choose another") from None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    timeout = 30

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        if (host[0] or host[2]) not in NAMES:
            return self._send(403, "text/plain", b"only 127.0.0.1 and localhost are served\n")
        parts = urlsplit(self.path)
        if parts.path == "/":
            return self._send(200, "text/html; charset=utf-8", page().encode())
        if not parts.path.startswith("/api/"):
            return self._send(404, "text/plain", b"not found\n")
        name = parts.path.removeprefix("/api/")
        if name == "run" and parse_qs(parts.query).get("stamp") == [self.server.runs[0].stamp()]:
            return self._send(200, "application/json", b"null")
        found = answer(self.server.runs, name)
        if found is None:
            return self._send(404, "application/json", b"null")
        self._send(200, "application/json", json.dumps(found, allow_nan=False, default=str).encode())

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

    A policy in the page itself allows exactly this style and this script, by their hashes, and no address but its own server; so
    texts that a model wrote cannot become anything else, and an exported page asks for nothing at all. data: what the server would
    answer, by path, for a page without one (exported); None for a page that asks a server.
    """
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    connect = "'self'" if data is None else "'none'"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src {connect}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
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
    """JSON that can stand in a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
