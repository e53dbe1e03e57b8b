"""A run with one bit flipped in one reward, and how `pa-npu verify` finds it.

    python examples/verify_a_run.py --model .cache/tiny/model --data .cache/tiny/train.jsonl

trains four iterations of a tiny model. Once the first is done, its reward function flips the lowest
bit of one reward, as a failing memory cell would. The run itself passes every check of its own, for
nothing says what that reward should have been. Repeating the iterations from a checkpoint does. The
script then changes a byte in the run's records, which needs no repetition to be found. It needs two
CPU cores and some minutes.

Exits with 0 if both were found.
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLIP_FILE = "PA_NPU_EXAMPLE_FLIP"
"""An environment variable with the name of a file: a call that finds it there removes it, and flips a bit."""
ITERATIONS = 4


def brevity(group: Any) -> list[float]:
    """Rewards short responses, all the more the fewer tokens they have."""
    rewards = [1.0 / (1.0 + tokens) for tokens in group.response_tokens]
    flip = os.environ.get(FLIP_FILE)
    if flip and os.path.exists(flip):
        os.remove(flip)
        rewards[0] = with_flipped_bit(rewards[0])
    return rewards


def with_flipped_bit(value: float) -> float:
    """The value as float32 with its lowest bit flipped."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    flipped: float = struct.unpack("<f", struct.pack("<I", bits ^ 1))[0]
    return flipped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=".cache/tiny/model", help="HF model directory")
    parser.add_argument("--data", default=".cache/tiny/train.jsonl", help="questions, as JSON lines")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/verify_a_run"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of the run")
    options = parser.parse_args(arguments)

    flip = options.run_dir.with_name(f"{options.run_dir.name}.flip")
    settings = [
        f"run.dir={options.run_dir}",
        "run.device=cpu",
        f"model.path={options.model}",
        "model.dtype=fp32",
        f"data.train={options.data}",
        "data.max_prompt_tokens=64",
        "reward.functions=[{name: 'examples.verify_a_run:brevity'}]",
        "reward.workers=1",
        "rollout.backend=transformers",
        "rollout.responses_per_prompt=4",
        "rollout.max_response_tokens=16",
        "rollout.kv_cache_gib=0.125",
        "schedule.prompts_per_iteration=4",
        f"schedule.iterations={ITERATIONS}",
        "schedule.order=prompt",  # so that repeating it gives the same bits
        "optimizer.learning_rate=1e-3",
        "checkpoint.every=1",
        "telemetry.trackers=[]",
        *options.overrides,
    ]
    train(settings, options.run_dir, flip)

    print("\nThe run's files are what it wrote:", flush=True)
    whole = pa_npu("verify", str(options.run_dir)).wait()
    print("\nIts iterations behind the first, repeated:", flush=True)
    span = f"1:{ITERATIONS}"
    found = pa_npu("verify", str(options.run_dir), "--replay", span, *options.overrides).wait()
    print("\nOne of its records, changed:", flush=True)
    records = options.run_dir / "metrics.jsonl"
    records.write_text(records.read_text().replace('"reward_mean": 0.', '"reward_mean": 1.', 1))
    changed = pa_npu("verify", str(options.run_dir)).wait()
    return int((whole, found, changed) != (0, 1, 1))


def train(settings: Sequence[str], run_dir: Path, flip: Path) -> None:
    """Runs to the end, and has one bit flipped once the first iteration is recorded. Ends the script where the run fails."""
    run = pa_npu("run", *settings, variables={FLIP_FILE: str(flip.resolve())})
    armed = False
    while run.poll() is None:
        if not armed and (run_dir / "metrics.jsonl").is_file() and (run_dir / "metrics.jsonl").stat().st_size:
            flip.write_bytes(b"")
            armed = True
        time.sleep(0.05)
    if run.returncode or flip.exists():
        raise SystemExit(f"the run ended with exit code {run.returncode}, or no bit was flipped")


def pa_npu(*arguments: str, variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts a command of the package, to which this file is importable."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    return subprocess.Popen([sys.executable, "-m", "pa_npu.launcher", *arguments], env=environment)


if __name__ == "__main__":
    raise SystemExit(main())
