"""An algorithm of one's own in one class: GRPO on what the policy writes, and cross entropy on what it is shown.

bash launch/install_cpu.sh && source .venv/bin/activate
python tools/make_tiny_model.py --out .cache/tiny
python examples/own_algorithm.py [--iterations 5] [--backend vllm|transformers] [--run-dir runs/own_algorithm]
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pa_npu import Run
from pa_npu.algorithm.algorithm import Component
from pa_npu.algorithm.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pa_npu.algorithm.policy_losses import TokenBatch

ALGORITHM = "examples.own_algorithm:WithObservations"
# Of a token that the environment wrote, where one that the policy wrote weighs 1.
OBSERVATION_WEIGHT = 0.05


class WithObservations(PolicyGradient):
    """The policy also learns to predict the tokens of its environment, which for a single turn are
    the prompt's.

    The policy's tokens lead: algorithm.loss, algorithm.advantage and algorithm.aggregation are
    theirs, and the normaliser counts them alone. Observations need no version and no log-prob of an
    engine.
    """

    components = (
        *PolicyGradient.components,
        Component(2, "observations", "those that the environment wrote", needs_provenance=False),
    )

    def token_components(
        self, tokens: np.ndarray, component: np.ndarray, written: np.ndarray
    ) -> np.ndarray:
        labelled = component.copy()
        labelled[~written] = 2
        labelled[0] = 0  # it follows from nothing
        return labelled

    def component_loss(self, component: Component, batch: TokenBatch) -> torch.Tensor:
        return -OBSERVATION_WEIGHT * batch.logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=".cache/tiny/model")
    parser.add_argument("--data", default=".cache/tiny/train.jsonl")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--run-dir", default="runs/own_algorithm")
    options = parser.parse_args()

    keys = {
        "algorithm.name": ALGORITHM,
        "model.path": options.model,
        "data.train": options.data,
        "data.test": None,
        "run.dir": options.run_dir,
        "rollout.backend": options.backend,
        "schedule.iterations": options.iterations,
        "schedule.prompts_per_iteration": 8,
    }
    with Run("configs/grpo_tiny.yaml", keys, on_line=None) as run:
        for record in run:
            # the loss of the policy's tokens, and what the observations add to it
            observations = record["loss"] - record["policy_loss"]
            print(
                f"iteration {record['iteration']}: reward {record['reward_mean']:.3f}, "
                f"observations {observations:.4f}, {record['iteration_s']:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
