"""The one style of every picture: comparisons and benchmarks draw with it, to PNG and SVG.

Series differ in colour, dash and marker, and bars in colour and hatch, so that they can be told
apart in grey and by the colour-blind (colours: Okabe and Ito, "Color Universal Design", 2008). The
same numbers give the same file, byte for byte. Matplotlib is optional:
`pip install 'pa_npu[plots]'`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pa_npu.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)
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
    """Returns a figure and its axes, row by row; width and height, in inches, are of one panel.

    Raises UserError without matplotlib.
    """
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(columns * width_in, rows * height_in), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def save(figure: Any, path: Path | str) -> list[Path]:
    """Writes the picture as PNG or SVG by its suffix, as both where the path has none; returns what
    was written.
    """
    path = Path(path)
    if path.suffix and path.suffix not in _FORMATS:
        raise UserError(
            f"{path}: a picture is .png or .svg; give one of them, or a name without suffix for "
            "both"
        )
    targets = [path] if path.suffix else [path.with_name(path.name + suffix) for suffix in _FORMATS]
    for target in targets:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(rendered(figure, target.suffix[1:]))
        except OSError as error:
            raise UserError(f"{target}: cannot be written ({error.strerror})") from error
    return targets


def rendered(figure: Any, form: str) -> bytes:
    """Returns the picture as a file's bytes; form: png or svg."""
    buffer = io.BytesIO()
    with _matplotlib().rc_context(_STYLE):
        # without the date and the library's version, which would make equal pictures differ
        figure.savefig(
            buffer,
            format=form,
            metadata={"Date": None, "Creator": None} if form == "svg" else {"Software": None},
        )
    return buffer.getvalue()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "pictures need matplotlib, which is not installed; pip install 'pa_npu[plots]'"
        ) from None
    matplotlib.use("agg")
    return matplotlib
