"""Entry of a trainer rank of the service, which the launcher starts: `python -m pa_npu.service.trainer --config FILE`.

It makes the training backend as a run's trainer does, then carries out one command after another
(commands.py). The environment is that of a run's trainer rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.errors import (
    DeadlineExceeded,
    ExportError,
    InvariantViolation,
    PaNpuError,
    exit_code,
    printable,
)
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher
from pa_npu.service import commands
from pa_npu.service.commands import Answer, Commands, Ready
from pa_npu.service.slots import ServedBackend, Slots
from pa_npu.service.wire import Refused, read_forward_backward, write_forward_backward
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.transport import WeightSyncError, run_and_exit

logger = logging.getLogger(__name__)
BUCKET_BYTES = 2**24
_NO_LIMIT = 2**31


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="resolved configuration of the service")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    setup_logging(f"trainer-{rank}")
    try:
        run_rank(load_config([arguments.config]), rank)
    except PaNpuError as error:
        return exit_code(error, logger)
    return 0


def run_rank(config: Config, rank: int) -> None:
    """Builds this rank's share of the model and carries out commands until the store is gone."""
    local_rank = int(os.environ["LOCAL_RANK"])
    platform = platforms.get(config.run.device)
    platform.set_device(local_rank)
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), config.run.startup_timeout_s)
    channel = StoreChannel(store, attempt_prefix())
    spec = ModelSpec.from_config(config)
    platform.seed_all(config.run.seed)
    platform.set_deterministic(True)
    with Timeline.for_run(Path(config.run.dir), f"trainer-{rank}") as timeline:
        module = backend_module(config.trainer.backend)
        group_store = dist.PrefixStore(f"{attempt_prefix()}trainer", store)
        backend = module.create(config, spec, platform, group_store, rank, local_rank, timeline)
        publisher = Publisher(
            backend.published_weights(BUCKET_BYTES),
            store_host=store.host,
            store_port=store.port,
            timeout_s=config.publish.timeout_s,
            backend=platform.comm_backend,
            device=backend.device,
            scope=attempt_prefix(),
        )
        base = base_digest(config, spec, publisher)
        slots = Slots(config, cast(ServedBackend, backend), base)
        own = Commands(channel, rank)
        manifest = publisher.manifest()
        own.announce(
            Ready(
                vocab_size=spec.vocab_size,
                base=base,
                software=backend.software,
                manifest_name=manifest.name,
                manifest=manifest.manifest,
                backend=platform.comm_backend,
            )
        )
        serve(own, slots, publisher)


def base_digest(config: Config, spec: ModelSpec, publisher: Publisher) -> str:
    """Digest of the model that all slots begin with, and of the shape of what is trained."""
    parts = [json.dumps(publisher.contents(), sort_keys=True)]
    parts.append(f"{config.model.dtype} {AdapterShape.from_config(config)}")
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()


def serve(own: Commands, slots: Slots, publisher: Publisher) -> None:
    """Carries out commands. One that is refused leaves everything as it was."""
    while True:
        command = own.next()
        try:
            answer = Answer(carry_out(command, slots, publisher))
        except Refused as refusal:
            answer = Answer(refused=str(refusal))
        except InvariantViolation as error:
            own.answer(Answer(broken=str(error)))
            raise
        except RuntimeError as error:  # torch's own, such as too little memory
            logger.exception("a command failed")
            slots.forget_active()
            reason = printable(str(error).partition("\n")[0])[:300]
            answer = Answer(refused=f"the trainer failed: {reason}")
        own.answer(answer)


def carry_out(command: commands.Command, slots: Slots, publisher: Publisher) -> bytes:
    """Returns what a command is answered with. Raises Refused."""
    return _ACTIONS[type(command)](command, slots, publisher)


def _create(command: commands.Create, slots: Slots, publisher: Publisher) -> bytes:
    slots.create(command.slot, command.seed)
    return b""


def _drop(command: commands.Drop, slots: Slots, publisher: Publisher) -> bytes:
    slots.drop(command.slot)
    return b""


def _compute(command: commands.Compute, slots: Slots, publisher: Publisher) -> bytes:
    call = read_forward_backward(command.body, _NO_LIMIT)
    run = slots.forward if call.forward_only else slots.forward_backward
    outputs = run(command.slot, call)
    return write_forward_backward(outputs.logprobs, {"loss:sum": outputs.loss})


def _optimize(command: commands.Optimize, slots: Slots, publisher: Publisher) -> bytes:
    metrics = slots.step(command.slot, command.adam)
    return json.dumps(
        {"metrics": {f"{name}:mean": value for name, value in metrics.items()}}
    ).encode()


def _save(command: commands.Save, slots: Slots, publisher: Publisher) -> bytes:
    return slots.save(command.slot, Path(command.file), command.parts).encode()


def _load(command: commands.Load, slots: Slots, publisher: Publisher) -> bytes:
    slots.load(command.slot, Path(command.file), command.optimizer)
    return b""


def _publish(command: commands.Publish, slots: Slots, publisher: Publisher) -> bytes:
    slots.show(Path(command.file))
    members = PublishMembers(command.epoch, command.workers)
    try:
        sent = publisher.publish(command.version, members)
    except (WeightSyncError, DeadlineExceeded) as error:  # an engine that ended
        raise Refused(f"publish: {error}") from None
    return sent.digests.encode()


def _export(command: commands.Export, slots: Slots, publisher: Publisher) -> bytes:
    try:
        slots.export(Path(command.file), Path(command.directory))
    except ExportError as error:
        raise Refused(f"export: {error}") from None
    return b""


_ACTIONS: dict[type[Any], Callable[[Any, Slots, Publisher], bytes]] = {
    commands.Create: _create,
    commands.Drop: _drop,
    commands.Compute: _compute,
    commands.Optimize: _optimize,
    commands.Save: _save,
    commands.Load: _load,
    commands.Publish: _publish,
    commands.Export: _export,
}


if __name__ == "__main__":
    run_and_exit(main)
