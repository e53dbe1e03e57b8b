"""A plan says what the same devices take in other ways, what a change would gain, and where a prediction is too close to decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pa_npu import platform as platforms
from pa_npu.config.load import load_config
from pa_npu.launcher.cli import main
from pa_npu.planning import comparison
from pa_npu.planning.comparison import Compared, PlannedWay, compare, comparison_lines
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.platform.typical import typical_speed
from tests.helpers.recipes import ROOT

MIXTURE = str(ROOT / "configs" / "grpo_qwen3_30b_a3b.yaml")
SEVEN = str(ROOT / "configs" / "grpo_qwen2.5_7b.yaml")
DENSE = str(ROOT / "configs" / "grpo_qwen3_8b.yaml")
SPLIT = [
    "run.device=npu",
    "placement.colocate=false",
    "rollout.engines=1",
    "rollout.tensor_parallel=4",
    "trainer.devices=12",
    "trainer.tensor_parallel=4",
    "trainer.pipeline_parallel=3",
    "trainer.expert_parallel=4",
    "trainer.recompute=full",
]
pytestmark = pytest.mark.skipif(
    platforms.missing("npu") is None, reason="plans with the typical device, not this one"
)


@pytest.fixture(scope="module")
def split() -> Compared:
    """A mixture whose trainers wait for one engine."""
    config, spec = load_config([MIXTURE], SPLIT), known_spec("Qwen3-30B-A3B")
    assert spec is not None
    compared = compare(config, spec)
    assert compared is not None
    return compared


def test_a_plan_says_what_the_same_devices_take_in_turns_split_with_roles_and_one_version_behind(
    split: Compared,
) -> None:
    assert [way.name for way in split.ways] == [
        "synchronous",
        "in turns",
        "split",
        "with roles",
        "one version behind",
    ]
    lines = comparison_lines(split)
    assert lines[0].startswith(
        f"an iteration          {split.this.seconds:.3g} s, of it {split.this.border_s:.3g} s for "
        "new weights: 1 engine x 4 beside 12 ranks of TP 4 PP 3 EP 4"
    )
    for way, line in zip(split.ways, lines[1:6], strict=True):
        assert line.split("s (")[0].split() == [*way.name.split(), f"{way.seconds:.3g}"], line


def test_a_way_in_which_nothing_fits_is_named(split: Compared) -> None:
    lines = comparison_lines(replace(split, ways=split.ways[:-1], missing=("one version behind",)))
    assert lines[5] == "  one version behind  no sizes fit on these devices"


def test_no_way_is_worse_than_what_the_configuration_itself_would_take_in_it(
    split: Compared,
) -> None:
    config, spec = load_config([MIXTURE], SPLIT), known_spec("Qwen3-30B-A3B")
    assert spec is not None
    own_s = assumed_basis(config, spec, typical_speed("npu")).predict(config).iteration_s
    by_name = {way.name: way.seconds for way in split.ways}
    assert split.this.seconds == pytest.approx(own_s) and by_name["split"] <= own_s
    assert by_name["with roles"] <= by_name["in turns"] * 1.001


def test_a_side_that_idles_is_a_warning_with_what_would_not_idle(split: Compared) -> None:
    (line,) = [
        line for line in comparison_lines(split) if line.startswith("note: trainers idle for ")
    ]
    assert (
        split.this.trainers_idle > 0.5
        and split.best.sizes in line
        and f"{split.best.seconds:.3g} s" in line
    )
    assert split.best.seconds < 0.9 * split.this.seconds
    quiet = replace(split, this=replace(split.this, trainers_idle=0.1, engines_idle=0.1))
    assert not [line for line in comparison_lines(quiet) if line.startswith("note:")]


def test_the_change_of_a_key_that_gains_most_is_named_and_gains_it() -> None:
    """Full recomputation, where everything fits without, costs a third more of all training."""
    inputs = ["run.device=npu", "trainer.recompute=full", "optimizer.offload=false"]
    config, spec = load_config([DENSE], inputs), known_spec("Qwen3-8B")
    assert spec is not None
    compared = compare(config, spec)
    assert compared is not None and compared.change == {"trainer.recompute": "none"}
    basis = assumed_basis(config, spec, typical_speed("npu"))
    faster = load_config([DENSE], [*inputs, "trainer.recompute=none"])
    gained = 1.0 - basis.predict(faster).iteration_s / basis.predict(config).iteration_s
    assert compared.gain == pytest.approx(gained, abs=0.03) and compared.gain > 0.05
    assert (
        f"would gain most       trainer.recompute=none: {compared.gain:.0%} less"
        in comparison_lines(compared)
    )


THIS = PlannedWay("this", "8 engines x 1 on 8 ranks of TP 4", 100.0, 0.02, 0.02)


@pytest.mark.parametrize(
    ("turns_s", "message"),
    [
        (
            103.0,
            "gain over turns       3.0%, below 5%: too little to decide by; "
            "schedule.compare_iterations measures both",
        ),
        (120.0, "gain over turns       20%"),
        (80.0, "gain over turns       none: turns with other sizes are predicted to take 20% less"),
    ],
)
def test_a_gain_over_turns_below_five_percent_is_said_to_decide_nothing(
    turns_s: float, message: str
) -> None:
    ways = (replace(THIS, name="in turns", seconds=turns_s),)
    lines = comparison_lines(Compared(THIS, ways, None, 0.0, 100, together=True))
    assert message in lines
    assert "the whole run         2 h 47 min for 100 iterations" in lines


def test_no_way_takes_less_than_full_engines_and_trainers_and_the_plan_says_how_far_above_it_turns_are() -> (
    None
):
    config, spec = load_config([SEVEN], ["run.device=npu"]), known_spec("Qwen2.5-7B")
    assert spec is not None
    compared = compare(config, spec)
    assert compared is not None and compared.turns is not None and compared.work_s is not None
    exact = [way.seconds for way in compared.ways if way.name != "one version behind"]
    assert 0.5 * min(exact) < compared.work_s < min(exact)
    above = compared.turns.seconds / compared.work_s - 1.0
    assert (
        f"no order below        {compared.work_s:.3g} s, which full engines and trainers take; "
        f"turns are {above:.0%} above it, and no overlap can gain more"
    ) in comparison_lines(compared)


def test_a_split_is_also_compared_with_its_own_sizes_without_overlap(split: Compared) -> None:
    """Turns of all devices may be faster, which is no verdict on the overlap that a run measures."""
    synchronous = split.synchronous
    assert synchronous is not None and synchronous.sizes == split.this.sizes
    assert synchronous.seconds > split.this.seconds
    lines = comparison_lines(split)
    ratio = synchronous.seconds / split.this.seconds
    assert f"overlap               {ratio:.2f}x as fast as the same sizes synchronous" in lines
    (turns,) = [line for line in lines if line.startswith("gain over turns")]
    assert "placement.colocate=true" in turns and "less than this split" in turns

    spec = known_spec("Qwen3-8B")
    assert spec is not None
    colocated = compare(load_config([DENSE], ["run.device=npu"]), spec)
    assert colocated is not None and colocated.synchronous is None, "there it is in turns"


@pytest.mark.parametrize(("device", "is_said"), [("cpu", True), ("npu", False)])
def test_a_plan_says_what_it_assumes_and_that_a_plan_for_cores_is_none_for_devices(
    device: str, is_said: bool
) -> None:
    arguments = [f"run.device={device}", "placement.colocate=false", "trainer.devices=4"]
    arguments += ["rollout.engines=4"]
    config, spec = load_config([DENSE], arguments), known_spec("Qwen3-0.6B")
    assert spec is not None
    compared = compare(config, spec)
    assert compared is not None
    lines = comparison_lines(compared)
    typical = typical_speed(device)
    assert any(line.startswith(f"assumed               {typical.name} (") for line in lines)
    assert any(line.startswith("for cores alone ") for line in lines) is is_said


def test_several_keys_are_named_where_no_single_one_gains_as_much() -> None:
    ways = (
        replace(THIS, name="with roles", sizes="4 engines x 2 on 8 ranks of TP 2", seconds=70.0),
    )
    lines = comparison_lines(
        Compared(THIS, ways, {"trainer.tensor_parallel": 2}, 0.06, 10, together=True)
    )
    (line,) = [line for line in lines if line.startswith("would gain most")]
    assert (
        "several keys, which auto finds: 30% less (4 engines x 2 on 8 ranks of TP 2, with roles)"
        in line
    )


def test_a_run_one_version_behind_is_as_long_as_its_longer_side() -> None:
    inputs = [
        "run.device=npu",
        "placement.colocate=false",
        "rollout.engines=4",
        "trainer.devices=4",
    ]
    spec = known_spec("Qwen3-8B")
    assert spec is not None
    config = load_config([DENSE], [*inputs, "schedule.max_staleness=1"])
    basis = assumed_basis(config, spec, typical_speed("npu"))
    sides = basis.predict(config, streams=False)
    this = comparison._this(basis, config)
    assert this.seconds == pytest.approx(max(sides.generate_s, sides.train_s) + sides.border_s)
    assert min(this.engines_idle, this.trainers_idle) == pytest.approx(
        sides.border_s / this.seconds
    )


def test_engines_that_run_already_are_not_compared_with_others() -> None:
    config, spec = load_config([DENSE], ["run.device=npu"]), known_spec("Qwen3-8B")
    assert spec is not None
    attached = config.rollout.model_copy(update={"attach": ("http://a",)})
    assert compare(config.model_copy(update={"rollout": attached}), spec) is None


def test_the_command_prints_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", DENSE, "--device", "npu"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "an iteration  ",
        "  in turns  ",
        "  split  ",
        "  with roles  ",
        "  one version behind",
        "the whole run  ",
    ):
        assert f"\n{line}" in printed
    assert "\ngain over turns  " in printed and "\nwould gain most  " in printed
