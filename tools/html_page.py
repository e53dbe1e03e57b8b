"""Self-contained HTML pages of tables and pictures."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import UserError
from tools.plots import rendered


def svg_fragment(figure: Any) -> str:
    """Returns the picture as an <svg> element that a page can hold."""
    text = rendered(figure, "svg").decode("utf-8")
    element = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*" height="[^"]*"',
        r'\1 style="max-width:100%;height:auto"',
        element,
        count=1,
    )


def html_page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Returns a page that needs nothing beside itself. sections: headings, and contents that are
    HTML already.
    """
    parts = [
        f"<section><h2>{html.escape(heading)}</h2>{content}</section>"
        for heading, content in sections
    ]
    return _PAGE.replace("{title}", html.escape(title)).replace("{body}", "\n".join(parts))


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of plain text; the first column is left-aligned, the others are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table><thead>{line(header, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1b1b;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}svg{background:#fff}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25rem .75rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def write_text(path: Path, text: str) -> Path:
    """Writes a page, its directory too, and returns its path.

    Raises UserError where the system refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    return path
