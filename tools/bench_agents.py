#!/usr/bin/env python
"""Costs of the agents' gateway per request, beside the same requests sent to the engine directly, and whether it grows.

    agents ──chat requests──> gateway, sessions, trees (this process) ──token ids──> stand-in engine
    agents ──the same conversations as token ids──────────────────────────────────> stand-in engine

This process has a core of its own, agents and engine share the others. Every session is a
conversation of --turns answers; --at-once of --sessions are open at a time.

    python tools/bench_agents.py                          # 256 at once, direct and through the gateway
    python tools/bench_agents.py --soak 10000             # and as many short sessions, with this process's memory on the way

Columns: seconds of a request (mean, median and 95th percentile, as agents see it), requests per
second, CPU milliseconds of this process per request. The overhead is the difference of the means.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.open_sessions import Sessions
from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import GroupGenerate, run_episode
from pa_npu.data.prompts import Prompt
from pa_npu.engines import codec
from pa_npu.engines.client import EngineClient
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.registry import make_environment, opened
from pa_npu.samples.seeds import group_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.make_tiny_model import AGENT_TEMPLATE, SPECIAL_TOKENS, make_tokenizer

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
WAIT_S = 600.0
# The engine writes printable ASCII, one token each: text that comes back as it went.
FIRST_TOKEN = len(SPECIAL_TOKENS)
LAST_TOKEN = len(SPECIAL_TOKENS) + 94
QUESTION_TOKENS = 256
FOLLOW_UP_TOKENS = 32


@dataclass(frozen=True)
class Load:
    """sessions: in all. tokens: of an answer, on average. step_s: of the engine, for one token of
    all answers under way.
    """

    sessions: int
    at_once: int
    turns: int
    tokens: int
    step_s: float


@dataclass(frozen=True)
class Measured:
    """request_s: of every request. cpu_s: of the process between agents and engine. rss_mib: by
    sessions done.
    """

    seconds: float
    request_s: Sequence[float]
    cpu_s: float = 0.0
    rss_mib: Sequence[tuple[int, float]] = ()

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.request_s))

    @property
    def per_s(self) -> float:
        return len(self.request_s) / self.seconds

    def cells(self, name: str) -> tuple[str, ...]:
        median, late = np.percentile(self.request_s, (50, 95))
        times = (f"{value:.4f}" for value in (self.mean_s, median, late))
        cpu = f"{self.cpu_s / len(self.request_s) * 1e3:.2f}" if self.cpu_s else ""
        return name, f"{len(self.request_s):,}", *times, f"{self.per_s:.1f}", cpu


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4, help="answers in a session")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, on average")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=40.0,
        help="of the engine, for one token of all that it writes",
    )
    parser.add_argument(
        "--soak", type=int, default=0, help="short sessions afterwards, with memory on the way"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--as-agents", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_agents:
        asyncio.run(agents(**json.loads(arguments.as_agents)))
        return 0
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    load = Load(
        arguments.sessions,
        arguments.at_once,
        arguments.turns,
        arguments.tokens,
        arguments.step_ms / 1e3,
    )
    direct = measure(load, cores, through_gateway=False)
    gateway = measure(load, cores, through_gateway=True)
    lines = [HEADER, ("---",) * len(HEADER), direct.cells("direct"), gateway.cells("gateway")]
    overhead_ms = (gateway.mean_s - direct.mean_s) * 1e3
    share = gateway.per_s / direct.per_s
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))
    print(
        f"overhead {overhead_ms:.2f} ms per request; throughput {share:.1%} of direct", flush=True
    )
    figures: dict[str, Any] = {
        "requests": [len(direct.request_s), len(gateway.request_s)],
        "overhead_ms": overhead_ms,
        "throughput_share": share,
        "cpu_ms": gateway.cpu_s / len(gateway.request_s) * 1e3,
    }
    if arguments.soak:
        soaked = measure(
            Load(arguments.soak, arguments.at_once, 2, 8, 0.001), cores, through_gateway=True
        )
        figures["soak_rss_mib"] = soaked.rss_mib
        print(
            f"soak: {arguments.soak:,} sessions in {soaked.seconds:.0f} s, {soaked.per_s:.0f} "
            "requests/s"
        )
        print(
            "resident MiB by sessions done: "
            + ", ".join(f"{done:,}: {mib:.1f}" for done, mib in soaked.rss_mib)
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


HEADER = ("way", "requests", "mean s", "median s", "95% s", "requests/s", "CPU ms/request")


def measure(load: Load, cores: Sequence[int], *, through_gateway: bool) -> Measured:
    """Returns a load on an engine of its own.

    The gateway has the first core, everything else the others.
    """

    def pin(chosen: Sequence[int]) -> None:
        if len(cores) > 1:
            os.sched_setaffinity(0, set(chosen))

    with contextlib.ExitStack() as stack:
        pin(cores[1:])  # inherited by what is started
        engine = [
            str(Path(__file__).with_name("stand_in.py")),
            "--step-s",
            f"{load.step_s}",
            "--variants",
            "64",
        ]
        engine += ["--eos-token-id", str(FIRST_TOKEN - 1), "--vocab-size", str(LAST_TOKEN)]
        process = start(stack, *engine, "--max-num-seqs", str(load.at_once))
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        if not through_gateway:
            return figures_of(start(stack, __file__, "--as-agents", agents_input(load, url, None)))

        def start_agents(gateway_url: str, key: str) -> subprocess.Popen[str]:
            pin(cores[1:])
            child = start(stack, __file__, "--as-agents", agents_input(load, gateway_url, key))
            pin(cores[:1])
            return child

        return asyncio.run(serve(load, url, start_agents))


def agents_input(load: Load, url: str, key: str | None) -> str:
    return json.dumps({"load": vars(load), "url": url, "key": key})


def start(stack: contextlib.ExitStack, *command: str) -> subprocess.Popen[str]:
    """Returns a Python child that ends with the stack."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def figures_of(process: subprocess.Popen[str], **more: Any) -> Measured:
    """Returns the figures of agents that have ended."""
    output, _ = process.communicate(timeout=WAIT_S)
    if process.returncode != 0:
        raise SystemExit(f"the agents ended with exit code {process.returncode}")
    return Measured(**json.loads(output), **more)


async def serve(
    load: Load, engine_url: str, start_agents: Callable[[str, str], subprocess.Popen[str]]
) -> Measured:
    """Returns the run's part: sessions, their gateway, and a pool of one engine, as the coordinator
    has them.
    """
    tokenizer = make_tokenizer()
    tokenizer.chat_template = AGENT_TEMPLATE
    longest = (2 * load.tokens + FOLLOW_UP_TOKENS + 8) * load.turns
    config = Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none", "max_prompt_tokens": 2 * QUESTION_TOKENS},
            "rollout": {"max_response_tokens": longest},
            "environment": {"name": "agents", "max_turns": load.turns},
            "agent": {"concurrent": load.at_once},
        }
    )
    prompt = Prompt(0, np.zeros(1, np.int32), "", "", {"question": text(QUESTION_TOKENS)})
    sessions = Sessions(secrets.token_hex(16))
    environment = make_environment(config, tokenizer, sessions)
    assert isinstance(environment, AgentEnvironment)
    sampling = Sampling(longest, 1.0, ignore_eos=True)
    numbers = iter(range(load.sessions))
    rss_mib = []
    async with (
        EnginePool([EngineClient(engine_url, LAST_TOKEN)]) as pool,
        Gateway(sessions).serving(HOST, 0, None),
        opened(environment, WAIT_S),
    ):
        for engine in pool.engines:
            await engine.load_weights(0, deadline_s=WAIT_S)

        async def work() -> None:
            for number in numbers:
                lease = await pool.admit(1, longest, lambda _: load.at_once, WAIT_S)
                with GroupSession(
                    pool,
                    lease,
                    lambda _: load.at_once,
                    deadline_s=WAIT_S,
                    again_deadline_s=WAIT_S,
                    label=f"session {number}",
                    version=None,
                ) as session:
                    generate = GroupGenerate(session, group_seed(0, 0, number), sampling)
                    samples = await run_episode(config, environment, prompt, 1, generate, longest)
                if len(samples) != 1:
                    raise SystemExit(
                        f"session {number} has {len(samples)} branches, though every request went "
                        "on with the last"
                    )
                if number % 1000 == 0 or number == load.sessions - 1:
                    gc.collect()
                    rss_mib.append((number, resident_mib()))

        gc.collect()
        gc.freeze()  # as the coordinator does
        child = start_agents(sessions.url, sessions.key)
        begin_cpu_s = time.process_time()
        await asyncio.gather(*(work() for _ in range(load.at_once)))
        cpu_s = time.process_time() - begin_cpu_s
        return await asyncio.to_thread(figures_of, child, cpu_s=cpu_s, rss_mib=rss_mib)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def text(num_tokens: int) -> str:
    """Returns a text that the tokenizer reads as about so many tokens."""
    return "".join(chr(33 + 7 * number % 90) for number in range(num_tokens))


async def agents(load: dict[str, Any], url: str, key: str | None) -> None:
    """Works at all sessions, and prints what Measured has. key: of a run at `url`; None: that is an
    engine.
    """
    work = Load(**load)
    request_s = []
    numbers = iter(range(work.sessions))
    lengths = np.random.default_rng(1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        def length() -> int:
            """Returns the number of tokens of the next answer: equal ones would all end in the same
            step of the engine.
            """
            return int(
                lengths.integers(work.tokens // 2, work.tokens + work.tokens // 2, endpoint=True)
            )

        async def timed(url: str, key: str, body: Any) -> Any:
            begin_s = time.perf_counter()
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await asked(http.post(url, data=data, headers=headers(key)))
            request_s.append(time.perf_counter() - begin_s)
            return answer

        async def through_gateway() -> None:
            assert key is not None
            taken = await asked(http.get(f"{url}/tasks?wait_s=60", headers=headers(key)))
            chat = f"{taken['base_url']}/chat/completions"
            messages = [{"role": "user", "content": taken["task"]["row"]["question"]}]
            for _ in range(work.turns):
                answer = await timed(
                    chat, taken["api_key"], {"messages": messages, "max_tokens": length()}
                )
                messages += [
                    answer["choices"][0]["message"],
                    {"role": "user", "content": text(FOLLOW_UP_TOKENS)},
                ]
            root = taken["base_url"].removesuffix("/v1")
            await asked(
                http.post(f"{root}/reward", json={"reward": 1.0}, headers=headers(taken["api_key"]))
            )
            await asked(http.post(f"{root}/end", json={}, headers=headers(taken["api_key"])))

        async def directly(number: int) -> None:
            tokens = np.full(QUESTION_TOKENS, FIRST_TOKEN, np.int32)
            for turn in range(work.turns):
                sampling = Sampling(length(), 1.0, ignore_eos=True)
                body = codec.encode_request(tokens, 1, number * work.turns + turn, sampling)
                answer = await timed(f"{url}/v1/completions", "", body)
                more = [*answer["choices"][0]["token_ids"], *[FIRST_TOKEN] * FOLLOW_UP_TOKENS]
                tokens = np.concatenate([tokens, np.asarray(more, np.int32)])

        async def one_after_another() -> None:
            for number in numbers:
                await (directly(number) if key is None else through_gateway())

        begin_s = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(work.at_once)))
        print(json.dumps({"seconds": time.perf_counter() - begin_s, "request_s": request_s}))


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


async def asked(request: Any) -> Any:
    async with request as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise SystemExit(f"{reply.url}: {reply.status}: {answer}")
        return answer


if __name__ == "__main__":
    sys.exit(main())
