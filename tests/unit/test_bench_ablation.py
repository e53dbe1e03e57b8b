"""tools/bench_ablation.py: the shares of the contributions, the order and the words of its rows."""

from __future__ import annotations

import argparse
import math

import pytest

from tools.bench_ablation import ALL_OFF, Row, Switches, render, row_of, shapley, trainer_cores

GAINS = (1.5, 1.1, 2.0)


def independent(switches: Switches) -> float:
    return sum(math.log(gain) for gain, on in zip(GAINS, switches, strict=True) if on)


def test_factors_that_do_not_touch_each_other_get_what_they_bring() -> None:
    assert shapley(independent) == pytest.approx([math.log(gain) for gain in GAINS])


def test_shares_add_up_and_what_two_bring_together_is_halved() -> None:
    def together(switches: Switches) -> float:
        return independent(switches) + (0.6 if switches[0] and switches[2] else 0.0)

    shares = shapley(together)
    assert sum(shares) == pytest.approx(together((True, True, True)) - together(ALL_OFF))
    expected = [math.log(gain) + extra for gain, extra in zip(GAINS, (0.3, 0.0, 0.3), strict=True)]
    assert shares == pytest.approx(expected)


def test_a_row_has_the_medians_of_its_iterations() -> None:
    records = [
        {
            "iteration_s": s,
            "generate_s": 1.0,
            "train_s": 2.0,
            "tpspd": 100 / s,
            "engine_idle": 0.5,
            "trainer_idle": 0.25,
        }
        | {"memory_trainer_host_bytes": 2**20 * s}
        for s in (1.0, 9.0, 2.0)
    ]
    row = row_of((True, False, True), records, 1e-6)
    assert (row.iteration_s, row.tpspd, row.name) == (2.0, 50.0, "periodic + shared prompt")
    assert row.memory == {"memory_trainer_host_bytes": 4 * 2**20}


def test_the_table_says_the_ratio_and_each_share() -> None:
    combinations = [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)]
    rows = [
        Row(s, 1.0, 0.5, 0.5, 100 * math.exp(independent(s)), 0.1, 0.2, {"memory_engine_host_bytes": 2**30}, 0.0)
        for s in combinations
    ]
    text = render(rows, argparse.Namespace(groups=8, response=64, prompt=512, iterations=10), stages=2)
    assert "PP2" in text and "2 pipeline stages" in text
    assert "| off | off | off | 1.00 | 0.50 | 0.50 | 100 | 1.00 | 10% | 20% | 1,024 | nan | nan | 0.0e+00 |" in text
    assert (
        "3.30x (Shapley, of the logarithm): periodic 1.50x (34%), tri-model 1.10x (8%), shared prompt 2.00x (58%)"
        in text
    )


def test_stages_share_the_last_core_where_there_are_too_few() -> None:
    assert [trainer_cores(1, 2), trainer_cores(2, 2), trainer_cores(2, 4)] == ["[1]", "[1,1]", "[1,2]"]
