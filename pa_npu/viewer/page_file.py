"""The page as one HTML text: markup, style and script in one, nothing loaded from anywhere.

A policy in the page itself allows exactly this style and this script, by their hashes, and no address but its own server; so texts
that a model wrote cannot become anything else, and an exported page asks for nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("page")
SCRIPTS = (
    "dom.js",
    "data.js",
    "charts.js",
    "overview.js",
    "samples.js",
    "evaluation.js",
    "configuration.js",
    "processes.js",
    "app.js",
)


def page(data: dict[str, Any] | None = None) -> str:
    """data: what the server would answer, by path, for a page without one (exported); None for a page that asks a server."""
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
