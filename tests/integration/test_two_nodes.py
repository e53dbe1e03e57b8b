"""Two launchers on two loopback addresses as two nodes: a whole run, a node that dies, a node that must not take part."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.launcher.placement import free_ports
from tests.helpers.launched import Launched, find, settings
from tests.helpers.sockets import listening

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="finds processes through /proc; other systems have one loopback"
    ),
]

RUN_TIMEOUT_S = 400.0
HEAD, OTHER = "127.0.0.1", "127.0.0.2"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


class Nodes:
    """Head and agent: trainer-0 on the head, engine-0 and trainer-1 on the other node."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self._tiny = tiny
        self._directory = directory
        self._launched: list[Launched] = []
        self._other: list[str] = []

    def start(self, *others: str, run_dir: str = "run", **keys: object) -> tuple[Launched, Launched]:
        """others: for the other node only."""
        (port,) = free_ports(HEAD, 1)
        nodes = {
            "trainer__devices": 2,
            "placement__nnodes": 2,
            "placement__devices_per_node": 2,
            "placement__engine_devices": "[2]",
            "placement__trainer_devices": "[0,3]",
            "placement__pin_cores": "false",
            "placement__master_addr": HEAD,
            "placement__store_port": port,
        }
        arguments = settings(self._tiny, self._directory / run_dir, **(nodes | keys))
        self._other = [*arguments, "placement.node_rank=1", f"placement.host={OTHER}", *others]
        return self._launch(arguments), self.start_other()

    def start_other(self) -> Launched:
        """Once more: the node comes back."""
        return self._launch(self._other)

    def close(self) -> None:
        for item in self._launched:
            item.close()

    def _launch(self, arguments: list[str]) -> Launched:
        directory = self._directory / f"launcher-{len(self._launched)}"
        directory.mkdir()
        self._launched.append(Launched(directory, "run", *arguments))
        return self._launched[-1]


@pytest.fixture
def nodes(tiny: Path, tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tiny, tmp_path)
    yield started
    started.close()


def trainer_environment(launched: Launched) -> dict[str, str]:
    pid = find(launched, "trainer.main")
    text = Path(f"/proc/{pid}/environ").read_text() if pid else ""
    pairs = dict(entry.partition("=")[::2] for entry in text.split("\0"))
    return {name: pairs[name] for name in RANK_VARIABLES if name in pairs}


def test_two_nodes_run_together_and_both_end_well(nodes: Nodes, tmp_path: Path) -> None:
    head, other = nodes.start()
    sockets: set[tuple[int, str, int]] = set()
    ranks: dict[str, dict[str, str]] = {}
    while head.popen.poll() is None:
        for name, node in (("head", head), ("other", other)):
            sockets |= listening([*node.family(), node.popen.pid])
            ranks[name] = trainer_environment(node) or ranks.get(name, {})
        with suppress(subprocess.TimeoutExpired):
            head.popen.wait(0.5)
    assert head.popen.returncode == 0, head.output + other.output
    assert other.popen.wait(20) == 0, other.output
    head.assert_nothing_survives()
    other.assert_nothing_survives()

    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [0, 1]
    assert list((run / "hf").glob("*.safetensors"))
    names = {"launcher", "launcher-node1", "coordinator", "engine-0", "trainer-0", "trainer-1"}
    assert {file.stem for file in (run / "logs").glob("*.log")} == names
    assert "node 1: engine-0 on device 0, trainer-1 on device 1" in head.output
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": HEAD}
    assert ranks == {
        "head": {"RANK": "0", "GROUP_RANK": "0", **shared},
        "other": {"RANK": "1", "GROUP_RANK": "1", **shared},
    }
    addresses = {address for _, address, _ in sockets}
    assert {HEAD, OTHER} <= addresses and all(address.startswith("127.") for address in addresses), addresses


def test_a_node_whose_launcher_is_killed_is_named_and_leaves_nothing(nodes: Nodes) -> None:
    head, other = nodes.start(placement__node_timeout_s=4)
    for node in (head, other):
        node.wait_for(lambda node=node: find(node, "trainer.main") is not None, "a rank has started", RUN_TIMEOUT_S)
    head.family()
    other.popen.kill()
    assert head.popen.wait(60) == 1, head.output
    assert f"node 1 ({OTHER}) is lost: its launcher gave no sign of life" in head.output
    assert re.search(rf"failed: (engine-0|trainer-1) ended: lost with node 1 \({re.escape(OTHER)}\)", head.output)
    head.assert_nothing_survives()
    other.assert_nothing_survives()


@pytest.mark.nightly
def test_a_node_that_is_lost_in_the_middle_and_comes_back_changes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "schedule__iterations": 30,
        "schedule__order": "prompt",
        "checkpoint__every": 1,
        "rollout__ignore_eos": "true",
        "reward__functions": '[{name: format, pattern: "[0-4]"}]',
        "data__test": "null",
        "placement__node_timeout_s": 4,
    }
    weights = []
    for run_dir in ("undisturbed", "run"):
        head, other = nodes.start(run_dir=run_dir, **keys)
        if run_dir == "run":
            head.wait_for(
                lambda head=head: "iteration  2/30" in head.output, "two iterations have ended", RUN_TIMEOUT_S
            )
            other.family()
            other.popen.kill()
            other.assert_nothing_survives()
            head.wait_for(lambda head=head: "is lost" in head.output, "the loss is noticed", RUN_TIMEOUT_S)
            other = nodes.start_other()
        assert head.popen.wait(RUN_TIMEOUT_S) == 0, head.output + other.output
        assert other.popen.wait(20) == 0, other.output
        weights.append(load_file(tmp_path / run_dir / "hf" / "model.safetensors"))
    assert f"node 1 ({OTHER}) is back" in head.output and "the run continues from" in head.output
    undisturbed, disturbed = weights
    changed = [name for name, weight in undisturbed.items() if not torch.equal(weight, disturbed[name])]
    assert not changed, f"tensors that differ: {changed}"


def test_a_node_with_another_configuration_is_refused_in_one_line(nodes: Nodes) -> None:
    head, other = nodes.start("optimizer.learning_rate=0.5")
    assert head.popen.wait(RUN_TIMEOUT_S) == 2 and other.popen.wait(20) == 2, head.output + other.output
    line = "configuration differs from the head's in optimizer.learning_rate; start every node with the same recipe"
    (said,) = [text for text in other.output.splitlines() if text.startswith("error: ")]
    assert said.startswith(f"error: {line}")
    (said,) = [text for text in head.output.splitlines() if text.startswith("error: ")]
    assert said.startswith("error: node 1 (") and line in said
