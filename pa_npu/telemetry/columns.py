"""A table with a column per run, or per group of runs, and notes below it: as text for any terminal, and as markdown."""

from __future__ import annotations

import io
from collections.abc import Sequence


def text_table(
    title: str,
    labels: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    notes: Sequence[str],
    column_width: int,
) -> str:
    """rows: a row's title and its cells."""
    from rich.box import ASCII2  # logs and terminals of any locale can show it
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=ASCII2)
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(name, *cells)
    output = io.StringIO()
    # Not a terminal: the width must fit the table, whoever reads it.
    console = Console(file=output, width=40 + column_width * len(labels), color_system=None)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    return output.getvalue().rstrip("\n")


def markdown_table(labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], notes: Sequence[str]) -> str:
    """As text_table."""
    lines = ["| |" + "".join(f" {label} |" for label in labels), "|---|" + "---:|" * len(labels)]
    lines += [f"| {name} |" + "".join(f" {cell} |" for cell in cells) for name, cells in rows]
    return "\n".join([*lines, "", *notes])
