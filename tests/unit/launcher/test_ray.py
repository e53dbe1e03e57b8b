"""A run on a Ray cluster of two raylets, with stand-in commands: roles on their nodes, ends, losses, returns, refusals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.cluster.host import forwarded_environment
from pa_npu.launcher.cluster.ray_connection import connected
from tests.helpers.processes import running
from tests.helpers.ray_launcher import UP_AND_SLEEP, RayLauncher, parent
from tests.helpers.raylets import HEAD, OTHER, Raylets, raylets

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="keepers are Linux calls, as are two loopback addresses"
)

ALL = ("coordinator", "engine-0", "trainer-0", "trainer-1")


@pytest.fixture(scope="module")
def two() -> Iterator[Raylets]:
    """Shared, because a raylet takes seconds to start; a test that kills one starts another."""
    with raylets({"PYTHONPATH": str(Path(__file__).parents[3])}) as cluster:
        yield cluster


@pytest.fixture
def launcher(two: Raylets, tmp_path: Path) -> Iterator[RayLauncher]:
    made = RayLauncher(tmp_path, two.address)
    for name in ALL:
        made.role(name, UP_AND_SLEEP)
    yield made
    made.close()


def test_roles_run_on_their_nodes_and_a_good_end_leaves_nothing(launcher: RayLauncher) -> None:
    engine_up = str(launcher.directory / "engine-0.up")
    for name in ("coordinator", "trainer-0", "trainer-1"):
        launcher.role(
            name,
            f"print('done {name}'); up.write_text(f'{{os.getpid()}} {{where}}')\n"
            # a run that ends before its engine has begun would leave nothing to look at
            f"while not pathlib.Path({engine_up!r}).exists(): time.sleep(0.01)",
        )
    (launcher.directory / "ready").touch()
    launcher.start()
    seen = launcher.wait_up(*ALL)
    assert launcher.code() == 0, launcher.output
    assert not running(seen["engine-0"][0])
    nodes = {name: where for name, (_, where) in seen.items()}
    assert nodes["coordinator"] == "launcher" and nodes["engine-0"] == nodes["trainer-1"]
    assert {nodes["trainer-0"], nodes["trainer-1"]} == {HEAD, OTHER}
    assert (launcher.directory / "logs" / "trainer-1.log").read_text() == "done trainer-1\n"


@pytest.mark.nightly  # each is a start of a cluster's processes
def test_a_trainer_that_fails_on_another_node_ends_the_run_with_its_name_and_log(
    launcher: RayLauncher,
) -> None:
    launcher.role("trainer-1", "print('cause of death'); raise SystemExit(7)")
    assert launcher.start().code() == 1
    assert (
        "failed: trainer-1 ended: exit code 7" in launcher.output
        and "    cause of death" in launcher.output
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_a_launcher_that_is_stopped_or_killed_leaves_nothing_on_any_node(
    launcher: RayLauncher, number: signal.Signals
) -> None:
    """The fake engine ignores SIGTERM: it is killed after the grace."""
    launcher.role(
        "engine-0", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {UP_AND_SLEEP}"
    )
    launcher.start()
    pids = [pid for pid, _ in launcher.wait_up(*ALL).values()]
    assert launcher.popen
    os.kill(launcher.popen.pid, number)
    assert launcher.code() == (130 if number == signal.SIGINT else -9), launcher.output
    launcher.wait_for(lambda: not any(running(pid) for pid in pids), "nothing is left")


@pytest.mark.nightly  # each is a start of a cluster's processes
def test_a_killed_raylet_is_named_not_those_who_lost_contact_and_its_processes_are_gone(
    launcher: RayLauncher, two: Raylets
) -> None:
    """The other trainer ends at once when its peer does, as a rank does whose collective breaks."""
    launcher.start()
    up = launcher.wait_up(*ALL)
    lost = next(name for name in ("trainer-0", "trainer-1") if up[name][1] == OTHER)
    peer = "trainer-0" if lost == "trainer-1" else "trainer-1"
    two.kill(OTHER)
    try:
        launcher.wait_for(lambda: not running(up[lost][0]), f"its keeper has killed {lost}")
        os.kill(up[peer][0], signal.SIGTERM)
        assert launcher.code() == 1
    finally:
        two.add(OTHER, 2)
    number = lost[-1]
    assert f"node {number} ({OTHER}) is lost" in launcher.output
    assert (
        f"ended: lost with node {number} ({OTHER})"
        in launcher.output.partition("failed: ")[2].splitlines()[0]
    )
    assert not any(running(pid) for pid, _ in up.values())


@pytest.mark.nightly
def test_a_node_that_comes_back_gets_its_processes_and_the_run_starts_again(
    launcher: RayLauncher, two: Raylets
) -> None:
    (launcher.directory / "ready").touch()
    launcher.start(run={"restarts": 1})
    first = launcher.wait_up(*ALL)
    launcher.wait_for(lambda: "trainers ready" in launcher.output, "the run is ready")
    two.kill(OTHER)
    launcher.wait_for(lambda: "is lost" in launcher.output, "the loss is noticed")
    for name in ("coordinator", "trainer-0", "trainer-1"):
        launcher.role(name, "up.write_text(f'{os.getpid()} {where}')")
    two.add(OTHER, 2)
    second = launcher.wait_up("coordinator", "trainer-0", "trainer-1")
    assert launcher.code() == 0, launcher.output
    if first["engine-0"][1] == OTHER:
        assert f"engine-0: lost with node 1 ({OTHER}); started again" in launcher.output
    assert (
        "starting coordinator and trainers again" in launcher.output
        and f"({OTHER}) is back" in launcher.output
    )
    pids = {pid for pid, _ in first.values()}, {pid for pid, _ in second.values()}
    assert not pids[0] & pids[1] and not any(map(running, pids[0] | pids[1]))


@pytest.mark.nightly  # each is a start of a cluster's processes
def test_a_host_that_is_silent_is_lost_and_its_processes_end(launcher: RayLauncher) -> None:
    """A stopped process keeps its connections, as a machine does that hangs."""
    launcher.start()
    up = launcher.wait_up(*ALL)
    keeper = parent(up["trainer-1"][0])
    os.kill(parent(keeper), signal.SIGSTOP)
    assert launcher.code() == 1
    assert (
        "node 1 (127.0.0." in launcher.output
        and "is lost: no sign of life for 60 s" in launcher.output
    )
    launcher.wait_for(
        lambda: not any(running(pid) for pid, _ in up.values()),
        "its keepers have ended its processes",
    )


@pytest.mark.nightly  # each is a start of a cluster's processes
def test_a_node_that_does_not_come_back_ends_the_run_in_one_line(
    launcher: RayLauncher, two: Raylets
) -> None:
    (launcher.directory / "ready").touch()
    launcher.start(run={"restarts": 1, "startup_timeout_s": 20.0})
    launcher.wait_up(*ALL)
    launcher.wait_for(lambda: "trainers ready" in launcher.output, "the run is ready")
    two.kill(OTHER)
    try:
        assert launcher.code() == 1
    finally:
        two.add(OTHER, 2)
    (line,) = [line for line in launcher.output.splitlines() if line.startswith("failed: ")]
    assert f"({OTHER}) is not there, within 20 s (run.startup_timeout_s)" in line


@pytest.mark.nightly  # each is a start of a cluster's processes
def test_too_few_resources_are_one_line_that_says_what_is_wanted_and_what_there_is(
    launcher: RayLauncher,
) -> None:
    keys = {"nnodes": 3, "devices": None, "devices_per_node": 1}
    assert launcher.start(run={"startup_timeout_s": 2.0}, placement=keys).code() == 2
    (line,) = [line for line in launcher.output.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        f"error: placement.cluster: the run needs 3 nodes with 1 CPU; the cluster has {HEAD} 2 "
        f"CPU, {OTHER} 2 CPU, of which"
    )


def test_a_node_with_a_problem_is_refused_by_its_address_at_once(launcher: RayLauncher) -> None:
    (launcher.directory / "problem").write_text("run.dir: not shared")
    assert launcher.start().code() == 2
    (line,) = [line for line in launcher.output.splitlines() if line.startswith("error: ")]
    assert line in {f"error: node {address}: run.dir: not shared" for address in (HEAD, OTHER)}


@pytest.mark.nightly  # each is a start of a cluster's processes
def test_an_extra_engine_comes_with_a_node_and_goes_with_it(
    launcher: RayLauncher, two: Raylets
) -> None:
    """The run takes both devices of both nodes; a third node has one for engine-1."""
    third = "127.0.0.4"
    launcher.role("engine-1", UP_AND_SLEEP)
    (launcher.directory / "ready").touch()
    launcher.start(rollout={"max_engines": 2}, placement={"devices": [0, 1, 3]})
    launcher.wait_up(*ALL)
    launcher.wait_for(lambda: "trainers ready" in launcher.output, "the run is ready")
    assert "engine-1" not in launcher.output
    two.add(third, 1)
    try:
        pid, where = launcher.wait_up("engine-1")["engine-1"]
        assert where == third
        launcher.wait_for(
            lambda: f"engine-1: starting at http://{third}:7" in launcher.output, "it is announced"
        )
        two.kill(third)
        launcher.wait_for(lambda: "engine-1: lost with node 2" in launcher.output, "it is missed")
        assert launcher.popen and launcher.popen.poll() is None, "the run goes on"
        assert not running(pid)
    finally:
        launcher.close()


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(UserError, match=r"RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1 "),
        connected(),
    ):
        pass
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: 'nowhere' is not HOST:PORT"), connected():
        pass


def test_without_ray_the_key_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(
            ConfigError, match=r"placement.cluster: ray, but Ray is not installed here; pip install"
        ),
        connected(),
    ):
        pass


def test_no_secret_and_no_device_list_goes_to_the_nodes() -> None:
    inputs = {
        "VLLM_API_KEY": "secret",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "HCCL_X": "1",
    }
    assert forwarded_environment(inputs) == {"OMP_NUM_THREADS": "1", "HCCL_X": "1"}
