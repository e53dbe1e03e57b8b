"""The process of a service, in the coordinator's place: `python -m pa_npu.service.main --config FILE --engine URL --port N`.

The launcher starts it together with trainer ranks and engine. It brings every slot to where the log
says that it was, and opens its port then. The environment has the store, the engine's key and the
service's own.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from pa_npu.checkpoints.whole_files import write_whole
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError, PaNpuError, exit_code
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.service import commands
from pa_npu.service.acceptance import Acceptance, Subject
from pa_npu.service.commands import STARTS_AGAIN, StartAgain, Trainers
from pa_npu.service.log import Begun, Log, Record
from pa_npu.service.registry import Registry
from pa_npu.service.sampler import ProbeLengths, Sampler
from pa_npu.service.server import Service
from pa_npu.service.slots import WEIGHTS
from pa_npu.service.turns import Turns
from pa_npu.telemetry.logs import setup_logging
from pa_npu.weight_transfer.transport import run_and_exit

logger = logging.getLogger(__name__)
KEY_VARIABLE = "PA_NPU_SERVICE_KEY"
_BASE_SLOT = "base"
_COMPACTED_FROM_BYTES = 2**26
"""A log below this is not made smaller while the service runs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="resolved configuration of the service")
    parser.add_argument("--engine", required=True, help="URL of the engine that samples")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    setup_logging("service")
    try:
        config = load_config([arguments.config])
        asyncio.run(serve(config, arguments.engine, arguments.port))
    except StartAgain as reason:
        logger.warning("%s", reason)
        return STARTS_AGAIN
    except PaNpuError as error:
        return exit_code(error, logger)
    return 0


class LoggedRegistry:
    """A registry whose every record is in the log before it is applied."""

    def __init__(self, log: Log, max_snapshots: int, *, is_restart: bool = True) -> None:
        """is_restart: whether a process of this service ended by itself. Requests that were being
        carried out when the service was stopped from outside are not suspected of it.
        """
        self._log = log
        self._max_snapshots = max_snapshots
        records = log.records
        if not is_restart:
            records = [record for record in records if not isinstance(record, Begun)]
        self.registry = self._of(records)
        compacted = list(self.registry.compacted())
        log.rewrite(compacted)
        self.registry = self._of(compacted)
        self._limit_bytes = max(_COMPACTED_FROM_BYTES, 2 * log.num_bytes)

    def write(self, record: Record) -> None:
        self._log.write(record)
        self.registry.apply(record)
        if self._log.num_bytes > self._limit_bytes:
            self.registry.records = list(self.registry.compacted())
            self._log.rewrite(self.registry.records)
            self._limit_bytes = max(_COMPACTED_FROM_BYTES, 2 * self._log.num_bytes)

    def _of(self, records: Iterable[Record]) -> Registry:
        registry = Registry(self._max_snapshots)
        for record in records:
            registry.apply(record)
        return registry


async def serve(config: Config, engine: str, port: int) -> None:
    """Serves until it is cancelled, or something that it needs has ended."""
    directory = Path(config.run.dir).resolve() / "service"
    host, store_port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    limit_s = config.run.startup_timeout_s
    channel = StoreChannel(connect(host, int(store_port), limit_s), attempt_prefix())
    keys = config.service
    trainers = Trainers(channel, config.trainer.devices, keys.call_timeout_s)
    with Log(directory / "log") as log:
        is_restart = attempt_prefix() != attempt_prefix(0)
        logged = LoggedRegistry(log, keys.snapshots, is_restart=is_restart)
        registry = logged.registry
        ready = await asyncio.to_thread(trainers.wait_ready, limit_s)
        check_base(directory / "base", ready.base)
        turns = Turns(registry, trainers, logged.write, directory, keep_every=keys.checkpoint_every)
        await turns.recover()
        base_file = directory / f"base-{ready.base}.safetensors"
        if not base_file.exists():
            await trainers.ask(commands.Create(slot=_BASE_SLOT, seed=0))
            await trainers.ask(commands.Save(slot=_BASE_SLOT, file=str(base_file), parts=[WEIGHTS]))
            await trainers.ask(commands.Drop(slot=_BASE_SLOT))
        sampler = Sampler(
            partial(engine_kind(config.rollout.backend).client, engine, ready.vocab_size),
            trainers,
            ready,
            (host, int(store_port)),
            load_timeout_s=config.publish.timeout_s,
            start_timeout_s=limit_s,
            probe=probe_lengths(config),
        )
        subject = Subject(ready.vocab_size, config.engine_tokens, AdapterShape.from_config(config))
        acceptance = Acceptance(config, registry, subject, logged.write, directory)

        async def drop(model: str) -> None:
            await trainers.ask(commands.Drop(slot=model))

        service = Service(
            config=config,
            key=os.environ[KEY_VARIABLE],
            registry=registry,
            acceptance=acceptance,
            turns=turns,
            sampler=sampler,
            write=logged.write,
            drop=drop,
            tidy=partial(remove_unneeded, registry, directory),
            base_file=str(base_file),
        )
        async with sampler:
            await run(service, turns, registry, config, port)
    trainers.close()


async def run(
    service: Service, turns: Turns, registry: Registry, config: Config, port: int
) -> None:
    """Opens the port and works until something fails."""
    runner = web.AppRunner(service.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    tasks = [
        asyncio.create_task(turns.run(), name="turns"),
        asyncio.create_task(service.tidy_forever(), name="tidy"),
    ]
    try:
        for future in list(registry.futures.values()):
            if future.request.route == "sample" and future.answer is None:
                service.start_sample(future.request)
        await web.TCPSite(runner, config.service.host, port).start()
        logger.info("serving at %s:%d", config.service.host, port)
        ends: list[asyncio.Future[Any]] = [*tasks, service.broken]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            if isinstance(error := end.result(), PaNpuError):
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await service.close()
        with suppress(asyncio.CancelledError):
            await runner.cleanup()


def probe_lengths(config: Config) -> ProbeLengths | None:
    """Returns the lengths of the probe behind each load; None where publish.probe_tokens is 0."""
    num_tokens = min(config.publish.probe_tokens, config.engine_tokens - 1)
    return ProbeLengths(num_tokens, config.engine_tokens) if num_tokens > 0 else None


def check_base(file: Path, base: str) -> None:
    """Raises ConfigError where the run directory is of another model than the one that is served."""
    if not file.exists():
        write_whole(file, base.encode())
        return
    if file.read_text() != base:
        raise ConfigError(
            f"run.dir: {file.parent.parent} has the slots of another model, dtype or lora.rank than "
            "those that are served; choose another run.dir"
        )


def remove_unneeded(registry: Registry, directory: Path) -> None:
    """Removes files of weights that nothing needs any more."""
    needed = registry.files()
    for folder in ("weights", "kept"):
        for file in (directory / folder).glob("*.safetensors"):
            if str(file) not in needed:
                file.unlink(missing_ok=True)


if __name__ == "__main__":
    run_and_exit(main)
