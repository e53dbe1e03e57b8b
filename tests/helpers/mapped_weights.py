"""A process that maps the sender's memory by handles: publishes of changed weights to it, and what it got compared bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher
from tests.helpers.launched import ROOT

TIMEOUT_S = 120.0

RECEIVER = """
import json, sys, types
from safetensors.torch import save_file
from pa_npu import platform
from pa_npu.weight_transfer.receiver import Receiver
kind, port, stages, directory, versions = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4], int(sys.argv[5])
device = platform.get(kind)
device.set_device(0)
receiver = Receiver.join(("127.0.0.1", port), stages, rank=1, world_size=2, backend="handles", device=device.device(0),
                         timeout_s=120.0, model=types.SimpleNamespace(), directory="")
for version in range(versions):
    weights = dict(receiver.receive(version))
    assert all(tensor.device.type == kind for tensor in weights.values())
    save_file({name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}, f"{directory}/{version}.safetensors")
    print(*receiver.digests, flush=True)
receiver.close()
"""


def publish_to_processes(publisher: Publisher, module: torch.nn.Module, directory: Path, port: int, kind: str) -> None:
    """Three versions, each of changed weights, to two processes that are killed in turn, the second served by the same memory.

    directory: of the checkpoint that the module holds. port: the store's. kind: of device. Raises AssertionError.
    """
    expected = load_file(directory / "model.safetensors")
    for epoch, versions in ((0, 2), (1, 1)):
        stages = json.dumps([publisher.manifest().by("handles").of_epoch(epoch).to_json()])
        command = [sys.executable, "-c", RECEIVER, kind, str(port), stages, str(directory), str(versions)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
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
