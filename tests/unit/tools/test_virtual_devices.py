"""tools/virtual_devices.py: a run's own coordinator on devices that only take time, in turns and with roles."""

from __future__ import annotations

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
