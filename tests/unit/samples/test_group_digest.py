"""Digests of groups and weights for the chain: each changes with what it is of and with nothing else, on whatever rank or way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.config.mesh import Mesh
from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.samples.columns import Column, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.group_digest import content_digest, digest_group
from pa_npu.samples.types import SampleBuilder
from pa_npu.samples.wire import from_bytes, to_bytes
from pa_npu.telemetry.chain import group_fields
from pa_npu.trainer.border import joint_digest

SCORES = Column("scores", "float32", tokens="all")


def group(index: int = 0) -> Group:
    """Three sessions of two turns each, of different lengths, with a declared column."""
    rng, samples = np.random.default_rng(index), []
    for length in (3, 5, 2):
        builder = SampleBuilder(np.arange(4, dtype=np.int32))
        for _ in range(2):
            builder.write(
                rng.integers(0, 9, length).astype(np.int32),
                -rng.random(length).astype(np.float32),
                2,
            )
            builder.show(np.array([7, 8], np.int32))
        samples.append(builder.finish(True, ""))
    rewards = rng.random(3).astype(np.float32)
    identity = {"run_seed": 1, "iteration": 2, "index": index, "prompt_id": 5}
    made = Group.from_samples(samples, rewards, rewards - rewards.mean(), **identity)
    return replace(made, columns={SCORES: rng.random(len(made.tokens)).astype(np.float32)})


def fields(
    *groups: Group, slot: tuple[int, int] = (0, 0), part: tuple[int, int] | None = None
) -> dict[str, Any]:
    actual = group_fields([digest_group(group, {slot: part}) for group in groups])
    actual.pop("responses")  # what the digests are of
    return actual


def changed(original: Group, name: str, place: int, value: Any) -> Group:
    array = getattr(original, name).copy()
    array[place] = value
    return replace(original, **{name: array})


def run(value: int, start: int = 1, name: str = "pixels") -> Placeholders:
    return Placeholders(start, 2, (Attachment(name, np.full((3, 2), value, np.uint8)),))


def test_trainers_know_a_group_that_was_changed_on_its_way_from_the_one_that_was_put() -> None:
    made = group()
    columns = RunColumns((SCORES,))
    read = from_bytes(to_bytes(replace(made, part=(0, 2)), columns), columns)
    assert content_digest(read) == content_digest(made)
    place = int(np.flatnonzero(made.trained)[1])
    others = [
        changed(made, "tokens", 0, made.tokens[0] + 1),
        changed(made, "tokens", place, made.tokens[place] + 1),
        changed(made, "logprobs", place, made.logprobs[place] - 1e-3),
        changed(made, "versions", slice(None), np.where(made.trained, 3, made.versions)),
        changed(made, "rewards", 0, made.rewards[1]),
        changed(made, "advantages", place, 9.0),
        changed(made, "finished", 0, False),
        replace(made, weight=np.ones(len(made.tokens), np.float32)),
        replace(made, placeholders=[run(1)]),
        replace(made, placeholders=[run(1, start=2)]),
        replace(made, iteration=3),
        replace(made, prompt_id=6),
    ]
    assert len({content_digest(one) for one in [made, *others]}) == 1 + len(others)


def test_what_is_attached_and_where_is_in_the_digest() -> None:
    made = group()
    attached = [
        replace(made, placeholders=runs)
        for runs in ([], [run(1)], [run(2)], [run(1, start=2)], [run(1, name="sound")])
    ]
    assert len({fields(one)["context"] for one in attached}) == len(attached)
    columns = RunColumns((SCORES,))
    again = from_bytes(to_bytes(attached[1], columns), columns)
    assert fields(again) == fields(attached[1])


def test_each_digest_changes_with_what_it_is_of_and_with_nothing_else() -> None:
    made = group()
    trained = int(np.flatnonzero(made.trained)[4])
    prompt = int(np.flatnonzero(~made.trained)[2])
    column = made.columns[SCORES].copy()
    column[1] += 1
    versions = made.versions.copy()
    versions[made.runs[0][0] : made.runs[1][0]] = 1
    advantages = made.advantages.copy()
    advantages[made.advantages == made.advantages[trained]] *= 2
    cases: dict[str, tuple[Group, set[str]]] = {
        "a token": (changed(made, "tokens", trained, 10), {"tokens"}),
        "a prompt's token": (changed(made, "tokens", prompt, 10), {"context"}),
        "a log-prob": (changed(made, "logprobs", trained, -2.0), {"logprobs"}),
        "a reward": (changed(made, "rewards", 1, 3.0), {"rewards"}),
        "advantages": (replace(made, advantages=advantages), {"advantages"}),
        "a version": (replace(made, versions=versions), {"context"}),
        "an end": (changed(made, "finished", 0, False), {"context"}),
        "a column": (replace(made, columns={SCORES: column}), {"context"}),
        "a prompt": (replace(made, prompt_id=6), {"prompts"}),
        "an attachment": (replace(made, placeholders=[run(1)]), {"context"}),
    }
    before = fields(made)
    for aspect, (another, expected) in cases.items():
        after = fields(another)
        assert {name for name in before if before[name] != after[name]} == expected, aspect
    assert {name for name in before if before[name] != fields(made, slot=(1, 0))[name]} == {
        "places"
    }
    assert {name for name in before if before[name] != fields(made, part=(0, 2))[name]} == {
        "places"
    }


def test_groups_count_by_their_index_whatever_the_order_of_their_arrival() -> None:
    first, second = group(0), group(1)
    assert fields(first, second) == fields(second, first)
    assert fields(first, second) != fields(first, replace(second, index=2))


def test_a_group_from_a_checkpoint_has_the_digest_of_the_one_that_was_dispatched() -> None:
    made = group()
    columns = RunColumns((SCORES,))
    again = from_bytes(to_bytes(made, columns), columns)
    assert fields(again) == fields(made)


def test_a_response_is_found_by_its_row() -> None:
    actual = group_fields([digest_group(group(index), {(0, index): None}) for index in (4, 2)])
    from pa_npu.telemetry.chain import unpack

    table = unpack(actual["responses"], 2, "")
    assert [table.where(row) for row in range(6)] == [
        (2, 0),
        (2, 1),
        (2, 2),
        (4, 0),
        (4, 1),
        (4, 2),
    ]
    made = group(4)
    assert table.rows["length"][3:].tolist() == [6, 10, 4]
    assert table.rows["reward"][3:].tobytes() == made.rewards.tobytes()
    sums = [
        made.logprobs[a:b].sum()
        for a, b in zip(made.offsets()[:-1], made.offsets()[1:], strict=True)
    ]
    assert table.rows["logprob_sum"][3:].tolist() == pytest.approx(sums)


class _Sums:
    """Stands in for the sum over ranks: adds what the others bring."""

    def __init__(self) -> None:
        self.brought: list[torch.Tensor] = []

    def ranks(self, values: torch.Tensor) -> torch.Tensor:
        self.brought.append(values.clone())
        return values


def joined(*ranks: tuple[int, str], mesh: Mesh) -> str:
    """The digest that all ranks get, which bring theirs in this order."""
    cpu = torch.device("cpu")
    brought: list[torch.Tensor] = []
    for rank, own in ranks:
        sums = _Sums()
        joint_digest(own, mesh.place(rank), sums, cpu)
        brought += sums.brought

    class Total:
        def ranks(self, values: torch.Tensor) -> torch.Tensor:
            return torch.stack(brought).sum(0)

    return joint_digest("", mesh.place(0), Total(), cpu)


def test_the_digest_of_all_ranks_depends_on_each_ranks_weights_and_place_and_on_no_order() -> None:
    mesh = Mesh.for_devices(2, 2, 1)
    one = joined((0, "a"), (1, "b"), mesh=mesh)
    assert one == joined((1, "b"), (0, "a"), mesh=mesh)
    assert one != joined((0, "b"), (1, "a"), mesh=mesh), "whose they are counts"
    assert one != joined((0, "a"), (1, "c"), mesh=mesh)


def test_further_replicas_with_copies_of_the_weights_change_nothing() -> None:
    alone, two = Mesh.for_devices(1, 1, 1), Mesh.for_devices(2, 1, 1)
    assert joined((0, "a"), mesh=alone) == joined((0, "a"), (1, ""), mesh=two)
