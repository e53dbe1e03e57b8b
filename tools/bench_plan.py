#!/usr/bin/env python
"""How far the planner is off: calibrated on one configuration, it predicts others, which are then measured.

Real vLLM engines and one real trainer rank, each pinned to a core. One run is calibrated on:
responses that end by themselves, of some 30 tokens on average and 128 at most, prompts of 16 to 256
tokens, one engine, a small model, prompts shared. From its records `pa_npu.planning.prediction`
predicts all rows, before any of them is run; what it is told of them is their configuration, and
how long prompts and responses are.
Rows vary

  waves, window    16 to 72 groups of 8; a constant window of 32 or 96 sequences
  lengths          equal (ignore_eos) or heavy-tailed, with means of 12 to 64
  Tg : Tt          by the prompt, which costs the trainer: trainer-bound with 448 tokens
  engines          one, or two on one core
  model            hidden size 128 and 3 layers, or 192 and 4
  shared prompts   on and off
  schedule         periodic, or synchronous

An error is predicted over measured iteration time, less one. Splits: for each work that several
ways of dividing the devices were measured for, whether the planner puts them into the order in
which they were measured.

    python tools/bench_plan.py [--rows equal,...] [--iterations 8] [--json FILE] [--markdown FILE]
    python tools/bench_plan.py --calibration RUN --predict       # no engines: predictions from a run that is kept
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# a script sees its own directory only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import free_ports
from pa_npu.planning.prediction.virtual_run import Basis, Predicted
from pa_npu.planning.prediction.workload import Shape, Workload
from pa_npu.platform.typical import typical_speed
from pa_npu.telemetry.records import read_records
from tools.bench_schedule import MAX_OF_MEAN, drawn_lengths, median_for
from tools.cluster.calibration import Calibration
from tools.cluster.fit import against_itself, calibrate
from tools.cluster.records import read_run, seen_workload
from tools.free_lengths import make_end_likelier
from tools.hardware import processor
from tools.processes import end_on_sigterm, reason_of, serve, started

ROOT = Path(__file__).resolve().parent.parent
RESPONSES = 8
MAX_NUM_SEQS = 256
MAX_PROMPT = 512
MAX_RESPONSE = 512
WARMUP = 3  # iterations: a controller learns in the first ones
SIZES = {"small": (128, 3), "large": (192, 4)}  # hidden size, layers
# of the end token's output row, where responses end by themselves: after some 30 tokens
END_SCALE = 4.5
CALIBRATION_PROMPTS = (16, 256)
CALIBRATION_ITERATIONS = 12


@dataclass(frozen=True)
class Case:
    """prompt: tokens, or the least and the most. mean: of a response; all are equal, unless they
    are drawn (heavy, a request each) or end by themselves (free). splits: work that others have
    too."""

    name: str
    groups: int = 16
    prompt: int | tuple[int, int] = 32
    mean: int = 64
    heavy: bool = False
    free: bool = False
    engines: int = 1
    window: str = "auto"
    shared_prompt: bool = True
    model: str = "small"
    stream: bool = True
    splits: str = ""


CALIBRATION = Case("calibration", 24, CALIBRATION_PROMPTS, 32, free=True)
CASES = (
    Case("equal", 24, 32, 48, splits="short prompts"),
    Case("trainer-bound", 16, 448, 24, splits="long prompts"),
    Case("three times the groups", 72, 32, 16),
    Case("window 32", 24, 64, 40, window="32"),
    Case("window 96", 24, 64, 40, window="96"),
    Case("longer heavy-tailed", 16, (16, 128), 64, heavy=True),
    Case("short", 48, 32, 12),
    Case("synchronous", 24, 128, 32, stream=False),
    Case("shared prompts off", 16, 128, 24, shared_prompt=False),
    Case("shared prompts on", 16, 128, 24),
    Case("two engines on a core", 24, 32, 48, engines=2, splits="short prompts"),
    Case("two engines trainer-bound", 16, 448, 24, engines=2, splits="long prompts"),
    Case("larger model", 16, 32, 40, model="large"),
    Case("larger model trainer-bound", 12, 320, 16, model="large"),
)


@dataclass(frozen=True)
class Row:
    """Medians, in seconds. train_s, generate_s: of an iteration's training without waiting and of
    its production.
    """

    case: Case
    predicted: Predicted
    iteration_s: float
    generate_s: float
    train_s: float
    border_s: float
    spread: float

    @property
    def error(self) -> float:
        return self.predicted.iteration_s / self.iteration_s - 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", default=",".join(case.name for case in CASES), help="which rows, by name"
    )
    parser.add_argument(
        "--iterations", type=int, default=7, help=f"per row, {WARMUP} of warm-up included"
    )
    parser.add_argument(
        "--calibration", type=Path, help="a calibration run that is kept, instead of running one"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="print predictions, and measure nothing but the calibration",
    )
    parser.add_argument("--keep", type=Path, help="directory for runs and logs, which stay there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    # of engines, and of the runs that attach to them
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
    names = args.rows.split(",")
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        parser.error(
            f"--rows: {', '.join(sorted(unknown))} not among "
            f"{', '.join(case.name for case in CASES)}"
        )
    if args.iterations <= WARMUP:
        parser.error(f"--iterations: {args.iterations} is not above {WARMUP}")
    end_on_sigterm()
    cases = [case for case in CASES if case.name in names]
    with contextlib.ExitStack() as stack:
        scratch = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_plan_"))
        )
        scratch.mkdir(parents=True, exist_ok=True)
        rows = measured(Bench(scratch, args.iterations), args, cases)
    if rows is None:
        return 0
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    table = render(rows, args.iterations)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    return 0


def measured(bench: Bench, args: argparse.Namespace, cases: Sequence[Case]) -> list[Row] | None:
    """Predictions are made and printed before the first row is run."""
    rows: list[Row] = []
    kinds = sorted(
        {(case.model, case.engines) for case in cases} | {("small", 1)},
        key=lambda kind: kind != ("small", 1),
    )
    predictions: dict[str, Predicted] = {}
    for model, engines in kinds:
        if args.calibration and args.predict:
            predictions = predict_all(bench, args.calibration, cases)
            break
        with bench.engines(model, engines):
            if not predictions:
                calibration = args.calibration or bench.run(CALIBRATION, CALIBRATION_ITERATIONS)
                predictions = predict_all(bench, calibration, cases)
                if args.predict:
                    break
            for case in cases:
                if (case.model, case.engines) == (model, engines):
                    rows.append(row_of(case, predictions[case.name], read_records(bench.run(case))))
                    print(f"# {rows[-1].error:+.1%} {rows[-1]}", file=sys.stderr, flush=True)
    return None if args.predict else sorted(rows, key=lambda row: cases.index(row.case))


def row_of(case: Case, predicted: Predicted, records: Sequence[dict[str, Any]]) -> Row:
    kept = records[WARMUP:]

    def median(key: str) -> float:
        return float(statistics.median(record[key] for record in kept))

    times = [record["iteration_s"] for record in kept]
    iteration_s = median("iteration_s")
    spread = (max(times) - min(times)) / iteration_s
    return Row(
        case,
        predicted,
        iteration_s,
        median("generate_s"),
        median("train_s"),
        median("publish_s"),
        spread,
    )


def predict_all(bench: Bench, directory: Path, cases: Sequence[Case]) -> dict[str, Predicted]:
    """By a case's name, from the records of the calibration run."""
    typical = typical_speed("cpu")
    run = read_run(directory)
    spec = ModelSpec.read(str(bench.model("small")))
    seen = seen_workload(run)
    calibration = calibrate(run, spec, typical)
    print(f"# calibrated: {calibration.engine} {calibration.trainer}", file=sys.stderr)
    calibration, ratio = against_itself(run, spec, calibration, seen, typical)
    print(f"# its own iterations took {ratio:.3f} of what was predicted of them", file=sys.stderr)
    predictions = {}
    for case in cases:
        predicted = predict_case(
            bench.config(case),
            ModelSpec.read(str(bench.model(case.model))),
            case,
            calibration,
            seen,
        )
        predictions[case.name] = predicted
        print(
            f"# predicted {predicted.iteration_s:.2f} s: {case.name}: {predicted}",
            file=sys.stderr,
            flush=True,
        )
    return predictions


def predict_case(
    config: Config, spec: ModelSpec, case: Case, calibration: Calibration, seen: Workload
) -> Predicted:
    """Responses are drawn as those of the row are, or all of the length that is asked for."""
    low, high = case.prompt if isinstance(case.prompt, tuple) else (case.prompt, case.prompt)
    rng = random.Random(0)
    prompts = [rng.randint(low, high) for _ in seen.shapes]
    lengths = [[case.mean] * RESPONSES for _ in prompts]
    if case.heavy:
        limit = MAX_OF_MEAN * case.mean
        median = median_for(case.mean, limit)
        lengths = [
            drawn_lengths(number, 0, RESPONSES, median, limit) for number in range(len(prompts))
        ]
    shapes = tuple(
        Shape(prompt, tuple(group)) for prompt, group in zip(prompts, lengths, strict=True)
    )
    workload = Workload(shapes, "measured")
    return Basis(config, spec, calibration, workload, typical_speed("cpu"), None).predict(
        config, streams=case.stream
    )


class Bench:
    """The same engines for all rows with as many of a model; a trainer and a coordinator per run."""

    def __init__(self, scratch: Path, iterations: int) -> None:
        self._scratch = scratch
        self._iterations = iterations
        self._runs = 0
        self._urls = ["http://127.0.0.1:1"]

    def model(self, name: str) -> Path:
        """Returns the directory of a model, which is made when it is first asked for."""
        directory = self._scratch / name
        if not (directory / "model" / "config.json").exists():
            command = [
                sys.executable,
                "tools/make_tiny_model.py",
                "--out",
                str(directory),
                "--random",
            ]
            size = ["--hidden", str(SIZES[name][0]), "--layers", str(SIZES[name][1])]
            subprocess.run([*command, *size], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            make_end_likelier(directory / "model", END_SCALE)
        return directory / "model"

    @contextlib.contextmanager
    def engines(self, model: str, count: int) -> Iterator[None]:
        first = free_ports("127.0.0.1", 1)[0]
        self._urls = [f"http://127.0.0.1:{first + i}" for i in range(count)]
        name = f"engines_{model}_{count}"
        log = self._scratch / f"{name}.log"
        case = Case("engines", engines=count, model=model)
        settings = [f"placement.port={first - 1}", f"run.dir={self._scratch / name}"]
        with started(self._command("engines", case, settings), log) as process:
            if not serve(process, self._urls, 300 * count):
                raise SystemExit(
                    f"bench_plan: no engine: {reason_of(log)}\n{log.read_text()[-2000:]}"
                )
            yield

    def run(self, case: Case, iterations: int | None = None) -> Path:
        """Returns the directory of a run that has ended. iterations: other than a row's."""
        iterations = iterations or self._iterations
        self._runs += 1
        run_dir = self._scratch / f"run{self._runs}"
        data = self._scratch / f"prompts{self._runs}.jsonl"
        write_prompts(data, case.prompt, case.groups * iterations, self._runs)
        settings = [f"run.dir={run_dir}", f"data.train={data}", *self._settings(case, iterations)]
        result = subprocess.run(
            self._command("run", case, settings),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SystemExit(
                f"bench_plan: a run failed:\n{(result.stdout + result.stderr)[-3000:]}"
            )
        return run_dir

    def config(self, case: Case) -> Config:
        """Resolves the configuration of a run of the case."""
        keys = [
            f"run.dir={self._scratch / 'none'}",
            f"data.train={self._scratch}",
            *self._keys(case),
            *self._settings(case, self._iterations),
        ]
        return load_config([], [key for key in keys if not key.startswith("rollout.attach")])

    def _settings(self, case: Case, iterations: int) -> list[str]:
        settings = [
            f"schedule.iterations={iterations}",
            f"schedule.prompts_per_iteration={case.groups}",
            "schedule.skip_zero_advantage=false",  # the same work whatever the rewards
            f"schedule.stream={str(case.stream).lower()}",
            f"rollout.window={case.window}",
            f"rollout.attach=[{','.join(self._urls)}]",
            f"rollout.max_response_tokens={case.mean}",
            f"attention.shared_prompt={str(case.shared_prompt).lower()}",
        ]
        if case.free:
            settings += [
                f"rollout.max_response_tokens={MAX_OF_MEAN * case.mean}",
                "rollout.ignore_eos=false",
            ]
        if case.heavy:
            limit = MAX_OF_MEAN * case.mean
            settings += [
                f"rollout.max_response_tokens={limit}",
                "environment.name=tools.bench_schedule:HeavyTailed",
                f"environment.options={{median: {median_for(case.mean, limit)}, limit: {limit}}}",
            ]
        return settings

    def _command(self, action: str, case: Case, settings: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "pa_npu.launcher", action, *self._keys(case), *settings]

    def _keys(self, case: Case) -> list[str]:
        model = self.model(case.model)
        cores = len(os.sched_getaffinity(0))
        # the trainer has the last core to itself; engines that have no core each share the first
        engine_cores = list(range(case.engines)) if cores > case.engines else [0] * case.engines
        common = {
            "run.device": "cpu",
            "model.path": model,
            "model.dtype": "fp32",
            "data.train": model.parent / "train.jsonl",
            "data.chat_template": "never",
            "data.shuffle": "false",
            "data.max_prompt_tokens": MAX_PROMPT,
            "rollout.engines": case.engines,
            "rollout.responses_per_prompt": RESPONSES,
            "rollout.max_response_tokens": MAX_RESPONSE,
            "rollout.max_num_seqs": MAX_NUM_SEQS,
            "rollout.ignore_eos": "true",
            "checkpoint.export_hf": "false",
            "telemetry.trackers": "[]",
            "placement.devices": str([*engine_cores, max(engine_cores) + 1]).replace(" ", ""),
        }
        return [f"{key}={value}" for key, value in common.items()]


def write_prompts(path: Path, length: int | tuple[int, int], count: int, seed: int) -> None:
    """Prompts of exactly that many tokens, or of random numbers of them (one letter is one token),
    all different.
    """
    rng = random.Random(seed)
    low, high = length if isinstance(length, tuple) else (length, length)
    letters = "bcdfghjkmpqvwxz"  # rare pairs, which the tokenizer does not merge
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))
            file.write(json.dumps({"question": text, "answer": "#### 0"}) + "\n")


def ranked(rows: Sequence[Row]) -> list[str]:
    """For each work that several splits were measured for: both orders, and whether they are one."""
    lines = []
    for work in dict.fromkeys(row.case.splits for row in rows if row.case.splits):
        of_work = [row for row in rows if row.case.splits == work]
        if len(of_work) < 2:
            continue
        measured_order = [row.case.name for row in sorted(of_work, key=lambda row: row.iteration_s)]
        predicted_order = [
            row.case.name for row in sorted(of_work, key=lambda row: row.predicted.iteration_s)
        ]
        verdict = (
            "right"
            if measured_order == predicted_order
            else f"wrong: {' < '.join(predicted_order)} was predicted"
        )
        lines.append(f"- {work}: {' < '.join(measured_order)}; {verdict}")
    return lines


def render(rows: Sequence[Row], iterations: int) -> str:
    errors = [abs(row.error) for row in rows]
    low, high = CALIBRATION_PROMPTS
    lines = [
        f"vLLM engines and one trainer rank, pinned to {len(os.sched_getaffinity(0))} cores "
        f"({processor()}); groups of {RESPONSES}; medians of {iterations - WARMUP} iterations. "
        f"Calibrated on one run of {CALIBRATION.groups} groups with prompts of {low} to {high} "
        "tokens and responses that end by themselves.",
        "",
        "| row | groups | prompt | response | Tg s | predicted | Tt s | predicted | iteration s | "
        "predicted | error | spread |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        case = row.case
        predicted = row.predicted
        prompt = (
            f"{case.prompt[0]} to {case.prompt[1]}"
            if isinstance(case.prompt, tuple)
            else str(case.prompt)
        )
        times = (
            row.generate_s,
            predicted.generate_s,
            row.train_s,
            predicted.train_s,
            row.iteration_s,
            predicted.iteration_s,
        )
        cells = [
            case.name,
            str(case.groups),
            prompt,
            f"{case.mean}{' heavy' if case.heavy else ''}",
        ]
        cells += [
            *(f"{seconds:.2f}" for seconds in times),
            f"{row.error:+.1%}",
            f"{row.spread:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Error: median {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
        *ranked(rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
