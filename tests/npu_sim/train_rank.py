"""One trainer rank that trains prepared groups in several parallel layouts, one after another, on the CPU or a simulated NPU.

    python -m tests.npu_sim.train_rank JOB.json RANK

JOB.json: {"layouts": {name: {"config": file, "port": port of the layout's store}}, "out":
directory, "engine_workers": n}. A rank leaves out the layouts that have no such rank. With engine
workers it publishes at the end: to an engine that gives up (epoch 0), to the engine that is left
(epoch 1), and to one that comes late. In `out` each layout leaves NAME/hf, the policy after the
last step, and NAME/rankN.pt: log-probs of every group, reports, what ran on the device and how the
first publish failed.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ITERATIONS = 2  # the second also shows that the first one's update was the same
BROKEN_EPOCH, EPOCH = 0, 1  # of the group whose engine gives up, and of the one after it
LATE_OVER = "late deliveries are over"  # a key
TIMEOUT_S = 60
BUCKET_BYTES = 16 * 1024


def main(job_file: str, rank: int) -> int:
    from pa_npu import platform as platforms
    from pa_npu.backends.megatron.patches.table import prepare
    from pa_npu.config.load import load_config

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    layouts = {
        name: (load_config([layout["config"]]), layout["port"])
        for name, layout in job["layouts"].items()
    }
    device = next(iter(layouts.values()))[0].run.device
    sim: Any = nullcontext()
    if device == "npu":
        import tests.npu_sim.environment  # noqa: F401 - imported for its effect
        from tests.npu_sim.reference_ops import all_references
        from tests.npu_sim.simulator import NpuSim

        sim = NpuSim(all_references())
    platform = platforms.get(device)
    prepare(platform.name)
    for name, (config, port) in layouts.items():
        if rank >= config.trainer.devices:
            continue
        directory = Path(job["out"]) / name
        directory.mkdir(parents=True, exist_ok=True)
        with sim:
            actual = train(config, platform, port, rank, directory, job["engine_workers"])
        if device == "npu":
            actual |= {"calls": dict(sim.calls), "without_kernel": sorted(sim.without_kernel)}
            sim.calls.clear()
        actual["mindspeed"] = "mindspeed.megatron_adaptor" in sys.modules
        torch.save(actual, directory / f"rank{rank}.pt")
    return 0


def train(
    config: Any, platform: Any, port: int, rank: int, directory: Path, engine_workers: int
) -> dict[str, Any]:
    from pa_npu.backends.registry import backend_module
    from pa_npu.control.channel import StoreChannel, connect
    from pa_npu.families.spec import ModelSpec
    from pa_npu.publish.publisher import Publisher
    from pa_npu.samples.rollout_buffer import RolloutBuffer
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.trainer.assemble import bucket_bytes, rollout_source
    from pa_npu.trainer.learner import Learner
    from pa_npu.trainer.loop import consume
    from tests.helpers.reports import numbers
    from tests.helpers.trainer_rank import put_groups

    logprobs: dict[int, torch.Tensor] = {}

    def recording(of_group: Any) -> Any:
        def loss(microbatch: Any, outputs: Any) -> torch.Tensor:
            (group,) = microbatch.group_indices
            actual = outputs.policy.values
            assert actual.device == device == microbatch.tokens.device
            logprobs[microbatch.iteration * config.schedule.prompts_per_iteration + group] = (
                actual.detach().cpu()
            )
            return of_group(microbatch, outputs)

        return loss

    class CountingChannel(StoreChannel):
        num_reads = 0

        def get_bytes(self, key: str) -> bytes:
            self.num_reads += 1
            return super().get_bytes(key)

    store = connect("127.0.0.1", port, 60)
    platform.seed_all(config.run.seed)
    platform.set_deterministic(True)
    device = platform.device(0)
    spec = ModelSpec.from_config(config)
    ranks = dist.PrefixStore("trainer", store)
    backend = backend_module(config.trainer.backend).create(
        config, spec, platform, ranks, rank, 0, Timeline(None, "")
    )
    accumulate = backend.accumulate

    def record(microbatches: Any, objective: Any) -> Any:
        objective.loss = recording(objective.loss)
        return accumulate(microbatches, objective)

    backend.accumulate = record
    learner = Learner(config, backend, platform, Timeline(None, ""))
    assert backend.device == device
    channel = CountingChannel(store)
    rollouts = rollout_source(config, channel, learner, Timeline(None, ""))
    reports = []
    for iteration in range(ITERATIONS):
        if rank == 0:
            put_groups(
                config, RolloutBuffer(StoreChannel(store), "run", readers=1), iteration, None
            )
        learner.publish(iteration)
        reports.append(numbers(consume(learner, rollouts(iteration), 1).report))
    backend.export(directory / "hf")
    automatic = bucket_bytes(platform, backend, num_senders=1)
    actual = {
        "logprobs": logprobs,
        "reports": reports,
        "reads": channel.num_reads,
        "automatic_bucket_bytes": automatic,
    }
    if engine_workers:
        learner.publish(ITERATIONS)
        weights, late_weights = (
            backend.published_weights(BUCKET_BYTES, late_from) for late_from in (None, "policy")
        )
        if weights is not None and late_weights is not None:
            publishers = [
                Publisher(
                    source,
                    store_host="127.0.0.1",
                    store_port=port,
                    timeout_s=TIMEOUT_S / 2,
                    backend=comm_backend,
                    device=memory,
                )
                for source, comm_backend, memory in (
                    (weights, platform.comm_backend, device),
                    (late_weights, "gloo", torch.device("cpu")),
                )
            ]
            actual |= publish(publishers[0], channel, backend.place.rank, engine_workers)
            serve_late(publishers[1], channel, learner, platform)
    backend.close()
    return actual


def publish(publisher: Any, channel: Any, rank: int, engine_workers: int) -> dict[str, Any]:
    """To an engine that gives up, and again; returns why the first failed here, and what was said
    about its group.
    """
    from pa_npu.publish.messages import MANIFEST, PublishMembers
    from pa_npu.weight_transfer.transport import WeightSyncError

    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pa_npu.weight_transfer.transport").addHandler(handler)
    failure = None
    with closing(publisher):
        if publisher.is_leader:
            MANIFEST.put(channel, publisher.manifest(), rank=rank)
        try:
            publisher.publish(ITERATIONS, PublishMembers(BROKEN_EPOCH, engine_workers))
        except WeightSyncError as error:
            failure = str(error)
        publisher.publish(ITERATIONS, PublishMembers(EPOCH, engine_workers))
    return {"failure": failure, "complaints": complaints}


def serve_late(publisher: Any, channel: Any, learner: Any, platform: Any) -> None:
    """As a trainer inside an iteration, until the test says that it is over."""
    from pa_npu.publish.late_engines import LateEngineSender
    from pa_npu.publish.messages import LATE_MANIFEST

    place = learner.backend.place
    with LateEngineSender(publisher, channel, learner.gate, platform, place, TIMEOUT_S / 2):
        if publisher.is_leader:
            LATE_MANIFEST.put(channel, publisher.manifest(), rank=place.rank)
        channel.wait_bytes(LATE_OVER, TIMEOUT_S, "the test to have received late")


if __name__ == "__main__":
    from pa_npu.weight_transfer.transport import run_and_exit

    run_and_exit(lambda: main(sys.argv[1], int(sys.argv[2])))
