"""What a plan knows of context parallelism: memory, bytes on the wire, time, proposals, and what auto chooses."""

from __future__ import annotations

from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.planning import automatic
from pa_npu.planning.amounts import work
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import gathered_keys_bytes, trainer_memory
from pa_npu.planning.plan_text import derived_lines
from pa_npu.planning.prediction.costs import GroupSeconds, gathered_key_bytes, typical_trainer
from pa_npu.planning.shortages import shortages
from pa_npu.platform.typical import typical_speed
from tests.helpers.recipes import ROOT

GIB = 2**30
SPEC = known_spec("Qwen3-8B")
assert SPEC is not None


def long_config(devices: int = 16, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"device": "npu"},
            "model": {"path": "models/Qwen3-8B", "dtype": "bf16"},
            "data": {"train": "unused", "max_prompt_tokens": 1024},
            "rollout": {"max_response_tokens": 31744, "responses_per_prompt": 8},
            # what a context group does not have, so that both keep the same rows
            "microbatch": {"responses": 1, "depth_first": False},
            "schedule": {"prompts_per_iteration": 64},
            "trainer": {"devices": devices, "tensor_parallel": 2, **trainer},
        }
    )


def parts(config: Config) -> dict[str, int]:
    assert SPEC is not None
    return dict(trainer_memory(config, SPEC).parts)


@pytest.mark.parametrize("context", [2, 4, 8])
def test_activations_fall_with_the_size_and_the_optimizer_stays_divided_over_all(
    context: int,
) -> None:
    alone = parts(long_config())
    divided = parts(long_config(context_parallel=context))
    assert divided["activations"] * context == alone["activations"]
    assert divided["optimizer"] == alone["optimizer"], "over replicas and context groups"
    assert divided["weights"] == alone["weights"], "every rank of a group has a copy"
    # keys and values of one of a rank's 4 heads at a time: three copies in bf16 and two in fp32
    assert SPEC is not None
    config = long_config(context_parallel=context)
    gathered = gathered_keys_bytes(config, SPEC, work(config))
    assert gathered == 2 * 32768 * 128 * (3 * 2 + 2 * 4)
    assert divided["working set"] >= gathered
    assert gathered_keys_bytes(long_config(), SPEC, work(long_config())) == 0


def test_shards_of_fsdp_are_divided_over_context_groups_too() -> None:
    sharded = {"backend": "fsdp", "tensor_parallel": 1}
    alone = parts(long_config(**sharded))
    divided = parts(long_config(**sharded, context_parallel=4))
    for name in ("weights", "gradients", "optimizer"):
        assert divided[name] == alone[name]
    assert divided["activations"] * 4 == alone["activations"]


def test_bytes_and_seconds_of_a_group_follow_from_keys_and_values() -> None:
    assert SPEC is not None
    config = long_config(context_parallel=4)
    # gathered in bf16 in the forward and in the backward, and gradients in fp32; 8 heads over TP2
    assert gathered_key_bytes(config, SPEC) == 36 * (2 * 8 * 128 / 2) * (2 * 2 + 4) * 3 / 4
    assert gathered_key_bytes(long_config(), SPEC) == 0
    recomputed = long_config(context_parallel=4, recompute="full")
    assert gathered_key_bytes(recomputed, SPEC) > gathered_key_bytes(config, SPEC)
    typical = typical_speed("npu")
    seconds = []
    for context in (1, 2, 4):
        config = long_config(context_parallel=context)
        cost = typical_trainer(config, SPEC, typical)
        seconds.append(GroupSeconds(config, SPEC, cost, typical)(1024, [31744] * 8))
    assert seconds[0] > seconds[1] > seconds[2], "ranks of a group share its work"
    assert 1.5 < seconds[0] / seconds[1] <= 2.0, "and pay for keys and values"


def test_the_plan_says_it_and_proposes_it_where_a_response_does_not_fit() -> None:
    assert SPEC is not None
    lines = derived_lines(long_config(context_parallel=2), SPEC, 64 * GIB, True)
    (ranks,) = [line for line in lines if line.startswith("trainer ranks")]
    assert ranks.endswith("TP 2 x PP 1 x DP 4, sequence parallel, context parallel 2")
    sharded = {"backend": "fsdp", "tensor_parallel": 1}
    config = long_config(**sharded, recompute="full")
    memory = trainer_memory(config, SPEC).total
    tight = int(memory / 0.9) - 2**28
    (shortage,) = [
        shortage
        for shortage in shortages(config, SPEC, tight, own_memory=True)
        if shortage.role == "trainer"
    ]
    assert shortage.proposal is not None, "with fsdp nothing else divides a sequence"
    assert "trainer.context_parallel" in shortage.proposal


def test_auto_takes_the_smallest_size_that_fits() -> None:
    inputs = [
        "run.device=npu",
        "model.path=models/Qwen3-8B",
        "rollout.max_response_tokens=32768",
        "rollout.max_num_batched_tokens=36864",
        "microbatch.responses=1",
        "trainer.wait_timeout_s=14400",
        "trainer.backend=fsdp",
        "trainer.tensor_parallel=1",
        "placement.devices_per_node=16",
    ]
    keys = ("trainer.devices", "rollout.engines", "rollout.tensor_parallel", "placement.colocate")
    lines: list[str] = []
    chosen = automatic.load(
        [str(ROOT / "configs" / "grpo_qwen3_8b.yaml")],
        [
            *inputs,
            *(f"{key}=auto" for key in keys),
            "trainer.context_parallel=auto",
            "trainer.recompute=none",
        ],
        lines.append,
    )
    assert chosen.trainer.context_parallel > 1, lines
    smaller = chosen.trainer.model_copy(
        update={"context_parallel": chosen.trainer.context_parallel // 2}
    )
    assert SPEC is not None
    memory = trainer_memory(chosen.model_copy(update={"trainer": smaller}), SPEC)
    assert memory.total > 0.9 * 64 * GIB, "half the size would not fit"
    assert f"C {chosen.trainer.context_parallel}" in lines[0]
