"""The recipes of docs/architecture.md: each block of code there is a file, and does what its heading says when a key names it.

What a recipe touches beside its own file is told in the registrations below: at most one line.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.algorithm.advantages import group_advantages
from pa_npu.algorithm.policy_losses import find_policy_loss
from pa_npu.algorithm.trial import _made_up_batch, check_algorithm
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.engines.registry import engine_kind
from pa_npu.environments.registry import make_environment, opened
from pa_npu.families import spec as families
from pa_npu.families.spec import ModelSpec
from pa_npu.rewards.check import check_reward_functions, sample_group
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.samples.rollout_buffer import RolloutBuffer, run_columns
from pa_npu.samples.types import SampleBuilder
from tests.unit.environments.test_environments import PROMPT, TOKENIZER, Scripted, episode

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"```python file=(\S+)\n(.*?)```", ARCHITECTURE, re.DOTALL))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every recipe's file, importable here and in processes that are started."""
    for name, code in RECIPES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in RECIPES:
        sys.modules.pop(name.removesuffix(".py"), None)


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


def test_every_seat_has_its_recipe() -> None:
    assert sorted(RECIPES) == [
        "my_advantage.py",
        "my_backend.py",
        "my_column.py",
        "my_engine.py",
        "my_environment.py",
        "my_loss.py",
        "my_reward.py",
        "my_sessions.py",
        "toy_platform.py",
        "yi.py",
    ]


def test_the_files_that_a_prompt_passes_exist() -> None:
    way = ARCHITECTURE.partition("## A prompt's way")[2].partition("\n## ")[0]
    actual: list[str] = []
    for row in re.findall(r"^\|[^|]*\|([^|]*)\|", way, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            actual.append(name if "/" in name else f"{folder}/{name}")
    assert all((ROOT / "pa_npu" / name).is_file() for name in actual), actual


def test_a_loss_and_an_advantage() -> None:
    own = config(algorithm={"loss": "my_loss:soft_clip", "advantage": "my_advantage:best_of"})
    check_algorithm(own)
    assert group_advantages(np.array([0, 1, 1], np.float32), "my_advantage:best_of").tolist() == [
        -0.5,
        0.5,
        0.5,
    ]


def test_a_column() -> None:
    own = config(algorithm={"loss": "my_column:weighted"})
    check_algorithm(own)
    (column,) = run_columns(own).declared
    sample = SampleBuilder(np.arange(2, dtype=np.int32))
    values = np.arange(18, dtype=np.float32).reshape(3, 3, 2)
    sample.write(np.arange(3, dtype=np.int32), -np.ones(3, np.float32), 0, {column: values})
    samples, zeros = [sample.finish(True, "")], np.zeros(1, np.float32)
    group = Group.from_samples(
        samples, zeros, zeros + 1, run_seed=0, iteration=0, index=0, prompt_id=0
    )
    buffer = RolloutBuffer(StoreChannel(dist.HashStore()), "run", 1, columns=run_columns(own))
    buffer.put(group, 0, 0)
    (microbatch,) = build_microbatches(buffer.read(0, 0, 0), 1, True, 1)
    batch = replace(
        _made_up_batch(), **{"columns": microbatch.columns, "advantages": microbatch.advantages}
    )
    batch = replace(batch, logprobs=torch.full((3,), -1.0))
    terms = find_policy_loss(own.algorithm.loss)(batch, own.algorithm)
    assert terms.loss.tolist() == values.mean((1, 2)).tolist(), (
        "-A log pi with A = 1, each times its own weight"
    )


async def test_a_reward() -> None:
    own = config(reward={"functions": [{"name": "my_reward:brevity"}], "workers": 1})
    group = sample_group("What is 6*7?", "42", {}, 4)
    await asyncio.to_thread(check_reward_functions, own, group)
    async with RewardPool(own.reward) as pool:
        assert (await pool.score(group)).total.tolist() == [
            float(len(text) < 20) for text in group.responses
        ]


async def test_an_environment() -> None:
    own = config(
        environment={"name": "my_environment:SecondThoughts"}, rollout={"max_response_tokens": 60}
    )
    samples = await episode(make_environment(own, TOKENIZER), Scripted([["#### 41", "#### 42"]]), 2)
    for sample in samples:
        spoken = np.flatnonzero(np.diff(sample.trained.astype(int)))
        assert len(spoken) == 3 and sample.prompt_length == len(PROMPT.tokens), (
            "asked, answered, asked, answered"
        )
        assert sample.text == "#### 41#### 42"


async def test_an_environment_that_opens_a_process_and_makes_several_samples_of_an_attempt() -> (
    None
):
    own = config(environment={"name": "my_sessions:Sessions"}, rollout={"max_response_tokens": 60})
    async with opened(make_environment(own, TOKENIZER), 30.0) as environment:
        samples = await episode(environment, Scripted([["#### 41"]] * 7), 4)
        process = environment.process  # type: ignore[attr-defined]
        assert len(samples) == 3 + PROMPT.prompt_id % 5 == 7 and process.returncode is None
    assert process.returncode is not None


def test_an_engine(tmp_path: Path) -> None:
    own = config(rollout={"backend": "my_engine:KIND"})
    kind = engine_kind(own.rollout.backend)
    spec = ModelSpec.read(llama_directory(tmp_path, "llama"))
    command = kind.command(own, spec, 0, 8000)
    assert command.env["MY_ENGINE"] == "1" and "8000" in command.argv


def test_a_training_backend() -> None:
    own = config(trainer={"backend": "my_backend:BACKEND"})
    assert backend_module(own.trainer.backend).changes()[-1] == "nothing more"


def test_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    from yi import Yi  # type: ignore[import-not-found]

    families.register(Yi())  # the line of registration
    spec = ModelSpec.read(llama_directory(tmp_path, "yi"))
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("yi", 2, 64)


def test_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    row = platforms._Seat("toy_platform:ToyPlatform", lambda: None)  # the line of registration
    monkeypatch.setitem(platforms._SEATS, "toy", row)
    assert platforms.get("toy").name == "toy" and platforms.get("toy").comm_backend == "gloo"


def llama_directory(tmp_path: Path, model_type: str) -> str:
    directory = tmp_path / "model"
    directory.mkdir()
    raw = {
        "model_type": model_type,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(raw))
    return str(directory)
