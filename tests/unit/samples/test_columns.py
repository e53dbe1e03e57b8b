"""Columns of any dtype and shape go from an environment and an engine to a loss; what is missing or unknown is one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import write
from pa_npu.environments.single_turn import samples_of
from pa_npu.errors import ConfigError
from pa_npu.samples.columns import ADVANTAGES, STORED, Column, GroupFormatError, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import build_microbatches, pack
from pa_npu.samples.rollout_buffer import RolloutBuffer, open_buffer
from pa_npu.samples.types import Sample, SampleBuilder
from pa_npu.samples.wire import from_bytes, to_bytes

MADE_UP = Column("made_up", "int16", (3, 2), "environment", "my_loss", elsewhere=-1)
EXPERT_CHOICES = Column(
    "expert_choices", "uint8", (4,), "engine", "the router", tokens="all", elsewhere=255
)
RUN = RunColumns((MADE_UP, EXPERT_CHOICES))
IDENTITY = {"run_seed": 0, "iteration": 0, "index": 0, "prompt_id": 0}
PROMPT = np.arange(3, dtype=np.int32)


def told(column: Column, tokens: np.ndarray) -> np.ndarray:
    """Values that say which token they belong to, and where in the shape."""
    places = np.arange(int(np.prod(column.shape)), dtype=np.int64).reshape(column.shape)
    return (tokens.reshape(-1, *[1] * len(column.shape)).astype(np.int64) * 10 + places).astype(
        column.type
    )


def generation(
    start: int, length: int, columns: tuple[Column, ...] = (MADE_UP, EXPERT_CHOICES)
) -> Generation:
    tokens = np.arange(start, start + length, dtype=np.int32)
    values = {column: told(column, tokens) for column in columns}
    return Generation(
        tokens, np.full(length, -0.5, np.float32), "", "stop", version=0, columns=values
    )


def two_turns(number: int, columns: tuple[Column, ...] = (MADE_UP, EXPERT_CHOICES)) -> Sample:
    """Expert choices are given for the prompt, and none for what the environment shows between."""
    inputs = {EXPERT_CHOICES: told(EXPERT_CHOICES, PROMPT)} if EXPERT_CHOICES in columns else None
    sample = SampleBuilder(PROMPT, inputs)
    write(sample, generation(10 + 100 * number, 2 + number, columns))
    sample.show(np.array([5, 6], np.int32))
    write(sample, generation(50 + 100 * number, 1, columns))
    return sample.finish(True, "")


def group_of(samples: list[Sample], index: int = 0) -> Group:
    rewards = np.arange(len(samples), dtype=np.float32)
    return Group.from_samples(samples, rewards, rewards + 1, **{**IDENTITY, "index": index})


def test_values_reach_the_targets_in_their_order_and_those_of_all_tokens_the_packed_rows() -> None:
    group = group_of([two_turns(number) for number in range(4)])
    parsed = from_bytes(to_bytes(group, RUN), RUN)
    for shared in (True, False):
        for microbatch in (
            *build_microbatches(parsed, 2, shared, 8),
            pack([parsed[:2], parsed[2:]], shared, 8),
        ):
            moved = microbatch.to("cpu")
            targets = moved.targets.numpy()
            assert moved.columns["made_up"].dtype == torch.int16
            np.testing.assert_array_equal(moved.columns["made_up"], told(MADE_UP, targets))
            np.testing.assert_array_equal(
                moved.columns["expert_choices"], told(EXPERT_CHOICES, targets)
            )
            tokens = moved.tokens.numpy()
            shown = np.isin(tokens, [5, 6])
            padding = np.arange(len(tokens)) >= moved.layout.total - moved.layout.padding
            wanted = np.where((shown | padding)[:, None], 255, told(EXPERT_CHOICES, tokens))
            np.testing.assert_array_equal(moved.packed["expert_choices"], wanted)


def test_responses_of_a_single_turn_bring_what_the_engine_filled() -> None:
    samples = samples_of(PROMPT, [generation(10, 3), generation(20, 1)])
    plain = samples_of(PROMPT, [generation(10, 3, ()), generation(20, 1, ())])
    for sample, without in zip(samples, plain, strict=True):
        assert all(
            np.array_equal(getattr(sample, name), getattr(without, name))
            for name in ("tokens", "versions")
        )
        np.testing.assert_array_equal(sample.columns[MADE_UP][3:], told(MADE_UP, sample.tokens[3:]))
        assert (sample.columns[MADE_UP][:3] == -1).all() and not without.columns


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_columns_of_any_type_and_shape_survive_the_wire_bit_for_bit_whole_in_parts_and_in_pieces(
    data: st.DataObject,
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    declared = []
    for number in range(data.draw(st.integers(0, 4))):
        shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
        tokens: Any = data.draw(st.sampled_from(["trained", "all"]))
        dtype = data.draw(st.sampled_from(sorted(STORED)))
        elsewhere = data.draw(st.sampled_from([0, 1]))
        declared.append(
            Column(f"column_{number}", dtype, shape, "environment", "a test", tokens, elsewhere)
        )
    columns = RunColumns(tuple(declared))

    def values(column: Column, length: int) -> np.ndarray:
        raw = random.integers(0, 100, (length, *column.shape))
        return (raw % 2 if column.dtype == "bool" else raw).astype(column.type)

    samples = []
    for _ in range(data.draw(st.integers(1, 4))):
        sample = SampleBuilder(
            PROMPT, {one: values(one, 3) for one in declared if one.tokens == "all"}
        )
        for length in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
            tokens = random.integers(0, 1000, length, dtype=np.int32)
            logprobs = -random.random(length, dtype=np.float32)
            sample.write(tokens, logprobs, 0, {one: values(one, length) for one in declared})
            sample.show(tokens)
        samples.append(sample.finish(True, ""))
    group = group_of(samples)
    data_bytes = to_bytes(group, columns)
    actual = from_bytes(data_bytes, columns)
    assert to_bytes(actual, columns) == data_bytes
    for column in declared:
        assert actual.columns[column].tobytes() == group.columns[column].tobytes()
        rest = b"".join(sample.columns[column].tobytes() for sample in samples[1:])
        assert len(samples) == 1 or actual[1:].columns[column].tobytes() == rest
    if declared:
        with pytest.raises(GroupFormatError, match="is unknown"):
            from_bytes(data_bytes)


def test_a_missing_column_is_one_line_with_who_fills_and_who_reads_it_on_both_sides_of_the_wire() -> (
    None
):
    group = group_of([two_turns(number, (EXPERT_CHOICES,)) for number in range(2)])
    line = (
        r"^group 0 of iteration 0 \(prompt 0\): column made_up, which my_loss reads, is missing; the environment "
        r"\(environment.name\) must give it to SampleBuilder$"
    )
    with pytest.raises(GroupFormatError, match=line):
        to_bytes(group, RUN)
    with pytest.raises(GroupFormatError, match=line):
        from_bytes(to_bytes(group, RunColumns((EXPERT_CHOICES,))), RUN)


def test_an_unknown_column_is_refused_on_both_sides_of_the_wire() -> None:
    group = group_of([two_turns(number) for number in range(2)])
    with pytest.raises(
        GroupFormatError,
        match=r"^group 0 .* column expert_choices is unknown, .* \(declared: made_up\); remove",
    ):
        to_bytes(group, RunColumns((MADE_UP,)))
    with pytest.raises(
        GroupFormatError,
        match=r"^group bytes: column (made_up|expert_choices) is unknown, .* \(declared: none\)",
    ):
        from_bytes(to_bytes(group, RUN))
    with pytest.raises(
        GroupFormatError, match="column made_up differs from its declaration; import that one"
    ):
        to_bytes(group, RunColumns((replace(MADE_UP, elsewhere=7), EXPERT_CHOICES)))
    another = RunColumns((replace(MADE_UP, dtype="int32"), EXPERT_CHOICES))
    with pytest.raises(
        GroupFormatError, match=r"made_up is I16 \[.*, 3, 2\], expected I32 \[n, 3, 2\]"
    ):
        from_bytes(to_bytes(group, RUN), another)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.zeros((2, 3), np.int16),
            r"made_up: must be a int16 array \[n, 3, 2\], found int16 \[2, 3\]",
        ),
        (np.zeros((2, 3, 2), np.int32), r"found int32 \[2, 3, 2\]"),
        (np.zeros((1, 3, 2), np.int16), "1 values for 2 tokens; give one each"),
        ([[1]], "found list"),
    ],
)
def test_values_that_are_not_the_column_are_refused_where_they_are_given(
    values: Any, message: str
) -> None:
    with pytest.raises(GroupFormatError, match=message):
        SampleBuilder(PROMPT).show(np.array([1, 2], np.int32), {MADE_UP: values})


def test_a_token_of_the_policy_without_value_beside_others_that_have_one_is_refused() -> None:
    sample = SampleBuilder(PROMPT)
    write(sample, generation(10, 2))
    write(sample, generation(20, 3, ()))
    with pytest.raises(
        GroupFormatError, match="column made_up: 3 of 5 tokens of the policy have no value"
    ):
        sample.finish(True, "")


def test_values_for_context_in_a_column_of_trained_tokens_and_values_that_are_not_finite_are_refused() -> (
    None
):
    group = group_of([two_turns(0)])
    values = group.columns[MADE_UP].copy()
    values[0, 1, 1] = 3
    with pytest.raises(
        GroupFormatError, match="made_up: must be -1 for tokens that are not trained"
    ):
        replace(group, columns={**group.columns, MADE_UP: values})
    teacher = Column("teacher", "float32", (), "engine", "a test")
    values = np.where(group.trained, np.nan, 0).astype(np.float32)
    with pytest.raises(GroupFormatError, match="teacher: values must be finite, number 3 is nan"):
        replace(group, columns={teacher: values})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (Column("tokens", "int32"), "an identifier that no other column has"),
        (Column("a b", "int32"), "an identifier"),
        (Column("complex", "complex64"), "its dtype complex64 must be one of bool"),
        (Column("empty", "int8", (0,)), "sizes of at least 1"),
        (Column("made", "int8", filled_by="trainers"), "with `make`"),
    ],
)
def test_a_declaration_that_no_run_can_have_is_one_line(column: Column, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^column {column.name}, .*{message}"):
        RunColumns((column,))


def test_a_task_gets_the_columns_that_it_names_and_no_others() -> None:
    data = to_bytes(group_of([two_turns(number) for number in range(2)]), RUN)
    task = RUN.reading(["made_up"])
    actual = from_bytes(data, task)
    assert set(actual.columns) == {MADE_UP} and not actual.logprobs.any()
    with pytest.raises(
        ConfigError, match=r"a task reads \['teacher'\], which no feature of this run declares"
    ):
        RUN.reading(["teacher"])


def advantage(rewards: Any, **_: Any) -> Any:
    return rewards


def loss(batch: Any, *_: Any) -> Any:
    return batch.advantages


@pytest.mark.parametrize("where", ["coordinator", "trainers"])
def test_trainers_read_the_columns_of_the_loss_and_not_those_of_the_advantage_alone(
    where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that trainers make may be made from any that is declared."""
    made = replace(ADVANTAGES, filled_by=where, make=of_length)
    monkeypatch.setattr(advantage, "columns", (made, EXPERT_CHOICES), raising=False)
    monkeypatch.setattr(loss, "columns", (MADE_UP,), raising=False)
    names = {"loss": f"{__name__}:loss", "advantage": f"{__name__}:advantage"}
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algorithm": names}
    )
    channel = StoreChannel(dist.HashStore())
    open_buffer(config, channel).put(group_of([two_turns(0), two_turns(1)]), 0, 0)
    actual = open_buffer(config, channel, trains=True).read(0, 0, 0)
    assert set(actual.columns) == (
        {MADE_UP} if where == "coordinator" else {MADE_UP, EXPERT_CHOICES}
    )
    assert (actual.logprobs[actual.trained] == -0.5).all() and actual.advantages.any()
    assert set(open_buffer(config, channel).read(0, 0, 0).columns) == {MADE_UP, EXPERT_CHOICES}, (
        "whoever keeps it has all"
    )


def share(group: Group) -> np.ndarray:
    return (
        np.repeat(group.trained_lengths / group.num_trained, group.lengths).astype(np.float32)
        * group.trained
    )


def of_length(group: Group) -> np.ndarray:
    return np.where(group.trained, np.repeat(group.trained_lengths, group.lengths), 0).astype(
        np.float32
    )


@pytest.mark.parametrize("where", ["coordinator", "trainers"])
def test_coordinator_and_trainers_make_columns_and_advantages_of_whole_groups(where: Any) -> None:
    """A piece of the group has the values of the whole."""
    made = Column("share", "float32", (), where, "a test", make=share)
    columns = RunColumns((made, replace(ADVANTAGES, filled_by=where, make=of_length)))
    buffer = RolloutBuffer(StoreChannel(dist.HashStore()), "run", 1, columns=columns)
    group = group_of([two_turns(number, ()) for number in range(4)])
    buffer.put(group, 0, 0)
    travels = b"share" in buffer.read_bytes(0, 0, 0)
    assert travels == (where == "coordinator")
    microbatches = MicrobatchIterator(
        buffer,
        replica=0,
        num_replicas=1,
        iteration=0,
        groups=1,
        order="prompt",
        responses_per_microbatch=2,
        shared_prompt=True,
        pad_multiple=1,
        timeout_s=5.0,
    )
    actual = list(microbatches)
    lengths = torch.tensor([3.0, 4.0, 5.0, 6.0]).repeat_interleave(torch.tensor([3, 4, 5, 6]))
    torch.testing.assert_close(torch.cat([one.columns["share"] for one in actual]), lengths / 18)
    assert torch.cat([one.advantages for one in actual]).tolist() == lengths.tolist()
