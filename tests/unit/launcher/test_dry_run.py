"""A dry run, the doctor and the help tell what there is, what is missing and what a run would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_npu import platform as platforms
from pa_npu.config.load import load_config
from pa_npu.engines import registry
from pa_npu.launcher import trainer_versions
from pa_npu.launcher.checks.machine import core_notes
from pa_npu.launcher.cli import main

pytestmark = pytest.mark.usefixtures("nothing_starts", "supported_versions")


def test_doctor_of_a_device_that_is_not_here_says_that_no_run_can_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--device", "npu"]) == 1
    out = capsys.readouterr().out
    assert "missing: run.device: npu cannot be used" in out and "a run can start" not in out


@pytest.mark.parametrize(("num_cores", "is_said"), [(1, True), (2, False), (3, False)])
def test_engines_and_trainers_that_share_cores_are_a_note(num_cores: int, is_said: bool) -> None:
    """The quick start's engine and trainer have two cores to themselves."""
    config = load_config([str(Path(__file__).parents[3] / "configs" / "grpo_tiny.yaml")], [])
    notes = core_notes(config, platforms.get("cpu"), num_cores)
    assert [note.partition(" (")[0] for note in notes] == (
        ["run.device: 2 processes"] if is_said else []
    )


def test_a_dry_run_prints_the_tree_and_its_arithmetic(
    capsys: pytest.CaptureFixture[str], base: list[str]
) -> None:
    assert main(["plan", *base, "--full", "schedule.iterations=3"]) == 0
    out = capsys.readouterr().out
    assert "iterations: 3" in out
    for line in (
        "# devices               2 =",
        "# trainer memory",
        "# engine memory",
        "# data.train: 16 prompts",
    ):
        assert line in out
    notes = [line for line in out.splitlines() if line.startswith("# note")]
    assert all("idle for" in note for note in notes), (
        "the plan may compare sides; nothing else is worth a note"
    )


def test_a_dry_run_forgives_what_this_machine_lacks_but_not_mistakes(
    capsys: pytest.CaptureFixture[str], base: list[str], tmp_path: Path
) -> None:
    assert (
        main(
            [
                "run",
                *base,
                "--dry-run",
                "--device",
                "npu",
                "data.train=/nowhere.jsonl",
                "trainer.devices=8",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "note: run.device: npu cannot be used" in out and "/nowhere.jsonl" in out
    (tmp_path / "broken.jsonl").write_text("{")
    assert main(["run", *base, "--dry-run", f"data.train={tmp_path / 'broken.jsonl'}"]) == 2


def test_doctor_tells_devices_versions_and_operators(
    capsys: pytest.CaptureFixture[str], base: list[str]
) -> None:
    assert main(["doctor", *base]) == 0
    out = capsys.readouterr().out
    for word in (
        "cpu            yes",
        "npu            no: ",
        "torch",
        "megatron-core",
        "ascendc",
        "a run can start",
    ):
        assert word in out


def test_doctor_names_each_stack_once_and_peft_where_it_is_missing(
    capsys: pytest.CaptureFixture[str], base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration with adapters cannot run without it; without a configuration it is one line
    among the packages.
    """
    there = registry.distributions  # which asks once

    def without_peft(python: str | None, names: tuple[str, ...]) -> dict[str, str]:
        return {name: version for name, version in there(python, names).items() if name != "peft"}

    monkeypatch.setattr("pa_npu.launcher.doctor.distributions", without_peft)
    monkeypatch.setattr("pa_npu.families.peft_directory.find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "  peft           not installed: adapters" in out and "missing: peft" not in out
    stack = trainer_versions.nearest_stack("cpu").name
    assert f"\n  cpu            {stack}: as supported\n" in out
    assert "trainers with megatron replace" in out and "what is installed stays as it is" in out
    assert main(["doctor", *base, "trainer.backend=fsdp"]) == 0, "trains without adapters"
    assert "replace" not in capsys.readouterr().out, "fsdp changes no other package"
    assert main(["doctor", *base, "trainer.backend=fsdp", "lora.rank=4"]) == 1
    assert (
        "missing: lora.rank: adapters need peft, which is not installed" in capsys.readouterr().out
    )


def test_help_lists_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "schedule"]) == 0
    assert "schedule.stream  (" in capsys.readouterr().out
