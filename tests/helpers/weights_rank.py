"""One trainer rank that publishes the weights of several HF directories, one after another, and can export the last.

    python -m tests.helpers.weights_rank JOB.json      with RANK set

JOB.json: {"trainer": section, "models": [directory of version 0, ...], "store": [host, port],
"workers": engine workers, "bucket_mib": float, "export": directory or null}. Through the store:
`manifest/STAGE` is set by each stage's leader, `digests/VERSION/STAGE` too; a version is published
once `go/VERSION` is there.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.preloaded import Rank, start_rank

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = timedelta(seconds=240)


def start_ranks(job: dict[str, Any], world_size: int, directory: Path) -> list[Rank]:
    """Start all ranks; the caller stops them. Their output is in directory/rankN.log."""
    job_file = directory / "job.json"
    job_file.write_text(json.dumps(job))
    return [
        start_rank(
            "tests.helpers.weights_rank",
            str(job_file),
            {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
            directory / f"rank{rank}.log",
        )
        for rank in range(world_size)
    ]


def main(job_file: str) -> None:
    from pa_npu.backends.megatron.parallel import shard_group
    from pa_npu.backends.megatron.weights.buckets import StageTensors, export_hf
    from pa_npu.families.spec import ModelSpec
    from pa_npu.publish.messages import PublishMembers
    from pa_npu.publish.publisher import Publisher
    from tests.helpers.megatron import (
        PLATFORM,
        build_stage,
        initialise_parallel,
        load_hf,
        model_config,
        shutdown_parallel,
    )

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    rank = int(os.environ["RANK"])
    models = [Path(path) for path in job["models"]]
    host, port = job["store"]
    config = model_config(
        models[0], trainer=job["trainer"], model={"dtype": job.get("dtype", "fp32")}
    )
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    place = initialise_parallel(config, PLATFORM, dist.PrefixStore("ranks", store), rank)
    spec = ModelSpec.read(str(models[0]))
    stage = build_stage(spec, config, PLATFORM, frozen=())
    bucket_bytes, group = int(job["bucket_mib"] * 2**20), shard_group()
    source = StageTensors(stage, spec, place, bucket_bytes, group) if place.sends else None
    with closing(
        Publisher(
            source,
            store_host=host,
            store_port=port,
            timeout_s=240.0,  # engines start meanwhile
            backend="gloo",
            device=torch.device("cpu"),
        )
    ) as publisher:
        members = PublishMembers(0, job["workers"])
        if job["workers"]:
            if place.publishes:
                store.set(f"manifest/{place.stage}", json.dumps(publisher.manifest().group(0)))
            publisher.connect(members)
        for version, model in enumerate(models):
            load_hf(stage.policy, ModelSpec.read(str(model)))
            if not job["workers"]:
                continue
            store.wait([f"go/{version}"], TIMEOUT)
            stats = publisher.publish(version, members)
            print(f"rank {rank}: {stats}", flush=True)
            if place.publishes:
                store.set(f"digests/{version}/{place.stage}", stats.digests)
    if job.get("export"):
        spec = ModelSpec.read(str(models[-1]))
        export_hf(stage, spec, job["export"], place, group, max_file_bytes=job["max_file_bytes"])
    shutdown_parallel()


if __name__ == "__main__":
    main(sys.argv[1])
