#!/usr/bin/env python
"""How many responses and tokens per second one coordinator and the rollout buffer sustain on one core.

The coordinator's real path runs in this process, pinned to one core: admission, HTTP client,
decoding and checks, a reward stub, advantages, the group's bytes, the put into the c10d store.
Around it, on the other cores, run what it talks to: stand-in engines (tools/stand_in.py, faster
than any row needs), the store's host, and a consumer that takes the groups out as trainers do.

    python tools/bench_control_path.py [--seconds 8] [--rows 8x128,16x512] [--engines 2] [--form
    json] [--profile] [--markdown FILE]

A row GxR has groups of G responses of R tokens each. Columns:

    responses/s, tokens/s   response tokens, by wall clock, with everything running
    core                    share of its core that the coordinator used; below 100% something else was the limit
    tokens/s of core        response tokens per second of the coordinator's CPU time: what a core of its own sustains
    decode ... other        CPU microseconds of the coordinator per group, each part timed alone on the same group: the answer to
                            checked arrays, advantages and Group, its bytes, the put; `other` is the rest of the total: HTTP
                            (receiving and joining the body), the event loop, admission, bookkeeping
    rewards                 what handing the group to the real reward workers and back would add (not in the total)
    expert_choices, bytes   what a mixture's expert choices add to decoding, building and encoding (not in the total), in
                            microseconds per group and in bytes of the group per response token; Qwen3-30B-A3B: 48
                            layers, 8 experts
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import cProfile
import gc
import json
import os
import platform
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.config.schema import Config
from pa_npu.config.sections.reward import RewardConfig
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.episode import reward_input
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.engines import codec as wire
from pa_npu.engines.client import EngineClient
from pa_npu.engines.expert_choice_codec import (
    with_expert_choices,
)
from pa_npu.engines.http_server import COMPACT_TYPE
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.environments.single_turn import samples_of as samples_of_turn
from pa_npu.families.shape import Experts
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.columns import RunColumns
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.types import Sample
from pa_npu.samples.wire import to_bytes
from pa_npu.telemetry.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
VOCABULARY = 150_000
EXPERTS = Experts(128, 8, 768, True, tuple(range(48)))  # Qwen3-30B-A3B
# Qwen2.5-7B: what the groups would be trained on.
SHAPE = ModelSpec.parse(
    "7B",
    {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    },
)
STARTUP_S = 60.0
# Groups in flight per engine: enough that none of them ever waits for the coordinator's next
# request.
GROUPS_IN_FLIGHT = 8
GROUPS_PER_ITERATION = 64


@dataclass(frozen=True)
class Body:
    """An engine's answer. form: its content type."""

    data: bytes
    form: str

    def generations(self, responses: int, sampling: Sampling, url: str = "") -> list[Generation]:
        return wire.decode_response(
            self.data, responses, sampling, VOCABULARY, url, version=0, content_type=self.form
        )


@dataclass(frozen=True)
class Row:
    responses: int
    length: int
    prompt: int
    body_bytes_per_token: float
    groups: int
    seconds: float
    cpu_s: float
    decode_us: float
    group_us: float
    bytes_us: float
    put_us: float
    total_us: float
    rewards_us: float
    expert_choices_us: float
    expert_choices_bytes: float

    @property
    def responses_per_s(self) -> float:
        return self.groups * self.responses / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.responses_per_s * self.length

    @property
    def core(self) -> float:
        return self.cpu_s / self.seconds

    @property
    def tokens_per_core_s(self) -> float:
        return self.groups * self.responses * self.length / self.cpu_s

    @property
    def other_us(self) -> float:
        return max(
            0.0, self.total_us - self.decode_us - self.group_us - self.bytes_us - self.put_us
        )


class StubRewards:
    """Rewards that cost nothing: the worker processes of the real ones are not the coordinator's
    core.
    """

    async def score(self, group: RewardInput) -> RewardResult:
        total = np.arange(len(group.responses), dtype=np.float32) % 2
        return RewardResult(total, {"stub": total}, total > 0, ())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="8x128,8x512,16x512,16x2048", help="GxR, separated by commas"
    )
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured seconds per row")
    parser.add_argument("--engines", type=int, default=2, help="stand-in engines")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also print where Python time goes (slows the row down)",
    )
    parser.add_argument(
        "--form",
        choices=("compact", "json"),
        default="compact",
        help="of the engines' answers: of this package's own, or of another server of vLLM",
    )
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores[1:]))  # inherited by everything started below
    rows = []
    for shape in arguments.rows.split(","):
        responses, length = map(int, shape.split("x"))
        with surroundings(arguments.engines, responses, length, arguments.form) as (urls, port):
            if len(cores) > 1:
                os.sched_setaffinity(0, {cores[0]})
            row = measure(
                urls,
                port,
                responses,
                length,
                arguments.prompt,
                arguments.seconds,
                arguments.profile,
            )
            if len(cores) > 1:
                os.sched_setaffinity(0, set(cores[1:]))
        rows.append(row)
        print(console_line(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows, arguments.engines))
    return 0


@contextlib.contextmanager
def surroundings(
    engines: int, responses: int, length: int, form: str
) -> Iterator[tuple[list[str], int]]:
    """Stand-in engines, store host and consumer as processes; yields the engines' URLs and the
    store's port. form: of the engines' answers, compact or json.
    """
    with contextlib.ExitStack() as stack:
        # one step per response and no time per token: bounded by the stand-in's own CPU time alone
        options = ["--variants", "64", "--stride", str(length), "--vocab-size", str(VOCABULARY)]
        options += ["--max-num-seqs", str(GROUPS_IN_FLIGHT * responses)]
        if form == "json":
            options.append("--json")
        urls = []
        for _ in range(engines):
            line = start(stack, str(Path(__file__).with_name("stand_in.py")), *options)
            urls.append(line.split()[-1])
        port = int(start(stack, __file__, "--as-store").split()[-1])
        start(stack, __file__, "--as-consumer", str(port))
        yield urls, port


def start(stack: contextlib.ExitStack, *command: str) -> str:
    """Start a Python child that ends with the stack, and return the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{' '.join(command)} ended before it was ready")
    return line


def measure(
    urls: Sequence[str],
    port: int,
    responses: int,
    length: int,
    prompt_tokens: int,
    seconds: float,
    profile: bool,
) -> Row:
    prompt = Prompt(0, np.arange(3, 3 + prompt_tokens, dtype=np.int32), "0", "prompt", {})
    config = Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rollout": {
                "responses_per_prompt": responses,
                "max_response_tokens": length,
                "window": GROUPS_IN_FLIGHT * responses,
            },
            # every group goes the whole way, whatever its rewards
            "schedule": {
                "prompts_per_iteration": GROUPS_PER_ITERATION,
                "skip_zero_advantage": False,
            },
            "telemetry": {"samples": 0},
        }
    )
    sampling = Sampling(length, 1.0, ignore_eos=True)
    channel = StoreChannel(connect(HOST, port, STARTUP_S))
    profiler = cProfile.Profile() if profile else None
    groups, wall_s, cpu_s = asyncio.run(
        produce_for(urls, channel, config, sampling, prompt, seconds, profiler)
    )
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
    body, parts = asyncio.run(time_parts(urls[0], channel, sampling, prompt, responses))
    rewards_us = asyncio.run(time_rewards(body, sampling, prompt, responses))
    return Row(
        responses=responses,
        length=length,
        prompt=prompt_tokens,
        body_bytes_per_token=len(body.data) / (responses * length),
        groups=groups,
        seconds=wall_s,
        cpu_s=cpu_s,
        **parts,
        **time_expert_choices(body, sampling, prompt, responses),
        total_us=cpu_s / groups * 1e6,
        rewards_us=rewards_us,
    )


async def produce_for(
    urls: Sequence[str],
    channel: StoreChannel,
    config: Config,
    sampling: Sampling,
    prompt: Prompt,
    seconds: float,
    profiler: cProfile.Profile | None,
) -> tuple[int, float, float]:
    """(groups, wall seconds, CPU seconds) of whole iterations, after one that warms everything up."""
    buffer = RolloutBuffer(channel, "run", readers=1)
    with ThreadPoolExecutor(1) as store_thread:
        async with EnginePool([EngineClient(url, VOCABULARY) for url in urls]) as pool:
            for engine in pool.engines:
                await engine.load_weights(0, deadline_s=STARTUP_S)
            timeline = Timeline(None, "")
            work = GroupWork(SHAPE, config)
            controller = ScheduleController(Rules.from_config(config), work)
            producer = producer_on_engines(
                config,
                pool,
                environment(config),
                StubRewards(),  # type: ignore[arg-type]
                buffer,
                controller,
                sampling,
                timeline,
                work,
                store_thread,
            )
            prompts = [prompt] * GROUPS_PER_ITERATION
            await producer.produce(0, prompts)
            gc.collect()
            gc.freeze()  # as the coordinator does
            if profiler is not None:
                profiler.enable()
            start_s = time.perf_counter()
            start_cpu_s = time.process_time()
            iteration = 0
            while time.perf_counter() - start_s < seconds:
                iteration += 1
                await producer.produce(iteration, prompts)
            wall_s = time.perf_counter() - start_s
            cpu_s = time.process_time() - start_cpu_s
            if profiler is not None:
                profiler.disable()
    return iteration * GROUPS_PER_ITERATION, wall_s, cpu_s


def environment(config: Config) -> SingleTurn:
    return SingleTurn(EnvironmentContext(None, config.rollout.max_response_tokens))


def samples_of(
    body: Body, sampling: Sampling, prompt: Prompt, responses: int, url: str
) -> list[Sample]:
    """Returns an engine's answer as the environment makes samples of it."""
    return samples_of_turn(prompt.tokens, body.generations(responses, sampling, url))


async def time_parts(
    url: str, channel: StoreChannel, sampling: Sampling, prompt: Prompt, responses: int
) -> tuple[Body, dict[str, float]]:
    """Returns a body, and the CPU microseconds of decoding, building, encoding and putting its
    group.
    """
    async with EngineClient(url, VOCABULARY) as engine:
        request = wire.encode_request(prompt.tokens, responses, 0, sampling)
        data, headers = await engine._request(
            "POST", "/v1/completions", request, STARTUP_S, accept=COMPACT_TYPE
        )
    body = Body(data, headers["Content-Type"].partition(";")[0])

    total = np.arange(responses, dtype=np.float32) % 2

    def decode() -> list[Sample]:
        return samples_of(body, sampling, prompt, responses, url)

    def build() -> Group:
        advantages = group_advantages(total, "group-std")
        return Group.from_samples(
            samples, total, advantages, run_seed=0, iteration=0, index=0, prompt_id=0
        )

    samples = decode()
    group = build()
    data = to_bytes(group)
    return body, {
        "decode_us": cpu_us(decode),
        "group_us": cpu_us(build),
        "bytes_us": cpu_us(lambda: to_bytes(group)),
        "put_us": cpu_us(lambda: channel.put_bytes("bench", data)),
    }


def time_expert_choices(
    body: Body, sampling: Sampling, prompt: Prompt, responses: int
) -> dict[str, float]:
    """CPU microseconds and bytes that expert choices, as the worker extension answers with them,
    add to a group.
    """
    asked = ExpertChoices.from_experts(EXPERTS)
    generations = body.generations(responses, sampling)
    num_prompt_tokens = len(prompt.tokens)
    rng = np.random.default_rng(1)
    shapes = [(len(generation.tokens), *asked.column.shape) for generation in generations]
    own_choices = [
        base64.b64encode(rng.integers(0, EXPERTS.count, shape, np.uint16).tobytes())
        for shape in shapes
    ]
    shared = base64.b64encode(
        rng.integers(
            0, EXPERTS.count, (num_prompt_tokens, *asked.column.shape), np.uint16
        ).tobytes()
    )

    def build(generations: Sequence[Generation], columns: RunColumns) -> bytes:
        total = np.zeros(responses, np.float32)
        samples = samples_of_turn(prompt.tokens, generations)
        group = Group.from_samples(
            samples, total, total, run_seed=0, iteration=0, index=0, prompt_id=0
        )
        return to_bytes(group, columns)

    def with_them() -> bytes:
        prompts = base64.b64decode(shared)
        recorded = [
            np.frombuffer(prompts + base64.b64decode(generation), "<u2")
            for generation in own_choices
        ]
        pairs = zip(generations, recorded, strict=True)
        return build(
            [
                with_expert_choices(generation, ids, num_prompt_tokens, asked, "")
                for generation, ids in pairs
            ],
            RunColumns((asked.column,)),
        )

    more = len(with_them()) - len(build(generations, RunColumns()))
    added_us = cpu_us(with_them) - cpu_us(lambda: build(generations, RunColumns()))
    return {
        "expert_choices_us": added_us,
        "expert_choices_bytes": more / sum(shape[0] for shape in shapes),
    }


async def time_rewards(body: Body, sampling: Sampling, prompt: Prompt, responses: int) -> float:
    """CPU microseconds of this process to have a group scored by a worker process (format reward)."""
    group = reward_input(prompt, samples_of(body, sampling, prompt, responses, ""))
    config = RewardConfig.model_validate({"functions": [{"name": "format", "pattern": "^ t"}]})
    async with RewardPool(config) as pool:
        times = []
        for _ in range(40):
            start_s = time.process_time()
            await pool.score(group)
            times.append(time.process_time() - start_s)
    return sorted(times)[len(times) // 2] * 1e6


def cpu_us(action: Callable[[], object], repetitions: int = 40) -> float:
    """Median CPU time of an action in microseconds."""
    times = []
    for _ in range(repetitions):
        start_s = time.process_time()
        action()
        times.append(time.process_time() - start_s)
    return sorted(times)[repetitions // 2] * 1e6


def host_store() -> None:
    """The store's host, as the launcher is."""
    import torch.distributed as dist

    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    print(f"store on port {store.port}", flush=True)
    while True:
        time.sleep(1)


def consume(port: int) -> None:
    """Takes every group out of the buffer and parses it, as one trainer rank does, until it is
    killed.
    """
    buffer = RolloutBuffer(StoreChannel(connect(HOST, port, STARTUP_S)), "run", readers=1)
    print("consumer ready", flush=True)
    iteration = 0
    while True:
        for slot in range(GROUPS_PER_ITERATION):
            buffer.wait(iteration, 0, slot, 600.0)
            buffer.read(iteration, 0, slot)
            buffer.done(iteration, 0, slot)
        iteration += 1


HEADER = (
    "G x R",
    "responses/s",
    "tokens/s",
    "core",
    "tokens/s of core",
    "decode",
    "group",
    "encode",
    "put",
    "other",
    "rewards",
    "expert_choices",
    "bytes",
)


def cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.responses} x {row.length}",
        f"{row.responses_per_s:,.0f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.core:.0%}",
        f"{row.tokens_per_core_s:,.0f}",
        *(
            f"{us:,.0f}"
            for us in (
                row.decode_us,
                row.group_us,
                row.bytes_us,
                row.put_us,
                row.other_us,
                row.rewards_us,
            )
        ),
        f"{row.expert_choices_us:,.0f}",
        f"{row.expert_choices_bytes:,.0f}",
    )


def console_line(row: Row) -> str:
    return " | ".join(f"{name} {value}" for name, value in zip(HEADER, cells(row), strict=True))


def markdown(rows: Sequence[Row], engines: int) -> str:
    table = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    lines = ["| " + " | ".join(line) + " |" for line in table]
    best = max(rows, key=lambda row: row.tokens_per_core_s)
    per_token = best.decode_us / (best.responses * best.length)
    return f"""# Control path

`python tools/bench_control_path.py`: the coordinator's path from HTTP response to rollout buffer on one core, between
{engines} stand-in engines, the store and a consumer on the other cores. Machine: {os.cpu_count()}-core
{platform.machine()} virtual machine, CPython {platform.python_version()}. Prompts of {rows[0].prompt} tokens.

{chr(10).join(lines)}

"core" is the share of its core that the coordinator used by wall clock; "tokens/s of core" divides by its CPU time. The
columns from "decode" on are microseconds of that CPU time per group: the answer to checked arrays, advantages and group,
its bytes, the put, and everything else (HTTP, event loop, admission). "rewards" comes on top with real reward workers,
"expert_choices" for a mixture with router replay (48 layers, 8 of 128 experts), whose groups are larger by "bytes" per
response token.

A core sustains up to {best.tokens_per_core_s / 1e6:.1f} million response tokens per second. The engines' answers have
{best.body_bytes_per_token:.0f} bytes per token (8 of arrays, 82 of JSON, with token strings, offsets and top log-probs).
Decoding takes {per_token * 1000:.0f} ns per token, {best.decode_us / best.total_us:.0%} of the CPU time. Short responses cost
more per token, because a request has a cost of its own.
"""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-store"]:
        host_store()
    elif sys.argv[1:2] == ["--as-consumer"]:
        consume(int(sys.argv[2]))
    else:
        sys.exit(main())
