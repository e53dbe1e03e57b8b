"""`auto` for sizes: the fastest predicted division that fits, within what is given, or one line that says why there is none."""

from __future__ import annotations

import re

import pytest

from pa_npu import platform as platforms
from pa_npu.config.load import load_config
from pa_npu.errors import ConfigError
from pa_npu.launcher.placement import place_nodes
from pa_npu.planning import automatic
from pa_npu.planning.comparison import compare
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.planning.shortages import shortages
from pa_npu.platform.typical import typical_speed
from tests.helpers.recipes import ROOT

RECIPE = str(ROOT / "configs" / "grpo_qwen2.5_7b.yaml")
ALL = tuple(f"{key}=auto" for key in automatic.KEYS)
EIGHT = ("run.device=npu", "placement.devices_per_node=8")
SPLIT = ("placement.colocate=false", "rollout.max_num_seqs=256")
pytestmark = pytest.mark.skipif(
    platforms.missing("npu") is None, reason="plans with the typical device, not this one"
)


def test_what_is_found_fits_and_is_no_slower_than_the_recipe_and_says_why() -> None:
    lines: list[str] = []
    actual = automatic.load([RECIPE], [*EIGHT, *ALL], lines.append)
    spec, memory = known_spec("Qwen2.5-7B"), platforms.typical_memory("npu")
    assert spec is not None and memory is not None
    assert actual.devices.num_devices == 8 and not [
        one for one in shortages(actual, spec, memory[1], True) if one.fatal
    ]
    typical = typical_speed("npu")
    by_hand = load_config([RECIPE], ["run.device=npu"])
    seconds, by_hand_s = (
        assumed_basis(one, spec, typical).predict(one).iteration_s for one in (actual, by_hand)
    )
    assert seconds < 1.02 * by_hand_s
    (line,) = lines
    assert (
        line.startswith("auto: rollout.engines=")
        and "is predicted at" in line
        and "8 x Ascend 910B" in line
    )
    assert automatic.load([RECIPE], [*EIGHT, *ALL], lines.append) == actual, (
        "a run that goes on has the same sizes"
    )


def test_sizes_that_a_recipe_gives_do_not_keep_auto_from_counting_its_devices() -> None:
    """TP 4, PP 3 and EP 4 share their ranks: 12 of them are a whole replica, not 48."""
    mixture = str(ROOT / "configs" / "grpo_qwen3_30b_a3b.yaml")
    sizes = (
        "trainer.tensor_parallel=4",
        "trainer.pipeline_parallel=3",
        "trainer.expert_parallel=4",
    )
    some = (
        "rollout.engines=auto",
        "trainer.devices=auto",
        "placement.colocate=auto",
        "rollout.tensor_parallel=auto",
    )
    inputs = [
        "run.device=npu",
        "placement.devices_per_node=16",
        "trainer.recompute=full",
        *sizes,
        *some,
    ]
    actual = automatic.load([mixture], inputs, lambda line: None)
    assert actual.devices.num_devices <= 16 and actual.trainer.devices == 12


def devices_of(sizes: str) -> int:
    """Devices of a way, as its line has them: engines beside ranks, or on them."""
    engines, shards, where, ranks = re.match(  # type: ignore[union-attr]
        r"(\d+) engines? x (\d+) (on|beside) (\d+) rank", sizes
    ).groups()
    return int(ranks) + (int(engines) * int(shards) if where == "beside" else 0)


def test_teachers_keep_their_devices() -> None:
    recipe = str(ROOT / "configs" / "distill_qwen3_8b.yaml")
    auto = ("rollout.engines=auto", "trainer.devices=auto", "placement.devices_per_node=16")
    said: list[str] = []
    found = automatic.load([recipe], ["run.device=npu", *auto], said.append)
    assert found.devices.num_policy_devices <= 12 and found.devices.num_teacher_devices == 4
    assert "on 12 x Ascend 910B" in said[0]
    spec = known_spec("Qwen3-8B")
    assert spec is not None
    ways = compare(found, spec, typical_speed("npu")).ways
    assert ways and all(devices_of(way.sizes) <= 12 for way in ways)
    with pytest.raises(
        ConfigError, match="no device for engines and trainers: teachers have 4 of 4"
    ):
        few = ("rollout.engines=auto", "placement.devices_per_node=4")
        automatic.load([recipe], ["run.device=npu", *few], said.append)


@pytest.mark.parametrize("mode", [(), ("placement.colocate=auto",), ("placement.colocate=true",)])
def test_auto_finds_engines_on_the_trainers_devices_where_none_fit_beside_them(
    mode: tuple[str, ...],
) -> None:
    """An engine of 8 and 16 ranks that share the experts are 24 devices, unless they share theirs."""
    mixture = str(ROOT / "configs" / "grpo_qwen3_30b_a3b.yaml")
    asked = ("rollout.engines=auto", "trainer.devices=auto", "placement.devices_per_node=16")
    actual = automatic.load([mixture], ["run.device=npu", *asked, *mode], lambda line: None)
    assert actual.placement.colocate and actual.devices.num_devices == 16
    assert actual.placement.devices_per_node == 16
    by_hand = load_config([mixture], ["run.device=npu"])
    spec = known_spec("Qwen3-30B-A3B")
    assert spec is not None
    predicted_s, by_hand_s = (
        assumed_basis(config, spec, typical_speed("npu")).predict(config).iteration_s
        for config in (actual, by_hand)
    )
    assert predicted_s <= 1.001 * by_hand_s


def test_what_auto_cannot_fit_is_a_line_about_the_devices_and_blames_no_key_that_is_auto() -> None:
    mixture = str(ROOT / "configs" / "grpo_qwen3_30b_a3b.yaml")
    asked = ("run.device=npu", "rollout.engines=auto", "trainer.devices=auto")
    for inputs in (
        ("placement.devices_per_node=2",),
        ("placement.devices_per_node=16", "placement.colocate=false"),
    ):
        with pytest.raises(ConfigError, match=r"auto found nothing for .* do not fit on"):
            automatic.load([mixture], [*asked, *inputs], lambda line: None)


def test_recomputation_offload_stages_and_experts_are_chosen_too() -> None:
    mixture = str(ROOT / "configs" / "grpo_qwen3_30b_a3b.yaml")
    lines: list[str] = []
    actual = automatic.load(
        [mixture], ["run.device=npu", "placement.devices_per_node=16", *ALL], lines.append
    )
    spec, memory = known_spec("Qwen3-30B-A3B"), platforms.typical_memory("npu")
    assert spec is not None and memory is not None and actual.devices.num_devices == 16
    assert not [one for one in shortages(actual, spec, memory[1], True) if one.fatal]
    for key in (
        "trainer.recompute",
        "optimizer.offload",
        "trainer.pipeline_parallel",
        "trainer.expert_parallel",
    ):
        assert f"{key}=" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ((), lambda actual: not actual.placement.colocate and actual.devices.num_devices <= 8),
        (
            ("trainer.devices=4",),
            lambda actual: actual.trainer.devices == 4 and actual.rollout.engines == 4,
        ),
        (
            ("trainer.tensor_parallel=4", "rollout.tensor_parallel=2"),
            lambda actual: actual.rollout.tensor_parallel == 2,
        ),
    ],
    ids=["separate", "trainers", "sizes"],
)
def test_what_is_given_stays(arguments: tuple[str, ...], kept: object) -> None:
    asked = [
        word
        for word in ("rollout.engines=auto", "trainer.devices=auto")
        if word.split("=")[0] + "=4" not in arguments
    ]
    actual = automatic.load([RECIPE], [*EIGHT, *SPLIT, *asked, *arguments], lambda line: None)
    assert callable(kept) and kept(actual), actual.rollout
    assert actual.rollout.max_num_seqs <= 256 and actual.schedule.prompts_per_iteration == 256


def test_an_engine_on_the_trainers_devices_stays_on_a_node() -> None:
    """8 devices beside a replica of TP=4 x PP=2 would be of two nodes; TP=8 trainers leave an
    engine of 4 within one.
    """
    large = str(ROOT / "configs" / "grpo_qwen2.5_32b.yaml")
    actual = automatic.load(
        [large], ["run.device=npu", "placement.devices_per_node=8", *ALL], lambda line: None
    )
    assert actual.placement.colocate and len(place_nodes(actual)) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*ALL, "run.device=npu"),
            "rollout.engines: auto needs to know how many devices there are, and they are not here",
        ),
        (
            (*ALL, "run.device=npu", "placement.devices_per_node=2"),
            "auto found nothing for 2 devices: 7.6 billion parameters do not fit",
        ),
        ((*EIGHT, "rollout.engines=automatic"), "rollout.engines"),
        ((*EIGHT, "rollout.max_num_seqs=auto"), "rollout.max_num_seqs"),
        ((*EIGHT, *ALL, "rollout.nonsense=1"), "rollout.nonsense"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        automatic.load([RECIPE], words, lambda line: None)
    assert message in str(refused.value) and "\n" not in str(refused.value)
