#!/usr/bin/env python
"""How much longer demonstrations make an iteration, as a share of the time that they take alone.

    python tools/bench_demonstrations.py [--groups 24] [--responses 8] [--tokens 200] [--repeats 3]

The run's own producer and demonstrations work with the sleeping engine and trainer of
bench_teacher.py. Demonstrations are groups like those that the engine writes. Each row gives the
seconds of an iteration without them, with them, in which they were trained, and

    cost = (iteration with them - iteration without) / seconds in which they were trained

Training them behind an iteration, or in a run that waits for the whole batch, costs 1. --train is
the time of training over that of generation.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_teacher import WINDOW, drawn_lengths, iteration


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="mean length of a response")
    parser.add_argument("--generate", type=float, default=6.0, help="seconds of generation, about")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    lengths = drawn_lengths(arguments.groups, arguments.responses, arguments.tokens, 1)
    num_tokens = sum(sum(of_group) for of_group in lengths.values())
    waves = arguments.groups * arguments.responses / WINDOW
    step_s = arguments.generate / waves / (1.7 * arguments.tokens)
    print("| training / generation | demonstrations | without | with | alone | cost |")
    print("|---|---|---|---|---|---|")
    for training in (0.5, 1.0):
        token_s = training * arguments.generate / num_tokens
        for demonstrated in (arguments.groups // 12, arguments.groups // 6, arguments.groups // 3):
            rows = []
            for _ in range(arguments.repeats):
                without = asyncio.run(iteration(lengths, step_s, token_s, None))
                beside = asyncio.run(
                    iteration(lengths, step_s, token_s, None, demonstrated=demonstrated)
                )
                longer_s = beside.iteration_s - without.iteration_s
                alone_s = beside.demonstrations_s
                rows.append((without.iteration_s, beside.iteration_s, alone_s, longer_s / alone_s))
            without_s, with_s, alone_s, cost = (
                statistics.median(column) for column in zip(*rows, strict=True)
            )
            print(
                f"| {training:.1f} | {demonstrated} of {arguments.groups} groups | {without_s:.2f} s "
                f"| {with_s:.2f} s | {alone_s:.2f} s | {cost:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
