#!/usr/bin/env python
"""The same fixed work through TRL's trainers and through this system, in turn: tokens/s, ratio, age of tokens.

Real engines and real trainers, a 1.8 M parameter Qwen2 in fp32, one core for generation and one for
training (colocated: a process on each core that does both), the same prompts and reward, 16 groups
of 8 responses an iteration, one update each.

    python tools/bench_peers.py [--shapes long,short,free] [--systems ...] [--rounds 2] [--iterations 4]
                                [--json FILE] [--markdown FILE] [--plot NAME]

TRL and what it needs are installed once, without dependencies, into .cache/peers, an environment
that sees this one's packages. Its engines have the arguments of this project's own. TRL sends
weights over NCCL and AsyncGRPOTrainer computes attention with FlashAttention 3, which no CPU has:
tools/peers/cpu_stand_ins.py has gloo and torch's attention in their place.

A round runs every system once; a run that fails or passes its deadline is a row that says why.
--json FILE keeps the runs, those of earlier invocations too, so that shapes can be measured one by
one; without --shapes nothing new is run and all are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.load import load_config
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.engines.vllm.kind import server_command
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import free_ports
from pa_npu.platform.typical import HOST_PREFIX_BLOCK
from pa_npu.telemetry.records import read_records

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_schedule import write_prompts
from tools.free_lengths import make_end_likelier
from tools.hardware import processor
from tools.peers.table import Measured, System, draw, render, rows_of
from tools.processes import end_on_sigterm, reason_of, serve, started

ROOT = Path(__file__).resolve().parents[1]

GROUPS = 16
RESPONSES = 8
SAMPLES = GROUPS * RESPONSES
# iterations: code is loaded, queues fill, and `rollout.window=auto` learns what a decode step takes
WARMUP = 4
MAX_NUM_SEQS = 256
LEARNING_RATE = 1e-4  # large enough that engines with old weights show in the log-prob difference
TEMPLATE_TOKENS = 2  # of the tiny model's chat template around a prompt
# of the output row of the end token: responses of a random model then have free lengths
END_SCALE = 2.2
# of all linear layers, in TRL as here
LORA_RANK = 16
LORA_ALPHA = 32
ROWS = 16  # responses of a microbatch, in TRL as here
ENVIRONMENT = ROOT / ".cache" / "peers"
REQUIREMENTS = ROOT / "requirements" / "peers.txt"
# deadlines of a server's start and of a run
STARTED_S = 180
RUN_S = 180


@dataclass(frozen=True)
class Shape:
    """prompt: in tokens, with the template. response: the length, or with `free` the longest."""

    prompt: int
    response: int
    free: bool = False

    @property
    def title(self) -> str:
        return (
            f"prompts of {self.prompt}, responses {'up to' if self.free else 'of'} {self.response}"
        )

    @property
    def prompt_tokens(self) -> int:
        """An iteration's prompt tokens, each response's prompt counted."""
        return SAMPLES * self.prompt

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of groups with ROWS responses, each prompt computed once."""
        return ROWS // RESPONSES * (self.prompt + RESPONSES * self.response)


SHAPES = {"long": Shape(128, 64), "short": Shape(16, 64), "free": Shape(64, 128, free=True)}
_ON_POLICY = "none: every token is sampled by the weights that it trains"
SYSTEMS = {
    "trl-server": System(
        "TRL GRPOTrainer, vLLM server",
        "sequences masked whose ratio to vLLM's log-probs is above 3, which takes one more forward "
        "pass",
        "repeated in each padded row",
        "engine and trainer one each, in turn",
    ),
    "trl-colocate": System(
        "TRL GRPOTrainer, colocated",
        "as with the server",
        "repeated in each padded row",
        "engine and trainer on both, two processes, in turn",
    ),
    "trl-async": System(
        "TRL AsyncGRPOTrainer",
        "PPO ratio against the log-probs that vLLM sampled with; too old responses are dropped",
        "computed once for responses packed together",
        "engine and trainer one each, at the same time",
    ),
    "trl-lora": System(
        "TRL GRPOTrainer, vLLM server, LoRA",
        "as with the server",
        "repeated in each padded row",
        "engine and trainer one each, in turn",
    ),
    "sync": System(
        "this, synchronous", _ON_POLICY, "computed once", "engine and trainer one each, in turn"
    ),
    "colocate": System(
        "this, colocated",
        _ON_POLICY,
        "computed once",
        "engine and trainer on both, a pair of processes each, in turn",
    ),
    "roles": System(
        "this, roles",
        _ON_POLICY,
        "computed once",
        "engine and trainer on both, a core trains when its engine has handed on",
    ),
    "periodic": System(
        "this, periodic",
        _ON_POLICY,
        "computed once",
        "engine and trainer one each, at the same time",
    ),
    "fsdp": System(
        "this, periodic, fsdp",
        _ON_POLICY,
        "computed once",
        "engine and trainer one each, at the same time",
    ),
    "lora": System(
        "this, periodic, fsdp, LoRA",
        _ON_POLICY,
        "computed once",
        "engine and trainer one each, at the same time",
    ),
    "stale": System(
        "this, max_staleness=1",
        "PPO ratio against the proximal policy, truncated weights of tokens; nothing is dropped",
        "computed once",
        "engine and trainer one each, at the same time",
    ),
}
REFERENCE = "trl-server"
OURS: dict[str, tuple[str, ...]] = {
    "sync": ("schedule.stream=false",),
    "colocate": (
        "placement.colocate=true",
        "schedule.stream=false",
        "rollout.engines=2",
        "trainer.devices=2",
    ),
    "roles": (
        "placement.colocate=true",
        "schedule.stream=true",
        "rollout.engines=2",
        "trainer.devices=2",
    ),
    "periodic": ("schedule.stream=true",),
    "fsdp": ("schedule.stream=true", "trainer.backend=fsdp"),
    "lora": (
        "schedule.stream=true",
        "trainer.backend=fsdp",
        f"lora.rank={LORA_RANK}",
        f"lora.alpha={LORA_ALPHA}",
    ),
    "stale": ("schedule.max_staleness=1", "algorithm.importance_sampling=token"),
}


class PeerError(Exception):
    """Why a run has no result, in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        default=",".join(SHAPES),
        help="which, by name; empty: only print what --json has",
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, by name")
    parser.add_argument("--rounds", type=int, default=2, help="of every shape")
    parser.add_argument(
        "--iterations", type=int, default=4, help=f"of a run, after {WARMUP} of warm-up"
    )
    parser.add_argument(
        "--json", type=Path, help="keep runs there, and print those that are there already"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    parser.add_argument(
        "--plot", type=Path, help="write a picture under this name, .png, .svg or both"
    )
    args = parser.parse_args(arguments)
    shapes = [name for name in args.shapes.split(",") if name]
    systems = [name for name in args.systems.split(",") if name]
    for option, names, known in (("--shapes", shapes, SHAPES), ("--systems", systems, SYSTEMS)):
        if unknown := set(names) - known.keys():
            parser.error(f"{option}: {', '.join(sorted(unknown))} not among {', '.join(known)}")
    end_on_sigterm()
    runs = load_runs(args.json)
    if shapes:
        install(ENVIRONMENT)
        with (
            tempfile.TemporaryDirectory(prefix="bench_peers_") as scratch,
            Bench(Path(scratch), systems) as bench,
        ):
            for number in range(args.rounds):
                for shape in shapes:
                    for system in systems:
                        runs.append(bench.run(shape, system, number, args.iterations))
                        print(f"# {runs[-1]}", file=sys.stderr, flush=True)
                        save_runs(args.json, runs)
    titles = {name: shape.title for name, shape in SHAPES.items()}
    rows = rows_of(
        runs,
        list(SHAPES),
        list(SYSTEMS),
        {name: shape.prompt_tokens for name, shape in SHAPES.items()},
    )
    text = f"{heading()}\n\n{render(rows, titles, SYSTEMS, REFERENCE)}"
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    if args.plot:
        draw(rows, titles, SYSTEMS, args.plot)
    return 0


def heading() -> str:
    pinned = next(
        line
        for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines()
        if line.startswith("trl==")
    )
    return (
        f"{pinned.replace('==', ' ')}, {len(os.sched_getaffinity(0))} cores ({processor()}); a "
        f"Qwen2 with 1.8 M parameters in fp32; {GROUPS} groups of {RESPONSES} responses an "
        "iteration, one update each. tokens/s: prompt and response tokens of trained responses. "
        "age: versions between the weights that sampled a token and those it trains."
    )


def load_runs(path: Path | None) -> list[Measured]:
    return (
        [Measured(**values) for values in json.loads(path.read_text())]
        if path and path.is_file()
        else []
    )


def save_runs(path: Path | None, runs: Sequence[Measured]) -> None:
    if path:
        path.write_text(
            json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8"
        )


def install(directory: Path) -> None:
    """The peers' environment: packages of their own before those of this one.

    Does nothing when it is there.
    """
    python = directory / "bin" / "python"
    stamp = directory / "installed.txt"
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print(f"# installing {REQUIREMENTS.name} into {directory}", file=sys.stderr, flush=True)
    _checked([sys.executable, "-m", "venv", "--clear", "--without-pip", str(directory)])
    site_packages = Path(
        _checked(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        ).strip()
    )
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "project.pth").write_text(
        "".join(f"{path}\n" for path in here), encoding="utf-8"
    )
    if importlib.util.find_spec("uv"):
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    else:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    _checked([*command, "--no-deps", "-r", str(REQUIREMENTS)])
    stamp.write_text(wanted, encoding="utf-8")


def _checked(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode:
        raise SystemExit(
            f"bench_peers: {' '.join(command)} failed:\n{result.stdout}{result.stderr}"
        )
    return result.stdout


class Bench:
    """Both systems' engines for all runs, started when first needed; a trainer per run.

    Use `with`: nothing is left running.
    """

    def __init__(self, scratch: Path, systems: Sequence[str]) -> None:
        self._scratch = scratch
        self._systems = systems
        self._model = make_model(scratch / "tiny")
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, str | PeerError] = {}
        self._runs = 0
        cores = sorted(os.sched_getaffinity(0))
        self._engine_core = cores[0]
        self._trainer_core = cores[min(1, len(cores) - 1)]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def last_run(self) -> Path:
        """The run directory of the last run of this system."""
        return self._scratch / f"run{self._runs}" / "run"

    def run(self, shape: str, system: str, number: int, iterations: int) -> Measured:
        """Round `number` of a system; never raises PeerError."""
        self._runs += 1
        directory = self._scratch / f"run{self._runs}"
        directory.mkdir()
        total = WARMUP + iterations
        prompts = directory / "prompts.jsonl"
        # the same for all systems of a round; twice as many, for those who generate ahead
        write_prompts(
            prompts, SHAPES[shape].prompt - TEMPLATE_TOKENS, 2 * GROUPS * total, seed=number + 1
        )
        try:
            records = (self._ours if system in OURS else self._trl)(
                SHAPES[shape], system, prompts, directory, total
            )
            return (read_ours if system in OURS else read_trl)(shape, system, number, records)
        except PeerError as error:
            return Measured(shape, system, number, problem=str(error))

    def _ours(
        self, shape: Shape, system: str, prompts: Path, directory: Path, iterations: int
    ) -> list[dict[str, Any]]:
        keys: dict[str, Any] = {
            "run.dir": directory / "run",
            "data.train": prompts,
            "schedule.iterations": iterations,
            "rollout.max_response_tokens": shape.response,
            "rollout.ignore_eos": str(not shape.free).lower(),
            "microbatch.max_tokens": shape.microbatch_tokens,
        }
        env = dict(os.environ)
        if system in ("colocate", "roles"):  # engines of the run's own, on both cores
            both = f"[{self._engine_core},{self._trainer_core}]"
            keys |= {"placement.devices": both}
        else:
            keys["rollout.attach"] = f"[{self._server('ours')}]"
            env[KEY_VARIABLE] = (
                (self._scratch / "ours-engines" / "api_key").read_text(encoding="utf-8").strip()
            )
        settings = [
            *self._keys(),
            *(f"{key}={value}" for key, value in keys.items()),
            *OURS[system],
        ]
        log = directory / "log"
        command = [sys.executable, "-m", "pa_npu.launcher", "run", *settings]
        with started(command, log, env) as process:
            finish(process, log)
        return read_records(directory / "run")

    def _trl(
        self, shape: Shape, system: str, prompts: Path, directory: Path, iterations: int
    ) -> list[dict[str, Any]]:
        adapters = system == "trl-lora"
        mode = "server" if adapters else system.removeprefix("trl-")
        ranks = 2 if mode == "colocate" else 1
        options = {
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": SAMPLES // ROWS // ranks,
        }
        cores = (
            [self._engine_core, self._trainer_core] if mode == "colocate" else [self._trainer_core]
        )
        work = {
            "mode": mode,
            "model": str(self._model),
            "prompts": str(prompts),
            "scratch": str(directory / "out"),
            "log": str(directory / "steps.jsonl"),
            "server": "" if mode == "colocate" else self._server("trl"),
            "port": free_ports("127.0.0.1", 1)[0],
            "cores": cores,
            "iterations": iterations,
            "responses": RESPONSES,
            "response_tokens": shape.response,
            "fixed_lengths": not shape.free,
            "max_model_len": 512,
            "block_size": HOST_PREFIX_BLOCK,
            "learning_rate": LEARNING_RATE,
            "lora": {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"}
            if adapters
            else None,
            "options": options,
        }
        specification = directory / "work.json"
        specification.write_text(json.dumps(work))
        command = [str(ENVIRONMENT / "bin" / "python")]
        if ranks > 1:
            port = free_ports("127.0.0.1", 1)[0]
            command += [
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={ranks}",
                f"--master-port={port}",
            ]
        command += [str(ROOT / "tools" / "peers" / "trl_trainer.py"), str(specification)]
        log = directory / "log"
        steps = directory / "steps.jsonl"
        env = trl_environment()
        if mode == "colocate":
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine inside each trainer
        with started(command, log, env) as process:
            finish(process, log)
        return (
            [json.loads(line) for line in steps.read_text().splitlines()] if steps.is_file() else []
        )

    def _server(self, name: str) -> str:
        """Returns the address of a running engine, started the first time.

        Raises PeerError where it does not start, each time.
        """
        if name not in self._servers:
            try:
                self._servers[name] = self._start(name)
            except PeerError as error:
                self._servers[name] = error
        server = self._servers[name]
        if isinstance(server, PeerError):
            raise server
        return server

    def _start(self, name: str) -> str:
        port = free_ports("127.0.0.1", 1)[0]
        log = self._scratch / f"{name}.log"
        keys = [*self._keys(), f"placement.port={port - 1}", f"run.dir={self._scratch / 'ours'}"]
        if name == "ours":
            command = [sys.executable, "-m", "pa_npu.launcher", "engines", *keys]
            env = None
        else:
            command, env = trl_server_command(keys, port, self._engine_core)
        process = self._stack.enter_context(started(command, log, env))
        url = f"http://127.0.0.1:{port}"
        if not serve(process, [url], STARTED_S):
            raise PeerError(f"no engine: {reason_of(log)}")
        return url

    def _keys(self) -> list[str]:
        longest = max(shape.prompt for shape in SHAPES.values())
        keys = {
            "run.device": "cpu",
            "model.path": self._model,
            "model.dtype": "fp32",
            "data.train": self._model.parent / "train.jsonl",
            "data.chat_template": "always",
            "data.shuffle": "false",
            "data.max_prompt_tokens": longest,
            "reward.functions": "[{name: 'tools.peers.rewards:of_group'}]",
            "schedule.prompts_per_iteration": GROUPS,
            "schedule.skip_zero_advantage": "false",  # the peers compute every group
            "optimizer.learning_rate": LEARNING_RATE,
            "rollout.engines": 1,
            "rollout.window": "auto",
            "rollout.responses_per_prompt": RESPONSES,
            "rollout.max_response_tokens": max(shape.response for shape in SHAPES.values()),
            "rollout.max_num_seqs": MAX_NUM_SEQS,
            "checkpoint.export_hf": "false",
            "telemetry.trackers": "[]",
            "placement.devices": f"[{self._engine_core},{self._trainer_core}]",
        }
        return [f"{key}={value}" for key, value in keys.items()]


def make_model(directory: Path) -> Path:
    """Returns a random tiny model whose end token is likelier now and then, so that free lengths
    are.
    """
    command = [sys.executable, "tools/make_tiny_model.py", "--out", str(directory), "--random"]
    subprocess.run(
        [*command, "--hidden", "192", "--layers", "4"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    make_end_likelier(directory / "model", END_SCALE)
    return directory / "model"


def trl_server_command(
    keys: Sequence[str], port: int, core: int
) -> tuple[list[str], dict[str, str]]:
    """This project's engine but for what only its own coordinator asks for, with TRL's weight
    transfer and the model's own name.
    """
    config = load_config([], keys)
    ours = server_command(config, ModelSpec.read(config.model.path), 0, port)
    arguments = list(ours.argv[ours.argv.index("--model") :])
    for option in ("--worker-extension-cls", "--middleware", "--served-model-name"):
        place = arguments.index(option)
        del arguments[place : place + 2]
    arguments += [
        "--weight-transfer-config",
        json.dumps({"backend": "nccl"}),
        "--max-logprobs",
        "-1",
    ]
    program = [
        str(ENVIRONMENT / "bin" / "python"),
        str(ROOT / "tools" / "peers" / "trl_server.py"),
        str(core),
    ]
    return [*program, *arguments], {**ours.env, **trl_environment()}


def trl_environment() -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises PeerError when it fails or is not done in time."""
    try:
        status = process.wait(RUN_S)
    except subprocess.TimeoutExpired:
        raise PeerError(f"not done after {RUN_S} s; its log: {reason_of(log)}") from None
    if status:
        raise PeerError(f"ended with {status}: {reason_of(log)}")


def read_ours(
    shape: str, system: str, number: int, records: Sequence[Mapping[str, Any]]
) -> Measured:
    """Iterations after warm-up; with bounded staleness not the last one, which produces nothing."""
    kept = records[WARMUP : len(records) - (system == "stale")]
    if not kept:
        raise PeerError(f"{len(records)} iterations are in the record, no more than the warm-up")
    return Measured(
        shape,
        system,
        number,
        [record["iteration_s"] for record in kept],
        [record["tokens_response"] for record in kept],
        _mean_of(kept, "age_mean") or 0.0,
        max(record.get("age_max") or 0 for record in kept),
        _mean_of(kept, "logprob_diff_mean"),
    )


def read_trl(shape: str, system: str, number: int, steps: Sequence[Mapping[str, Any]]) -> Measured:
    """Steps after warm-up, from the end of one to the end of the next."""
    if len(steps) <= WARMUP:
        raise PeerError(f"{len(steps)} steps were logged, no more than the warm-up")
    kept = steps[WARMUP:]
    ends = [step["seconds"] for step in steps[WARMUP - 1 :]]
    synchronous = system != "trl-async"
    return Measured(
        shape,
        system,
        number,
        [after - before for before, after in itertools.pairwise(ends)],
        [trained_response_tokens(step) for step in kept],
        0.0 if synchronous else _mean_of(kept, "sample/staleness_mean"),
        0.0 if synchronous else max(step["sample/staleness_max"] for step in kept),
        _mean_of(kept, "sampling/sampling_logp_difference/mean"),
    )


def trained_response_tokens(step: Mapping[str, Any]) -> float:
    """AsyncGRPOTrainer says it; GRPOTrainer trains the SAMPLES that it generated for the step."""
    if "batch/trained_tokens_per_step" in step:
        return float(step["batch/trained_tokens_per_step"])
    return SAMPLES * float(step["completions/mean_length"])


def _mean_of(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [float(record[key]) for record in records if record.get(key) is not None]
    return sum(known) / len(known) if known else None


if __name__ == "__main__":
    sys.exit(main())
