"""The commands that README and docs show, run as they are written, from a directory like a new user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pa_npu.config.load import dump_config, load_config
from pa_npu.evaluation.results import Judged, results_file, write_results
from pa_npu.launcher.cli import main
from tests.helpers.documented_commands import AS_WRITTEN, PLANNED, ROOT, arguments
from tests.helpers.finished_run import make_run
from tools import import_config, make_tiny_model

pytestmark = pytest.mark.integration


TRL = "model_name_or_path: .cache/tiny/model\nnum_generations: 4\n"
VERL = """
data: {train_files: train.jsonl, train_batch_size: 64, max_prompt_length: 128, max_response_length: 64}
actor_rollout_ref: {model: {path: .cache/tiny/model}, rollout: {n: 4}}
algorithm: {adv_estimator: remax}
"""
WORK = {"tokens_prompt": 1000, "tokens_response": 800, "tokens_computed": 1900, "devices": 4}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone after the quick start, with data, rewards and foreign configurations of a user beside
    it.
    """
    directory = tmp_path_factory.mktemp("clone")
    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    tiny = directory / ".cache" / "tiny"
    model = ["--out", str(tiny), "--random", "--train-questions", "128", "--test-questions", "8"]
    assert make_tiny_model.main(model) == 0
    for name in ("grpo_tiny", "sync"):
        metrics = make_run(directory / "runs" / name) / "metrics.jsonl"
        records = [json.loads(line) | WORK for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    quick_start = load_config([str(ROOT / "configs" / "grpo_tiny.yaml")])
    (directory / "runs" / "grpo_tiny" / "config.yaml").write_text(dump_config(quick_start))
    for version, right in ((0, 2), (20, 5)):
        answers = [
            Judged("test", number, "1+1?", "2", "greedy", 0, "2", "2", number < right, 1.0, 5, True)
            for number in range(6)
        ]
        write_results(results_file(directory / "runs" / "grpo_tiny", version), answers)
    for name in ("train", "test"):
        (directory / f"{name}.jsonl").symlink_to(tiny / "train.jsonl")
    (directory / "my_rewards.py").write_text(
        "def brevity(group):\n    return [float(len(t) < 9) for t in group.responses]\n"
    )
    (directory / "grpo.yaml").write_text(TRL)
    (directory / "ppo_trainer.yaml").write_text(VERL)
    (directory / "run_qwen3_8b.sh").write_text(
        "G=8\npython3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$G trainer.total_epochs=3 "
        "\\\n  $@\n"
    )
    (directory / "train.py").write_text(
        "trainer = GRPOTrainer('m', [right], args=GRPOConfig('runs/a'))\n"
    )
    return directory


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("PYTHONPATH", f"{home}:{ROOT}")
    monkeypatch.setenv("COLUMNS", "80")


def run(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    program, *inputs = [*arguments(command), *more]
    assert program == "pa-npu" or [program, inputs.pop(0)] == ["python", "tools/import_config.py"]
    try:
        code = main(inputs) if program == "pa-npu" else import_config.main(inputs)
    except SystemExit as ended:  # argparse's own, for --help
        code = int(ended.code or 0)
    output = capsys.readouterr()
    assert code == 0, f"{command}\n{output.out}\n{output.err}"
    return output.out + output.err


@pytest.mark.parametrize("command", AS_WRITTEN)
def test_a_command_as_it_is_written(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert AS_WRITTEN[command] in run(command, capsys)


@pytest.mark.parametrize("command", PLANNED)
def test_a_run_as_it_is_written_can_start(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, here in PLANNED[command].items():
        assert name in command
        command = command.replace(name, here)
    printed = run(command, capsys, "--dry-run")
    assert any(shown in printed for shown in ("first prompt", "first row", "of the first pair"))
