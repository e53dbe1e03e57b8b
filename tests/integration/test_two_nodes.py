"""Two raylets on two loopback addresses as two nodes of a Ray cluster, with real engines and trainers.

A run over both equals the run on one machine bit for bit, also when one of the raylets is killed in
the middle. Nightly: in CI tests/unit/launcher/test_ray.py has such clusters with stand-in commands.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.messages import SHARD
from tests.helpers.launched import Launched, environment, settings
from tests.helpers.processes import running
from tests.helpers.raylets import HEAD, OTHER, Raylets, raylets
from tests.helpers.sockets import listening

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="finds processes through /proc; other systems have one loopback",
    ),
]

RUN_TIMEOUT_S = 400.0
ITERATIONS = 16
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
COMMON: dict[str, object] = {
    "trainer__devices": 2,
    "schedule__iterations": ITERATIONS,
    "schedule__order": "prompt",
    "checkpoint__every": 1,
    "rollout__ignore_eos": "true",
    "reward__functions": '[{name: format, pattern: "[0-4]"}]',
    "data__test": "null",
    "placement__pin_cores": "false",
}
# trainer-0 on one node, engine-0 and trainer-1 on the other
ON_TWO_NODES: dict[str, object] = {
    "placement__cluster": "ray",
    "placement__nnodes": 2,
    "placement__devices_per_node": 2,
    "placement__devices": "[2,0,3]",
    "placement__join_timeout_s": 120,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets({"PYTHONPATH": str(Path(__file__).parents[2])}) as two:
        yield two


@pytest.fixture(scope="module")
def on_one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the same run on this machine alone."""
    directory = tmp_path_factory.mktemp("one")
    launched = Launched(directory, "run", *settings(tiny, directory / "run", **COMMON))
    assert launched.popen.wait(RUN_TIMEOUT_S) == 0, launched.output
    return directory / "run"


@pytest.fixture
def launch(
    cluster: Raylets, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Launched]]:
    """Start the run on the cluster, with other keys if any are given."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    launched: list[Launched] = []

    def start(**others: object) -> Launched:
        keys = {**COMMON, **ON_TWO_NODES, **others}
        launched.append(Launched(tmp_path, "run", *settings(tiny, tmp_path / "run", **keys)))
        return launched[-1]

    yield start
    for item in launched:
        item.close()


@pytest.fixture
def launched(launch: Callable[..., Launched]) -> Launched:
    return launch()


def processes_of(run_dir: Path) -> dict[int, str]:
    """Every process that was started for a run, with its environment: those on nodes are no
    descendants of the launcher.
    """
    actual = {int(path.name): environment(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return {pid: text for pid, text in actual.items() if f"PA_NPU_RUN_DIR={run_dir}\n" in text}


def assert_same_weights(first: Path, second: Path) -> None:
    weights = [load_file(run / "hf" / "model.safetensors") for run in (first, second)]
    changed = [
        name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])
    ]
    assert not changed, f"tensors that differ: {changed}"


def test_a_run_over_two_nodes_equals_the_run_on_one_bit_for_bit(
    launched: Launched, on_one: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launched.wait_for(
        lambda: f"( 2/{ITERATIONS})" in launched.output, "two iterations have ended", RUN_TIMEOUT_S
    )
    seen = processes_of(run)
    addresses = {address for _, address, _ in listening(list(seen))}
    store = re.search(r"pa-npu join (\S+):(\d+)", launched.output)
    assert store
    channel = StoreChannel(connect(store[1], int(store[2]), 30.0), attempt_prefix(0))
    shards = [SHARD.get(channel, replica=replica).host for replica in range(2)]
    assert launched.popen.wait(RUN_TIMEOUT_S) == 0, launched.output

    launched.assert_nothing_survives()
    assert not [pid for pid in seen if running(pid)]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == list(range(ITERATIONS))
    assert_same_weights(on_one, run)
    assert sorted(shards) == sorted([HEAD, OTHER]), "each replica's groups lie on its own node"
    on_head = [json.loads(line) for line in (on_one / "metrics.jsonl").read_text().splitlines()]
    for there, here in zip(records, on_head, strict=True):
        assert (
            here["rollout_head_bytes"]
            == here["rollout_buffer_bytes"]
            == there["rollout_buffer_bytes"]
        )
        assert 0 < there["rollout_head_bytes"] < 0.5 * there["rollout_buffer_bytes"], (
            "what the head says of small groups"
        )
    names = {"launcher", "coordinator", "engine-0", "trainer-0", "trainer-1"}
    assert {file.stem for file in (run / "logs").glob("*.log")} == names
    assert "node 1: engine-0 on device 0, trainer-1 on device 1" in launched.output

    ranks = {
        dict(line.partition("=")[::2] for line in text.splitlines()).get("RANK"): text
        for text in seen.values()
    }
    for rank in ("0", "1"):
        values = dict(line.partition("=")[::2] for line in ranks[rank].splitlines())
        assert [values[name] for name in RANK_VARIABLES] == [rank, "0", rank, "2", "1"]
        assert (
            not [name for name in values if name.startswith("RAY_")]
            and values["MASTER_ADDR"] == HEAD
        )
    assert {HEAD, OTHER} & addresses and all(address.startswith("127.") for address in addresses), (
        addresses
    )


def test_a_raylet_that_is_killed_in_the_middle_changes_nothing(
    launched: Launched, cluster: Raylets, on_one: Path, tmp_path: Path
) -> None:
    launched.wait_for(
        lambda: f"( 2/{ITERATIONS})" in launched.output, "two iterations have ended", RUN_TIMEOUT_S
    )
    seen = processes_of(tmp_path / "run")
    cluster.kill(OTHER)
    cluster.add(OTHER, 2)
    assert launched.popen.wait(RUN_TIMEOUT_S) == 0, launched.output
    assert f"({OTHER}) is lost" in launched.output and f"({OTHER}) is back" in launched.output
    assert "the run continues from" in launched.output
    assert_same_weights(on_one, tmp_path / "run")
    assert not [pid for pid in seen if running(pid)]


def test_an_engine_that_comes_and_goes_with_its_node_serves_meanwhile_and_ends_nothing(
    launch: Callable[..., Launched], cluster: Raylets, tmp_path: Path
) -> None:
    third = "127.0.0.4"
    keys: dict[str, object] = {
        "rollout__backend": "vllm",
        "rollout__engines": 1,
        "rollout__max_engines": 2,
        "placement__devices": "[0,1,3]",
    }
    launched = launch(**keys, schedule__iterations=2000, checkpoint__every=0)
    launched.wait_for(
        lambda: "(   2/2000)" in launched.output, "two iterations have ended", RUN_TIMEOUT_S
    )
    cluster.add(third, 1)
    log = tmp_path / "run" / "logs" / "coordinator.log"

    def served() -> int:
        """Engines that generated something for the newest iteration."""
        *_, newest = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return sum(1 for use in json.loads(newest)["engines"].values() if use["tokens"])

    launched.wait_for(
        lambda: f"engine-1: starting at http://{third}:" in launched.output, "engine-1 starts", 120
    )
    launched.wait_for(lambda: served() == 2, f"two engines serve; see {log}", RUN_TIMEOUT_S)
    cluster.kill(third)
    launched.wait_for(lambda: "the run goes on without it" in launched.output, "it is missed", 60)
    launched.wait_for(lambda: served() == 1, "one engine serves again", 120)
    launched.popen.terminate()
    assert launched.popen.wait(60) == 143, launched.output
    launched.assert_nothing_survives()
