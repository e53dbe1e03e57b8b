"""The mesh: every group and duty of a trainer rank, against megatron-core's own enumeration; and nobody else reckons with ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from pa_npu.config.mesh import Axis, Mesh
from tests.helpers.house import PACKAGE, modules

# tensor, pipeline, data, context, expert, expert_tensor
SIZES = [
    (1, 1, 1, 1, 1, None),
    (2, 1, 3, 1, 1, None),
    (2, 3, 4, 1, 1, None),
    (1, 4, 2, 2, 1, None),
    (2, 2, 2, 2, 1, None),
    (4, 2, 2, 3, 1, None),
    (1, 1, 8, 1, 4, None),
    (2, 2, 4, 1, 4, None),
    (2, 2, 4, 1, 8, 1),
    (4, 1, 2, 1, 4, 2),
    (2, 2, 4, 2, 8, 1),
    (2, 3, 2, 2, 2, 2),
    (1, 2, 6, 2, 3, 2),
]
TOKENS: dict[str, Axis] = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
EXPERT_TOKENS: dict[str, Axis] = {
    "tp": "expert_tensor",
    "ep": "expert",
    "dp": "expert_data",
    "pp": "pipeline",
}


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_are_those_of_megatron_for_every_axis_and_for_several(
    sizes: tuple[int, ...],
) -> None:
    from megatron.core.parallel_state import RankGenerator

    tensor, pipeline, data, context, expert, expert_tensor = sizes
    mesh = Mesh(*sizes)
    order, of_experts = "tp-cp-ep-dp-pp", expert_tensor or tensor
    over = tensor * context * data // (of_experts * expert)
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    experts = RankGenerator(tp=of_experts, ep=expert, dp=over, pp=pipeline, cp=1, order=order)
    assert mesh.size == dense.world_size == experts.world_size
    for generator, tokens in ((dense, TOKENS), (experts, EXPERT_TOKENS)):
        several = ["-".join(pair) for pair in (("tp", "dp"), ("tp", "pp"), ("dp", "pp"))]
        for token in [*tokens, *several, "-".join(tokens)]:
            axes = [tokens[part] for part in token.split("-")]
            assert mesh.groups(*axes) == [tuple(ranks) for ranks in generator.get_ranks(token)], (
                token
            )
            for group in mesh.groups(*axes):
                assert all(mesh.place(rank).group(*axes) == group for rank in group)
    if context > 1:
        assert mesh.groups("data", "context") == [
            tuple(ranks) for ranks in dense.get_ranks("dp-cp")
        ]


@pytest.mark.parametrize("sizes", SIZES)
def test_coordinates_and_rank_are_two_names_of_one_place(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(*sizes)
    for rank in range(mesh.size):
        place = mesh.place(rank)
        coordinates = {axis: place.coordinate(axis) for axis in TOKENS.values()}
        assert mesh.at(**coordinates) == place
        assert place.group("tensor")[place.tensor] == rank == place.group("pipeline")[place.stage]
        assert place.is_tensor_leader == (place.group("tensor")[0] == rank)


@pytest.mark.parametrize("sizes", SIZES)
def test_each_stage_has_one_publisher_and_each_replica_one_reader(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(*sizes)
    publishers = [place for place in map(mesh.place, range(mesh.size)) if place.publishes]
    assert [place.stage for place in publishers] == list(range(mesh.pipeline))
    assert {place.rank for place in publishers} <= set(mesh.senders())
    assert sorted(rank for replica in range(mesh.data) for rank in mesh.replica(replica)) == list(
        range(mesh.size)
    )
    for replica in range(mesh.data):
        reader = mesh.place(mesh.replica(replica)[0])
        assert (reader.replica, reader.stage, reader.is_tensor_leader) == (replica, 0, True)
    # every shard of the dense weights, and every shard of every expert, is on exactly one rank that
    # sends it or a copy of it
    sent = [mesh.place(rank) for rank in mesh.senders()]
    dense = [place for place in sent if place.coordinate("context") == place.replica == 0]
    assert len(dense) == mesh.tensor * mesh.pipeline
    experts = [place for place in sent if place.coordinate("expert_data") == 0]
    if mesh.expert > 1:
        assert len(experts) == mesh.expert_tensor * mesh.expert * mesh.pipeline


def test_replicas_take_turns_with_groups_and_each_group_has_one_slot() -> None:
    mesh = Mesh(data=3)
    slots = [mesh.slot_of(number) for number in range(12)]
    for replica in range(mesh.data):
        own = [number for number, slot in enumerate(slots) if slot[0] == replica]
        assert list(mesh.numbers_of(replica, 12)) == own
    assert sorted(slots) == [
        (replica, slot) for replica in range(3) for slot in range(mesh.per_replica(12))
    ]
    assert [mesh.number_of(*slot) for slot in slots] == list(range(12))
    assert mesh.shares(12) and not mesh.shares(13)


def test_a_mesh_that_cannot_be_is_refused() -> None:
    assert (
        Mesh.for_devices(8, 2, 2) == Mesh(2, 2, 2, experts_tensor=1)
        and Mesh.for_devices(7, 2, 2).size == 4
        and Mesh.for_devices(1, 2, 2).size == 4
    )
    with pytest.raises(
        ValueError, match="expert: 3 x 2 ranks do not divide the 8 ranks of a stage"
    ):
        Mesh(tensor=2, data=4, expert=3)
    with pytest.raises(ValueError, match="rank: 4 is not one of the 4 ranks"):
        Mesh(2, 2).place(4)
    with pytest.raises(ValueError, match="data, expert divide a stage in different ways"):
        Mesh(data=4, expert=2).groups("data", "expert")


@pytest.mark.parametrize("data", [1, 3])
def test_ranks_of_a_context_group_hold_copies_with_megatron_and_shards_with_fsdp(data: int) -> None:
    copies = Mesh(tensor=2, context=2, data=data)
    assert copies.weight_shards == 1
    assert copies.senders() == (0, 1), "the first context rank of the first replica"
    assert copies.place(0).shard_group == (0, 1) and copies.place(3).shard_group == (2, 3)
    shards = Mesh(context=2, data=data, shards=data, context_shards=True)
    assert shards.weight_shards == 2 * data == len(shards.senders())
    assert shards.place(1).shard_group == tuple(range(2 * data))
    for mesh in (copies, shards):
        for replica in range(data):
            speakers = [mesh.place(rank).speaks_for_stage for rank in mesh.replica(replica)]
            assert speakers.count(True) == 1, "log-probs are counted once per replica"
    assert Mesh.for_devices(8, 2, 1, context=2) == Mesh(2, 1, 2, 2, experts_tensor=1)


# A name that stands for a rank, and names that stand for how many ranks there are along an axis,
# replicas among them.
RANK = re.compile(r"(^|_)ranks?$")
SIZE = re.compile(
    r"^(tensor|pipeline|data|context|expert)_(parallel|size)$|^(num_)?replicas$|^(data_parallel|world_size)$"
)
MEGATRON = re.compile(r"^get_\w+_parallel_(rank|world_size)$")
# (path, what stands there): why it is no arithmetic on the run's trainer ranks.
KNOWN = {
    (
        "backends/megatron/parallel.py",
        "the sizes that Megatron was given make this process's mesh",
    ): 5,
    (
        "coordinator/token_budget.py",
        "rows of groups, one per replica, of an update that is not known to be whole",
    ): 3,
    ("planning/iteration_model/flow.py", "replicas of a cluster whose iteration is predicted"): 2,
}


def _names(node: ast.AST) -> set[str]:
    """Returns names and attributes of an expression, not those that only say where in it to look; a mesh's
    `data` are replicas.
    """
    if isinstance(node, ast.Attribute) and node.attr == "data" and _names(node.value) == {"mesh"}:
        return {"replicas"}
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    children = [node.value] if isinstance(node, ast.Subscript) else list(ast.iter_child_nodes(node))
    return set().union(*map(_names, children))


def _reckons(node: ast.AST) -> bool:
    """Returns whether an expression divides ranks, divides among ranks or replicas, or multiplies
    sizes of axes.
    """
    if isinstance(node, ast.Call):
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called == "divmod":
            left, right = _names(node.args[0]), _names(node.args[1])
            return any(map(RANK.search, left)) or any(map(_counts_replicas, right))
        return bool(MEGATRON.match(called))
    if not isinstance(node, ast.BinOp):
        return False
    left, right = _names(node.left), _names(node.right)
    if isinstance(node.op, (ast.Mod, ast.FloorDiv)):
        return not isinstance(node.left, ast.Constant) and (
            any(map(RANK.search, left)) or any(map(_counts_replicas, right))
        )
    axes = [{name for name in names if SIZE.match(name)} for names in (left, right)]
    return isinstance(node.op, ast.Mult) and all(axes) and axes[0] != axes[1]


def _counts_replicas(name: str) -> bool:
    return bool(SIZE.match(name)) and not name.startswith(
        ("tensor", "pipeline")
    )  # a model's layers are divided by these


def _found(source: str) -> Iterator[int]:
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr))
    return (node.lineno for node in nodes if _reckons(node))


@pytest.mark.parametrize(
    "source",
    [
        "stage = rank // per_stage",
        "place = self.rank % self.tensor_size",
        "slot = divmod(position, config.mesh.data)",
        "shard = trainer.tensor_parallel * trainer.pipeline_parallel",
        "own = groups[number // num_replicas]",
        "rank = parallel_state.get_tensor_model_parallel_rank()",
    ],
)
def test_arithmetic_on_ranks_is_seen(source: str) -> None:
    assert list(_found(source)) == [1]


def test_only_the_mesh_reckons_with_ranks() -> None:
    known = {path: count for (path, _), count in KNOWN.items()}
    for file in modules().values():
        path = file.relative_to(PACKAGE).as_posix()
        if path == "config/mesh.py":
            continue
        lines = sorted(_found(file.read_text()))
        assert len(lines) == known.get(path, 0), (
            f"pa_npu/{path}, lines {lines}: ask pa_npu/config/mesh.py for ranks, groups, sizes and "
            f"who reads which group; {known.get(path, 0)} such lines are known there (KNOWN, which "
            "only shrinks)"
        )
