"""Weights through CUDA's IPC handles: another process maps the sender's memory on one GPU and gets every tensor bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pa_npu import platform as platforms
from pa_npu.backends.megatron.weights.buckets import Position, StageTensors
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher
from pa_npu.weight_transfer import transport
from tests.helpers.launched import ROOT
from tests.helpers.weights import Stage, make_checkpoint

TIMEOUT_S = 120.0
RECEIVER = """
import json, sys, types, torch
from safetensors.torch import save_file
from pa_npu import platform
from pa_npu.weight_transfer.receiver import Receiver
port, stages, directory, versions = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
gpu = platform.get("cuda")
gpu.set_device(0)
receiver = Receiver.join(("127.0.0.1", port), stages, rank=1, world_size=2, backend="handles", device=gpu.device(0),
                         timeout_s=120.0, model=types.SimpleNamespace())
for version in range(versions):
    weights = dict(receiver.receive(version))
    assert all(tensor.is_cuda for tensor in weights.values())
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, f"{directory}/{version}.safetensors")
    print(*receiver.digests, flush=True)
receiver.close()
"""


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
        StageTensors(module, spec, Position(), 4096),
        store_host="127.0.0.1",
        store_port=store.port,
        timeout_s=20.0,
        backend="gloo",
        device=gpu.device(0),
        memory=gpu,
    )
    expected = load_file(directory / "model.safetensors")
    for epoch, versions in ((0, 2), (1, 1)):
        stages = json.dumps([publisher.manifest().by("handles").of_epoch(epoch).to_json()])
        command = [sys.executable, "-c", RECEIVER, str(store.port), stages, str(directory), str(versions)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            publisher.connect(PublishMembers(epoch, 0, handles_workers=1), TIMEOUT_S)
            for version in range(versions):
                stats = publisher.publish(version)
                assert process.stdout is not None and process.stdout.readline().strip() == stats.digests
                arrived = load_file(directory / f"{version}.safetensors")
                assert arrived.keys() == expected.keys() and stats.buckets > 5
                different = [name for name, tensor in expected.items() if not torch.equal(arrived[name], tensor)]
                assert not different, different
                expected = {name: tensor + 1 for name, tensor in expected.items()}
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(1)
        finally:
            process.kill()
            process.wait()
    try:
        publisher.publish(1)
    except (transport.WeightSyncError, DeadlineExceeded) as error:
        assert "20" in str(error), error
    else:
        raise AssertionError("a publish that nobody takes must end with an error")
    print("sent")
