"""The real trainer on two and four ranks of npu tensors over cpu:gloo,npu:hccl, against one rank on the CPU.

The ranks are started once for all tests; this process is the engine worker that they publish to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.typed import Topic
from pa_npu.engines.protocol import WeightGroups
from pa_npu.publish.messages import (
    LATE_ANSWER,
    LATE_DECISION,
    LATE_MANIFEST,
    LATE_REQUEST,
    LATE_SENT,
    MANIFEST,
    LateDecision,
    LateRequest,
    StageManifest,
)
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.receiver import Receiver
from tests.conftest import NIGHTLY, PROFILE
from tests.helpers.models import make_model
from tests.npu_sim.reference_ops import all_references
from tests.npu_sim.simulator import NpuSim
from tests.npu_sim.train_rank import BROKEN_EPOCH, EPOCH, ITERATIONS, LATE_OVER, TIMEOUT_S

ROOT = Path(__file__).parents[3]
# ranks import MindSpeed and Megatron in a minute each where others work on the machine
TIME_LIMIT_S = 420
GROUPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"devices": 2, "tensor_parallel": 2, "recompute": "none"},
    "TP2 full": {"devices": 2, "tensor_parallel": 2, "recompute": "full"},
    "DP2": {"devices": 2, "recompute": "none"},
    "PP2": {"devices": 2, "pipeline_parallel": 2, "recompute": "none"},
    "TP2xPP2": {
        "devices": 4,
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "recompute": "full",
    },
    "FSDP2": {"devices": 2, "backend": "fsdp", "recompute": "full"},
    "EP2": {"devices": 2, "expert_parallel": 2, "recompute": "none"},
    "C2": {"devices": 2, "context_parallel": 2, "recompute": "none"},
}
PARTS_OF_TP2XPP2 = ("TP2", "TP2 full", "PP2")
if PROFILE != NIGHTLY:
    LAYOUTS = {name: trainer for name, trainer in LAYOUTS.items() if name not in PARTS_OF_TP2XPP2}
ONE_RANK = {"one rank": {"devices": 1}, "one rank, mixture": {"devices": 1}}


def is_mixture(layout: str) -> bool:
    return "expert_parallel" in LAYOUTS.get(layout, {}) or "mixture" in layout


def make_config(model: Path, device: str, trainer: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"seed": 3, "device": device},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unused.jsonl"},
        "rollout": {"responses_per_prompt": 4, "max_response_tokens": 16},
        "attention": {"implementation": "merge"},
        "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01},
        # an epsilon above the rounding of the gradients, which Adam would otherwise scale to whole
        # steps where they are zero
        "optimizer": {
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "warmup_iterations": 0,
            "epsilon": 1e-4,
        },
        "schedule": {"prompts_per_iteration": GROUPS, "iterations": ITERATIONS, "order": "prompt"},
        "trainer": trainer,
    }
    return Config.model_validate(tree)


class Run:
    """Several layouts on one set of rank processes; `stores` has each layout's."""

    def __init__(
        self, directory: Path, device: str, layouts: dict[str, Any], engine_workers: int
    ) -> None:
        self.directory = directory
        directory.mkdir()
        self.stores = {
            name: dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
            for name in layouts
        }
        job: dict[str, Any] = {
            "layouts": {},
            "out": str(directory),
            "engine_workers": engine_workers,
        }
        for name, trainer in layouts.items():
            file = directory / f"{name}.yaml"
            file.write_text(dump_config(make_config(self.model(name), device, trainer)))
            job["layouts"][name] = {"config": str(file), "port": self.stores[name].port}
        (directory / "job.json").write_text(json.dumps(job))
        self.processes = []
        for rank in range(max(trainer["devices"] for trainer in layouts.values())):
            with open(directory / f"rank{rank}.log", "w") as log:
                command = [
                    sys.executable,
                    "-m",
                    "tests.npu_sim.train_rank",
                    str(directory / "job.json"),
                    str(rank),
                ]
                environment = os.environ | {
                    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                    "PYTHONWARNINGS": "ignore",
                }
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )

    def model(self, layout: str) -> Path:
        return self.directory.parent / ("mixture" if is_mixture(layout) else "model")

    def finish(self) -> None:
        codes = [process.wait(TIME_LIMIT_S) for process in self.processes]
        assert not any(codes), f"exit codes {codes}\n{self.logs}"

    @property
    def healthy(self) -> bool:
        return all(process.poll() in (None, 0) for process in self.processes)

    @property
    def written(self) -> int:
        """Bytes that the ranks have written so far: logs, and what they leave of each layout."""
        total = 0
        # which may lose some meanwhile: an export is renamed
        for folder, _, files in os.walk(self.directory):
            for file in files:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, file)).st_size
        return total

    @property
    def logs(self) -> str:
        return "\n".join(
            f"--- {file.name}\n{file.read_text()[-14000:]}"
            for file in self.directory.glob("rank*.log")
        )

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def weights(self, layout: str) -> dict[str, torch.Tensor]:
        """Reads the weights of one file, or of one per pipeline stage."""
        files = sorted((self.directory / layout / "hf").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def ranks(self, layout: str) -> list[dict[str, Any]]:
        return [
            torch.load(file, weights_only=False)
            for file in sorted((self.directory / layout).glob("rank*.pt"))
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Run, dict[str, Any]]]:
    """The CPU's run, the NPU's, and what engines got from each of its layouts."""
    directory = tmp_path_factory.mktemp("trainer")
    make_model(directory / "model", "qwen3", tied=True)
    make_model(directory / "mixture", "qwen3_moe")
    npu = Run(directory / "npu", "npu", LAYOUTS, engine_workers=1)
    cpu = Run(directory / "cpu", "cpu", ONE_RANK, engine_workers=0)
    try:
        received = {name: EngineWorker(npu, name).receive() for name in LAYOUTS}
        npu.finish()
        cpu.finish()
        yield cpu, npu, received
    finally:
        npu.stop()
        cpu.stop()


class EngineWorker:
    """Engines of a layout's trainers in this process: one gives up, one is left, one comes late."""

    def __init__(self, run: Run, layout: str) -> None:
        self.run, self.layout = run, layout
        self.store = run.stores[layout]
        self.channel = StoreChannel(self.store)
        self.mesh = make_config(run.model(layout), "npu", LAYOUTS[layout]).mesh
        self.publishers = self.mesh.publishers("shards")

    def receive(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that arrived after the publish that was given up, and late."""
        manifests = self._wait_for(MANIFEST)
        with NpuSim(all_references()):
            broken = self._join(manifests, BROKEN_EPOCH)
            for manifest in manifests:
                name = transport.epoch_name(manifest.name, BROKEN_EPOCH)
                transport.Abandonment("127.0.0.1", self.store.port, name).declare(
                    "the engine is gone"
                )
            after_failure, _ = self._read(self._join(manifests, EPOCH))
            # only now: gloo would have told the trainers that it is gone, which HCCL does not
            broken.close()

            late_manifests = self._wait_for(LATE_MANIFEST)
            LATE_REQUEST.put(self.channel, LateRequest(ITERATIONS, 1), number=0)
            senders = self.mesh.senders()
            answers = [
                LATE_ANSWER.wait(self.channel, TIMEOUT_S, number=0, rank=rank) for rank in senders
            ]
            assert all(answer.held for answer in answers)
            LATE_DECISION.put(self.channel, LateDecision(True), number=0)
            late, digests = self._read(self._join(late_manifests, 0, "gloo"), "cpu")
        sent = [
            LATE_SENT.wait(self.channel, TIMEOUT_S, number=0, rank=rank).digests
            for rank in self.publishers
        ]
        assert sent == digests, "what arrived late is not what was sent"
        self.channel.put_bytes(LATE_OVER, b"over")
        return {"after failure": after_failure, "late": late}

    def _wait_for(self, topic: Topic[StageManifest]) -> list[StageManifest]:
        written, deadline = -1, 0.0
        while not all(topic.exists(self.channel, rank=rank) for rank in self.publishers):
            if self.run.written != written:  # ranks that get on have as long again
                written, deadline = self.run.written, time.monotonic() + TIME_LIMIT_S
            assert time.monotonic() < deadline and self.run.healthy, (
                f"{self.layout}: no manifest\n{self.run.logs}"
            )
            time.sleep(0.02)
        return [topic.get(self.channel, rank=rank) for rank in self.publishers]

    def _join(self, manifests: list[StageManifest], epoch: int, backend: str = "hccl") -> Receiver:
        stages = [manifest.group(epoch) for manifest in manifests]
        groups = WeightGroups(("127.0.0.1", self.store.port), 1, 2, stages, backend, TIMEOUT_S / 2)
        model = self.run.model(self.layout)
        return Receiver.join(
            vars(groups), 0, torch.device("npu", 0), AutoConfig.from_pretrained(model), str(model)
        )

    def _read(
        self, receiver: Receiver, memory: str = "npu"
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        tensors = dict(receiver.receive(ITERATIONS))
        assert {tensor.device.type for tensor in tensors.values()} == {memory}
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        digests = list(receiver.digests)
        receiver.close()
        return on_host, digests


def largest_difference(
    ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]
) -> tuple[float, Any]:
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).abs().max().item(), name) for name in ours)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_and_weights_after_the_steps_equal_the_cpu_run(layout: str, runs: Any) -> None:
    cpu, npu, _ = runs
    one_rank = "one rank, mixture" if is_mixture(layout) else "one rank"
    expected = cpu.ranks(one_rank)[0]
    first_version = load_file(cpu.model(layout) / "model.safetensors")
    after = cpu.weights(one_rank)
    assert largest_difference(after, {name: first_version[name] for name in after})[0] > 1e-3, (
        "nothing was learned"
    )
    actual: dict[int, torch.Tensor] = {}
    for rank in npu.ranks(layout):
        for report, wanted in zip(rank["reports"], expected["reports"], strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy"):
                assert report[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
        actual |= rank["logprobs"]
    assert len(actual) == GROUPS * ITERATIONS
    difference, group = largest_difference(actual, expected["logprobs"])
    assert difference < 1e-5, f"log-probs of group {group} differ by {difference:.1e}"
    difference, name = largest_difference(npu.weights(layout), after)
    assert difference < 1e-5, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("engine", ["after failure", "late"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_on_an_npu_group_gets_the_trained_weights(
    layout: str, engine: str, runs: Any
) -> None:
    """Also when a publish before was given up in the middle, and from the thread that serves
    engines which come late.
    """
    _, npu, received = runs
    weights, actual = npu.weights(layout), received[layout][engine]
    assert actual.keys() == weights.keys()
    different = [name for name, tensor in actual.items() if not torch.equal(tensor, weights[name])]
    assert not different, f"{layout}: received other weights than the trainer has: {different}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_publish_that_is_given_up_ends_on_its_senders_with_the_reason_and_leaves_nothing_pending(
    layout: str, runs: Any
) -> None:
    """Its group is dropped by torch_npu's own calls, of which none fails."""
    _, npu, _ = runs
    ranks = npu.ranks(layout)
    senders = make_config(Path("model"), "npu", LAYOUTS[layout]).mesh.publishers("shards")
    failures = [rank["failure"] for rank in ranks if rank.get("failure")]
    assert len(failures) == len(senders)
    assert all("the engine is gone" in failure for failure in failures)
    assert [rank["complaints"] for rank in ranks if rank.get("complaints")] == []


def test_automatic_buckets_go_by_the_devices_free_memory(runs: Any) -> None:
    """60 GiB in the stub, of which a 256th would be more than the largest that gains anything."""
    _, npu, _ = runs
    assert {rank["automatic_bucket_bytes"] for layout in LAYOUTS for rank in npu.ranks(layout)} == {
        64 * 2**20
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_of_a_replica_reads_each_group_and_the_others_get_it_over_the_device(
    layout: str, runs: Any
) -> None:
    _, npu, _ = runs
    ranks, trainer = npu.ranks(layout), LAYOUTS[layout]
    replica = trainer.get("tensor_parallel", 1) * trainer.get("pipeline_parallel", 1)
    replica *= trainer.get("context_parallel", 1)
    groups = GROUPS * ITERATIONS * replica // len(ranks)
    readers = range(
        len(ranks) // replica
    )  # tensor parallel varies fastest, and there are no replicas of several ranks here
    assert [rank["reads"] for rank in ranks] == [
        groups if number in readers else 0 for number in range(len(ranks))
    ]
    collectives = 0 if replica == 1 else 2
    for rank in ranks:
        assert rank["calls"].get("c10d::broadcast_", 0) >= collectives * groups, "sizes and payload"
        assert sum(report["rollout_reads"] for report in rank["reports"]) == GROUPS * ITERATIONS, (
            "over all replicas"
        )
        assert bool(sum(report["rollout_collective_bytes"] for report in rank["reports"])) == bool(
            collectives
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_operators_run_and_no_operator_lacks_an_npu_kernel(layout: str, runs: Any) -> None:
    _, npu, _ = runs
    fused, is_megatron = ["npu::npu_fusion_attention"], LAYOUTS[layout].get("backend") != "fsdp"
    if is_megatron:  # fsdp has transformers' layers
        fused += ["npu::npu_rms_norm", "npu::npu_rotary_mul", "npu::npu_swiglu"]
    for rank in npu.ranks(layout):
        calls = rank["calls"]
        for name in fused:
            assert calls[name] and calls.get(f"{name}_backward", 0) + calls.get(
                f"{name}_grad", 0
            ), name
        assert calls.get("aten::_fused_adamw_") or not is_megatron
        assert bool(calls.get("npu::npu_grouped_matmul")) == is_mixture(layout)
        assert rank["without_kernel"] == []


def test_mindspeed_is_active_where_it_was_asked_for(runs: Any) -> None:
    _, npu, _ = runs
    wanted = "PA_NPU_SIM_MINDSPEED" in os.environ
    assert {rank["mindspeed"] for layout in LAYOUTS for rank in npu.ranks(layout)} == {wanted}
