"""The chain of a run: lines follow one another through kills and resumes, hold no secrets, and tell where two runs part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pa_npu.errors import DataError
from pa_npu.telemetry.chain import CHAIN, read_chain
from pa_npu.telemetry.chain_comparison import Comparison, compare_chains
from tests.helpers.chained_run import SOFTWARE, Step, make_chained_run, step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_chained_run(tmp_path / "run", [step(i) for i in range(4)], tmp_path / "model")


def test_every_line_names_the_one_before_and_has_its_own_digest(run: Path) -> None:
    links = list(read_chain(run))
    assert [link.iteration for link in links] == [0, 1, 2, 3]
    assert [link.before for link in links] == ["", *(link.digest for link in links[:3])]
    assert all(link.digest == link.actual for link in links)
    assert len({link.digest for link in links}) == 4


def test_a_run_that_goes_on_from_a_checkpoint_has_the_chain_of_one_that_was_never_interrupted(
    run: Path, tmp_path: Path
) -> None:
    whole = (run / CHAIN).read_text()
    torn = whole.splitlines(keepends=True)
    (run / CHAIN).write_text("".join(torn[:3]) + torn[3][:200])  # killed while it wrote a line
    assert len(list(read_chain(run))) == 3, "half a line is left out"
    make_chained_run(run, [step(i) for i in range(2, 4)], tmp_path / "model", first=2)
    assert (run / CHAIN).read_text() == whole


def test_no_line_has_a_secret_or_a_text_of_the_data(run: Path) -> None:
    text = (run / CHAIN).read_text()
    assert "hf_secret_of_the_run" in (run / "config.yaml").read_text(), "negative control"
    for word in (
        "hf_secret",
        "HF_TOKEN",
        "what a prompt says",
        "what a response says",
        "train.jsonl",
        str(run),
    ):
        assert word not in text


def test_a_line_that_was_changed_is_seen_and_one_that_is_none_is_named(run: Path) -> None:
    lines = (run / CHAIN).read_text().splitlines(keepends=True)
    (run / CHAIN).write_text("".join([lines[0].replace('"groups": 4', '"groups": 5'), *lines[1:]]))
    assert [link.digest == link.actual for link in read_chain(run)] == [False, True, True, True]
    for broken in ("no object\n", "[]\n", '{"iteration": 1}\n', "{" * 100_000 + "\n"):
        (run / CHAIN).write_text(lines[0] + broken + lines[2])
        with pytest.raises(DataError, match=r"chain\.jsonl:2: is no line of a chain"):
            list(read_chain(run))


def test_damaged_numbers_of_responses_are_one_error(run: Path) -> None:
    link = next(read_chain(run))
    assert link.table().where(4) == (1, 1), "the fifth response is the second of the second group"
    for text in ("not base64!", link.responses[:40], ""):
        with pytest.raises(DataError, match=r"iteration 0: .*the line is damaged"):
            replace(link, responses=text).table()


# two runs


def compared(tmp_path: Path, other: list[Step], **others: object) -> Comparison:
    """Compares a run of four iterations with another of these."""
    first = make_chained_run(tmp_path / "first", [step(i) for i in range(4)], tmp_path / "model")
    second = make_chained_run(tmp_path / "second", other, tmp_path / "model", **others)
    return compare_chains(read_chain(first), read_chain(second))


def steps() -> list[Step]:
    return [step(i) for i in range(4)]


def test_equal_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    comparison = compared(tmp_path, steps())
    assert (comparison.verdict, comparison.iterations, comparison.causes) == ("equal", 4, ())


def test_one_bit_of_a_reward_is_found_and_named_before_what_follows_from_it(tmp_path: Path) -> None:
    another = steps()
    another[2].rewards.view(np.uint32)[3, 1] ^= 1
    another[2].gradient_norms[0] = 0.26
    another[2].weights[1] = another[3].weights[0] = "another"
    actual = compared(tmp_path, another)
    assert actual.verdict == "different" and actual.iterations == 3
    cause, *effects = actual.last
    assert (cause.iteration, cause.aspect, cause.response) == (2, "rewards", (3, 1))
    assert (
        "reward of response 1 of group 3 is " in cause.text
        and "1 bit apart; 1 of 12 differ" in cause.text
    )
    assert [effect.aspect for effect in effects][-2:] == ["gradient", "weights"]


def test_each_kind_of_difference_is_named_by_its_cause(tmp_path: Path) -> None:
    def data(numbers: Step) -> None:
        numbers.data["position"] += 1

    def token(numbers: Step) -> None:
        numbers.tokens[1, 2, 3] += 1

    def logprob(numbers: Step) -> None:
        numbers.logprobs.view(np.uint32)[2, 0, 5] ^= 1

    def gradient(numbers: Step) -> None:
        numbers.gradient_norms[0] = float(np.nextafter(0.25, 1))

    def weights(numbers: Step) -> None:
        numbers.weights[1] = "another"

    named = {
        data: ("data", "another position"),
        token: ("responses", "response 2 of group 1 has other tokens"),
        logprob: ("log-probs", "response 0 of group 2"),
        gradient: ("gradient", "update 0 is 0.25 and 0.25000000000000006"),
        weights: ("weights", "w2 and another"),
    }
    for number, (change, (aspect, text)) in enumerate(named.items()):
        another = steps()
        change(another[1])
        comparison = compared(tmp_path / str(number), another)
        assert comparison.verdict == "different" and comparison.last[0].iteration == 1
        assert comparison.last[0].aspect == aspect and text in comparison.last[0].text


def test_another_number_of_replicas_may_differ_by_rounding_and_no_more(tmp_path: Path) -> None:
    def rounded(gradient: float, logprob: float) -> list[Step]:
        made = [replace(numbers, replicas=1) for numbers in steps()]
        for numbers in made[1:]:
            numbers.gradient_norms[0] *= 1 + gradient
            numbers.logprobs[...] += np.float32(logprob)
            numbers.weights[:] = [f"{name} of one" for name in numbers.weights]
        return made

    two = {"trainer": {"devices": 2}}
    actual = compared(tmp_path / "near", rounded(1e-6, 1e-6), **two)
    assert (
        actual.verdict == "rounding"
        and actual.iterations == 4
        and "trainer.devices is 1 and 2" in actual.causes
    )
    assert compared(tmp_path / "far", rounded(1e-2, 0.0), **two).last[0].aspect == "gradient"
    assert compared(tmp_path / "farther", rounded(0.0, 1e-2), **two).last[0].aspect == "log-probs"
    without = compared(tmp_path / "without", rounded(1e-6, 1e-6))
    assert without.verdict == "different", "negative control: equal arrangements have equal bits"


def test_other_tokens_between_runs_that_may_round_differently_decide_nothing(
    tmp_path: Path,
) -> None:
    another = steps()
    another[2].tokens[0, 0, 0] += 1
    comparison = compared(tmp_path, another, software={**SOFTWARE, "engines": "vllm 0.12.0"})
    assert comparison.verdict == "undecided" and comparison.causes == (
        "engines: vllm 0.11.0 and vllm 0.12.0",
    )
    assert comparison.last[0].response == (0, 0) and comparison.iterations == 3


def test_rewards_have_no_rounding_whatever_else_differs(tmp_path: Path) -> None:
    another = steps()
    another[1].rewards.view(np.uint32)[0, 0] ^= 1
    comparison = compared(tmp_path, another, software={**SOFTWARE, "torch": "2.8.0"})
    assert comparison.verdict == "different" and comparison.last[0].aspect == "rewards"


def test_chains_are_compared_over_the_iterations_that_both_have(tmp_path: Path) -> None:
    first = make_chained_run(tmp_path / "first", steps(), tmp_path / "model")
    second = make_chained_run(tmp_path / "second", [step(2), step(3)], tmp_path / "model", first=2)
    comparison = compare_chains(read_chain(first), read_chain(second))
    assert (comparison.verdict, comparison.begin, comparison.iterations) == ("equal", 2, 2)
    assert compare_chains(read_chain(first), read_chain(first), 1, 3).iterations == 2
