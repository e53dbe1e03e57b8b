"""publish.senders in whole runs with vLLM: engines that several ranks send to generate what those of one leader do, to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.ended_runs import EndedRun, assert_same_to_the_bit, run_to_end
from tests.helpers.engine_process import KEY, EngineProcess

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]
LIMIT_S = 400.0


@dataclass(frozen=True)
class Case:
    """keys: of the trainers. senders: beside leader. shares: of each sender, at most so much of the
    leader's bytes, as norms, and of Megatron's stages the embedding, are not divided evenly.
    """

    keys: dict[str, object]
    senders: str = "shards"
    mixture: bool = False
    count: int = 2
    share: float = 0.58
    leaders: int = 1


FSDP: dict[str, object] = {"trainer.backend": "fsdp", "trainer.devices": 2}
CASES = {
    "TP2": Case({"trainer.devices": 2, "trainer.tensor_parallel": 2}),
    "PP2": Case({"trainer.devices": 2, "trainer.pipeline_parallel": 2}, leaders=2, share=1.0),
    "EP2": Case({"trainer.devices": 2, "trainer.expert_parallel": 2}, mixture=True, share=0.75),
    "DP2, all": Case({"trainer.devices": 2}, senders="all"),
    "fsdp": Case(FSDP),
    "fsdp, adapters merged": Case({**FSDP, "lora.rank": 32, "checkpoint.export_hf": "merged"}),
    "fsdp, adapters alone": Case(
        {**FSDP, "lora.rank": 32, "checkpoint.export_hf": "merged", "publish.lora": "adapter"}
    ),
}


@pytest.fixture(scope="module")
def attached(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], str]]:
    """Gives rollout.attach of a vLLM engine of a model, which all runs with this model share."""
    with ExitStack() as started:

        @cache
        def attach(model: Path) -> str:
            directory = tmp_path_factory.mktemp("engine")
            engine = EngineProcess("vllm", model, directory, {"kv_cache_gib": 0.125})
            started.callback(engine.kill)
            asyncio.run(engine.wait_ready())
            return f"[{engine.url}]"

        yield attach


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_several_senders_is_that_of_one_leader_to_the_bit(
    name: str,
    attached: Callable[[Path], str],
    tiny: Path,
    tiny_mixture: Path,
    tmp_path: Path,
) -> None:
    """With a checked log-prob difference after each publish."""
    case = CASES[name]
    inputs = tiny_mixture if case.mixture else tiny

    def run(senders: str) -> EndedRun:
        keys: dict[str, object] = {
            "rollout.backend": "vllm",
            "rollout.attach": attached(inputs / "model"),
            "rollout.responses_per_prompt": 4,
            "schedule.iterations": 3,
            "schedule.order": "prompt",
            "optimizer.learning_rate": 1e-2,
            "optimizer.warmup_iterations": 0,
            "reward.functions": '[{name: format, pattern: "[0-4]"}]',
            "publish.senders": senders,
        }
        ended = run_to_end(
            inputs, tmp_path / senders, {**keys, **case.keys}, limit_s=LIMIT_S, variables=KEY
        )
        assert all(record["logprob_diff_max"] < 1e-4 for record in ended.records)
        assert len({link["weights_after"] for link in ended.chain}) == 3, "each update changes some"
        assert len({link["tokens"] for link in ended.chain}) == 3
        return ended

    one = run("leader")
    several = run(case.senders)
    assert_same_to_the_bit(several, one)

    assert len(one.mib_of_senders) == case.leaders
    assert len(several.mib_of_senders) == case.count
    total = sum(one.mib_of_senders)
    assert sum(several.mib_of_senders) == pytest.approx(total, abs=0.1 * case.count)
    print(name, one.mib_of_senders, several.mib_of_senders)
    assert several.mib_of_senders[0] <= case.share * total + 0.1
