"""Placement over several nodes, their addresses, and the environments of ranks and engines there."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from typing import Any

import pytest

from pa_npu import platform as platforms
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.cluster.ray_cluster import wanted_nodes
from pa_npu.launcher.engine_key import run_key
from pa_npu.launcher.placement import (
    Placement,
    engine_ports,
    place_nodes,
    placement_lines,
    settle_on_node,
)
from pa_npu.launcher.process.commands import (
    NodeCommands,
    Role,
    Store,
    interface_of,
    is_loopback,
    trainer_command,
)


def make_config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}}
    return Config.model_validate(tree | sections)


def shares(
    nnodes: int, engines: int, engine_tp: int, ranks: int, tp: int, **placement: Any
) -> list[Placement]:
    return place_nodes(
        make_config(
            rollout={"engines": engines, "tensor_parallel": engine_tp},
            trainer={"devices": ranks, "tensor_parallel": tp},
            schedule={"prompts_per_iteration": ranks},
            placement={"cluster": "ray", "nnodes": nnodes, **placement},
        )
    )


def test_engines_fill_the_first_nodes_and_trainers_the_others() -> None:
    """16 engines and 16 ranks on 4 nodes of 8."""
    placed = shares(4, 16, 1, 16, 4)
    assert [share.engines for share in placed] == [tuple(range(8)), tuple(range(8, 16)), (), ()]
    assert [share.ranks for share in placed] == [(), (), tuple(range(8)), tuple(range(8, 16))]
    assert placed[1].engine_devices == tuple((index,) for index in range(8))
    assert placed[3].trainer_devices == tuple(range(8)), "local indices"


@pytest.mark.parametrize(
    ("nnodes", "engines", "engine_tp", "devices", "tp", "per_node"),
    [
        (2, 1, 2, 6, 2, None),
        (2, 2, 4, 8, 8, None),
        (3, 5, 2, 8, 4, 8),
        (2, 1, 1, 2, 1, 2),
        (8, 8, 4, 32, 8, None),
    ],
)
def test_every_process_has_devices_of_its_own_and_peers_share_a_node(
    nnodes: int, engines: int, engine_tp: int, devices: int, tp: int, per_node: int | None
) -> None:
    placed = shares(nnodes, engines, engine_tp, devices, tp, devices_per_node=per_node)
    assert sorted(index for share in placed for index in share.engines) == list(range(engines))
    assert sorted(rank for share in placed for rank in share.ranks) == list(range(devices))
    most = per_node or (engines * engine_tp + devices) // nnodes
    node_of = {rank: node for node, share in enumerate(placed) for rank in share.ranks}
    for share in placed:
        used = [index for engine in share.engine_devices for index in engine] + list(
            share.trainer_devices
        )
        assert len(set(used)) == len(used) and all(0 <= index < most for index in used)
        assert all(len(engine) == engine_tp for engine in share.engine_devices)
    for first in range(0, devices, tp):
        assert len({node_of[rank] for rank in range(first, first + tp)}) == 1


def test_listed_devices_count_over_all_nodes() -> None:
    placed = shares(2, 1, 1, 2, 1, devices_per_node=2, devices=[2, 0, 3])
    assert placed[0] == Placement((), (0,), (), ((),), (), (0,))
    assert placed[1] == Placement(((0,),), (1,), ((),), ((),), (0,), (1,))
    assert placement_lines(placed) == [
        "node 0: trainer-0 on device 0",
        "node 1: engine-0 on device 0, trainer-1 on device 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "placement", "expected"),
    [
        (
            (2, 1, 2, 4, 4),
            {},
            r"trainer.tensor_parallel: 4 peers must share a node, but after 0 of 1 groups .* 1, 3 "
            r"devices",
        ),
        ((2, 1, 4, 2, 1), {}, r"rollout.tensor_parallel: 4 peers must share a node"),
        (
            (2, 1, 2, 2, 1),
            {"devices": [1, 2, 0, 3]},
            r"placement.devices: \[1, 2\] are tensor-parallel peers",
        ),
        (
            (2, 1, 1, 3, 1),
            {"devices": [4, 0, 1, 2]},
            r"names a device twice or one beyond the 4 of 2 nodes of 2",
        ),
        ((2, 1, 1, 1, 1), {"devices": [1, 1]}, r"names a device twice"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    arguments: Any, placement: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        shares(*arguments, **placement)


def test_uneven_use_of_nodes_needs_their_size() -> None:
    with pytest.raises(
        ValueError, match=r"cannot be divided evenly .* set placement.devices_per_node"
    ):
        shares(2, 1, 1, 2, 1)
    with pytest.raises(
        ValueError, match=r"placement.devices_per_node: 3 devices .* more than 2 nodes of 1"
    ):
        shares(2, 1, 1, 2, 1, devices_per_node=1)


def test_a_node_with_fewer_devices_is_refused_and_cores_are_pinned_where_there_are_enough() -> None:
    config = make_config(
        trainer={"devices": 3},
        placement={"cluster": "ray", "nnodes": 2},
        schedule={"prompts_per_iteration": 3},
    )
    first, second = place_nodes(config)
    with pytest.raises(
        ConfigError,
        match=r"placement.devices_per_node: the run uses 2 devices of each node, but 1 are",
    ):
        settle_on_node(config, second, 1, [])
    assert settle_on_node(config, second, 2, []) == second
    assert settle_on_node(config, first, None, [4, 7]).engine_cores == ((4,),)
    assert settle_on_node(config, first, None, [4, 7]).trainer_cores == ((7,),)
    assert settle_on_node(config, first, None, [4]) == replace(first, shared_cores=1)


def test_ports_follow_the_engines_index_on_every_node() -> None:
    assert engine_ports(make_config(placement={"port": 8000}), [3, 4]) == [8004, 8005]


def trainer_environment(nnodes: int, rank: int) -> dict[str, str]:
    config = make_config(
        rollout={"engines": 4},
        trainer={"devices": 4},
        schedule={"prompts_per_iteration": 4},
        placement={"cluster": "ray", "nnodes": nnodes, "host": "127.0.0.1"},
    )
    share = place_nodes(config)[-1]
    return trainer_command(
        config, platforms.get("cpu"), share, Store("10.0.0.1", 29500, 2), rank, nnodes - 1
    ).env


def test_ranks_know_their_place_on_their_node_and_in_the_run() -> None:
    env = trainer_environment(4, 3)  # the second of two on the last node
    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert [env[name] for name in names] == ["3", "1", "3", "4", "2", "10.0.0.1", "29500"]
    assert env["PA_NPU_STORE"] == "10.0.0.1:29500" and env["PA_NPU_ATTEMPT"] == "2"
    assert env["PA_NPU_ADDRESS"] == "127.0.0.1", "of its own node"


@pytest.mark.skipif(
    sys.platform != "linux", reason="asks the kernel for the addresses of interfaces"
)
def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == interface_of("::1") == "lo"
    assert interface_of("203.0.113.1") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    assert interface_of(own) in {name for _, name in socket.if_nameindex()}
    assert is_loopback("localhost") and not is_loopback("node-a")


def test_a_host_builds_the_roles_of_its_node_only_and_without_rays_variables(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    config = make_config(
        run={"dir": str(tmp_path)},
        trainer={"devices": 3},
        schedule={"prompts_per_iteration": 3},
        placement={"cluster": "ray", "nnodes": 2, "host": "127.0.0.1"},
    )
    build = NodeCommands(
        config, platforms.get("cpu"), place_nodes(config)[1], Store("127.0.0.1", 29500), 1, str
    )
    command = build(Role(1, "trainer", 2, 5))
    assert (
        command.argv[1:3] == ("-m", "pa_npu.trainer.main") and command.env["PA_NPU_ATTEMPT"] == "5"
    )
    assert "RAY_JOB_ID" not in command.env and command.env["GROUP_RANK"] == "1"
    for role in (Role(1, "trainer", 0), Role(1, "engine", 0)):
        with pytest.raises(UserError, match=f"{role.name} is not of node 1"):
            build(role)


def test_a_node_reserves_its_devices_up_to_the_highest_and_extra_engines_theirs() -> None:
    config = make_config(
        rollout={"engines": 2, "max_engines": 3, "tensor_parallel": 2},
        trainer={"devices": 3},
        schedule={"prompts_per_iteration": 3},
        placement={"cluster": "ray", "nnodes": 2, "devices_per_node": 4},
    )
    nodes = wanted_nodes(config, platforms.get("cpu"))
    assert [node.resources for node in nodes] == [{"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 2.0}]
    assert [node.extra for node in nodes] == [None, None, 2] and nodes[2].share.engines == (2,)


def test_the_engines_key_comes_from_the_shared_directory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(run={"dir": str(tmp_path)})
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"VLLM_API_KEY: the engines' key cannot be read from"):
        run_key(config)
    monkeypatch.setenv("VLLM_API_KEY", "own")
    assert run_key(config) == "own"
    (tmp_path / "api_key").write_text("runs\n")
    assert run_key(config) == "runs"
