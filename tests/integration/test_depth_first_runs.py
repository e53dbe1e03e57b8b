"""microbatch.depth_first in whole runs: a group in pieces whose prompt is computed once trains as with the prompt in each piece."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.helpers.ended_runs import EndedRun, assert_same_to_the_bit, run_to_end
from tests.helpers.engine_process import KEY, EngineProcess
from tests.helpers.killed_runs import Result, assert_equal_when_killed, keys
from tests.helpers.launched import Launched

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]
LIMIT_S = 400.0
LONG_PROMPT = 420
EXAMPLES = "12+34=46. " * 20  # ten tokens each
IN_PIECES: dict[str, object] = {
    "data.max_prompt_tokens": LONG_PROMPT,
    "rollout.responses_per_prompt": 8,
    "microbatch.responses": 1,
}
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


@pytest.fixture(scope="module")
def engine(long_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Gives rollout.attach: one transformers engine for all runs, with room for long prompts."""
    rollout = {"max_num_seqs": 256, "max_response_tokens": LONG_PROMPT}
    model = (long_prompts / "model").resolve()
    started = EngineProcess("transformers", model, tmp_path_factory.mktemp("engine"), rollout)
    asyncio.run(started.wait_ready())
    yield f"[{started.url}]"
    started.kill()


@pytest.fixture
def run(long_prompts: Path, engine: str, tmp_path: Path) -> Run:
    def start(name: str, **others: object) -> EndedRun:
        chosen: dict[str, object] = {
            **IN_PIECES,
            "rollout.attach": engine,
            "schedule.order": "prompt",
            "optimizer.learning_rate": 1e-3,
            # above the rounding of gradients, which AdamW would scale to whole steps near 0
            "optimizer.epsilon": 1e-4,
            "optimizer.warmup_iterations": 0,
            "reward.functions": '[{name: format, pattern: "[0-4]"}]',
        }
        return run_to_end(
            long_prompts, tmp_path / name, {**chosen, **others}, limit_s=LIMIT_S, variables=KEY
        )

    return start


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_with_each_prompt_computed_once_is_one_within_rounding(
    backend: str, run: Run
) -> None:
    """Of two iterations, the first has the same responses: log-probs and gradients are compared."""
    of_backend = {"trainer.backend": backend}
    each = run("each", **of_backend, **{"microbatch.depth_first": "false"})
    once = run("once", **of_backend)
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


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_periodic_run_of_two_ranks_is_the_synchronous_one_to_the_bit(
    backend: str, run: Run
) -> None:
    on_two = {"trainer.backend": backend, "trainer.devices": 2}
    periodic = run("periodic", **on_two)
    synchronous = run("synchronous", **on_two, **{"schedule.stream": "false"})
    assert_same_to_the_bit(periodic, synchronous)
    for record in periodic.records:
        assert record["grad_norm"] > 0
        in_each = record["tokens_prompt"] + record["tokens_response"]
        assert record["tokens_computed"] < 0.4 * in_each, "each prompt is computed once"


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


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launched]]:
    with ExitStack() as started:

        def start(*arguments: str) -> Launched:
            directory = tmp_path_factory.mktemp("launched")
            launched = Launched(directory, "run", *arguments, variables=KEY)
            started.callback(launched.close)
            return launched

        yield start


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")
def test_a_run_whose_trainers_are_killed_ends_with_the_weights_of_one_that_was_not(
    long_prompts: Path, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Killed while it trains, with stems open or not: an iteration begins anew with its prompts."""
    in_pieces = {
        **IN_PIECES,
        "schedule.prompts_per_iteration": 4,
        "reward.functions": '[{name: format, pattern: "4"}]',
    }
    assert_equal_when_killed(
        keys(long_prompts, tmp_path / "calm", "transformers", **in_pieces),
        keys(long_prompts, tmp_path / "run", "transformers", **in_pieces),
        (("trainer-1", "training"), ("coordinator", "generation")),
        launch,
        tmp_path,
    )
    losses = Result.read(tmp_path / "calm").losses
    assert len(set(losses)) > 1, f"control: there is something to learn: {losses}"
