"""A run from Python: a reward of this file, rows that are objects of the script, records as they come, and an early stop.

bash launch/install_cpu.sh && source .venv/bin/activate
python tools/make_tiny_model.py --out .cache/tiny
python examples/train_from_python.py [--iterations 5] [--backend vllm|transformers] [--run-dir runs/from_python]
"""

from __future__ import annotations

import argparse
import re

from pa_npu import Run

REWARD = "examples.train_from_python:right_and_short"


def right_and_short(group) -> list[float]:  # type: ignore[no-untyped-def]
    """Workers import it by its name; group has prompt, answer, responses, response_tokens and row."""
    answers = [re.findall(r"#### (\d+)", text) for text in group.responses]
    return [
        float(found[-1:] == [group.answer]) - 0.001 * tokens
        for found, tokens in zip(answers, group.response_tokens, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=".cache/tiny/model")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--run-dir", default="runs/from_python")
    parser.add_argument(
        "--good-enough", type=float, default=0.95, help="mean reward at which the run is stopped"
    )
    options = parser.parse_args()

    rows = [
        {"question": f"What is {x}+{y}?", "answer": str(x + y)}
        for x in range(10, 100)
        for y in range(10, 100, 7)
    ]
    keys = {
        "model.path": options.model,
        "run.dir": options.run_dir,
        "rollout.backend": options.backend,
        "schedule.iterations": options.iterations,
        "schedule.prompts_per_iteration": 8,
        "data.test": None,
        "checkpoint.export_hf": True,
    }
    with Run("configs/grpo_tiny.yaml", keys, reward=REWARD, train=rows, on_line=None) as run:
        for record in run:
            print(
                f"iteration {record['iteration']}: reward {record['reward_mean']:.3f}, "
                f"{record['iteration_s']:.1f} s",
                flush=True,
            )
            if record["reward_mean"] > options.good_enough:
                print("good enough; stopping after this iteration")
                run.stop()
    print(f"the final weights are in {run.hf}")


if __name__ == "__main__":
    main()
