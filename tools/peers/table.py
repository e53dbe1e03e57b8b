"""Results of bench_peers' runs: a row per shape and system, as a table and as a bar chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.plots import bar_style, new_figure, save


@dataclass(frozen=True)
class System:
    """How it differs, in a few words each: what is corrected for, what is done with a group's
    prompt, who has which core.
    """

    name: str
    corrections: str
    prompts: str
    placement: str


@dataclass(frozen=True)
class Measured:
    """One run. seconds: of each iteration after warm-up. response_tokens: of each of these,
    trained. age_mean, age_max: versions that trained tokens were older. logprob_difference: mean
    |trainer - engine| on tokens of that age. problem: why there is nothing else."""

    shape: str
    system: str
    round: int
    seconds: Sequence[float] = ()
    response_tokens: Sequence[float] = ()
    age_mean: float | None = None
    age_max: float | None = None
    logprob_difference: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Row:
    """iteration_s: the mean over rounds of each round's mean; range_s: the least and the largest of
    these. tokens_per_s: prompt and response tokens of trained responses."""

    shape: str
    system: str
    iteration_s: float | None
    range_s: tuple[float, float] | None
    tokens_per_s: float | None
    response_tokens: float | None
    age_mean: float | None
    age_max: float | None
    logprob_difference: float | None
    rounds: int
    problem: str | None


def row_of(runs: Sequence[Measured], prompt_tokens: int) -> Row:
    """runs: of one shape and system. prompt_tokens: of an iteration, each response's prompt
    counted.
    """
    good = [run for run in runs if run.seconds]
    problem = next((run.problem for run in runs if run.problem), None)
    if not good:
        return Row(
            runs[0].shape, runs[0].system, None, None, None, None, None, None, None, 0, problem
        )
    means = [statistics.fmean(run.seconds) for run in good]
    tokens = sum(sum(run.response_tokens) + prompt_tokens * len(run.seconds) for run in good)
    ages = [run.age_max for run in good if run.age_max is not None]
    return Row(
        good[0].shape,
        good[0].system,
        statistics.fmean(means),
        (min(means), max(means)),
        tokens / sum(sum(run.seconds) for run in good),
        statistics.fmean([count for run in good for count in run.response_tokens]),
        _mean([run.age_mean for run in good]),
        max(ages, default=None),
        _mean([run.logprob_difference for run in good]),
        len(good),
        problem,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def rows_of(
    runs: Sequence[Measured],
    shapes: Sequence[str],
    systems: Sequence[str],
    prompt_tokens: Mapping[str, int],
) -> list[Row]:
    """In the order of `shapes` and `systems`; pairs that nobody ran are left out."""
    rows = []
    for shape in shapes:
        for system in systems:
            of_cell = [run for run in runs if (run.shape, run.system) == (shape, system)]
            if of_cell:
                rows.append(row_of(of_cell, prompt_tokens[shape]))
    return rows


def render(
    rows: Sequence[Row], titles: Mapping[str, str], systems: Mapping[str, System], reference: str
) -> str:
    """Returns a table per shape, as Markdown. titles: of shapes. reference: the system that the
    ratio is over.
    """
    lines: list[str] = []
    for shape in dict.fromkeys(row.shape for row in rows):
        of_shape = [row for row in rows if row.shape == shape]
        base = next((row.tokens_per_s for row in of_shape if row.system == reference), None)
        lines += [
            f"### {titles[shape]}",
            "",
            "| system | s per iteration | rounds: least, largest | tokens/s | over "
            f"{systems[reference].name} | response tokens | age: mean, largest | log-prob "
            "difference |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in of_shape:
            name = systems[row.system].name
            if row.iteration_s is None or row.range_s is None or row.tokens_per_s is None:
                lines.append(f"| {name} | did not run | | | | | | |")
                continue
            ratio = f"{row.tokens_per_s / base:.2f}x" if base else ""
            cells = [name, f"{row.iteration_s:.2f}", f"{row.range_s[0]:.2f}, {row.range_s[1]:.2f}"]
            cells += [f"{row.tokens_per_s:,.0f}", ratio, f"{row.response_tokens:,.0f}"]
            cells.append(
                f"{row.age_mean:.2f}, {row.age_max:.0f}"
                if row.age_mean is not None and row.age_max is not None
                else ""
            )
            cells.append("" if row.logprob_difference is None else f"{row.logprob_difference:.1e}")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for row in of_shape:
            if row.problem:
                runs = (
                    "no run"
                    if row.iteration_s is None
                    else f"{row.rounds} runs did, another did not"
                )
                lines += [f"{systems[row.system].name}, {runs}: {row.problem}", ""]
    lines += ["| system | corrections | a group's prompt | cores |", "|---|---|---|---|"]
    for key in dict.fromkeys(row.system for row in rows):
        system = systems[key]
        lines.append(
            f"| {system.name} | {system.corrections} | {system.prompts} | {system.placement} |"
        )
    return "\n".join(lines)


def draw(
    rows: Sequence[Row], titles: Mapping[str, str], systems: Mapping[str, System], path: Path
) -> list[Path]:
    """Returns a panel per shape with a bar of tokens/s per system; one that did not run has no bar
    but its name.
    """
    shapes = list(dict.fromkeys(row.shape for row in rows))
    keys = list(dict.fromkeys(row.system for row in rows))
    figure, panels = new_figure(columns=len(shapes), width_in=4.2, height_in=0.6 + 0.34 * len(keys))
    for axes, shape in zip(panels, shapes, strict=True):
        speeds = {row.system: row.tokens_per_s or 0.0 for row in rows if row.shape == shape}
        for place, key in enumerate(keys):
            value = speeds.get(key, 0.0)
            axes.barh(place, value, height=0.7, **bar_style(place))
            axes.annotate(
                f"{value:,.0f}" if value else "did not run",
                (value, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(
            range(len(keys)),
            [systems[key].name for key in keys] if axes is panels[0] else [""] * len(keys),
        )
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max([*speeds.values(), 1.0]))
        axes.set_xlabel("prompt and response tokens/s")
        axes.set_title(titles[shape])
    return save(figure, path)
