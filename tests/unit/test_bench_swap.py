"""tools/bench_swap.py: every mode is a configuration that runs, and the table compares iterations with the first mode's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench_scaling import configuration
from tools.bench_swap import MODES, render


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_a_configuration(name: str, tmp_path: Path) -> None:
    keys = {"schedule": {"max_staleness": 1}, "publish": MODES[name]}
    config = configuration(tmp_path, tmp_path / "run", 8, 4, ignore_eos=False, **keys)
    assert not config.rollout.ignore_eos and config.schedule.prompts_per_iteration == 64, "the usual keys stay"
    assert [config.delays(1), config.swaps_in_turn(1)] == [name != "blocking", name == "delayed, rolling"]


def test_the_table_has_medians_over_the_first_mode() -> None:
    found = {
        "blocking": [{"iteration_s": s, "tail_waste": 0.3} for s in (2.0, 9.0, 3.0)],
        "delayed, rolling": [{"iteration_s": s, "tail_waste": 0.1} for s in (1.0, 2.0, 2.5)],
    }
    lines = render(found, 8).splitlines()
    assert lines[-2:] == ["| blocking | 3.00 | 1.00 | 30% |", "| delayed, rolling | 2.00 | 1.50 | 10% |"]
    assert "medians of 3 iterations" in lines[0]
