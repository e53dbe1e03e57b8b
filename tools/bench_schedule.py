#!/usr/bin/env python
"""How close periodic asynchrony comes to its bound: sync against periodic, alternating inside each run, with fixed work.

One real vLLM engine pinned to one core, one real trainer rank to another; every response has the same length (ignore_eos). With
Tg the seconds of generation and Tt those of training per iteration, a synchronous iteration takes Tg + Tt and a perfectly
overlapped one max(Tg, Tt), so the speedup is bounded by (Tg + Tt) / max(Tg, Tt). Rows vary

  waves     sequences per iteration over the window of sequences in flight; the window is the same in all rows, so that the
            engine's speed is too. The head bubble (no group yet) is about Tg / waves, the tail bubble (the last groups
            still to be trained) about Tt / waves: one wave cannot overlap at all.
  Tg : Tt   balanced, engine-bound (2 : 1) and trainer-bound (1 : 2). Tt is set through the prompt length, which costs the trainer
            (separate sequences) and hardly the engine (prefix cache).

A run alternates iteration by iteration (schedule.stream=alternate): even ones are synchronous, odd ones periodic.

    python tools/bench_schedule.py [--iterations 12] [--rows balanced-16,...] [--json FILE] [--markdown FILE]
    python tools/bench_schedule.py --shared-prompt        # P=512, R=64, G=8 with attention.shared_prompt on and off
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pa_npu.launcher.placement import free_ports
from pa_npu.telemetry.hardware import processor
from pa_npu.telemetry.metrics import read_records

ROOT = Path(__file__).resolve().parent.parent
RESPONSES = 8
WARMUP = 2  # iterations, one of each kind
MAX_PROMPT = 2048


@dataclass(frozen=True)
class Case:
    """waves: sequences per iteration / window. ratio: Tg / Tt aimed at."""

    name: str
    waves: int
    ratio: float


@dataclass(frozen=True)
class Row:
    name: str
    waves: int
    prompt_tokens: int
    generate_s: float  # Tg, of synchronous iterations
    train_s: float  # Tt
    border_s: float  # publish and all else that no schedule can hide
    sync_s: float
    periodic_s: float

    @property
    def bound(self) -> float:
        return (self.generate_s + self.train_s) / max(self.generate_s, self.train_s)

    @property
    def speedup(self) -> float:
        return self.sync_s / self.periodic_s

    @property
    def model(self) -> float:
        """The speedup that head and tail bubbles of 1 / waves and the border leave."""
        longer, shorter = max(self.generate_s, self.train_s), min(self.generate_s, self.train_s)
        overlapped = longer + shorter / self.waves
        return self.sync_s / (overlapped + self.border_s)


CASES = (
    Case("balanced-1", 1, 1.0),
    Case("balanced-2", 2, 1.0),
    Case("balanced-4", 4, 1.0),
    Case("balanced-16", 16, 1.0),
    Case("engine-bound-16", 16, 2.0),
    Case("trainer-bound-16", 16, 0.5),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=12, help="per run, the warm-up included; even")
    parser.add_argument("--window", type=int, default=16, help="sequences in flight, a multiple of 8")
    parser.add_argument("--response", type=int, help="tokens per response; 32, or 64 with --shared-prompt")
    parser.add_argument("--rows", default=",".join(case.name for case in CASES), help="which rows, by name")
    parser.add_argument(
        "--shared-prompt", action="store_true", help="measure attention.shared_prompt on and off instead"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    unknown = set(args.rows.split(",")) - {case.name for case in CASES}
    if unknown:
        parser.error(f"--rows: {', '.join(sorted(unknown))} not among {', '.join(case.name for case in CASES)}")

    args.response = args.response or (64 if args.shared_prompt else 32)

    with tempfile.TemporaryDirectory(prefix="bench_schedule_") as scratch:
        bench = Bench(Path(scratch), args)
        with bench.engine():
            rows = bench.shared_prompt_rows() if args.shared_prompt else bench.schedule_rows(args.rows.split(","))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    table = render(rows, args)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    return 0


class Bench:
    """One engine for all rows; a trainer and a coordinator per run."""

    def __init__(self, scratch: Path, args: argparse.Namespace) -> None:
        self._scratch = scratch
        self._args = args
        self._runs = 0
        self._url = f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        self._model = scratch / "tiny" / "model"
        command = [sys.executable, "tools/make_tiny_model.py", "--out", str(self._model.parent), "--random"]
        subprocess.run([*command, "--hidden", "192", "--layers", "4"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        port = self._url.rpartition(":")[2]
        command = self._command("engines", [f"placement.engine_port={port}", f"run.dir={self._scratch / 'engines'}"])
        with open(self._scratch / "engines.log", "w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 300
            while not self._healthy():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(
                        f"bench_schedule: no engine:\n{(self._scratch / 'engines.log').read_text()[-2000:]}"
                    )
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)

    def schedule_rows(self, names: list[str]) -> list[Row]:
        rows = []
        measured = {prompt: self._calibrate(prompt) for prompt in (32, 256)}
        generate_s = statistics.mean(generate for generate, _ in measured.values())
        train_at = {prompt: train for prompt, (_, train) in measured.items()}
        for case in (case for case in CASES if case.name in names):
            prompt = self._prompt_for(generate_s / case.ratio, train_at)
            rows.append(self._measure(case.name, case.waves, prompt, []))
        return rows

    def shared_prompt_rows(self) -> list[Row]:
        return [
            self._measure(f"shared_prompt={flag}", 8, 512, [f"attention.shared_prompt={flag}"])
            for flag in ("false", "true")
        ]

    def _calibrate(self, prompt: int) -> tuple[float, float]:
        """Tg and Tt of a synchronous iteration of 4 waves."""
        records = self._records(4, prompt, 5, ["schedule.stream=false"])[WARMUP:]
        return statistics.median(r["generate_s"] for r in records), statistics.median(r["train_s"] for r in records)

    def _prompt_for(self, train_s: float, train_at: dict[int, float]) -> int:
        """The prompt length at which training takes train_s, by the line through two measured ones."""
        (p0, t0), (p1, t1) = sorted(train_at.items())
        prompt = p0 + (train_s - t0) * (p1 - p0) / (t1 - t0)
        return int(min(max(prompt, 8), MAX_PROMPT))

    def _measure(self, name: str, waves: int, prompt: int, overrides: list[str]) -> Row:
        records = self._records(waves, prompt, self._args.iterations, ["schedule.stream=alternate", *overrides])
        kinds = [[r for r in records[WARMUP:] if r["iteration"] % 2 == odd] for odd in (0, 1)]
        sync, periodic = (statistics.median(r["iteration_s"] for r in kind) for kind in kinds)
        generate_s = statistics.median(r["generate_s"] for r in kinds[0])
        train_s = statistics.median(r["train_s"] for r in kinds[0])
        border_s = max(0.0, sync - generate_s - train_s)
        row = Row(name, waves, prompt, generate_s, train_s, border_s, sync, periodic)
        print(f"# {row}", file=sys.stderr, flush=True)
        return row

    def _records(self, waves: int, prompt: int, iterations: int, overrides: list[str]) -> list[dict[str, Any]]:
        """The iteration records of one run."""
        self._runs += 1
        groups = max(1, waves * self._args.window // RESPONSES)
        run_dir = self._scratch / f"run{self._runs}"
        data = self._scratch / f"prompts{self._runs}.jsonl"
        write_prompts(data, prompt, groups * iterations, self._runs)
        settings = [
            f"run.dir={run_dir}",
            f"data.train={data}",
            f"schedule.iterations={iterations}",
            f"schedule.prompts_per_iteration={groups}",
            f"rollout.window={self._args.window}",
            f"rollout.attach=[{self._url}]",
            f"rollout.key_file={self._scratch / 'engines-engines' / 'api_key'}",
            *overrides,
        ]
        result = subprocess.run(self._command("run", settings), cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"bench_schedule: a run failed:\n{(result.stdout + result.stderr)[-3000:]}")
        return read_records(run_dir)

    def _command(self, action: str, settings: list[str]) -> list[str]:
        common = {
            "run.device": "cpu",
            "model.path": self._model,
            "model.dtype": "fp32",
            "data.train": self._model.parent / "train.jsonl",
            "data.chat_template": "never",
            "data.shuffle": "false",
            "data.max_prompt_tokens": MAX_PROMPT,
            "rollout.responses_per_prompt": RESPONSES,
            "rollout.max_response_tokens": self._args.response,
            "rollout.ignore_eos": "true",
            "attention.shared_prompt": "false",
            "checkpoint.export_hf": "false",
            "telemetry.tensorboard": "false",
            "placement.engine_devices": "[0]",
            "placement.trainer_devices": "[1]",
        }
        keys = [f"{key}={value}" for key, value in common.items()]
        return [sys.executable, "-m", "pa_npu.launcher", action, *keys, *settings]

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=1) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def write_prompts(path: Path, length: int, count: int, seed: int) -> None:
    """Prompts of exactly `length` tokens (one letter is one token), all different, so that none is in the prefix cache."""
    rng = random.Random(seed)
    letters = "bcdfghjkmpqvwxz"  # rare pairs, which the tokenizer does not merge
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(rng.choice(letters) for _ in range(length))
            file.write(json.dumps({"question": text, "answer": "#### 0"}) + "\n")


def render(rows: list[Row], args: argparse.Namespace) -> str:
    lines = [
        f"One engine (vLLM) and one trainer rank, each pinned to one core ({processor()}); groups of {RESPONSES} responses x "
        f"{args.response} tokens, {args.window} sequences in flight; medians of {(args.iterations - WARMUP) // 2} synchronous "
        f"and as many periodic iterations, alternating in one run.",
        "",
        "| row | waves | prompt | Tg s | Tt s | border s | sync s | periodic s | bound | measured | of bound | bubble model |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        times = (r.generate_s, r.train_s, r.border_s, r.sync_s, r.periodic_s)
        cells = [r.name, str(r.waves), str(r.prompt_tokens), *(f"{t:.2f}" for t in times)]
        cells += [f"{r.bound:.2f}x", f"{r.speedup:.2f}x", f"{r.speedup / r.bound:.0%}", f"{r.model:.2f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
