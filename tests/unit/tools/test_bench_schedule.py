"""tools/bench_schedule.py: its optimum is no later than any constant window and within the bound."""

from __future__ import annotations

from pa_npu.dispatch.schedule import Schedule, same_windows
from pa_npu.planning.iteration_model.subjects import EngineSpeed, VirtualCluster, VirtualGroup
from tools.bench_schedule import RESPONSES, best_known_s, drawn_lengths, median_for
from tools.simulate import simulate


def test_the_optimum_is_below_every_constant_window_and_above_the_longer_side():
    cluster = VirtualCluster({"0": EngineSpeed(0.005, 0.00025)}, 256)
    for heavy in (False, True):
        lengths = [
            drawn_lengths(i, 0, RESPONSES, median_for(64, 256), 256) if heavy else [64] * RESPONSES
            for i in range(16)
        ]
        groups = [
            VirtualGroup(i, 0, tuple(map(float, ls)), 1e-4 * sum(ls), 1.0)
            for i, ls in enumerate(lengths)
        ]
        ends = []
        for places in range(1, 17):
            schedule = Schedule("", tuple(range(16)), (same_windows(("0",), places * RESPONSES),))
            ends.append(simulate(cluster, groups, schedule))
        best = best_known_s(cluster, groups)
        train_s = sum(group.train_s for group in groups)
        assert (
            max(train_s, min(end.generated_s for end in ends))
            <= best
            <= min(end.end_s for end in ends)
        )


def test_groups_that_end_in_the_step_of_an_arrival_are_counted():
    """With room for four groups and training of two waves each: backwards, groups come as others
    end, but for rounding.
    """
    cluster = VirtualCluster({"0": EngineSpeed(0.004, 0.00025)}, 32)
    groups = [VirtualGroup(i, 0, (64.0,) * RESPONSES, 0.384, 1.0) for i in range(16)]
    assert 16 * 0.384 < best_known_s(cluster, groups) < 16 * 0.384 + 16 * 64 * 0.004
