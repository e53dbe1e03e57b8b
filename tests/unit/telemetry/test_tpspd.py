"""TPSPD counts what its definition says, whatever the shape of the iterations."""

from __future__ import annotations

import pytest

from pa_npu.errors import DataError
from pa_npu.telemetry.report import run_throughput, throughput


def record(iteration: int, **values: object) -> dict[str, object]:
    base = {
        "iteration": iteration,
        "tokens_prompt": 800,
        "tokens_response": 1600,
        "tokens_computed": 1700,
        "iteration_s": 4.0,
        "devices": 3,
        "generate_s": 3.0,
        "train_s": 2.0,
        "publish_s": 0.5,
        "trainer_idle": 0.25,
        "engine_idle": 0.5,
    }
    return {**base, **values}


def test_one_iteration_equals_the_mindspeed_formula() -> None:
    # (mean response + mean prompt) x global batch x n / devices / iteration seconds
    prompts = [10, 30]
    responses_per_prompt = 4
    response_lengths = [[5, 6, 7, 8], [100, 1, 1, 1]]
    samples = len(prompts) * responses_per_prompt
    mean_prompt = sum(prompts) / len(prompts)
    mean_response = sum(map(sum, response_lengths)) / samples
    expected = (mean_response + mean_prompt) * samples / 5 / 2.5
    tokens = {
        "tokens_prompt": sum(prompts) * responses_per_prompt,
        "tokens_response": sum(map(sum, response_lengths)),
        "tokens_computed": sum(prompts) + sum(map(sum, response_lengths)),
    }
    rates = throughput(tokens, seconds=2.5, devices=5)
    assert rates["tpspd"] == pytest.approx(expected, rel=1e-12)
    assert rates["tpspd_response"] == pytest.approx(129 / 12.5)
    assert rates["tpspd_computed"] == pytest.approx(169 / 12.5)


@pytest.mark.parametrize(("seconds", "devices"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)])
def test_meaningless_seconds_or_devices_are_refused(seconds: float, devices: int) -> None:
    with pytest.raises(ValueError, match="seconds > 0 and devices >= 1"):
        throughput(
            dict.fromkeys(("tokens_prompt", "tokens_response", "tokens_computed"), 1),
            seconds,
            devices,
        )


def test_a_run_is_the_ratio_of_sums_and_not_the_mean_of_ratios() -> None:
    records = [
        record(0, iteration_s=100.0),
        record(1),
        record(2, iteration_s=12.0, trainer_idle=0.75, train_s=6.0),
    ]
    result = run_throughput(records, warmup_iterations=1)
    assert result["tpspd"] == pytest.approx(2 * 2400 / 16.0 / 3)
    assert result["trainer_idle"] == pytest.approx((0.25 * 4 + 0.75 * 12) / 16)
    assert result["train_s"] == pytest.approx(4.0)
    assert (result["iterations"], result["dropped_iterations"], result["iteration_s"]) == (
        2,
        1,
        8.0,
    )


def test_evaluation_and_checkpoint_count_where_they_happened() -> None:
    records = [record(0), record(1, evaluation_s=3.0, checkpoint_s=1.0), record(2)]
    result = run_throughput(records, warmup_iterations=1)
    assert (result["evaluation_s"], result["checkpoint_s"]) == (1.5, 0.5)
    assert result["tpspd"] == run_throughput([record(1), record(2)], 0)["tpspd"]


def test_nothing_left_after_the_warm_up_is_an_error() -> None:
    with pytest.raises(DataError, match="2 iterations, all within the warm-up of 2"):
        run_throughput([record(0), record(1)], 2)


def test_a_missing_number_is_named_with_its_iteration() -> None:
    with pytest.raises(DataError, match="iteration 7: train_s is None"):
        run_throughput([record(7, train_s=None)], 0)


def test_a_changed_number_of_devices_is_refused() -> None:
    with pytest.raises(DataError, match=r"\[3, 4\]"):
        run_throughput([record(0), record(1, devices=4)], 0)


def test_synchronous_iterations_between_periodic_ones_are_counted_apart() -> None:
    turns = [
        record(number, periodic=bool(number % 2), iteration_s=3.0 if number % 2 else 6.0)
        for number in range(4)
    ]
    result = run_throughput(turns, warmup_iterations=0)
    assert (result["iteration_s"], result["iterations"]) == (3.0, 2)
    assert (result["synchronous_s"], result["dropped_iterations"]) == (6.0, 0)
    assert run_throughput([turns[0], turns[2]], warmup_iterations=0)["iteration_s"] == 6.0, (
        "a synchronous run"
    )
