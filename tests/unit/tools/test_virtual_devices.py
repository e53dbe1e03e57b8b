"""tools/virtual_devices.py: a run's own coordinator on devices that only take time, in turns and with roles."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from pa_npu.config.load import load_config
from pa_npu.planning.iteration_model.subjects import EngineSpeed
from tools import virtual_devices

GROUPS = 8
RESPONSES = 8


@pytest.mark.parametrize("stream", [False, True], ids=["turns", "roles"])
def test_iterations_take_at_least_the_work_over_all_devices(stream: bool) -> None:
    keys = [
        "model.path=none",
        "data.train=none",
        f"schedule.prompts_per_iteration={GROUPS}",
        "schedule.skip_zero_advantage=false",
        f"schedule.stream={str(stream).lower()}",
        f"rollout.responses_per_prompt={RESPONSES}",
        "rollout.max_response_tokens=64",
        "rollout.max_num_seqs=64",
        "rollout.engines=2",
        "trainer.devices=2",
        "placement.colocate=true",
    ]
    pace = EngineSpeed(0.01, 0.0001)
    token_s = 1e-3
    prompt = 16
    length = 32

    def lengths(iteration: int) -> list[list[int]]:
        return [[length] * RESPONSES for _ in range(GROUPS)]

    records = virtual_devices.run(load_config([], keys), pace, token_s, prompt, lengths, 3)
    assert [record["groups"] for record in records] == [GROUPS] * 3
    train_s = token_s * GROUPS * RESPONSES * (prompt + length) / 2
    for record in records:
        decode_s = length * pace.step_s
        assert decode_s + train_s <= record["iteration_s"] < 2 * (decode_s + train_s)


def heavy(iteration: int) -> list[list[int]]:
    rng = np.random.default_rng([iteration, 3])
    lengths = 60 * np.exp(0.8 * rng.standard_normal((16, RESPONSES)))
    return np.clip(lengths, 1, 256).astype(int).tolist()


def equal(iteration: int) -> list[list[int]]:
    return [[64] * RESPONSES for _ in range(16)]


@pytest.mark.parametrize("order", ["prompt", "completion"])
@pytest.mark.parametrize("lengths", [equal, heavy])
@pytest.mark.parametrize("unsteady", [0.0, 0.1])
def test_roles_never_lose_to_turns_on_engines_that_are_as_fast_as_cores(
    order: str, lengths: virtual_devices.Draw, unsteady: float
) -> None:
    """With order=prompt a replica waits for its own groups, which prediction has to know."""
    iterations = 12
    seconds = {}
    for stream in (False, True):
        keys = [
            "model.path=none",
            "data.train=none",
            f"schedule.iterations={iterations}",
            "schedule.prompts_per_iteration=16",
            "schedule.skip_zero_advantage=false",
            f"schedule.stream={str(stream).lower()}",
            f"schedule.order={order}",
            f"rollout.responses_per_prompt={RESPONSES}",
            "rollout.max_response_tokens=256",
            "rollout.max_num_seqs=256",
            "rollout.engines=2",
            "trainer.devices=2",
            "placement.colocate=true",
        ]
        pace = EngineSpeed(step_s=0.003, sequence_s=0.00017, prompt_token_s=0.00002)
        records = virtual_devices.run(
            load_config([], keys), pace, 1.6e-4, 16, lengths, iterations, unsteady=unsteady
        )
        seconds[stream] = [record["iteration_s"] for record in records]
    ratios = [turns / roles for turns, roles in zip(seconds[False], seconds[True], strict=True)]
    assert sum(seconds[False]) / sum(seconds[True]) >= 0.99, ratios
    assert statistics.median(ratios) >= 0.99, ratios
