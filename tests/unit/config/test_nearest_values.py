"""A value that is misspelled is answered with the value that was probably meant."""

from __future__ import annotations

import pytest

from pa_npu.algorithm.rules import load_config
from pa_npu.config.user_code import check_name
from pa_npu.config.words import choose_among, nearest_name, three_digits
from pa_npu.errors import ConfigError

INPUTS = ["model.path=m", "data.train=t.jsonl"]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm.name=gpro", "grpo"),
        ("algorithm.name=dr_grpo", "dr-grpo"),
        ("algorithm.advantage=group_std", "group-std"),
        ("algorithm.loss=Clip", "clip"),
        ("algorithm.aggregation=token_mean", "token-mean"),
        ("algorithm.kl_estimator=K3", "k3"),
        ("schedule.order=promt", "prompt"),
        ("checkpoint.resume=atuo", "auto"),
        ("telemetry.trackers=[wandbb]", "wandb"),
        ("reward.functions=[{name: maht}]", "math"),
    ],
)
def test_a_misspelled_value_is_answered_with_the_nearest(override: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([], [*INPUTS, override])
    assert f"did you mean {meant}?" in str(refused.value)
    assert override.partition("=")[0] in str(refused.value)


@pytest.mark.parametrize(
    "override",
    ["algorithm.kl_in=sideways", "telemetry.trackers=[comet]", "run.device=tpu", "run.device=gpu"],
)
def test_a_value_that_is_near_to_none_is_answered_with_all(override: str) -> None:
    """Negative control: a guess that is far off would mislead."""
    with pytest.raises(ConfigError) as refused:
        load_config([], [*INPUTS, override])
    assert "did you mean" not in str(refused.value) and "use " in str(refused.value)


def test_a_kind_of_backend_that_is_misspelled_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean fsdp\?"):
        check_name("trainer.backend", "fdsp", ("megatron", "fsdp"), "module:NAME")


def test_an_entry_that_is_no_section_is_answered_with_its_keys() -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions\.0.*\{name, weight, pattern"):
        load_config([], [*INPUTS, "reward.functions=[math]"])


def test_names_differ_by_case_and_by_dash_or_underscore_only() -> None:
    assert nearest_name("LEAVE_ONE_OUT", ["centred", "leave-one-out"]) == "leave-one-out"
    assert nearest_name("zzz", ["centred", "leave-one-out"]) is None
    assert choose_among("zzz", ["centred"]) == "use one of these"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1028.7, "1030"), (123456.0, "123000"), (24.2, "24.2"), (29.04, "29"), (0.2651, "0.265")],
)
def test_a_number_of_a_sentence_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text
