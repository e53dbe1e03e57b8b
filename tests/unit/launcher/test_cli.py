"""`pa-npu`: every sub-command of the table exists and is imported only when it is called; help and mistakes stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pa_npu import __version__
from pa_npu.config.foreign_names import FOREIGN
from pa_npu.config.keys import all_keys, keys_help
from pa_npu.config.schema import Config
from pa_npu.launcher.cli import _MODULES, SUBCOMMANDS, _parser, main

ROOT = Path(__file__).resolve().parents[3]
REQUIRED = {
    "join": ["h:1"],
    "export": ["--checkpoint", "c", "--output", "o"],
    "report": ["r"],
    "evaluate": ["--model", "m"],
    "view": ["r"],
    "verify": ["r"],
    "diff": ["r", "s"],
}
HEAVY = ("torch", "transformers", "megatron", "vllm", "pydantic")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_its_functions_its_help_and_its_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pa-npu ")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and SUBCOMMANDS[name] in " ".join(capsys.readouterr().out.split())
    assert callable(
        _parser([name, *REQUIRED.get(name, ())]).parse_args([name, *REQUIRED.get(name, ())]).main
    )


def test_every_subcommand_of_a_module_is_in_the_table() -> None:
    for module in {"subcommands", *_MODULES.values()}:
        file = ROOT / "pa_npu" / "launcher" / f"{module.replace('.', '/')}.py"
        functions = {
            node.name
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        named = {name.removesuffix("_options") for name in functions if name.endswith("_options")}
        assert named - {"configuration"} <= SUBCOMMANDS.keys() and named & functions, file


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "code", ["import pa_npu", "from pa_npu.launcher.cli import main; main(['--version'])"]
)
def test_neither_the_package_nor_the_table_imports_anything_heavy(code: str) -> None:
    ending = f"import sys; print('loaded', sorted(set({HEAVY}) & set(sys.modules)))"
    code = f"try:\n    {code}\nexcept SystemExit:\n    pass\n{ending}"
    assert run_python(code).splitlines()[-1] == "loaded []"
    control = f"import pydantic; {ending}"
    assert run_python(control).splitlines()[-1] == "loaded ['pydantic']"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"pa-npu {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "the following arguments are required: RUN; see pa-npu report --help"),
        (["frobnicate"], "'frobnicate' is no sub-command of run, plan"),
        (["raport", "runs/none"], "did you mean report?"),
        (["rnu"], "did you mean run?"),
        ([], "a sub-command is needed: run, plan"),
        (["plan", "--device", "gpu"], "--device: invalid choice: 'gpu'"),
        (["selftest", "--device", "gpu"], "see pa-npu selftest --help"),
        (["plan", "my.yaml"], "--config my.yaml"),
        (["plan", "schedule.stream", "=", "false"], "without spaces around ="),
        (["plan", "--schedule.stream=false"], "schedule.stream=false"),
        (["plan", "--schedule.stream", "false"], "schedule.stream=VALUE"),
        (["run", "--help", "optimzer"], "did you mean optimizer?"),
        (["run", "--help", "rollout.n"], "did you mean rollout.responses_per_prompt?"),
        (["run", "--help", "optimzer.learning_rate"], "did you mean optimizer"),
        (
            ["report", "runs/none", "--frobnicate"],
            "error: command line: --frobnicate: unknown argument; see --help",
        ),
        (["plan", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_a_mistake_ends_with_2_and_says_in_one_line_what_it_was(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 2 and message in printed.err
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert printed.out == ""


def test_help_shows_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "rollout.engines"]) == 0
    printed = capsys.readouterr().out
    assert "rollout.engines  (" in printed and "rollout.max_engines" not in printed


def test_help_shows_the_keys_below_a_part_of_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "reward.judge"]) == 0
    printed = capsys.readouterr().out
    assert "reward.judge.url" in printed and "reward.functions" not in printed


def test_plan_is_a_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    keys = [
        "--config",
        "configs/grpo_qwen2.5_7b.yaml",
        "--device",
        "npu",
        "--device-memory-gib",
        "64",
    ]
    assert main(["plan", *keys]) == 0
    planned = capsys.readouterr().out
    assert main(["run", *keys, "--dry-run"]) == 0
    assert (
        planned == capsys.readouterr().out
        and "trainer memory" in planned
        and len(planned.splitlines()) < 60
    )
    assert "without a password" not in planned

    small = ["model.path=models/qwen3-0.6B", "data.train=t.jsonl", "run.device=cpu"]
    assert main(["plan", *small, "placement.host=0.0.0.0"]) == 0
    planned = capsys.readouterr().out
    assert "placement.host: 0.0.0.0 opens the run's store, without a password" in planned
    assert main(["plan", *small, "placement.host=0.0.0.0", "--full"]) == 0
    full = capsys.readouterr().out
    assert full.splitlines()[0] == f"# {planned.splitlines()[0]}"
    assert yaml.safe_load(full)["rollout"]["responses_per_prompt"] > 0, "a file that --config takes"


def test_a_plan_without_a_model_is_refused_unless_its_shape_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, remedy in (
        ("nowhere/model", "a known name, such as Qwen2.5-7B or Qwen3-8B"),
        ("models/Qwen2.5-8B", "a known name, such as Qwen2.5-7B"),
        ("models/mine.gguf", "the directory of an HF model"),
    ):
        assert main(["plan", f"model.path={path}", "data.train=t.jsonl", "run.device=cpu"]) == 2
        streams = capsys.readouterr()
        assert not streams.out and streams.err.count("\n") == 1, streams
        assert f"error: model.path: '{path}' does not exist" in streams.err, streams
        assert remedy in streams.err, streams

    known = ["plan", "model.path=models/qwen3-0.6B", "data.train=t.jsonl", "run.device=cpu"]
    assert main(known) == 0
    planned = capsys.readouterr().out
    assert "'models/qwen3-0.6B' is not here; planned with the published shape" in planned


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_a_sub_command_does_not_wait_for_torch(name: str) -> None:
    script = (
        "import contextlib, sys\n"
        "from pa_npu.launcher.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main([{name!r}, '--help'])\n"
        "sys.exit(','.join({'torch', 'transformers', 'megatron'} & set(sys.modules)) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, f"imported: {ended.stderr}"
    assert f"usage: pa-npu {name}" in ended.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothere", "nothere: does not exist; give the directory of a run"),
        ("file", "file: is not a directory; give the directory of a run"),
        ("empty", "empty: is no run directory, since it holds none of config.yaml"),
        ("begun", "begun: this run has no chain.jsonl yet, which is written with the first"),
        ("runs", "runs: is a folder of runs, not a run; give one of them, as in runs/b"),
    ],
)
def test_what_is_no_run_is_named_as_that_and_not_by_a_file_inside(
    name: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("empty", "begun", "runs/a", "runs/b"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "begun" / "config.yaml").touch()
    for run in ("runs/a", "runs/b"):
        (tmp_path / run / "chain.jsonl").touch()
    for arguments in (["verify", name], ["diff", name, name], ["verify", name, "--replay", "0:1"]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error


def test_help_is_short_and_that_of_a_section_has_its_keys_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 60
    for section in Config.model_fields:
        assert f"  {section} " in short
    assert main(["run", "--help", "rollout"]) == 0
    of_a_section = capsys.readouterr().out
    named = [
        line.split()[0]
        for line in of_a_section.splitlines()
        if line.startswith("  ") and line[2] != " "
    ]
    assert named == [key.name for key in all_keys() if key.name.startswith("rollout.")]
    assert main(["plan", "rollout", "--help"]) == 0 and capsys.readouterr().out == of_a_section
    assert main(["run", "--help", "all"]) == 0 and capsys.readouterr().out == keys_help() + "\n"
    assert main(["run", "--help", "rolout"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: command line: rolout: no section or key of the configuration"
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("rollout.n", "rollout.responses_per_prompt"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.rollout.n", "rollout.responses_per_prompt"),
        ("actor_rollout_ref.model.lora_rank", "lora.rank"),
        ("num_generations", "rollout.responses_per_prompt"),
        ("trainer.total_training_steps", "schedule.iterations"),
        ("trainer.n_gpus_per_node", "placement.devices_per_node"),
        ("beta", "algorithm.kl_coef"),
        ("optimizer.beta", "optimizer.betas"),
        ("algorithm.kl_coeff", "algorithm.kl_coef"),
    ],
)
def test_the_names_of_other_systems_lead_to_the_key_itself(
    theirs: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model.path=m", "data.train=t", f"{theirs}=1"]) == 2
    assert f"{theirs}: unknown key; did you mean {ours}?" in capsys.readouterr().err


def test_every_name_of_another_system_leads_to_a_key_that_exists_and_is_none_of_ours() -> None:
    ours = {key.name for key in all_keys()}
    assert set(FOREIGN.values()) <= ours and not FOREIGN.keys() & ours
    assert not FOREIGN.keys() & {name.rpartition(".")[2] for name in ours}
