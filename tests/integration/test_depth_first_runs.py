"""microbatch.depth_first in whole runs: a group in pieces whose prompt is computed once trains as with the prompt in each piece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.ended_runs import EndedRun, assert_same_to_the_bit, run_to_end
from tests.helpers.engine_process import KEY

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]
LIMIT_S = 400.0
LONG_PROMPT = 420
EXAMPLES = "12+34=46. " * 20
Run = Callable[..., EndedRun]


@pytest.fixture(scope="module")
def long_prompts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and questions behind so many examples that a prompt's once saves its 1,024 rows."""
    directory = tmp_path_factory.mktemp("long")
    (directory / "model").symlink_to(tiny / "model")
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    with (directory / "train.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({**row, "question": EXAMPLES + row["question"]}) + "\n")
    shutil.copy(tiny / "test.jsonl", directory)
    return directory


@pytest.fixture
def run(long_prompts: Path, shared_engine: Callable[[Path], str], tmp_path: Path) -> Run:
    def start(name: str, **keys: object) -> EndedRun:
        chosen: dict[str, object] = {
            "rollout.attach": shared_engine((long_prompts / "model").resolve()),
            "data.max_prompt_tokens": LONG_PROMPT,
            "rollout.responses_per_prompt": 8,
            "schedule.order": "prompt",
            "optimizer.learning_rate": 1e-3,
            "optimizer.warmup_iterations": 0,
            "reward.functions": '[{name: format, pattern: "[0-4]"}]',
            "microbatch.responses": 1,
        }
        return run_to_end(
            long_prompts, tmp_path / name, {**chosen, **keys}, limit_s=LIMIT_S, variables=KEY
        )

    return start


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_with_each_prompt_computed_once_is_one_within_rounding(
    backend: str, run: Run
) -> None:
    """Of two iterations, the first has the same responses: log-probs and gradients are compared.

    Weights may differ by a hundredth of an update, where a gradient is near 0 (AdamW). Against the
    synchronous run it is equal to the bit.
    """
    keys = {"trainer.backend": backend, "trainer.devices": 2}
    each = run("each", **keys, **{"microbatch.depth_first": "false"})
    once = run("once", **keys)
    synchronous = run("synchronous", **keys, **{"schedule.stream": "false"})
    assert_same_to_the_bit(once, synchronous)

    assert each.chain[0]["tokens"] == once.chain[0]["tokens"]
    assert each.chain[0]["logprobs"] == once.chain[0]["logprobs"]
    first, second = each.records[0], once.records[0]
    assert second["tokens_computed"] < 0.4 * first["tokens_computed"]
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=2e-5)
    assert second["loss"] == pytest.approx(first["loss"], rel=2e-5, abs=1e-7)
    assert first["grad_norm"] > 0
    for record in each.records + once.records:
        assert record["logprob_diff_max"] < 1e-5
    for name, weight in each.weights.items():
        torch.testing.assert_close(once.weights[name], weight, rtol=1e-5, atol=4e-5)


def test_two_ranks_that_share_sequences_in_bf16_train(run: Run) -> None:
    """C = 2 on fsdp, where each piece computes its prompt."""
    ended = run(
        "context",
        **{
            "trainer.backend": "fsdp",
            "trainer.devices": 2,
            "trainer.context_parallel": 2,
            "model.dtype": "bf16",
        },
    )
    assert len(ended.records) == 2
    for record in ended.records:
        assert record["grad_norm"] > 0 and record["logprob_diff_mean"] < 0.02
