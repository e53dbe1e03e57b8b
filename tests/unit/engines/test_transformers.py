"""The transformers engine passes the suite of every engine; its command, and what it cannot do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pa_npu.config.schema import Config
from pa_npu.engines.registry import engine_kind
from pa_npu.engines.transformers.server import load_server
from pa_npu.errors import ConfigError, DataError
from pa_npu.families.model_directory import end_token_ids, end_tokens_line, load_tokenizer
from pa_npu.families.spec import ModelSpec
from tests.helpers.engine_model_conformance import ModelConformance
from tests.helpers.engine_process import EngineProcess
from tests.helpers.engine_subjects import Subject, make_engine_model


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    directory = tmp_path_factory.mktemp("engine")
    engine = EngineProcess(
        "transformers", make_engine_model(directory / "model"), directory, {"max_num_seqs": 64}
    )
    try:
        asyncio.run(engine.wait_ready())
        yield engine.subject()
    finally:
        engine.kill()


class TestTransformers(ModelConformance):
    pass


def config(rollout: dict[str, object], model: Path | str = "/models/tiny") -> Config:
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": "t", "max_prompt_tokens": 100},
            "rollout": {"backend": "transformers", "max_response_tokens": 50, **rollout},
        }
    )


def test_the_command_starts_its_server_with_the_lengths_of_the_configuration(subject):
    kind, spec = engine_kind("transformers"), ModelSpec.read(str(subject.model))
    chosen = config({"max_num_seqs": 7, "env": {"A": "b"}}, subject.model)
    kind.check(chosen)
    command = kind.command(chosen, spec, 0, 8123)
    assert command.argv[1:3] == ("-m", "pa_npu.engines.transformers.server")
    options = dict(zip(command.argv[3::2], command.argv[4::2], strict=True))
    assert (
        options["--model"] == str(subject.model)
        and options["--port"] == "8123"
        and options["--dtype"] == "fp32"
    )
    assert options["--max-model-len"] == "150" and options["--max-num-seqs"] == "7"
    assert (
        command.env["A"] == "b"
        and command.env["OMP_NUM_THREADS"] == "1"
        and command.scratch_env is None
    )
    assert not any("KEY" in name for name in command.env), "the key is the launcher's to give"
    trusting = chosen.model_copy(
        update={"model": chosen.model.model_copy(update={"trust_remote_code": True})}
    )
    assert set(kind.command(trusting, spec, 0, 8123).argv) - set(command.argv) == {
        "--trust-remote-code"
    }
    with pytest.raises(ConfigError, match="exceeds the 512 positions of"):
        kind.command(config({"max_response_tokens": 500}, subject.model), spec, 0, 1)


@pytest.mark.parametrize(
    ("rollout", "problem"),
    [
        (
            {"tensor_parallel": 2},
            "tensor_parallel: 2: the transformers engine computes on one device",
        ),
        ({"extra_args": ["--seed", "1"]}, "extra_args: the transformers engine knows no --seed"),
        ({"graph_mode": True}, "graph_mode: the transformers engine computes eagerly"),
    ],
)
def test_keys_that_it_would_not_read_are_refused(rollout, problem):
    with pytest.raises(ConfigError, match=rf"rollout.{problem}.*rollout.backend=vllm"):
        engine_kind("transformers").check_keys(config(rollout), None)


def test_a_response_ends_at_the_tokens_of_both_files_and_of_the_tokenizer_as_vllm_ends_it(
    tmp_path: Path,
) -> None:
    directory = make_engine_model(tmp_path / "model")
    spec = ModelSpec.read(str(directory))
    tokenizer = load_tokenizer(str(directory))
    known = {*spec.eos_token_ids, tokenizer.eos_token_id} - {None}
    assert set(end_token_ids(spec.path, spec.eos_token_ids, tokenizer)) == known
    for value, more in ([1, 67], {1, 67}), (68, {68}), (None, set()):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert set(end_token_ids(spec.path, spec.eos_token_ids, tokenizer)) == known | more
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 67]}')
    server = load_server(str(directory), "fp32", torch.device("cpu"), "key", 64, 4)
    server.close()
    assert server._end_token_ids == known | {1, 67}
    line = end_tokens_line(spec, tokenizer)
    assert line.startswith("a response ends at ") and "(token 67)" in line and "(token 1)" in line
    (directory / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(DataError, match="has a value that cannot be used"):
        end_token_ids(spec.path, spec.eos_token_ids, tokenizer)


def test_an_interpreter_without_what_it_needs_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{}'\n")
    python.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"rollout.python: .* has no torch, transformers, .*install it"
    ):
        engine_kind("transformers").check(config({"python": str(python)}))
