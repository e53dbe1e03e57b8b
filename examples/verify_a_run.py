"""A run with one bit flipped in one reward, and how `pa-npu verify` finds it.

    python examples/verify_a_run.py

trains four iterations of a tiny model. After the first one, its reward function flips the lowest
bit of one reward, as a failing memory cell would. The run itself passes every check of its own,
because nothing says what that reward should have been; repeating the iterations from a checkpoint
does. The script then changes a number in the run's records, which is found without a repetition. It
needs two CPU cores and some minutes, and the quick start's model: python tools/make_tiny_model.py
--out .cache/tiny
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
"""An environment variable that names a file.

The next call removes the file, if it is there, and flips a bit.
"""
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
    parser.add_argument(
        "--data", default=".cache/tiny/train.jsonl", help="questions, as JSON lines"
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/verify_a_run"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of the run")
    options = parser.parse_args(arguments)
    for path in (options.model, options.data):
        if not Path(path).exists():
            parser.error(
                f"{path} is not there; python tools/make_tiny_model.py --out .cache/tiny makes "
                "model and data"
            )

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
    code_of_files = verify(options.run_dir)
    print("\nIts iterations after the first, repeated:", flush=True)
    code_of_replay = verify(options.run_dir, "--replay", f"1:{ITERATIONS}", *options.overrides)
    print("\nA number of its records, changed:", flush=True)
    code_of_change = verify_with_changed_record(options.run_dir)

    both_found = (code_of_files, code_of_replay, code_of_change) == (0, 1, 1)
    print("\nBoth faults were found." if both_found else "\nNot both faults were found.")
    return 0 if both_found else 1


def verify(run_dir: Path, *arguments: str) -> int:
    return pa_npu("verify", str(run_dir), *arguments).wait()


def verify_with_changed_record(run_dir: Path) -> int:
    """Raises the first mean reward by 1, verifies, and puts the records back as they were."""
    records = run_dir / "metrics.jsonl"
    text = records.read_text()
    records.write_text(text.replace('"reward_mean": 0.', '"reward_mean": 1.', 1))
    try:
        return verify(run_dir)
    finally:
        records.write_text(text)


def train(settings: Sequence[str], run_dir: Path, flip: Path) -> None:
    """Runs to the end, and has one bit flipped once the first iteration is recorded.

    Ends the script if the run fails.
    """
    started_s = time.time()
    run = pa_npu("run", *settings, variables={FLIP_FILE: str(flip.resolve())})
    records = run_dir / "metrics.jsonl"
    is_armed = False
    while run.poll() is None:
        # records of an earlier run may lie there until this one begins
        if not is_armed and records.is_file():
            status = records.stat()
            if status.st_size and status.st_mtime >= started_s:
                flip.touch()
                is_armed = True
        time.sleep(0.05)
    if run.returncode:
        raise SystemExit(f"the run ended with exit code {run.returncode}")
    if flip.exists() or not is_armed:
        flip.unlink(missing_ok=True)
        raise SystemExit("the run ended before a bit was flipped; give it more iterations")


def pa_npu(*arguments: str, variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts a command of the package; its reward workers can import this file."""
    paths = [str(Path(__file__).resolve().parents[1])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    return subprocess.Popen([sys.executable, "-m", "pa_npu.launcher", *arguments], env=environment)


if __name__ == "__main__":
    raise SystemExit(main())
