"""Runs in every state, served to a browser, and the list of pictures to look at after a change of the page."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pa_npu.telemetry.chain import CHAIN
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import ViewServer
from pa_npu.viewer.shelf import Shelf
from tests.helpers.chained_run import step, write_chain
from tests.helpers.finished_run import HOSTILE, ITERATIONS, end_run, make_run, resume_run

FLIPPED_ITERATION, FLIPPED_GROUP, FLIPPED_RESPONSE = 2, 3, 1
DAMAGED_ITERATION = 4


class served:
    """A ViewServer in a thread."""

    def __init__(self, *runs: RunDirectory | Shelf) -> None:
        shelf = next((shown for shown in runs if isinstance(shown, Shelf)), None)
        self._server = ViewServer(shelf or [run for run in runs if isinstance(run, RunDirectory)])
        self._thread = threading.Thread(target=self._server.serve_forever, name="viewer")

    def __enter__(self) -> ViewServer:
        self._thread.start()
        return self._server

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


def make_states(folder: Path) -> Path:
    """A folder of five runs: finished, resumed, failed, stopped, and at work or silent."""
    make_run(folder / "good")
    resume_run(make_run(folder / "resumed"), 8, down_s=60.0)
    end_run(folder / "resumed", "finished", "")
    log = ("E trainer-1 loop: out of memory", HOSTILE)
    cause = "trainer-1 ended: killed by SIGKILL"
    end_run(make_run(folder / "crashed", iterations=5), "failed", cause, "trainer-1", log)
    end_run(make_run(folder / "stopped", iterations=7), "stopped", "SIGTERM")
    make_run(folder / "at work", iterations=2)
    return folder


def make_chained(folder: Path) -> Path:
    """A folder of runs with chains: two equal ones, one with a reward's bit flipped, one with a
    damaged line, one of an upgraded engine, and one without a chain."""
    for name in ("whole", "equal", "flipped", "damaged", "upgraded", "without"):
        make_run(folder / name, schedule={"iterations": ITERATIONS, "order": "prompt"})
    steps = [step(number) for number in range(ITERATIONS)]
    steps[FLIPPED_ITERATION].rewards[FLIPPED_GROUP, FLIPPED_RESPONSE] = 1.0
    for name in ("whole", "equal", "damaged"):
        write_chain(folder / name, steps)
    file = folder / "damaged" / CHAIN
    name = f"w{DAMAGED_ITERATION + 1}"
    file.write_text(
        file.read_text().replace(f'"weights_after": "{name}"', '"weights_after": "<b>other</b>"')
    )
    steps[FLIPPED_ITERATION + 2].logprobs[0, 0, 0] += np.float32(1e-6)
    write_chain(folder / "upgraded", steps, {"engines": "vllm 0.12.0 <b>"})
    steps[FLIPPED_ITERATION].rewards.view(np.uint32)[FLIPPED_GROUP, FLIPPED_RESPONSE] ^= 1
    write_chain(folder / "flipped", steps)
    return folder


@dataclass(frozen=True)
class Picture:
    """One page in one state.

    address: within a folder of runs. look_at: what a reader of the picture checks. document: its
    file in docs/pictures, where a page shows it.
    """

    address: str
    look_at: str
    document: str = ""


BESIDE = "whole/?with=flipped&with=equal&with=upgraded&with=without"
PICTURES = {
    "runs": Picture(
        "", "each state has its chip; causes and numbers in their columns", "view_runs"
    ),
    "overview": Picture("good/#overview", "tiles, advice, the curves' axes and legends"),
    "overview_two": Picture(
        "good/?with=resumed#overview", "two hues, the header names both", "view_overview"
    ),
    "resumed": Picture("resumed/#overview", "marks of the resume and of checkpoints on each curve"),
    "crashed": Picture("crashed/#overview", "the cause on top, with the end of the log"),
    "stopped": Picture("stopped/#overview", "which signal, and how to continue"),
    "silent": Picture("at work/#overview", "since when nothing was written"),
    "empty": Picture("empty/#overview", "no iteration yet: a way to the processes, no empty chart"),
    "chain": Picture("whole/#overview", "the chain's mark, extent and newest digest"),
    "chain_beside": Picture(
        f"{BESIDE}#overview", "a verdict for each other run, and what differs first"
    ),
    "chain_damaged": Picture("damaged/#overview", "which line, and until where the chain is whole"),
    "timeline": Picture(
        "good/#timeline?i=1", "names of rows, hatched waits, numbers below", "view_timeline"
    ),
    "samples": Picture(
        "good/?with=resumed#samples?i=1&c=difference&g=3",
        "coloured tokens, the histogram, the other run's answers",
        "view_samples",
    ),
    "session": Picture("good/#samples?i=0&g=2", "the tree of turns, messages by role"),
    "hostile": Picture(
        "good/#samples?i=0&g=0", "texts that are markup or control characters, as texts"
    ),
    "evaluation": Picture(
        "good/#evaluation?n=4", "intervals, questions gained and lost", "view_evaluation"
    ),
    "configuration": Picture(
        "good/?with=other#configuration",
        "the keys that differ, in both colours",
        "view_configuration",
    ),
    "processes": Picture("crashed/#processes", "the chosen log, warnings in colour"),
}


def make_site(folder: Path) -> Path:
    """The folder in which PICTURES have their addresses."""
    make_chained(make_states(folder))
    make_run(folder / "other", optimizer={"learning_rate": 2e-6})
    make_run(folder / "empty", iterations=0)
    return folder
