"""The processes of `pa-npu serve`: service, trainer ranks and an engine, started again when they end."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.control.bounded_http import bounded_get
from pa_npu.control.channel import host_store
from pa_npu.errors import BAD_INPUT, FAILED, MUST_NOT_CONTINUE, ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.engines import check_engines
from pa_npu.launcher.checks.machine import resolve_device
from pa_npu.launcher.engine_key import engine_key, read_key
from pa_npu.launcher.placement import Placement, engine_ports
from pa_npu.launcher.process.commands import (
    Command,
    Store,
    coordinator_command,
    engine_command,
    engine_url,
    trainer_command,
)
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree, TreeProcess
from pa_npu.launcher.process.supervisor import StopSignals, stop_signals
from pa_npu.launcher.run_directory import CONFIG_FILE
from pa_npu.platform.base import Platform
from pa_npu.service.commands import STARTS_AGAIN
from pa_npu.service.wire import MAX_LIKELY_TOKENS

SERVICE_KEY_VARIABLE = "PA_NPU_SERVICE_KEY"
_POLL_S = 0.1
_PROBE_S = 1.0
_RESTARTS_WITHIN_S = 3600.0
_FINAL = (BAD_INPUT, MUST_NOT_CONTINUE)


def serve(config: Config) -> int:
    """Serves until a signal comes. Raises UserError before anything starts."""
    config, platform = resolve_device(config)
    check(config)
    placement = check_engines(config, platform)
    config = with_likely_tokens(fitted(config))
    directory = Path(config.run.dir)
    with (
        service_directory(directory) as key,
        Console(directory / "logs" / "launcher.log") as console,
        stop_signals() as signals,
        ProcessTree(directory / "logs", GRACE_S, signals.insisted) as tree,
    ):
        port = config.service.port or free_port(config.service.host)
        server = host_store(config.placement.address, 0)  # lives as long as this name
        store = Store(config.placement.address, server.port)
        write_configuration(directory / CONFIG_FILE, config)
        processes = ServedProcesses(config, platform, placement, store, key, port, tree)
        return Watch(config, processes, tree, console, signals, port).run()


def check(config: Config) -> None:
    """Raises ConfigError for keys that a service does not have."""
    problem = None
    if config.trainer.backend != "fsdp":
        problem = f"trainer.backend: {config.trainer.backend}; a service trains with fsdp"
    elif config.mesh.weight_shards != config.trainer.devices or config.mesh.context > 1:
        problem = (
            f"trainer.devices: {config.trainer.devices} ranks hold {config.mesh.weight_shards} "
            "shards of the weights; in a service each rank holds a shard of its own, without "
            "context parallelism"
        )
    elif config.trainer.devices > 1 and config.publish.senders != "leader":
        problem = (
            "publish.senders: the first trainer rank sends a service's weights; set it to leader"
        )
    elif config.rollout.engines != 1 or config.rollout.tensor_parallel != 1:
        problem = "rollout.engines: a service samples with one engine on one device; set both to 1"
    elif config.optimizer.offload:
        problem = "optimizer.offload: true; slots are on the host already, set it to false"
    elif config.algorithm.kl_coef or config.schedule.updates_per_iteration > 1:
        problem = "algorithm: a service keeps no reference and no old policy; clients do both"
    elif config.rollout.temperature != 1.0:
        problem = (
            f"rollout.temperature: {config.rollout.temperature}; clients say theirs with every "
            "request, and training computes log-probs at 1"
        )
    elif config.algorithm.entropy_coef or config.model.vision == "trained":
        problem = (
            "algorithm.entropy_coef, model.vision: a service trains the clients' losses on text"
        )
    if problem is not None:
        raise ConfigError(f"{problem} (pa-npu serve)")


def fitted(config: Config) -> Config:
    """Returns the configuration as the trainers' backend needs it for this model."""
    from pa_npu.backends.registry import backend_module

    config, lines = backend_module(config.trainer.backend).fit(
        config, ModelSpec.from_config(config)
    )
    for line in lines:
        print(line, file=sys.stderr)
    return config


def with_likely_tokens(config: Config) -> Config:
    """Returns the configuration with an engine that gives as many likely tokens as clients may ask
    for. vLLM's own limit is 20.
    """
    if config.rollout.backend != "vllm":
        return config
    arguments = (*config.rollout.extra_args, "--max-logprobs", str(MAX_LIKELY_TOKENS))
    rollout = config.rollout.model_copy(update={"extra_args": arguments})
    return config.model_copy(update={"rollout": rollout})


def write_configuration(file: Path, config: Config) -> None:
    """Writes what the processes read; it may hold secrets of the engine's environment."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(dump_config(config))


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class service_directory:
    """RUN/service with the clients' key, kept by this process alone: a second service is refused.

    The key is made at the first start, and stays; the file can be read by the user alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> str:
        import fcntl

        from pa_npu.errors import UserError

        service = self._directory / "service"
        service.mkdir(parents=True, exist_ok=True)
        self._lock = (service / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"run.dir: another service is at work in {self._directory}; choose another run.dir"
            ) from None
        file = service / "key"
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(f"tml-{secrets.token_hex(24)}\n")
        return read_key(file, "run.dir", "remove it, and a new one is made")

    def __exit__(self, *exc_info: object) -> None:
        self._lock.close()


@dataclass(eq=False)
class ServedProcesses:
    """The commands of a service's processes."""

    config: Config
    platform: Platform
    placement: Placement
    store: Store
    key: str
    port: int
    tree: ProcessTree
    engine_key: str = ""
    engine_port: int = 0
    attempt: int = 0

    def __post_init__(self) -> None:
        self.engine_key = engine_key(self.config)
        (self.engine_port,) = engine_ports(self.config, [0])

    @property
    def engine_url(self) -> str:
        return engine_url(self.config.placement.address, self.engine_port)

    def start_engine(self) -> TreeProcess:
        spec = ModelSpec.from_config(self.config)
        return self.tree.launch(
            engine_command(
                self.config,
                spec,
                self.platform,
                self.placement,
                0,
                self.engine_port,
                self.engine_key,
            )
        )

    def start_core(self) -> list[TreeProcess]:
        """Starts the service and the trainer ranks of a new attempt."""
        store = replace(self.store, attempt=self.attempt)
        self.attempt += 1
        command = coordinator_command(self.config, self.platform, store, self.engine_key)
        config_file = str(Path(self.config.run.dir) / CONFIG_FILE)
        argv: tuple[str, ...] = (sys.executable, "-m", "pa_npu.service.main")
        argv += ("--config", config_file, "--engine", self.engine_url, "--port", str(self.port))
        env = command.env | {SERVICE_KEY_VARIABLE: self.key}
        started = [self.tree.launch(Command("service", argv, env))]
        for rank in self.placement.ranks:
            trainer = trainer_command(self.config, self.platform, self.placement, store, rank)
            argv = (sys.executable, "-m", "pa_npu.service.trainer", "--config", config_file)
            started.append(self.tree.launch(replace(trainer, argv=argv)))
        return started


@dataclass(eq=False)
class Watch:
    """Starts what has ended again, until a signal comes or it has ended too often."""

    config: Config
    processes: ServedProcesses
    tree: ProcessTree
    console: Console
    signals: StopSignals
    port: int
    _restarts: dict[str, deque[float]] = field(default_factory=dict)

    def run(self) -> int:
        engine = self.processes.start_engine()
        core = self.processes.start_core()
        url = engine_url(self.config.service.host, self.port)
        self.console.print_line(
            f"serving {self.config.model.path} at {url} as soon as trainers and log are ready; "
            f"key in {Path(self.config.run.dir) / 'service' / 'key'}"
        )
        is_told = False
        while not self.signals.received:
            time.sleep(_POLL_S)
            if not is_told and answers(url):
                is_told = True
                self.console.print_line(f"ready: {url} (Ctrl-C ends)")
            ended = [process for process in core if process.exit_code is not None]
            if ended:
                if not self._may_restart("service and trainers", ended):
                    return FAILED
                self.tree.stop(core)
                self.tree.forget(core)
                core = self.processes.start_core()
                is_told = False
            if engine.exit_code is not None:
                if not self._may_restart("the engine", [engine]):
                    return FAILED
                self.tree.forget([engine])
                engine = self.processes.start_engine()
        self.console.print_line("stopping")
        return 0

    def _may_restart(self, name: str, ended: Sequence[TreeProcess]) -> bool:
        process = ended[0]
        for line in process.last_lines(5):
            self.console.print_error(f"{process.name}: {line}")
        if any((other.exit_code or 0) in _FINAL for other in ended):
            self.console.print_error(f"{process.name}: {process.describe_end()}; it must not go on")
            return False
        times = self._restarts.setdefault(name, deque())
        now_s = time.monotonic()
        while times and now_s - times[0] > _RESTARTS_WITHIN_S:
            times.popleft()
        if any(other.exit_code == STARTS_AGAIN for other in ended):
            self.console.print_error(f"{name} start again; the request that ended them is answered")
            return True
        if len(times) >= self.config.run.restarts:
            often = counted(len(times), "time")
            self.console.print_error(
                f"{process.name}: {process.describe_end()}; {name} was started again {often} within "
                "an hour (run.restarts)"
            )
            return False
        times.append(now_s)
        self.console.print_error(f"{process.name}: {process.describe_end()}; {name} starts again")
        return True


def answers(url: str) -> bool:
    """Returns whether the service has opened its port."""
    try:
        return bounded_get(f"{url}/api/v1/healthz", {}, _PROBE_S)[0] == 200
    except (OSError, ValueError):
        return False
