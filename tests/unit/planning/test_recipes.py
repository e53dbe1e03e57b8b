"""Recipes: what their comments claim, that each fits every device and overlay it names, and proposals where it does not."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pa_npu import platform as platforms
from pa_npu.config.keys import all_keys
from pa_npu.config.load import load_config
from pa_npu.config.removed import REMOVED
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.planning.automatic import with_share
from pa_npu.planning.engine_memory import engine_memory, kv_bytes_per_token, wanted_tokens
from pa_npu.planning.known_models import KNOWN, known_spec
from pa_npu.planning.memory import trainer_memory
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.plan_text import derived_lines
from pa_npu.planning.shortages import USABLE, shortages
from tests.helpers.recipes import (
    RECIPES,
    ROOT,
    SIZED,
    STAGES,
    WITH_IMAGES,
    claims,
    dry_run,
    planned,
    predicted_s,
    quoted,
    shipped,
)
from tools.foreign.names import RELATED, SAME

GIB = 2**30
OVERLAYS = {
    "7b": ["7b_16_devices.yaml", "7b_2_nodes.yaml", "7b_4_nodes.yaml"],
    "30b": [],
    "32b": ["32b_2_nodes_of_16.yaml", "32b_8_nodes.yaml"],
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_the_7b_recipe_fits_sharded_and_its_plan_says_how(kind: str) -> None:
    """Exact parts are the model's parameters, in fp32 with both moments, over the shards."""
    recipe = ROOT / "configs" / "grpo_qwen2.5_7b.yaml"
    memory, spec = platforms.typical_memory(kind), known_spec("Qwen2.5-7B")
    assert memory is not None and spec is not None
    split = [
        f"run.device={kind}",
        "placement.colocate=false",
        "rollout.engines=4",
        "trainer.devices=4",
    ]
    config = load_config([recipe, ROOT / "configs" / "backends" / "fsdp.yaml"], split)
    parts = dict(trainer_memory(config, spec).parts)
    assert (
        parts["weights"]
        == parts["gradients"]
        == parts["optimizer"] // 2
        == spec.num_parameters * 4 // 4
    )
    assert parts["frozen models"] == spec.num_parameters * 2 // 4
    layer = (spec.num_parameters - 2 * spec.vocab_size * spec.hidden_size) // spec.num_layers
    assert (
        parts["gathered layers"] > 2 * 2 * layer
        and parts["gathered layers"] < 2 * spec.num_parameters
    )
    assert not shortages(config, spec, memory[1], own_memory=True)
    lines = derived_lines(config, spec, memory[1], True)
    assert "trainer ranks         4 shards of every weight, each rank a replica" in lines
    copied = load_config(
        [recipe, ROOT / "configs" / "backends" / "fsdp.yaml"], [*split, "trainer.shards=2"]
    )
    assert dict(trainer_memory(copied, spec).parts)["optimizer"] == 2 * parts["optimizer"]


def size_of(recipe: Path) -> str:
    return next((size for size in ("32b", "30b") if size in recipe.name), "7b")


@pytest.mark.parametrize(
    "recipe",
    [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.nightly) for recipe in RECIPES[1:])],
    ids=lambda path: path.stem,
)
def test_the_arithmetic_in_a_recipe_is_what_dry_run_prints(recipe: Path) -> None:
    for arguments, claimed in claims(recipe):
        assert claimed == quoted(recipe, arguments), (
            f"{arguments}: run python -m tests.helpers.recipes"
        )
        assert len(claimed) == 6


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        *zip(STAGES, (8, 16), strict=True),
        # read by transformers; their shapes in CI: launcher/test_images.py
        *(pytest.param(recipe, 8, marks=pytest.mark.nightly) for recipe in WITH_IMAGES),
    ],
    ids=["sft", "distill", "qwen2.5 with images", "qwen3 with images"],
)
def test_the_recipe_of_a_stage_fits_and_says_what_dry_run_prints(
    recipe: Path, devices: int
) -> None:
    for arguments, claimed in claims(recipe):
        assert claimed == quoted(recipe, arguments), (
            f"{arguments}: run python -m tests.helpers.recipes"
        )
        config = load_config([recipe], [f"run.device={arguments[-1]}"])
        spec, memory = known_spec(config.model.path), platforms.typical_memory(arguments[-1])
        assert spec is not None and memory is not None and config.devices.num_devices == devices
        check_model(config, spec)
        assert not list(shortages(config, spec, memory[1], own_memory=True))
    assert len(list(claims(recipe))) == 2


# a dense model on one machine, and a mixture
IN_CI = ("grpo_qwen2.5_7b.yaml", "grpo_qwen3_30b_a3b.yaml")


@pytest.mark.skipif(
    platforms.missing("npu") is None, reason="plans with the typical device, not this one"
)
@pytest.mark.parametrize("kind", ["npu", "cuda"])
@pytest.mark.parametrize(
    "files",
    [
        files if files[-1] in IN_CI else pytest.param(files, marks=pytest.mark.nightly)
        for files in SIZED
    ],
    ids=lambda files: files[-1].removesuffix(".yaml").removeprefix("clusters/"),
)
def test_what_auto_finds_is_never_worse_than_the_recipe_and_on_npu_the_recipe_is_within_two_percent(
    files: tuple[str, ...], kind: str
) -> None:
    config, (nodes, devices) = shipped(files, kind), SIZED[files]
    assert config.devices.num_devices == nodes * devices
    actual = planned(files, kind)
    assert actual.devices.num_devices <= nodes * devices
    assert predicted_s(actual) <= 1.001 * predicted_s(config)
    if kind == "npu":
        assert predicted_s(config) <= 1.02 * predicted_s(actual), (
            f"{actual.rollout}: run python -m tests.helpers.recipes"
        )


@pytest.mark.skipif(
    platforms.missing("npu") is None, reason="plans with the typical device, not this one"
)
@pytest.mark.parametrize("kind", ["npu", pytest.param("cuda", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "nodes", [*(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 2, 4)), 8]
)
@pytest.mark.parametrize(
    "recipe",
    [
        recipe if recipe.name in IN_CI else pytest.param(recipe, marks=pytest.mark.nightly)
        for recipe in RECIPES
    ],
    ids=lambda path: path.stem,
)
def test_more_devices_are_never_planned_slower_than_the_recipes_own(
    recipe: Path, nodes: int, kind: str
) -> None:
    files = (recipe.name,)
    if nodes * 8 < math.prod(SIZED[files]):
        pytest.skip("fewer devices than the recipe is for")
    actual = planned(files, kind, (nodes, 8))
    assert predicted_s(actual) <= 1.001 * predicted_s(shipped(files, kind))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_every_recipe_fits_with_every_overlay(recipe: Path, kind: str) -> None:
    memory = platforms.typical_memory(kind)
    assert memory is not None
    clusters = [None, *OVERLAYS[size_of(recipe)]]
    for cluster, data in itertools.product(clusters, [None, "gsm8k.yaml", "deepscaler.yaml"]):
        files = [str(recipe)]
        files += [f"configs/clusters/{cluster}"] if cluster else []
        files += [f"configs/data/{data}"] if data else []
        config = load_config(files, [f"run.device={kind}"])
        spec = known_spec(config.model.path)
        assert spec is not None
        check_model(config, spec)
        config = with_share(config, spec, memory[1], True)
        lines = [
            shortage.line() for shortage in shortages(config, spec, memory[1], own_memory=True)
        ]
        assert not lines, f"{files} on {kind}: {lines}"


def test_32b_on_16_devices_needs_80_gib_and_on_64_says_how_many_devices_it_needs() -> None:
    files = [
        "--config",
        "configs/grpo_qwen2.5_32b.yaml",
        "--config",
        "configs/clusters/32b_2_nodes_of_8_80gib.yaml",
    ]
    notes = [line for line in dry_run(*files, "--device", "cuda") if "memory:" in line]
    assert notes == []
    with pytest.raises(
        ConfigError,
        match=r"take 68\.7 GiB of a device's 64\.0 GiB; set trainer\.devices=16 \(needs",
    ):
        load_and_check(files[1], files[3])


def load_and_check(*files: str) -> None:
    from pa_npu.launcher.run_checks import check_surroundings

    config = load_config(files, ["run.device=npu"])
    check_surroundings(config, None, forgive=True)


def test_the_cpu_overlay_keeps_a_recipes_keys() -> None:
    """Every key that the overlay sets, a recipe or the defaults know; and the recipe's algorithm
    stays as it is.
    """
    for recipe in RECIPES:
        plain = load_config([str(recipe)])
        tiny = load_config([str(recipe), "configs/clusters/cpu_tiny.yaml"], ["run.device=cpu"])
        assert tiny.devices.num_devices == 2
        assert tiny.algorithm == plain.algorithm
        assert tiny.rollout.responses_per_prompt == plain.rollout.responses_per_prompt


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-7B", 7.616),
        ("Qwen3-8B", 8.191),
        ("Qwen2.5-32B", 32.764),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.616),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    spec = known_spec(f"/somewhere/{name.lower()}")
    assert spec is not None and spec.num_parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_an_unknown_name_has_no_shape() -> None:
    assert known_spec("models/Qwen2.5-7B-finetuned") is None


def test_yaml_starters_parse() -> None:
    for path in (*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("launch/*.yaml")):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


@pytest.mark.parametrize("recipe", ["distill_tiny", "distill_two_tiny"])
def test_the_script_of_a_tiny_recipe_makes_its_models_and_questions(recipe: str) -> None:
    config = load_config([ROOT / "configs" / f"{recipe}.yaml"])
    script = (ROOT / "launch" / f"run_{recipe}.sh").read_text()
    made = {f".cache/{name}" for name in re.findall(r"^make_tiny (\w+) ", script, re.MULTILINE)}
    teachers = [str(teacher.model) for teacher in config.teacher.values()]
    data = [dataset.path for dataset in config.data.datasets]
    data += map(str, config.evaluate.sets.values())
    assert {str(Path(path).parent) for path in (config.model.path, *teachers, *data)} == made
    assert f'run_recipe {recipe} "$@"' in script


def test_the_script_from_nothing_to_a_reward_names_keys_and_goes_on_from_its_export() -> None:
    script = (ROOT / "launch" / "run_sft_grpo_tiny.sh").read_text()
    first, second = script.split("run_recipe grpo_tiny")
    (test,) = re.findall(r"^test=(\S+)$", first, re.MULTILINE)
    pattern = r"\b((?:data|schedule|optimizer)\.\w+=[\w./-]+)"
    keys = re.findall(pattern, first.replace(f"test={test}", ""))
    assert len(keys) == 5 and first.count('"$test"') == second.count('"$test"') == 1
    supervised = load_config([ROOT / "configs" / "sft_tiny.yaml"], [*keys, test])
    assert supervised.schedule.iterations == 150 and not supervised.rollout.has_engines
    keys = re.findall(pattern, second)
    rewarded = load_config([ROOT / "configs" / "grpo_tiny.yaml"], [*keys, test])
    # the reward is told the right answers, not those of the demonstrations
    assert str(rewarded.data.train).endswith("tiny_random/train.jsonl") and len(keys) == 3
    assert str(supervised.data.train).endswith("tiny_random/demonstrations.jsonl")
    (run_dir,) = re.findall(r"sft_tiny.yaml run.dir=(\S+)", first)
    assert f"model.path={run_dir}/hf" in second and f"[ ! -d {run_dir}/hf ]" in first


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_keys_in_the_documents_exist(document: Path) -> None:
    text = document.read_text()
    keys = {key.name for key in all_keys()}
    # it says what is gone; a configuration that names such a key hears the same
    if document.stem == "releases":
        keys |= REMOVED.keys()
    if document.stem in ("names", "images"):  # with tables of verl's names
        keys |= SAME["verl"].keys() | RELATED["verl"].keys()
    sections = "|".join(Config.model_fields)
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)(?:=[^`]*)?`", text)
    assert [name for name in named if name not in keys and not name.endswith("_")] == []


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    tensor, pipeline, replicas = (
        draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2, 4], [1, 2, 4])
    )
    responses = draw(st.sampled_from([4, 8, 16]))
    tree: dict[str, Any] = {
        "run": {"device": "npu"},
        "model": {"path": f"models/{draw(st.sampled_from(sorted(KNOWN)))}"},
        "data": {"train": "t", "max_prompt_tokens": draw(st.sampled_from([256, 1024]))},
        "rollout": {
            "engines": draw(st.sampled_from([1, 2, 4, 8])),
            "responses_per_prompt": responses,
            "max_response_tokens": draw(st.sampled_from([512, 4096, 8192])),
            "max_num_seqs": draw(st.sampled_from([16, 128, 512])),
            "window": draw(st.sampled_from(["auto", 64])),
        },
        "trainer": {
            "devices": tensor * pipeline * replicas,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        },
        "algorithm": {"kl_coef": draw(st.sampled_from([0.0, 0.01]))},
        "schedule": {
            "prompts_per_iteration": 64,
            "updates_per_iteration": draw(st.sampled_from([1, 2])),
        },
    }
    if pipeline == 1:
        tree["microbatch"] = {"max_tokens": draw(st.sampled_from([None, 32768]))}
    return tree


MORE_REPLICAS_THAN_PROMPTS = {
    "run": {"device": "npu"},
    "model": {"path": "models/Qwen3-30B-A3B"},
    "data": {"train": "t", "max_prompt_tokens": 256},
    "rollout": {"responses_per_prompt": 4, "max_response_tokens": 512, "max_num_seqs": 16},
    "trainer": {"devices": 2, "recompute": "none"},
    "schedule": {"prompts_per_iteration": 64},
    "microbatch": {"max_tokens": 32768},
}
"""Among the sizes that are tried for it, before the rules refuse them."""


@settings(max_examples=max(10, settings().max_examples // 50))
@example(MORE_REPLICAS_THAN_PROMPTS, 32)
@given(configurations(), st.sampled_from([32, 64, 80, 140]))
def test_a_proposal_passes_the_estimate_and_every_rule(tree: dict[str, Any], gib: int) -> None:
    """With the proposed keys the tree validates, the model divides, and nothing of that role is
    short any more.
    """
    config = Config.model_validate(tree)
    spec = known_spec(config.model.path)
    assert spec is not None
    actual = shortages(config, spec, gib * GIB, own_memory=True)
    assume(actual)
    for shortage in actual:
        assert "\n" not in shortage.line()
        if shortage.proposal is None:
            continue
        changed = Config.model_validate(with_changes(config.model_dump(), shortage.proposal))
        check_model(changed, spec)
        if shortage.role == "trainer":
            assert trainer_memory(changed, spec).total <= USABLE * gib * GIB
        else:
            cache = dict(engine_memory(changed, spec, gib * GIB).parts)["KV cache"]
            assert cache // kv_bytes_per_token(changed, spec) >= wanted_tokens(changed)
        assert shortage.role not in {
            another.role for another in shortages(changed, spec, gib * GIB, own_memory=True)
        }


def with_changes(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    return tree


def test_a_run_whose_state_does_not_fit_is_refused_and_one_whose_activations_do_not_is_warned() -> (
    None
):
    base = {"model": {"path": "models/Qwen2.5-7B"}, "data": {"train": "t"}}
    spec = known_spec("models/Qwen2.5-7B")
    assert spec is not None
    one_rank = Config.model_validate(base)
    (refused,) = (s for s in shortages(one_rank, spec, 64 * GIB, True) if s.role == "trainer")
    assert refused.fatal and "127.7 GiB of a device's 64.0 GiB" in refused.line()
    long = {
        "rollout": {"max_response_tokens": 8192},
        "trainer": {"devices": 4, "tensor_parallel": 4},
    }
    (warned,) = (
        s
        for s in shortages(Config.model_validate(base | long), spec, 64 * GIB, True)
        if s.role == "trainer"
    )
    assert not warned.fatal and warned.proposal is not None


def test_a_shared_host_memory_counts_all_processes() -> None:
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"kv_cache_gib": 16}}
    )
    spec = known_spec("models/Qwen2.5-7B")
    assert spec is not None
    (shortage,) = shortages(config, spec, 180 * GIB, own_memory=False)
    # 14 GiB of weights twice, 4 + 8 + 12 bytes of training per parameter, activations, and 16 GiB
    # of cache
    assert shortage.role == "host" and shortage.proposal == {"rollout.kv_cache_gib": 4.0}
    assert shortages(config, spec, 400 * GIB, own_memory=False) == []
