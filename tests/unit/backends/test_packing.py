"""A packed group equals its separate sequences, whatever is recomputed; and the check would see a wrong position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pa_npu.agents.tree import SessionTree, num_unique
from pa_npu.attention import PrefixLayout
from pa_npu.engines.protocol import Generation
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import pack
from pa_npu.samples.types import SampleBuilder
from tests.helpers.megatron import loaded_stage, model_config, single_process
from tests.helpers.models import make_model

PROMPT, RESPONSES = 7, (5, 3, 1, 6)


class NotRestarted(PrefixLayout):
    """A layout whose positions run through, as if the responses followed one another."""

    def position_ids(self, device: torch.device | str | None = None) -> torch.Tensor:
        return torch.arange(self.total)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    with single_process(model_config(path)):
        yield path


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(
        0, 128, (1, PROMPT + sum(RESPONSES)), generator=torch.Generator().manual_seed(3)
    )


def run_packed(
    stage: Any, tokens: torch.Tensor, layout: PrefixLayout, chunk: int = 64
) -> torch.Tensor:
    """Log-probs of all response tokens; gradients of their sum are left in the parameters."""
    rows = layout.predictor_rows()[PROMPT : tokens.shape[1]]
    output = stage(pad(tokens, layout.total), layout, rows, tokens[0, PROMPT:], 1.0, chunk)
    output.logprobs.sum().backward()
    return output.logprobs.detach()


def run_separately(stage: Any, tokens: torch.Tensor) -> torch.Tensor:
    logprobs, start = [], PROMPT
    for length in RESPONSES:
        sequence = torch.cat([tokens[:, :PROMPT], tokens[:, start : start + length]], dim=1)
        layout = PrefixLayout.from_sequences([PROMPT + length])
        rows = torch.arange(PROMPT - 1, PROMPT + length - 1)
        output = stage(sequence, layout, rows, sequence[0, PROMPT:], 1.0, 64)
        output.logprobs.sum().backward()
        logprobs.append(output.logprobs.detach())
        start += length
    return torch.cat(logprobs)


def pad(tokens: torch.Tensor, total: int) -> torch.Tensor:
    return torch.nn.functional.pad(tokens, (0, total - tokens.shape[1]))


def gradients(stage: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def worst_relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)


def test_packed_group_equals_separate_sequences(model: Path, tokens: torch.Tensor) -> None:
    packed, separate = loaded_stage(model), loaded_stage(model)
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))]).pad(4)
    assert layout.total > tokens.shape[1], "the case must contain padding"
    difference = (run_packed(packed, tokens, layout) - run_separately(separate, tokens)).abs().max()
    assert difference < 3e-6
    assert worst_relative(gradients(packed), gradients(separate)) < 5e-6


def test_the_comparison_sees_positions_that_do_not_restart(
    model: Path, tokens: torch.Tensor
) -> None:
    wrong = NotRestarted.from_groups([(PROMPT, list(RESPONSES))])
    stage = loaded_stage(model)
    difference = (run_packed(stage, tokens, wrong) - run_separately(stage, tokens)).abs().max()
    assert difference > 0.05


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute: str, model: Path, tokens: torch.Tensor) -> None:
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    plain, recomputed = loaded_stage(model), loaded_stage(model, trainer={"recompute": recompute})
    assert torch.equal(run_packed(plain, tokens, layout), run_packed(recomputed, tokens, layout))
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(recomputed)[name]), name


def test_bf16_stays_near_fp32(model: Path, tokens: torch.Tensor) -> None:
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    wide, narrow = loaded_stage(model), loaded_stage(model, model={"dtype": "bf16"})
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    ours, theirs = run_packed(narrow, tokens, layout, chunk=5), run_packed(wide, tokens, layout)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.05
    for name, gradient in gradients(wide).items():
        cosine = torch.cosine_similarity(
            gradients(narrow)[name].float().flatten(), gradient.flatten(), dim=0
        )
        assert cosine > 0.99, f"{name}: {cosine:.4f}"


def test_wrong_shapes_are_refused_with_the_remedy(model: Path, tokens: torch.Tensor) -> None:
    stage = loaded_stage(model)
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    with pytest.raises(ValueError, match=r"must be \(1, 22\)"):
        stage(tokens[:, 1:], layout, torch.tensor([0]), torch.tensor([0]), 1.0, 64)


def test_a_sessions_tree_has_the_gradients_of_its_branches_one_by_one_at_the_cost_of_its_unique_tokens(
    model: Path,
) -> None:
    """Compaction, a sub-agent and a retry, as samples of a group: log-probs and gradients of the
    trained tokens.
    """
    numbers = np.random.default_rng(5)

    def written(count: int) -> Generation:
        logprobs = np.full(count, -0.5, np.float32)
        return Generation(
            numbers.integers(0, 128, count, dtype=np.int32), logprobs, "", "stop", version=0
        )

    def shown(count: int) -> npt.NDArray[np.int32]:
        return numbers.integers(0, 128, count, dtype=np.int32)

    tree = SessionTree()
    first = tree.add(tree.root, shown(70), "", written(66), ())
    second = tree.add(first, shown(3), "", written(5), ())
    tree.add(second, shown(2), "", written(4), ())
    tree.add(second, shown(2), "", written(3), ())  # a retry
    tree.add(first, shown(4), "", written(6), ())  # a sub-agent that knows the first turn
    tree.add(tree.root, shown(9), "", written(7), ())  # a compacted context
    samples = tree.samples("", ended=True, reward=1.0)
    assert [sample.num_trained for sample in samples].count(0) == 0 and len(samples) == 4
    assert sum(sample.num_trained for sample in samples) == 66 + 5 + 4 + 3 + 6 + 7, "each turn once"
    identity = {"run_seed": 0, "iteration": 0, "index": 0, "prompt_id": 0}
    ones = np.ones(len(samples), np.float32)
    group = Group.from_samples(samples, ones, ones, **identity)
    packed = pack([group], True, 4)
    total, unique = sum(len(sample.tokens) for sample in samples), num_unique(samples)
    assert unique < packed.num_computed_tokens + 1 < total / 2

    def run(stage: Any, microbatch: Any) -> torch.Tensor:
        layout = microbatch.layout
        output = stage(
            microbatch.tokens[None], layout, microbatch.rows, microbatch.targets, 1.0, 64
        )
        output.logprobs.sum().backward()
        found: torch.Tensor = output.logprobs.detach()
        return found

    together, apart, twice = (loaded_stage(model) for _ in range(3))
    logprobs = run(together, packed)
    alone = torch.cat([run(apart, pack([group[n : n + 1]], False, 1)) for n in range(len(samples))])
    assert (logprobs - alone).abs().max() < 3e-6
    assert worst_relative(gradients(together), gradients(apart)) < 5e-6
    # control: a turn that its branches share would count in each of them
    for leaf in tree.leaves():
        sample = SampleBuilder(leaf.path[0].context)
        for node in leaf.path:
            if node is not leaf.path[0]:
                sample.show(node.context)
            assert node.written is not None
            sample.write(node.written.tokens, node.written.logprobs, 0)
        one = Group.from_samples([sample.finish(True, "")], ones[:1], ones[:1], **identity)
        run(twice, pack([one], False, 1))
    assert worst_relative(gradients(twice), gradients(apart)) > 0.1
