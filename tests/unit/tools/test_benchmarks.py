"""Benchmarks in tools/: formulas of their figures, and configurations that the package accepts."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.load import load_config
from pa_npu.coordinator.publication import (
    BlockingPublication,
    RollingPublication,
    publication_kind,
)
from pa_npu.telemetry.chain import read_chain
from tests.helpers.chained_run import make_chained_run, step
from tools import bench_chain, bench_scaling, bench_stages, bench_staleness
from tools.bench_ablation import ALL_OFF, Switches, shapley
from tools.bench_scaling import Row
from tools.bench_streaming import ideal_gain
from tools.bench_swap import MODES
from tools.make_tiny_model import write_demonstrations

ROOT = Path(__file__).resolve().parents[3]


def test_shares_of_an_ablation_add_up_and_what_two_bring_together_is_halved() -> None:
    gains = [math.log(gain) for gain in (1.5, 1.1, 2.0)]

    def together(switches: Switches) -> float:
        alone = sum(gain for gain, on in zip(gains, switches, strict=True) if on)
        return alone + (0.6 if switches[0] and switches[2] else 0.0)

    shares = shapley(together)
    assert sum(shares) == pytest.approx(together((True, True, True)) - together(ALL_OFF))
    assert shares == pytest.approx(
        [gain + extra for gain, extra in zip(gains, (0.3, 0.0, 0.3), strict=True)]
    )


def test_the_ideal_of_scaling_is_that_of_the_slower_side() -> None:
    fast = Row("engines", 8, 4, 1.0, 1000.0, 0.1)
    assert fast.generate_s == pytest.approx(2.56) and fast.train_s == pytest.approx(16 * 0.08)
    assert fast.ideal_tokens_per_s == pytest.approx(64 * 1024 / 2.56)
    slow = Row("replicas", 8, 1, 1.0, 1000.0, 0.1)
    assert slow.ideal_tokens_per_s == pytest.approx(64 * 1024 / (64 * 0.08))


def test_the_ideal_of_streaming_hides_all_but_the_last_minibatch() -> None:
    assert ideal_gain(4.0, 4.0, 0.0, 4) == pytest.approx(8 / 5)
    assert ideal_gain(4.0, 4.0, 0.0, 1) == pytest.approx(1.0)
    assert ideal_gain(1.0, 4.0, 1.0, 2) == pytest.approx(ideal_gain(4.0, 1.0, 1.0, 2))
    assert ideal_gain(4.0, 4.0, 1e6, 4) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.nightly
def test_a_small_job_reaches_what_its_engines_and_replicas_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator, its store and HTTP are real. Loose bounds: the machine may be busy."""
    monkeypatch.setattr(bench_scaling, "GROUPS_PER_ENGINE", 4)
    out = tmp_path / "rows.json"
    assert (
        bench_scaling.main(
            ["--engines", "2", "--replicas", "", "--iterations", "2", "--json", str(out)]
        )
        == 0
    )
    (row,) = [Row(**row) for row in json.loads(out.read_text())]
    assert (row.sweep, row.engines, row.replicas) == ("engines", 2, 1)
    assert 0.2 < row.of_ideal <= 1.001 and 0 < row.coordinator < 1


def test_every_case_of_staleness_is_a_configuration() -> None:
    actual = [
        *bench_staleness.cases([0, 1, 4], list(bench_staleness.CORRECTIONS)),
        *bench_staleness.cases([1], ["sampling"], budget=2000, prompts=24)[1:],
    ]
    ratios = {}
    for case in actual:
        config = load_config([str(ROOT / "configs" / "grpo_tiny.yaml")], list(case.settings))
        ratios[case.name] = (
            config.schedule.max_staleness,
            build_algorithm(config).ratio,
            config.schedule.tokens_per_update,
        )
    assert len(ratios) == 15
    assert ratios["k1-sampling"] == (1, "sampling", None) and ratios["k4-uncorrected"] == (
        4,
        "proximal",
        None,
    )
    assert ratios["k1-sampling-budget"] == (1, "sampling", 2000)


@pytest.mark.parametrize("name", MODES)
def test_every_mode_of_swaps_is_a_configuration(name: str, tmp_path: Path) -> None:
    keys = {"schedule": {"max_staleness": 1}, "publish": MODES[name]}
    config = bench_scaling.configuration(tmp_path, tmp_path / "run", 8, 4, ignore_eos=False, **keys)
    kind = publication_kind(config.publish)
    assert (kind is not BlockingPublication) == (name != "blocking")
    assert (kind is RollingPublication) == (name == "delayed, rolling")


def test_a_line_of_a_chain_is_timed_with_as_many_groups_and_responses_of_the_same_lengths(
    tmp_path: Path,
) -> None:
    run = make_chained_run(tmp_path / "run", [step(0)], tmp_path / "model")
    (link,) = read_chain(run)
    responses = link.table()
    groups = bench_chain.groups_like(responses)
    assert len(groups) == link.groups
    assert [length for group in groups for length in group.trained_lengths] == responses.rows[
        "length"
    ].tolist()
    assert bench_chain.IterationCost(iteration_s=4.0, line_s=0.004, responses=12).share == 0.001


@pytest.mark.parametrize("subject", ["teacher", "nothing"])
def test_every_case_of_stages_is_a_configuration_with_equally_many_responses(subject: str) -> None:
    responses = set()
    for case in bench_stages.cases_of(subject, 4, 6, "m"):
        config = load_config([bench_stages.CONFIGS / case.config], case.settings)
        if config.rollout.has_engines:
            size = config.rollout.responses_per_prompt
            responses.add(config.schedule.prompts_per_iteration * size)
            assert config.schedule.iterations == 4
    assert responses == {384}


def test_the_table_of_stages_has_means_over_seeds_and_the_first_iteration_that_is_there() -> None:
    args = argparse.Namespace(iterations=2)
    case = bench_stages.Case("GRPO", "c")
    runs = [
        bench_stages.Curve((0.5, 0.7, 0.96), (0.0, 2.0, 5.0)),
        bench_stages.Curve((0.5, 0.96, 0.98), (0.0, 1.0, 3.0)),
        bench_stages.Curve((0.5, None, 0.9), (0.0, 1.5, 4.0)),
    ]
    line = bench_stages.render([case], {"GRPO": runs}, args).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "GRPO",
        "0.50",
        "0.83 (0.70 to 0.96), 1 not",
        "0.95 (0.90 to 0.98)",
        "2 (1 to 2), 1 not",
        "3 (1 to 5), 1 not",
        "2.0 (1.5 to 2.5)",
    ]


def test_supervised_rows_of_stages_have_as_many_mistakes_as_asked(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    sums = [(x, y) for x in range(20, 60) for y in range(10, 40)]
    source.write_text(
        "".join(
            json.dumps({"question": f"What is {x}+{y}?", "answer": "as it was"}) + "\n"
            for x, y in sums
        )
    )
    for share in (0.0, 0.65, 1.0):
        pairs = bench_stages.questions_of(source)
        write_demonstrations(tmp_path / "rows.jsonl", pairs, share)
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        answers = [int(row["answer"].split("#### ")[1]) for row in rows]
        wrong = [answer != x + y for answer, (x, y) in zip(answers, sums, strict=True)]
        assert abs(sum(wrong) / len(wrong) - share) < 0.05
