"""trainer.context_parallel in a configuration: what it divides, and one line where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pa_npu.config.mesh import Mesh
from tests.helpers.megatron import model_config

MODEL = Path("unused")


def config_of(**trainer: Any) -> Any:
    attention = trainer.pop("attention", {})
    return model_config(
        MODEL,
        trainer=trainer,
        attention=attention,
        schedule={"prompts_per_iteration": 8},
    )


def test_a_context_group_divides_the_devices_of_a_replica_and_shards_with_fsdp() -> None:
    mesh = config_of(devices=8, tensor_parallel=2, context_parallel=2).mesh
    assert mesh == Mesh(2, 1, 2, 2, experts_tensor=1)
    assert (mesh.replica_size, mesh.weight_shards) == (4, 1)
    sharded = config_of(backend="fsdp", devices=8, context_parallel=2).mesh
    assert (sharded.data, sharded.context, sharded.weight_shards) == (4, 2, 8)
    copies = config_of(backend="fsdp", devices=8, context_parallel=2, shards=4).mesh
    assert (copies.data, copies.shards, copies.weight_shards) == (4, 2, 4)
    experts = config_of(devices=4, context_parallel=4, expert_parallel=4).mesh
    assert (experts.data, experts.expert) == (1, 4)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"devices": 6, "tensor_parallel": 2, "context_parallel": 2},
            r"trainer\.devices: 6 is not a multiple of tensor_parallel x pipeline_parallel x "
            r"context_parallel = 4; set trainer\.devices to a multiple of 4",
        ),
        (
            {"backend": "fsdp", "devices": 3, "context_parallel": 2},
            r"trainer\.devices: 3 is not a multiple of .* context_parallel = 2",
        ),
        (
            {"backend": "fsdp", "devices": 12, "context_parallel": 4, "shards": 6},
            r"trainer\.shards: 6 is not a multiple of trainer\.context_parallel = 4",
        ),
        (
            {
                "backend": "fsdp",
                "devices": 2,
                "context_parallel": 2,
                "attention": {"implementation": "sdpa", "shared_prompt": False},
            },
            r"attention\.implementation: sdpa is transformers' own attention, which computes whole "
            r"sequences, with trainer\.context_parallel = 2",
        ),
        ({"context_parallel": 0}, r"context_parallel"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(**trainer)
