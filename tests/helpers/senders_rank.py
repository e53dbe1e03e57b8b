"""One fsdp rank that writes down what it would send to engines, by each way to divide that among ranks.

run_job starts it in place of tests.helpers.trainer_rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 4096


def main(job_file: str) -> None:
    from pa_npu import platform as platforms
    from pa_npu.backends.registry import backend_module
    from pa_npu.config.load import load_config
    from pa_npu.control.channel import connect
    from pa_npu.families.spec import ModelSpec
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.weight_transfer.transport import Deadline

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    config = load_config([job["config"]])
    rank = int(os.environ["RANK"])
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), 60)
    backend: Any = backend_module(config.trainer.backend).create(
        config,
        ModelSpec.from_config(config),
        platforms.get(config.run.device),
        dist.PrefixStore("trainer", store),
        rank,
        0,
        Timeline(None, ""),
    )
    sent: dict[str, Any] = {}
    for lora in job["lora"]:
        for senders in ("leader", "shards", "all"):
            publish = config.publish.model_copy(update={"lora": lora, "senders": senders})
            backend._config = config.model_copy(update={"publish": publish})
            source = backend.published_weights(BUCKET_BYTES)
            if source is None:
                continue
            buckets = [
                bucket.clone() for bucket in source.buckets(Deadline(60.0)) if bucket is not None
            ]
            contents = source.contents()
            manifest = source.manifest.to_json() if source.is_leader else None
            sent[f"{lora} {senders}"] = (manifest, buckets, contents)
    torch.save(sent, Path(job_file).with_name(f"sent-{rank}.pt"))
    dist.barrier()
    if rank == 0:
        Path(job["out"]).write_text("[]")
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1])
