"""The examples run as they stand: attention under a plain transformers model, and a run from Python with rows of the script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_shared_prompts_are_exact_and_their_speed_is_said() -> None:
    """Exactness is asserted by the example itself; speed is for the benchmarks."""
    printed = run(
        "examples/shared_prompt_attention.py", "--prompt", "64", "--steps", "1", timeout_s=300
    )
    assert re.search(r"speed-up \d+\.\d+x", printed), printed


@pytest.mark.nightly  # another run of an example is below
def test_a_run_from_python_takes_rows_and_a_reward_of_the_script(
    tiny: Path, tmp_path: Path
) -> None:
    options = ["--iterations", "2", "--backend", "transformers", "--run-dir", str(tmp_path / "run")]
    printed = run(
        "examples/train_from_python.py", "--model", str(tiny / "model"), *options, timeout_s=300
    )
    assert re.search(
        r"^iteration 0: reward -?\d\.\d+, .*\niteration 1: ", printed, flags=re.MULTILINE
    ), printed
    assert (
        "examples.train_from_python:right_and_short"
        in (tmp_path / "run" / "config.yaml").read_text()
    )
    assert (tmp_path / "run" / "hf" / "config.json").is_file()


def test_an_algorithm_of_the_example_trains_the_quick_starts_task(
    tiny: Path, tmp_path: Path
) -> None:
    options = ["--iterations", "2", "--backend", "transformers", "--run-dir", str(tmp_path / "run")]
    files = ["--model", str(tiny / "model"), "--data", str(tiny / "train.jsonl")]
    printed = run("examples/own_algorithm.py", *files, *options, timeout_s=400)
    pattern = r"^iteration \d: reward -?\d\.\d+, observations (\d+\.\d+),"
    observations = [float(value) for value in re.findall(pattern, printed, flags=re.MULTILINE)]
    assert len(observations) == 2 and observations[1] < observations[0], printed


@pytest.mark.nightly  # a judge in a run: test_coordinator_run.py
def test_a_run_is_rewarded_by_a_judge_and_a_function_of_the_example(
    tiny: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ["--iterations", "2", "--backend", "transformers", "--run-dir", str(run_dir)]
    printed = run(
        "examples/judged_rewards.py", "--model", str(tiny / "model"), *options, timeout_s=300
    )
    lines = re.findall(
        r"^iteration \d: (\S+) (-?\d\.\d+), judge (\d\.\d+); 0 responses without",
        printed,
        flags=re.MULTILINE,
    )
    assert len(lines) == 2 and lines[0][0] == "examples.judged_rewards:brevity", printed
    assert all(float(brevity) < 0 < float(judged) <= 1 for _, brevity, judged in lines)
    assert (run_dir / "judge_scores.sqlite").is_file() and list((run_dir / "tensorboard").iterdir())


@pytest.mark.nightly  # a flipped bit that is found: test_verify.py
def test_the_example_of_verify_prints_what_the_document_shows(tiny: Path, tmp_path: Path) -> None:
    options = [
        "--model",
        str(tiny / "model"),
        "--data",
        str(tiny / "train.jsonl"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    printed = run("examples/verify_a_run.py", *options, timeout_s=900)
    page = (ROOT / "docs" / "verify.md").read_text()
    shown = (
        page.partition("python examples/verify_a_run.py\n```")[2]
        .partition("```\n")[2]
        .partition("```")[0]
    )
    title = "The run's files are what it wrote:"
    assert without_numbers(shown) == without_numbers(title + printed.partition(title)[2]), printed


def without_numbers(text: str) -> list[str]:
    """The lines of an output with marks in place of paths, digests and numbers."""
    text = re.sub(r"\S*/\S+|runs/\w+", "PATH", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", text)
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)
    return text.replace(": iterations N to N\n", ": iteration N\n").strip().splitlines()
