"""Weights through CUDA's IPC handles: another process maps the sender's memory on one GPU and gets every tensor bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.publisher import Publisher
from pa_npu.weight_transfer import transport
from tests.helpers.launched import ROOT
from tests.helpers.mapped_weights import TIMEOUT_S, publish_to_processes
from tests.helpers.weights import Stage, make_checkpoint


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_what_another_process_maps_is_the_checkpoint_bit_for_bit(
    allocator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, because an allocator is set when the device is first used."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    code = f"from pathlib import Path; from tests.cuda.test_handles import send; send(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
    assert done.returncode == 0 and done.stdout.strip().endswith("sent"), done.stdout + done.stderr


def send(directory: Path) -> None:
    """Three versions to two receivers that are killed in turn, then one that nobody takes."""
    gpu = platforms.get("cuda")
    gpu.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spec = make_checkpoint(directory, "qwen3", tied=False, vocab=61)
    module = Stage().load(spec, 0).to("cuda")
    publisher = Publisher(
        StageTensors(module, spec, Mesh().place(0), 4096),
        store_host="127.0.0.1",
        store_port=store.port,
        timeout_s=20.0,
        backend="gloo",
        device=gpu.device(0),
        memory=gpu,
    )
    publish_to_processes(publisher, module, directory, store.port, "cuda")
    try:
        publisher.publish(1)
    except (transport.WeightSyncError, DeadlineExceeded) as error:
        assert "20" in str(error), error
    else:
        raise AssertionError("a publish that nobody takes must end with an error")
    print("sent")
