"""Head and agents of several nodes with fake commands: roles on their node, ends, losses and returns, refusals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pa_npu.checkpoints.provenance import config_tree
from pa_npu.config import Config
from pa_npu.errors import ConfigError
from pa_npu.launcher.node_agent import check_same
from pa_npu.launcher.node_messages import End, NodeError, Start, parse_event, parse_order, to_json
from pa_npu.launcher.process.commands import Role
from tests.helpers.fake_nodes import UP_AND_SLEEP, Cluster, alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="keepers and reapers are Linux calls")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("pa_npu.launcher.process.supervisor._AFTERMATH_S", 0.05)
    made = Cluster(tmp_path)
    for name in ("coordinator", "engine-0", "trainer-0", "trainer-1"):
        made.role(name, UP_AND_SLEEP)
    yield made
    made.close()


ALL = ("coordinator", "engine-0", "trainer-0", "trainer-1")


def test_roles_run_on_their_nodes_and_a_good_end_is_one_everywhere(cluster: Cluster) -> None:
    for name in ("coordinator", "trainer-0", "trainer-1"):
        cluster.role(name, f"print('done {name}'); up.write_text(str(os.getppid()))")
    (cluster.directory / "ready").touch()
    head, agent = cluster.head(), cluster.agent()
    engine = cluster.wait_up("engine-0")["engine-0"]
    assert cluster.code_of(head) == 0 and cluster.code_of(agent) == 0, cluster.output()
    assert not alive(engine)
    assert cluster.output("trainer-1") == "done trainer-1\n"
    assert "node 1 (127.0.0.1) has joined" in cluster.output()
    assert "the head ended the run: it is done" in cluster.output("launcher-node1")


def test_a_trainer_that_fails_on_another_node_ends_the_run_with_its_name_and_log(cluster: Cluster) -> None:
    cluster.role("trainer-1", "print('cause of death'); raise SystemExit(7)")
    head, agent = cluster.head(), cluster.agent()
    assert cluster.code_of(head) == 1 and cluster.code_of(agent) == 1
    assert "failed: trainer-1 ended: exit code 7" in cluster.output() and "    cause of death" in cluster.output()


def test_a_killed_launcher_is_named_not_those_who_lost_contact_and_its_processes_are_gone(cluster: Cluster) -> None:
    """trainer-0 ends at once when its peer does, as a rank does whose collective breaks."""
    cluster.node_timeout_s = 2.0
    head, agent = cluster.head(), cluster.agent()
    pids = cluster.wait_up(*ALL)
    agent.kill()
    cluster.wait_for(lambda: not alive(pids["trainer-1"]), "the keeper has killed trainer-1")
    os.kill(pids["trainer-0"], signal.SIGTERM)
    assert cluster.code_of(head) == 1
    assert "node 1 (127.0.0.1) is lost: its launcher gave no sign of life" in cluster.output()
    assert "ended: lost with node 1 (127.0.0.1)" in cluster.output().partition("failed: ")[2].splitlines()[0]
    assert not any(alive(pid) for pid in pids.values())


def test_a_node_that_comes_back_gets_its_engine_and_the_run_starts_again(cluster: Cluster) -> None:
    cluster.restarts, cluster.node_timeout_s = 1, 2.0
    (cluster.directory / "ready").touch()
    head, agent = cluster.head(), cluster.agent()
    first = cluster.wait_up(*ALL)
    cluster.wait_for(lambda: "trainers ready" in cluster.output(), "the run is ready")
    agent.kill()
    cluster.wait_for(lambda: "is lost" in cluster.output(), "the loss is noticed")
    for name in ("coordinator", "trainer-0", "trainer-1"):
        cluster.role(name, "up.write_text(str(os.getpid()))")
    again = cluster.agent()
    second = cluster.wait_up(*ALL)
    assert cluster.code_of(head) == 0 and cluster.code_of(again) == 0
    output = cluster.output()
    assert "starting coordinator and trainers again" in output and "node 1 (127.0.0.1) is back" in output
    assert "engine-0: lost with node 1 (127.0.0.1); started again" in output
    assert not set(first.values()) & set(second.values()) and not any(map(alive, [*first.values(), *second.values()]))


def test_a_node_that_does_not_come_back_ends_the_run_in_one_line(cluster: Cluster) -> None:
    cluster.restarts, cluster.node_timeout_s, cluster.join_timeout_s = 1, 2.0, 1.0
    (cluster.directory / "ready").touch()
    head, agent = cluster.head(), cluster.agent()
    cluster.wait_up(*ALL)
    cluster.wait_for(lambda: "trainers ready" in cluster.output(), "the run is ready")
    agent.kill()
    assert cluster.code_of(head) == 1
    assert "failed: node 1 (127.0.0.1) did not come back within 1 s (placement.join_timeout_s)" in cluster.output()


def test_an_agent_whose_head_is_killed_stops_everything_on_its_node(cluster: Cluster) -> None:
    head, agent = cluster.head(), cluster.agent()
    pids = cluster.wait_up(*ALL)
    head.kill()
    assert cluster.code_of(agent) == 1
    assert not any(alive(pid) for pid in pids.values())
    assert "failed: the head is lost" in cluster.output("launcher-node1")


def test_an_agent_whose_head_is_silent_stops_everything_on_its_node(cluster: Cluster) -> None:
    """A stopped process keeps its connections, as a machine does that vanished."""
    cluster.silence_s = 2.0
    head, agent = cluster.head(), cluster.agent()
    pids = cluster.wait_up(*ALL)
    os.kill(head.pid or 0, signal.SIGSTOP)
    try:
        cluster.wait_for(lambda: not alive(pids["engine-0"]), "node 1 is stopped")
        assert cluster.code_of(agent) == 1
    finally:
        os.kill(head.pid or 0, signal.SIGCONT)
    assert "failed: the head is lost: no sign of life for" in cluster.output("launcher-node1")


@pytest.mark.parametrize("where", ["head", "agent"])
def test_ctrl_c_on_any_node_ends_the_run_on_all(cluster: Cluster, where: str) -> None:
    head, agent = cluster.head(), cluster.agent()
    pids = cluster.wait_up(*ALL)
    os.kill((head if where == "head" else agent).pid or 0, signal.SIGINT)
    codes = cluster.code_of(head), cluster.code_of(agent)
    assert codes == ((130, 130) if where == "head" else (1, 130))
    assert not any(alive(pid) for pid in pids.values())
    said = "SIGINT: stopping" if where == "head" else "failed: node 1 (127.0.0.1) was stopped by SIGINT"
    assert said in cluster.output()


def test_a_node_with_a_problem_or_other_versions_is_refused_by_name(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    head, agent = cluster.head(), cluster.agent(problem="run.dir: not shared")
    assert cluster.code_of(head) == 2 and cluster.code_of(agent) == 2
    assert "error: node 1 (other): run.dir: not shared" in capfd.readouterr().err
    head, agent = cluster.head(), cluster.agent(versions={"pa_npu": "2"})
    assert cluster.code_of(head) == 2 and cluster.code_of(agent) == 2
    assert "error: node 1 (other): pa_npu is 2, but 1 on the head" in capfd.readouterr().err


def test_a_second_launcher_of_a_node_is_refused_while_the_first_lives(cluster: Cluster) -> None:
    head, agent = cluster.head(), cluster.agent()
    cluster.wait_up(*ALL)
    assert cluster.code_of(cluster.agent()) == 2
    assert "refused: node 1 has a launcher already" in cluster.output()
    assert agent.is_alive() and head.is_alive()


def test_a_node_that_never_comes_is_named(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.join_timeout_s = 0.3
    assert cluster.code_of(cluster.head()) == 2
    assert "node 1 did not join within 0 s (placement.join_timeout_s)" in capfd.readouterr().err


START = {"is": "start", "process": 3, "role": {"node": 1, "kind": "trainer", "index": 0, "attempt": 2}}


def test_orders_travel_as_json() -> None:
    assert parse_order(START, 1) == Start(3, Role(1, "trainer", 0, 2))
    for order in (Start(3, Role(1, "engine", 0)), End([1, 2], True)):
        assert parse_order(to_json(order), 1) == order


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {"is": "start"},
        {"is": "run", "argv": ["sh"]},
        {"is": "end", "processes": "all", "at_once": True},
        {"is": "end", "processes": [-1], "at_once": True},
        START | {"process": "3"},
        START | {"role": {"node": 2, "kind": "trainer", "index": 0, "attempt": 0}},
        START | {"role": {"node": 1, "kind": "coordinator", "index": 0, "attempt": 0}},
        START | {"role": {"node": 1, "kind": "trainer", "index": True, "attempt": 0}},
        START | {"role": {"node": 1, "kind": "trainer", "index": 0, "attempt": "0; sh"}},
    ],
)
def test_nothing_but_an_order_for_this_node_is_obeyed(raw: Any) -> None:
    with pytest.raises(NodeError, match="an order for node 1 cannot be understood"):
        parse_order(raw, 1)
    with pytest.raises(NodeError, match="event cannot be understood"):
        parse_event(raw)


def make_config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


def test_a_node_must_have_the_heads_configuration_but_for_its_place() -> None:
    nodes = {"nnodes": 2, "master_addr": "10.0.0.1"}
    head = config_tree(make_config(placement=nodes | {"host": "10.0.0.1"}))
    same = {"node_rank": 1, "host": "10.0.0.2"}
    check_same(make_config(placement=nodes | same), head)
    with pytest.raises(ConfigError, match=r"differs from the head's in rollout\.python, run\.seed; start every node"):
        check_same(make_config(placement=nodes | same, run={"seed": 3}, rollout={"python": "/bin/sh"}), head)
    continued = make_config(placement=nodes, checkpoint={"resume": "auto", "load": "RUN/checkpoints/iteration_000001"})
    check_same(make_config(placement=nodes | same, checkpoint={"resume": "auto"}), config_tree(continued))
