"""The one style of every picture: reports, comparisons and benchmarks draw with it, to PNG, SVG and self-contained HTML.

Series differ in colour, dash and marker, and bars in colour and hatch, so that they can be told apart in grey and by the
colour-blind (colours: Okabe and Ito, "Color Universal Design", 2008). The same numbers give the same file, byte for byte.
Matplotlib is optional: `pip install 'pa_npu[plots]'`.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that text is equally wide everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "figure.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "pa_npu",
}
_FORMATS = (".png", ".svg")


def line_style(number: int) -> dict[str, Any]:
    """Colour, dash and marker of the series with this number, for `Axes.plot`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markevery": 0.1,
    }


def bar_style(number: int) -> dict[str, Any]:
    """Colour and hatch of the bars with this number, for `Axes.bar` and `Axes.barh`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "hatch": _HATCHES[number % len(_HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.5,
    }


def new_figure(
    columns: int = 1, rows: int = 1, *, width_in: float = 5.0, height_in: float = 3.2
) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row; width and height, in inches, are of one panel. Raises UserError without matplotlib."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(columns * width_in, rows * height_in), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def save(figure: Any, path: Path | str) -> list[Path]:
    """Writes the picture as PNG or SVG by its suffix, as both where the path has none; returns what was written."""
    path = Path(path)
    if path.suffix and path.suffix not in _FORMATS:
        raise UserError(f"{path}: a picture is .png or .svg; give one of them, or a name without suffix for both")
    targets = [path] if path.suffix else [path.with_name(path.name + suffix) for suffix in _FORMATS]
    for target in targets:
        _write(target, _rendered(figure, target.suffix[1:]))
    return targets


def write_text(path: Path, text: str) -> Path:
    """Writes a page, its directory too, and returns its path. Raises UserError where the system refuses."""
    _write(path, text.encode("utf-8"))
    return path


def svg_fragment(figure: Any) -> str:
    """The picture as an <svg> element that a page can hold."""
    text = _rendered(figure, "svg").decode("utf-8")
    element = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r'\1 style="max-width:100%;height:auto"', element, count=1
    )


def html_page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page that needs nothing beside itself. sections: headings, and contents that are HTML already."""
    parts = [f"<section><h2>{html.escape(heading)}</h2>{content}</section>" for heading, content in sections]
    return _PAGE.replace("{title}", html.escape(title)).replace("{body}", "\n".join(parts))


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text; the first column is left-aligned, the others are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return (
        f"<table><thead>{line(header, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
    )


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


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _rendered(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    with _matplotlib().rc_context(_STYLE):
        # without the date and the library's version, which would make equal pictures differ
        figure.savefig(
            buffer, format=form, metadata={"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        )
    return buffer.getvalue()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib, which is not installed; pip install 'pa_npu[plots]'") from None
    matplotlib.use("agg")
    return matplotlib
