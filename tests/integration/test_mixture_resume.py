"""Several datasets in runs of the coordinator: a resumed run asks and trains what the undisturbed does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.samples.wire import to_bytes
from tests.integration.test_coordinator_run import GROUPS
from tests.integration.test_dynamic_sampling_resume import RESUMED_AT, content, produce, write_checkpoint
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ITERATIONS = 5


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_resumed_run_goes_on_as_the_undisturbed_one(order: str, tmp_path: Path) -> None:
    names = {"many": range(40), "few": range(40, 70)}
    for name, numbers in names.items():
        rows = [{"q": f"w{3 + i} w{4 + i}", "a": {"final": str(i)}} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {
        "data": {
            "train": [
                {"path": str(tmp_path / "many.jsonl"), "weight": 1},
                {"path": str(tmp_path / "few.jsonl"), "weight": 2},
            ],
            "test": None,
            "max_prompt_tokens": 16,
            "question_column": "q",
            "answer_column": "a.final",
        },
        "schedule": {"iterations": ITERATIONS, "prompts_per_iteration": GROUPS, "order": order},
    }
    whole = produce(tmp_path / "whole", order, 0, Speed(step_s=0.0005, stride=4), 2, None, ITERATIONS, **changes)
    checkpoint = write_checkpoint(tmp_path, whole.states[RESUMED_AT])
    # another number of engines and another speed, so that groups finish in another order
    slower = Speed(step_s=0.002, stride=8)
    resumed = produce(tmp_path / "resumed", order, RESUMED_AT, slower, 1, checkpoint, ITERATIONS, **changes)
    later = range(RESUMED_AT, ITERATIONS)
    for iteration in later:
        assert content(resumed.trained[iteration]) == content(whole.trained[iteration]), f"iteration {iteration}"
        if order == "prompt":
            ours, expected = resumed.trained[iteration], whole.trained[iteration]
            assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected]
        assert resumed.states[iteration + 1] == whole.states[iteration + 1]
        assert resumed.records[iteration]["sources"] == whole.records[iteration]["sources"]

    # the weights, by what was trained
    asked: list[int] = []
    for iteration in range(ITERATIONS):
        sources, groups = whole.records[iteration]["sources"], whole.trained[iteration]
        assert [sources[name]["prompts"] for name in names] == [GROUPS // 3, 2 * GROUPS // 3]
        assert sources["few"]["share"] == pytest.approx(2 / 3)
        own = [float((group.rewards > 0).mean()) for group in groups if group.prompt_id >= 40]
        assert sources["few"]["accuracy"] == pytest.approx(sum(own) / len(own))
        asked += [group.prompt_id for group in groups]
    assert len(asked) > len(set(asked)), "later epochs came"
