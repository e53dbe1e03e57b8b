"""tools/bench_staleness.py: which runs it makes, and a table whose numbers are those of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pa_npu.config.load import load_config
from pa_npu.telemetry.compare import RunGroup, load_runs
from tools import bench_staleness

ROOT = Path(__file__).resolve().parents[2]


def test_every_case_is_a_configuration_that_is_accepted() -> None:
    found = bench_staleness.cases([0, 1, 4], list(bench_staleness.CORRECTIONS))
    assert [case.name for case in found][:3] == ["k0-on-policy", "k0-dpo", "k1-sampling"] and len(found) == 12
    ratios = {}
    for case in found:
        config = load_config([str(ROOT / "configs" / "grpo_tiny.yaml")], list(case.settings))
        ratios[case.name] = (config.schedule.max_staleness, config.ratio, config.algorithm.importance_rule)
    assert ratios["k1-sampling"] == (1, "sampling", "truncate")
    assert ratios["k4-icepop"] == (4, "proximal", "mask")
    assert ratios["k4-dpo"] == (4, "sampling", "truncate")
    assert ratios["k4-uncorrected"] == (4, "proximal", "truncate")


def test_a_budget_adds_every_case_that_runs_ahead_once_more() -> None:
    found = bench_staleness.cases([0, 1], ["sampling"], budget=2000, prompts=24)
    assert [case.name for case in found] == ["k0-on-policy", "k1-sampling", "k1-sampling-budget"]
    config = load_config([str(ROOT / "configs" / "grpo_tiny.yaml")], list(found[-1].settings))
    assert (config.schedule.tokens_per_update, config.schedule.prompts_per_iteration) == (2000, 24)


def test_variation_is_that_of_the_updates_between_the_first_and_the_last() -> None:
    records = [{"tokens_response": tokens} for tokens in (1, 10, 20, 30, 999)]
    assert bench_staleness.variation(records, "tokens_response") == pytest.approx(0.5)
    assert bench_staleness.variation(records, "grad_norm") is None


def write_run(directory: Path, accuracy: float, age: float) -> None:
    directory.mkdir(parents=True)
    records = [
        {"iteration": i, "age_mean": age * (i >= 6), "clip_ratio": 0.1, "tokens_response": 100 + 10 * (-1) ** i}
        for i in range(8)
    ]
    evaluations = [{"version": 0, "accuracy": 0.1}, {"version": 8, "accuracy": accuracy}]
    for name, lines in (("metrics.jsonl", records), ("evaluations.jsonl", evaluations)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_has_mean_and_range_over_seeds_and_the_last_quarters_means(tmp_path: Path) -> None:
    for seed, accuracy in ((1, 0.5), (2, 0.75)):
        write_run(tmp_path / f"k2-decoupled-{seed}", accuracy, age=2.0)
    chosen = bench_staleness.cases([2], ["decoupled"])
    last = bench_staleness.render(chosen, [1, 2], tmp_path).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["2", "decoupled", "0.625", "0.500", "0.750", "2.000", "", "", "0.100", *("0.110", "")]


def test_every_correction_has_a_panel_with_a_line_for_each_k_beside_the_on_policy_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chosen = bench_staleness.cases([0, 2], ["decoupled", "dpo"])
    drawn = []
    for case in chosen:
        write_run(tmp_path / f"{case.name}-1", 0.5, age=case.staleness)
        drawn.append((case, RunGroup(case.name, load_runs([tmp_path / f"{case.name}-1"]))))
    svg, *_ = (file for file in bench_staleness.draw(drawn, tmp_path / "picture") if file.suffix == ".svg")
    text = svg.read_text()
    assert all(text.count(f"<!-- {label} -->") == 1 for label in ("decoupled", "dpo"))
    assert text.count("<!-- k = 0 -->") == text.count("<!-- k = 2 -->") == 2


def test_an_unknown_correction_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_staleness.main(["--corrections", "nope"])
    assert "nope not among sampling, decoupled" in capsys.readouterr().err
