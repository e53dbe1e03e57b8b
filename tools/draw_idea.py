"""Draw what periodic asynchrony is: a synchronous and a periodic iteration of one run, from its timeline.

    bash launch/run_grpo_tiny.sh
    python tools/draw_idea.py runs/grpo_tiny --output docs/pictures/idea.svg

In the last schedule.compare_iterations of a run, even iterations are synchronous and odd ones
periodic, on the same engines, trainers and kind of work. By default the last pair is drawn.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import reason
from pa_npu.errors import DataError, UserError
from pa_npu.telemetry.chrome_trace import read_spans, spans_of
from pa_npu.telemetry.timeline import DIRECTORY

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import plots

_ROWS = ("engine", "trainer")
Span = tuple[float, float]  # start and end, seconds from the iteration's publish


@dataclass(frozen=True)
class Iteration:
    """The work of engines and trainer rank 0 between two completed publishes."""

    number: int
    seconds: float
    generated: list[Span]
    trained: list[Span]
    border: list[Span]

    def busy_share(self, spans: list[Span]) -> float:
        return sum(end - start for start, end in merged(spans)) / self.seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--pair",
        type=int,
        metavar="N",
        help="the synchronous iteration N and the periodic one N + 1",
    )
    parser.add_argument("--output", type=Path, default=Path("idea.svg"), metavar="SVG")
    options = parser.parse_args(arguments)
    try:
        drawn = iterations(Path(options.run))
        pair = choose(drawn, options.pair)
        written = plots.save(draw(pair), options.output)
    except UserError as error:
        print(f"draw_idea: {error}", file=sys.stderr)
        return 2
    for kind, iteration in zip(("synchronous", "periodic"), pair, strict=True):
        print(
            f"{kind:<11} iteration {iteration.number}: {iteration.seconds:.2f} s, engine at work "
            f"{iteration.busy_share(iteration.generated):.0%}, trainer "
            f"{iteration.busy_share(iteration.trained):.0%}"
        )
    print("wrote " + ", ".join(map(str, written)))
    return 0


def iterations(run: Path) -> dict[int, Iteration]:
    """Returns all iterations between two publishes, by number.

    Raises DataError where the run has no timeline.
    """
    coordinator, trainer = (
        _events(run / DIRECTORY / f"{name}.jsonl") for name in ("coordinator", "trainer-0")
    )
    published = spans_of(coordinator, "publish", "version")
    evaluated = {
        version: span["end"]
        for version, span in spans_of(coordinator, "evaluate", "version").items()
    }
    by_number = {}
    for number in sorted(published):
        if number + 1 not in published:
            continue
        # an evaluation stands between publish and generation
        start_s = max(published[number]["end"], evaluated.get(number, 0.0))
        end_s = published[number + 1]["end"]

        def inside(
            event: dict[str, Any], start_s: float = start_s, end_s: float = end_s
        ) -> Span | None:
            if event["end"] <= start_s or event["start"] >= end_s:
                return None
            return max(event["start"], start_s) - start_s, min(event["end"], end_s) - start_s

        groups = [
            event
            for event in coordinator
            if event["lane"].startswith("engine ") and event["args"].get("iteration") == number
        ]
        steps = [
            event for event in trainer if event["lane"] == "microbatches" or event["name"] == "step"
        ]
        by_number[number] = Iteration(
            number,
            end_s - start_s,
            [span for event in groups if (span := inside(event))],
            [span for event in steps if (span := inside(event))],
            [span for event in (published[number + 1],) if (span := inside(event))],
        )
    return by_number


def choose(by_number: dict[int, Iteration], first: int | None) -> tuple[Iteration, Iteration]:
    """Returns a synchronous and the following periodic iteration; the last such pair unless `first`
    names one.
    """
    pairs = [number for number in by_number if number % 2 == 0 and number + 1 in by_number]
    wanted = first if first is not None else max(pairs, default=-1)
    if wanted not in pairs:
        raise DataError(
            f"iterations {sorted(by_number)} have no synchronous one followed by a periodic one"
            f"{f' from {first} on' if first is not None else ''}; draw a run with "
            "schedule.compare_iterations"
        )
    return by_number[wanted], by_number[wanted + 1]


def draw(pair: tuple[Iteration, Iteration]) -> Any:
    """Two panels on one time axis: who is at work when."""
    figure, axes = plots.new_figure(1, 2, width_in=7.2, height_in=1.45)
    longest = max(iteration.seconds for iteration in pair)
    titles = (
        "synchronous: generate all, then train",
        "periodic: train each group as it comes; same update",
    )
    for panel, iteration, title in zip(axes, pair, titles, strict=True):
        for row, spans in enumerate((iteration.generated, iteration.trained)):
            bars = [(start, end - start) for start, end in merged(spans)]
            panel.broken_barh(
                bars, (row - 0.35, 0.7), label=("generates", "trains")[row], **plots.bar_style(row)
            )
        bars = [(start, end - start) for start, end in iteration.border]
        panel.broken_barh(bars, (-0.35, 1.7), label="weights cross", **plots.bar_style(3))
        panel.axvline(iteration.seconds, color="black", linewidth=1)
        panel.set_title(f"{title} ({iteration.seconds:.2f} s)", loc="left")
        panel.set_yticks(range(len(_ROWS)), _ROWS)
        panel.set_ylim(1.6, -0.6)
        panel.set_xlim(0, longest * 1.02)
        panel.grid(axis="y", visible=False)
    axes[0].tick_params(labelbottom=False)
    axes[1].set_xlabel("seconds since the engines have this iteration's weights")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=3)
    return figure


def merged(spans: list[Span], gap_s: float = 0.0) -> list[Span]:
    """Overlapping spans as one, in order."""
    done: list[Span] = []
    for start, end in sorted(spans):
        if done and start <= done[-1][1] + gap_s:
            done[-1] = (done[-1][0], max(done[-1][1], end))
        else:
            done.append((start, end))
    return done


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        return read_spans(path)
    except OSError as error:
        raise DataError(f"{path}: {reason(error)}; draw the directory of a run") from None


if __name__ == "__main__":
    sys.exit(main())
