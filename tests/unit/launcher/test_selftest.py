"""`pa-npu selftest`: a part that fails in any way is named, the others go on, and the folder can be sent to others."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pa_npu.errors import FAILED
from pa_npu.launcher.cli import main
from pa_npu.launcher.selftest import command, parts
from pa_npu.launcher.selftest.parts import Bench, Finding, SelftestPart

KEY = "sk-abcdefghijklmnop1234"


def passes(bench: Bench) -> list[Finding]:
    print(f"Authorization: Bearer {KEY}")
    return [Finding("difference", 1e-7, 1e-6), Finding("tokens", 3.0)]


def misses(bench: Bench) -> list[Finding]:
    return [Finding("difference", 1e-3, 1e-6), Finding("reward", 0.1, 0.3, least=True)]


def crashes(bench: Bench) -> list[Finding]:
    os.abort()


def raises(bench: Bench) -> list[Finding]:
    raise RuntimeError("no such operator")


def hangs(bench: Bench) -> list[Finding]:
    time.sleep(600)
    return []


def test_each_way_to_fail_is_named_and_the_other_parts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tuple(
        SelftestPart(
            function.__name__,
            f"{__name__}:{function.__name__}",
            "a promise",
            60 if function is not hangs else 3,
        )
        for function in (misses, crashes, raises, hangs, passes)
    )
    monkeypatch.setattr(command, "PARTS", table)
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path / "out")]) == FAILED
    output = capsys.readouterr().out
    assert "difference: 0.001, limit 1e-06" in output and "reward: 0.1, limit 0.3" in output
    assert (
        "1 of 5 parts passed" in output and "what failed: misses, crashes, raises, hangs" in output
    )
    report = (tmp_path / "out" / "report.md").read_text()
    for line in (
        "Failed: it was not done after 3 s, and was ended. Send logs/hangs.log",
        "RuntimeError: no such operator",
        "Failed: it ended with code -6",
        "| passes | a promise |",
    ):
        assert line in report, line
    known = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {part["name"]: part["ok"] for part in known["parts"]}["passes"] is True
    assert known["hardware"].startswith("yes: ") and known["installed"]["engines"]["transformers"]
    assert all(
        KEY not in file.read_text() for file in (tmp_path / "out").rglob("*") if file.is_file()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "attention,all"], "--only: all is no part; take some of versions, attention"),
        (
            ["--frobnicate"],
            "command line: --frobnicate is neither an option of selftest nor key=value",
        ),
        (["--acceptance", "m", "d", "--iterations", "0"], "--iterations: 0 is below 1"),
        (["--config", "recipe.yaml"], "--config: goes with --acceptance alone"),
        (["--out", "."], "is there already and not empty; name a new folder"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_the_numbers_of_the_host_pass() -> None:
    from pa_npu.launcher.selftest import numbers

    bench = Bench(Path("."), "cpu")
    assert all(
        finding.ok for part in (numbers.attention, numbers.operator) for finding in part(bench)
    )


def test_the_publish_group_of_two_interpreters_works_and_can_be_given_up(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (part,) = (part for part in parts.PARTS if part.name == "collectives")
    result = parts.run_part(part, Bench(tmp_path, "cpu", (f"rollout.python={sys.executable}",)))
    assert result.ok and len(result.findings) == 5, (
        result,
        (tmp_path / "logs" / "collectives.log").read_text(),
    )


def test_versions_outside_of_the_supported_rows_fail_and_a_single_device_has_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pa_npu.launcher.selftest import numbers, runs

    monkeypatch.setattr(numbers, "doctor", lambda config: 0)
    monkeypatch.setattr(numbers, "trainer_problems", lambda kind: [f"a torch that {kind} has not"])
    bench = Bench(tmp_path, "cpu")
    assert [finding.ok for finding in numbers.versions(bench)] == [True, False]

    assert "placement.colocate=true" not in runs.tiny_settings(bench)
    one = SimpleNamespace(device_count=lambda: 1)
    monkeypatch.setattr(runs.platforms, "get", lambda kind: one)
    settings = runs.tiny_settings(replace(bench, device="npu"))
    assert {"placement.colocate=true", "rollout.engines=1", "trainer.devices=1"} <= set(settings)


@pytest.mark.nightly
def test_acceptance_of_a_recipe_runs_it_in_both_modes(tmp_path: Path) -> None:
    from pa_npu.launcher.selftest import runs

    settings = [*runs.tiny_settings(Bench(tmp_path, "cpu")), "rollout.backend=transformers"]
    overrides = dict(word.split("=", 1) for word in settings)
    mine = {
        "model.path",
        "data.train",
        "schedule.iterations",
        "schedule.compare_iterations",
        "run.device",
    }
    recipe = tmp_path / "recipe.yaml"
    tree: dict[str, dict[str, object]] = {}
    for key, value in overrides.items():
        if key not in mine:
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = yaml.safe_load(value)
    recipe.write_text(yaml.safe_dump(tree))
    arguments = [
        "--acceptance",
        overrides["model.path"],
        overrides["data.train"],
        "--iterations",
        "2",
        "--config",
        str(recipe),
    ]
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) in (
        0,
        FAILED,
    )
    known = {
        part["name"]: part
        for part in json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    }
    for mode in ("periodic", "synchronous"):
        actual = {finding["name"]: finding["value"] for finding in known[mode]["findings"]}
        assert actual["iterations"] == 2 and actual["peak memory, host, a process"] > 0.1, known[
            mode
        ]
        assert actual["peak memory, device, a process"] == 0, "a CPU run has no device memory"


def test_a_limit_is_a_floor_or_a_ceiling() -> None:
    assert Finding("a", 1.0, 1.0).ok and not Finding("a", 1.1, 1.0).ok
    assert Finding("a", 1.0, 1.0, least=True).ok and not Finding("a", 0.9, 1.0, least=True).ok
    assert [part.name for part in parts.PARTS][:2] == ["versions", "attention"], (
        "what others need comes first"
    )


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (("npu", "cuda"), "testing cpu; npu cannot be tested: none; cuda cannot be tested: none\n"),
        (("npu",), "testing cuda; npu cannot be tested: none\n"),
        ((), "testing npu\n"),
    ],
)
def test_without_a_named_kind_the_first_that_is_here_is_tested_and_said(
    absent: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pa_npu.platform.missing", lambda kind: "none" if kind in absent else None)
    assert main(["selftest", "--out", "."]) == 2  # refused before anything is tested
    assert capsys.readouterr().out == message


def test_a_kind_of_device_that_is_not_here_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pa_npu.platform.missing", lambda kind: "there is none")
    assert main(["selftest", "--device", "npu", "--out", str(tmp_path / "report")]) == 2
    assert capsys.readouterr().err == (
        "error: --device: npu cannot be tested: there is none, or name another kind of device\n"
    )
    assert not (tmp_path / "report").exists()
