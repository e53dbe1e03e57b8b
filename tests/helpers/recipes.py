"""The arithmetic in the recipes' comments: what each says `--dry-run` prints, and what it prints.

    python -m tests.helpers.recipes     writes the figures into configs/grpo_*.yaml after a recipe or an estimate has changed

A recipe's comment has the line of MARK, then arguments, each followed by the lines that --dry-run prints with them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from pa_npu.launcher.cli import main as launcher

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path for path in (ROOT / "configs").glob("grpo_*.yaml") if "tiny" not in path.name)
MARK = "# What --dry-run prints:"
QUOTED = ("devices ", "trainer memory ", "engine memory ", "KV cache ", "predicted ")


def dry_run(*arguments: str) -> list[str]:
    """The lines that follow from the configuration."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert launcher(["run", *arguments, "--dry-run"]) == 0, arguments
    return printed.getvalue().splitlines()


def claims(recipe: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yields arguments and lines of each block of the comment."""
    lines = recipe.read_text().splitlines()
    arguments: list[str] = []
    claimed: list[str] = []
    for line in lines[lines.index(MARK) + 1 :]:
        if line.startswith("#   --"):
            if arguments:
                yield arguments, claimed
            arguments, claimed = line.removeprefix("#").split(), []
        elif line.startswith("#     "):
            claimed.append(line.removeprefix("#     "))
        else:
            break
    yield arguments, claimed


def quoted(recipe: Path, arguments: list[str]) -> list[str]:
    """Returns the lines that a block with these arguments must have."""
    printed = dry_run("--config", str(recipe.relative_to(ROOT)), *arguments)
    return [line for line in printed if line.startswith(QUOTED)]


def write(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    start = lines.index(MARK) + 1
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith(("#   --", "#     ")))
    block = []
    for arguments, _ in claims(recipe):
        block.append("#   " + " ".join(arguments))
        block += [f"#     {line}" for line in quoted(recipe, arguments)]
    recipe.write_text("\n".join([*lines[:start], *block, *lines[end:]]) + "\n")


if __name__ == "__main__":
    for path in RECIPES:
        write(path)
