"""Entry of a trainer rank of the service, which the launcher starts: `python -m pa_npu.service.trainer --config FILE`.

It makes the training backend as a run's trainer does, then carries out one command after another
(commands.py). The environment is that of a run's trainer rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix
from pa_npu.errors import (
    DeadlineExceeded,
    ExportError,
    InvariantViolation,
    printable,
)
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher
from pa_npu.service import commands
from pa_npu.service.commands import Answer, Commands, Ready
from pa_npu.service.probe import Probes
from pa_npu.service.ranks import Ranks
from pa_npu.service.slots import ServedBackend, Slots
from pa_npu.service.wire import Refused, read_forward_backward, write_forward_backward
from pa_npu.trainer.rank_process import RankProcess, run_rank_process
from pa_npu.weight_transfer.transport import WeightSyncError, run_and_exit

logger = logging.getLogger(__name__)
BUCKET_BYTES = 2**24
_NO_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class ServedRank:
    """What a rank carries commands out with."""

    slots: Slots
    publisher: Publisher | None
    probes: Probes | None


def main() -> int:
    return run_rank_process(__doc__.splitlines()[0], run_rank)


def run_rank(process: RankProcess) -> None:
    """Builds this rank's share of the model and carries out commands until the store is gone."""
    config, spec, platform, store = process.config, process.spec, process.platform, process.store
    rank = process.rank
    channel = StoreChannel(store, attempt_prefix())
    platform.seed_all(config.run.seed)
    platform.set_deterministic(True)
    module = backend_module(config.trainer.backend)
    group_store = dist.PrefixStore(f"{attempt_prefix()}trainer", store)
    backend = module.create(
        config, spec, platform, group_store, rank, process.local_rank, process.timeline
    )
    publisher = Publisher(
        backend.published_weights(BUCKET_BYTES),
        store_host=store.host,
        store_port=store.port,
        timeout_s=config.publish.timeout_s,
        backend=platform.comm_backend,
        device=backend.device,
        scope=attempt_prefix(),
    )
    slots = Slots(config, cast(ServedBackend, backend))
    base = base_digest(config, publisher, slots.ranks)
    slots.base = base
    served = ServedRank(slots, publisher, Probes(config, backend, slots.ranks))
    own = Commands(channel, rank, slots.ranks.num_ranks)
    ready = Ready(vocab_size=spec.vocab_size, base=base, software=backend.software)
    if publisher.is_leader:
        manifest = publisher.manifest()
        ready.manifest_name = manifest.name
        ready.manifest = manifest.manifest
        ready.backend = platform.comm_backend
    own.announce(ready)
    serve(own, served)


def base_digest(config: Config, publisher: Publisher, ranks: Ranks) -> str:
    """Digest of the model that all slots begin with, and of the shape of what is trained, the same
    on all ranks. Collective.
    """
    contents = ranks.all_of(publisher.contents(), dict[str, str])[0]
    parts = [json.dumps(contents, sort_keys=True)]
    parts.append(f"{config.model.dtype} {AdapterShape.from_config(config)}")
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()


def serve(own: Commands, served: ServedRank) -> None:
    """Carries out commands. One that is refused, or fails, leaves every slot as it was."""
    ranks = served.slots.ranks
    while True:
        command = own.next()
        try:
            content = carry_out(command, served)
            answer = Answer(content if ranks.rank == 0 else b"")
        except Refused as refusal:
            answer = Answer(refused=str(refusal))
        except InvariantViolation as error:
            own.answer(Answer(broken=str(error)))
            raise
        except (RuntimeError, MemoryError) as error:
            lacks_memory = is_lack_of_memory(error)
            if ranks.num_ranks > 1 and not lacks_memory:
                raise  # such as a peer's end, which is no fault of the command: all start again
            logger.exception("a command failed")
            served.slots.forget_active()
            own.fail(failure_of(error, lacks_memory))
            continue
        own.answer(answer)


def is_lack_of_memory(error: RuntimeError | MemoryError) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def failure_of(error: RuntimeError | MemoryError, lacks_memory: bool) -> str:
    """Returns what a client reads of it."""
    words = printable(str(error).partition("\n")[0])[:300]
    if not lacks_memory:
        return f"the trainers failed: {words}"
    return (
        f"the trainers had too little memory for it ({words or 'MemoryError'}); send shorter datums, "
        "or serve with a smaller microbatch.max_tokens"
    )


def carry_out(command: commands.Command, served: ServedRank) -> bytes:
    """Returns what a command is answered with. Raises Refused."""
    return _ACTIONS[type(command)](command, served)


def _create(command: commands.Create, served: ServedRank) -> bytes:
    served.slots.create(command.slot, command.seed)
    return b""


def _drop(command: commands.Drop, served: ServedRank) -> bytes:
    served.slots.drop(command.slot)
    return b""


def _compute(command: commands.Compute, served: ServedRank) -> bytes:
    call = read_forward_backward(command.body, _NO_LIMIT)
    run = served.slots.forward if call.forward_only else served.slots.forward_backward
    outputs = run(command.slot, call)
    if served.slots.ranks.rank != 0:
        return b""
    return write_forward_backward(outputs.logprobs, {"loss:sum": outputs.loss})


def _optimize(command: commands.Optimize, served: ServedRank) -> bytes:
    metrics = served.slots.step(command.slot, command.adam)
    return json.dumps(
        {"metrics": {f"{name}:mean": value for name, value in metrics.items()}}
    ).encode()


def _save(command: commands.Save, served: ServedRank) -> bytes:
    return served.slots.save(command.slot, Path(command.file), command.parts).encode()


def _load(command: commands.Load, served: ServedRank) -> bytes:
    served.slots.load(command.slot, Path(command.file), command.optimizer)
    return b""


def _publish(command: commands.Publish, served: ServedRank) -> bytes:
    assert served.publisher is not None, "a process of a trainer rank has one"
    served.slots.show(Path(command.file))
    members = PublishMembers(command.epoch, command.workers)
    try:
        sent = served.publisher.publish(command.version, members)
    except (WeightSyncError, DeadlineExceeded) as error:  # an engine that ended
        raise Refused(f"publish: {error}") from None
    return sent.digests.encode()


def _probe(command: commands.Probe, served: ServedRank) -> bytes:
    assert served.probes is not None, "a process of a trainer rank has them"
    served.slots.show(Path(command.file))
    difference = served.probes.difference(
        command.version, command.prompt, command.tokens, command.logprobs
    )
    return (difference or "").encode()


def _export(command: commands.Export, served: ServedRank) -> bytes:
    refusal = None
    try:
        served.slots.export(Path(command.file), Path(command.directory))
    except ExportError as error:
        refusal = f"export: {error}"
    served.slots.ranks.agree(refusal)
    return b""


_ACTIONS: dict[type[Any], Callable[[Any, ServedRank], bytes]] = {
    commands.Create: _create,
    commands.Drop: _drop,
    commands.Compute: _compute,
    commands.Optimize: _optimize,
    commands.Save: _save,
    commands.Load: _load,
    commands.Publish: _publish,
    commands.Probe: _probe,
    commands.Export: _export,
}


if __name__ == "__main__":
    run_and_exit(main)
