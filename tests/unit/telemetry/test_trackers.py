"""Trackers: each gets every record once under one id, by the documented names, and whatever its library does costs only itself."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import TelemetryConfig
from pa_npu.coordinator.record import tracked_config
from pa_npu.errors import ConfigError
from pa_npu.launcher.checks.engines import check_trackers
from pa_npu.telemetry import records
from pa_npu.telemetry import trackers as feed
from pa_npu.telemetry.records import MetricsWriter, lost_records
from pa_npu.telemetry.tracker_libraries import TRACKERS
from pa_npu.telemetry.trackers import NAMES, Trackers, tracked, tracked_evaluation
from tests.helpers.tracked_run import evaluation, record, response

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0  # for what ought to take a moment, on a machine that is busy


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_lost", 0)
    monkeypatch.setattr(records, "_reported", set())


class Fake:
    """Calls to the stand-in library."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "told.jsonl"

    def told(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.file.read_text().splitlines()]
            if self.file.exists()
            else []
        )

    def steps(self, name: str = "train/loss") -> list[int]:
        return [
            reported["log"]["iteration"]
            for reported in self.told()
            if name in reported.get("log", {})
        ]

    def inits(self) -> list[dict[str, Any]]:
        return [reported["init"] for reported in self.told() if "init" in reported]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    library = tmp_path / "library"
    library.mkdir()
    (library / "wandb.py").write_text((ROOT / "tests/helpers/fake_wandb.py").read_text())
    monkeypatch.syspath_prepend(str(library))
    # imported anew, with the wishes of this test
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("FAKE_WANDB_FILE", str(tmp_path / "told.jsonl"))
    monkeypatch.delenv("FAKE_WANDB", raising=False)
    return Fake(tmp_path)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ANSWER_TIMEOUT_S", PATIENCE_S)


def telemetry(**settings: Any) -> TelemetryConfig:
    return TelemetryConfig(trackers=("wandb",), **settings)


def test_the_documented_table_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "trackers.md").read_text()
    trl = NAMES["trl"]
    verl = NAMES["verl"]
    for field in {**trl, **verl}:
        shown = (f"`{names[field]}`" if field in names else "" for names in (trl, verl))
        assert page.count(f"\n| `{field}` | {' | '.join(shown)} | ") == 1
    extras = (ROOT / "setup.py").read_text()
    assert all(f'"{requirement}"' in extras for _, requirement in TRACKERS.values())


def test_a_records_numbers_have_the_names_of_trl_or_of_verl_and_none_is_left_out() -> None:
    numbers = record(
        3,
        rewards={"math": 0.5, "my:f#2": 1.0},
        tokens_prompt=30,
        tokens_response=12,
        tpspd=9.0,
        kl=None,
        learned={"a": 2.0},
    )
    assert tracked(numbers, "trl") == {
        "train/global_step": 3.0,
        "train/loss": 0.5,
        "train/reward": 0.3,
        "train/rewards/math/mean": 0.5,
        "train/rewards/my:f#2/mean": 1.0,
        "pa_npu/tokens_prompt": 30.0,
        "pa_npu/tokens_response": 12.0,
        "pa_npu/tpspd": 9.0,
        "pa_npu/learned/a": 2.0,
    }
    verl = tracked(numbers, "verl")
    assert (
        verl["critic/score/mean"] == 0.3
        and verl["reward/math/mean"] == 0.5
        and verl["perf/throughput"] == 9.0
    )
    assert (
        verl["training/global_step"] == 3
        and verl["pa_npu/tokens_prompt"] == 30
        and len(verl) == len(tracked(numbers, "trl"))
    )
    assert tracked_evaluation(evaluation(2), "verl")["val-core/test/acc/greedy"] == 0.25
    assert tracked_evaluation(evaluation(2), "trl") == {
        "train/global_step": 2.0,
        "eval/test/greedy": 0.25,
        "eval/test/pass@4": 0.5,
    }


def test_a_tracker_gets_every_record_and_the_samples_and_a_resumed_run_goes_on_under_its_id(
    fake: Fake, tmp_path: Path
) -> None:
    """The first attempt is killed after iteration 4 was told and before 2 became its last
    checkpoint; 1 was never delivered.
    """
    run = tmp_path / "runs" / "sums"
    settings = telemetry(project="arithmetic")
    with MetricsWriter(run) as metrics, Trackers(run, settings, {"run.seed": 1}) as trackers:
        for iteration in range(5):
            kept = [
                response(iteration, 0, "x" * 9000 + "\ud800"),
                *(response(iteration, number) for number in (1, 2)),
            ]
            trackers.write_iteration(metrics.write(record(iteration)), kept)
        trackers.write_evaluation(metrics.write_evaluation(evaluation(0)))
    (init,) = fake.inits()
    assert (init["project"], init["name"]) == ("arithmetic", "sums")
    assert init["config"] == {"run.seed": 1} and init["resume"] == "allow"
    assert fake.steps() == [0, 1, 2, 3, 4] and fake.steps("eval/test/greedy") == [0]
    assert fake.told()[-1] == {"finish": True}
    columns, rows = next(
        reported["tables"]["completions"] for reported in fake.told() if reported.get("tables")
    )
    assert columns == [
        "step",
        "prompt",
        "completion",
        "answer",
        "math",
        "reward",
        "advantage",
        "correct",
        "tokens",
    ]
    assert (
        len(rows) == 2
        and rows[0][:2] == [0, "2+2?"]
        and rows[0][3:] == ["4", 1.0, 1.0, 0.5, True, 2]
    )
    assert len(rows[0][2]) < 4200 and rows[0][2].endswith("x?") and "[...]" in rows[0][2]

    kept_identity = run / "trackers" / "wandb.json"
    kept_identity.write_text(json.dumps({**json.loads(kept_identity.read_text()), "iteration": 0}))
    fake.file.unlink()
    settings = telemetry(project="another")
    with MetricsWriter(run, 3) as metrics, Trackers(run, settings, {}, 3) as trackers:
        for iteration in range(3, 6):
            trackers.write_iteration(metrics.write(record(iteration)))
    (again,) = fake.inits()
    assert again["id"] == init["id"] and again["project"] == "arithmetic"
    assert fake.steps() == [1, 2, 3, 4, 5], (
        "what was never delivered comes first, and nothing comes twice"
    )

    fake.file.unlink()
    with MetricsWriter(run, 4) as metrics, Trackers(run, settings, {}, 4) as trackers:
        for iteration in range(4, 7):
            trackers.write_iteration(metrics.write(record(iteration)))
    assert fake.steps() == [6], "iterations that ran again are not told again"
    assert lost_records() == 0


def test_a_table_has_all_rewards_of_groups_that_agents_and_reward_functions_reward(
    fake: Fake, tmp_path: Path
) -> None:
    by_agents = replace(response(0, 0), rewards={"environment": 0.5})
    with MetricsWriter(tmp_path) as metrics, Trackers(tmp_path, telemetry(), {}) as trackers:
        trackers.write_iteration(metrics.write(record(0)), [by_agents, response(0, 1)])
    columns, rows = next(
        reported["tables"]["completions"] for reported in fake.told() if reported.get("tables")
    )
    assert columns[4:6] == ["environment", "math"]
    assert [row[4:6] for row in rows] == [[0.5, None], [None, 1.0]]


def test_a_record_that_is_refused_is_counted_and_said_once_and_the_others_arrive(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "raise:1")
    with MetricsWriter(tmp_path) as metrics, Trackers(tmp_path, telemetry(), {}) as trackers:
        for iteration in (0, 1, 2):
            trackers.write_iteration(metrics.write(record(iteration)))
    assert fake.steps() == [0, 2] and len(fake.inits()) == 1
    assert lost_records() == 1
    printed = capsys.readouterr().out
    assert printed.count("| tracker wandb: ConnectionError: no route to host; the run goes on") == 1


def test_a_tracker_that_hangs_is_counted_and_goes_on_under_its_id_when_it_answers(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "hang:1")
    monkeypatch.setattr(feed, "ANSWER_TIMEOUT_S", 0.5)
    trackers = Trackers(tmp_path, telemetry(), {})
    deadline_s = time.monotonic() + PATIENCE_S
    while lost_records() == 0 and time.monotonic() < deadline_s:
        start_s = time.perf_counter()
        trackers.write_evaluation(evaluation(0))
        for iteration in range(4):
            trackers.write_iteration(record(iteration))
        assert time.perf_counter() - start_s < 0.5, "handing over must not wait"
        time.sleep(0.05)
    assert fake.steps() == [0] and lost_records() == 1
    Path(f"{fake.file}.go").touch()
    trackers.close(PATIENCE_S)
    assert fake.steps() == [0, 1, 2, 3] and lost_records() == 1 and len(fake.inits()) == 1
    assert capsys.readouterr().out.count("| tracker wandb: no answer within") == 1


def test_a_tracker_that_cannot_begin_is_given_up_and_the_next_attempt_gives_it_everything(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "no_key")
    trackers = Trackers(tmp_path, telemetry(), {})
    trackers.write_iteration(record(0))
    trackers.close()
    assert lost_records() == 1
    assert capsys.readouterr().out.count("api_key not configured") == 1
    monkeypatch.setattr("wandb.WISHES", {})
    with Trackers(tmp_path, telemetry(), {}, 1) as trackers:
        trackers.write_iteration(record(1))
    assert fake.steps() == [0, 1] and lost_records() == 1


def test_a_tracker_that_takes_nothing_never_holds_the_run(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "hang:0")
    trackers = Trackers(tmp_path, telemetry(), {})
    start_s = time.perf_counter()
    for iteration in range(200):
        trackers.write_iteration(record(iteration))
    handed_over_s = time.perf_counter() - start_s
    trackers.close(0.5)
    assert handed_over_s < 5 and lost_records() == 1
    assert time.perf_counter() - start_s - handed_over_s < 5, (
        "the end must not wait longer than it is told"
    )


def test_a_tracker_that_hangs_at_the_end_delays_it_by_its_deadline_only(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "hang_at_finish")
    monkeypatch.setattr(feed, "ANSWER_TIMEOUT_S", 3.0)
    trackers = Trackers(tmp_path, telemetry(), {})
    trackers.write_iteration(record(0))
    start_s = time.perf_counter()
    trackers.close()
    assert time.perf_counter() - start_s < 10 and lost_records() >= 1


def test_tensorboard_holds_scalars_and_samples_and_a_resumed_run_takes_back_what_comes_again(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = TelemetryConfig()
    for first in (0, 2):
        with (
            MetricsWriter(tmp_path, first) as metrics,
            Trackers(tmp_path, settings, {}, first) as trackers,
        ):
            for iteration in range(first, 4):
                kept = [response(iteration, 0, "a | b\nc")]
                trackers.write_iteration(metrics.write(record(iteration, loss=float(first))), kept)
            trackers.write_evaluation(metrics.write_evaluation(evaluation(first)))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (0, 0),
        (1, 0),
        (2, 2),
        (3, 2),
    ]
    assert [event.step for event in events.Scalars("eval/test/greedy")] == [0, 2]
    (text,) = events.Tensors("completions/text_summary")[-1].tensor_proto.string_val
    assert b"| step | prompt | completion |" in text and rb"| 3 | 2+2? | a \| b c | 4 |" in text
    assert lost_records() == 0


def test_a_tracker_that_is_not_installed_is_refused_in_one_line_and_secrets_stay_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(**settings: Any) -> Config:
        tree = {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"env": {"TOKEN": "secret"}},
        }
        return Config.model_validate({**tree, "telemetry": settings})

    check_trackers(config())
    for actual, words in (
        ({}, "swanlab is not installed in"),
        ({"swanlab": "0.3.1"}, "as 0.3.1, not as swanlab>=0.10"),
    ):
        monkeypatch.setattr(
            "pa_npu.launcher.checks.engines.distributions",
            lambda python, names, result=actual: result,
        )
        with pytest.raises(
            ConfigError, match=r"^telemetry\.trackers: swanlab .*pip install 'pa_npu\[swanlab\]'"
        ) as refused:
            check_trackers(config(trackers=["swanlab"]))
        assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"telemetry\.trackers: wandb is listed twice"):
        config(trackers=["wandb", "wandb"])
    assert "secret" not in json.dumps(tracked_config(config()))
    assert tracked_config(config())["rollout.env"] == ["TOKEN"]
