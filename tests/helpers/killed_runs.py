"""Runs whose processes are killed at chosen moments, again and again, and what they end with."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.messages import DISPATCHED
from pa_npu.publish.messages import LATE_DECISION, MANIFEST, READY, VERDICT
from tests.helpers.launched import ENGINE_SERVERS, Launched, settings

# enough that a moment comes again where a busy machine misses it; an iteration takes a second
ITERATIONS = 10
FEW_KILLS = 5
TIMEOUT_S = 300.0
# An engine that is killed in training is back with the next publish: in this order a kind takes two
# iterations.
MOMENTS = ("publish", "generation", "training")
# Where devices decode and train in one iteration: an engine is about to hand on what it has; its
# device trains, and others decode. Each shows as one more of these texts in a file of the run's.
CHANGES = {
    "hand-over": ("logs/coordinator.log", "units decode from here on"),
    "beside": ("timeline/coordinator.jsonl", '"name":"decodes"'),
}
VLLM = (ENGINE_SERVERS["vllm"], "VLLM::EngineCore")  # HTTP server; scheduler and model
TRANSFORMERS = ENGINE_SERVERS["transformers"]
WORKERS = ("trainer-0", "trainer-1", "coordinator", "keeper of trainer-0")
AGAIN = "starting coordinator and trainers again"
# Kinds and moments, in this order; a later kind in a later iteration, so that there are checkpoints
# to go on from.
Kills = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Result:
    """The results that a run leaves behind."""

    weights: dict[str, torch.Tensor]
    rewards: list[float]
    losses: list[float]

    @classmethod
    def read(cls, directory: Path, iterations: int = ITERATIONS) -> Result:
        records = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        assert [record["iteration"] for record in records] == list(range(iterations)), (
            "each iteration is recorded once"
        )
        weights = load_file(directory / "hf" / "model.safetensors")
        return cls(weights, [r["reward_mean"] for r in records], [r["loss"] for r in records])

    def assert_equal(self, another: Result) -> None:
        assert any(0 < reward < 1 for reward in self.rewards), "there is something to learn"
        assert (self.rewards, self.losses) == (another.rewards, another.losses)
        assert self.weights.keys() == another.weights.keys()
        changed = [
            name
            for name, weight in self.weights.items()
            if not torch.equal(weight, another.weights[name])
        ]
        assert not changed, f"tensors that differ: {changed}"


class Watched:
    """A launched run, with eyes on its store and its processes."""

    def __init__(
        self,
        launched: Launched,
        ahead: int = 0,
        engine_port: int | None = None,
        iterations: int = ITERATIONS,
    ) -> None:
        """ahead: how far the iteration that a version completes is ahead of the one that it trains.
        engine_port: of the first engine, by which engines of one kind are told apart.
        iterations: of the run."""
        self.run = launched
        self._iterations = iterations
        self._ahead = ahead
        self._ports = (
            {}
            if engine_port is None
            else {f"engine-{n}": f"--port {engine_port + n}" for n in range(9)}
        )
        self._clients: dict[int, StoreChannel] = {}

    @property
    def attempt(self) -> int:
        return self.run.output.count(AGAIN)

    def wait_for(self, moment: str, at_least: int = 0) -> int:
        """Until an iteration, of this version or a later one, is at this moment; returns its
        version.
        """
        actual: list[int] = []

        def reached() -> bool:
            version = next(
                (v for v in range(self._iterations, -1, -1) if self._there(READY.at(version=v))),
                None,
            )
            if version is None:
                return False
            produces = min(version + self._ahead, self._iterations - 1)
            produced = DISPATCHED.exists(self._channel, iteration=produces)
            published = self._published(version)
            state = "training" if produced else "generation"
            if not published:
                state = "publish"
            actual[:] = [version]
            return state == moment and at_least <= version < self._iterations

        self._until(reached, moment)
        return actual[0]

    def wait_for_change(self, moment: str, directory: Path, at_least: int = 0) -> int:
        """As wait_for, for a moment of CHANGES. directory: the run's."""
        name, text = CHANGES[moment]
        actual: list[int] = []

        def reached() -> bool:
            version = self.wait_for("generation", at_least)
            file = directory / name
            before = file.read_text().count(text)
            produced = functools.partial(DISPATCHED.exists, self._channel, iteration=version)
            self._until(lambda: file.read_text().count(text) > before or produced(), moment)
            actual[:] = [version]
            return not produced()

        self._until(reached, moment)
        return actual[0]

    def kill(self, kind: str, number: int = signal.SIGKILL) -> None:
        pids: list[int] = []
        self._until(lambda: bool(pids.extend(self._find(kind)) or pids), f"a process: {kind}")
        os.kill(pids[0], number)

    def wait_for_recovery(self, kind: str, attempt: int, progress: int) -> None:
        """After a kill: an engine holds weights again, or another attempt has begun."""
        if kind in WORKERS:
            self._until(
                lambda: self.attempt > attempt and self._there(MANIFEST.at(rank=0)),
                f"recovery from {kind}",
            )
        elif kind != "reward worker":  # which is missed by its pool alone
            self._until(lambda: self.progress() > progress, f"recovery from {kind}")

    def progress(self) -> int:
        """Completed publishes and late deliveries of this attempt."""
        late = next(n for n in range(100) if not self._there(LATE_DECISION.at(number=n)))
        return late + sum(self._published(version) for version in range(self._iterations + 1))

    def _published(self, version: int) -> bool:
        if (
            READY.exists(self._channel, version=version)
            and not READY.get(self._channel, version=version).publishes
        ):
            # engines keep the version that they have, and that is all there is to wait for
            return True
        places = ({"version": version, "attempt": attempt} for attempt in range(4))
        return any(
            VERDICT.get(self._channel, **place).done
            for place in places
            if VERDICT.exists(self._channel, **place)
        )

    def _there(self, key: str) -> bool:
        return self._channel.exists(key)

    @property
    def _channel(self) -> StoreChannel:
        attempt = self.attempt
        if attempt not in self._clients:
            address = re.search(r"pa-npu join (\S+):(\d+)", self.run.output)
            assert address
            self._clients[attempt] = StoreChannel(
                connect(address[1], int(address[2]), 30.0), attempt_prefix(attempt)
            )
        return self._clients[attempt]

    def _find(self, kind: str) -> Iterator[int]:
        keeper = kind.startswith("keeper of ")
        name = kind.removeprefix("keeper of ")
        patterns = {
            "coordinator": "coordinator.main",
            "reward worker": "rewards.worker",
            "engine-0": VLLM[0],
        } | self._ports
        pattern = "trainer.main" if name.startswith("trainer-") else patterns.get(name, name)
        for pid, line in self.run.family().items():
            if (
                pattern in line
                and ("keeper.py" in line) == keeper
                and (name[:8] != "trainer-" or rank(pid) == name[8:])
            ):
                yield pid

    def _until(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.run.popen.poll() is None, (
                f"the launcher ended before {description}:\n{self.run.output}"
            )
            assert time.monotonic() < deadline, (
                f"{description}: not within {TIMEOUT_S} s\n{self.run.output}"
            )
            time.sleep(0.003)


def rank(pid: int) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((entry[5:].decode() for entry in environment if entry.startswith(b"RANK=")), "")


def keys(tiny: Path, directory: Path, backend: str, **others: object) -> list[str]:
    chosen: dict[str, object] = {
        "rollout.backend": backend,
        "schedule.iterations": ITERATIONS,
        "schedule.prompts_per_iteration": 8,
        "schedule.order": "prompt",
        "rollout.responses_per_prompt": 4,
        # a second or two of generation, which a busy machine does not miss
        "rollout.max_response_tokens": {"vllm": 64, "transformers": 24}[backend],
        "rollout.ignore_eos": "true",
        "rollout.window": 8,
        "run.restarts": 40,
        # which about half of the responses have, so that there is something to learn
        "reward.functions": '[{name: format, pattern: "3"}]',
        "data.test": "null",
        "trainer.devices": 2,
        "optimizer.learning_rate": "1e-3",
        "checkpoint.every": 1,
        "telemetry.trackers": "[]",
    }
    return settings(tiny, directory, **{**chosen, **others})


def each(kinds: Iterable[str]) -> Kills:
    """Every kind at every moment."""
    return itertools.product(kinds, MOMENTS)


def watched_when_ready(
    run: Launched, ahead: int = 0, engine_port: int | None = None, iterations: int = ITERATIONS
) -> Watched:
    watched = Watched(run, ahead, engine_port, iterations)
    run.wait_for(lambda: "engine-0 ready" in run.output, "the engine is ready", TIMEOUT_S)
    return watched


def kill_all(
    watched: Watched,
    kills: Kills,
    number: int = signal.SIGKILL,
    directory: Path | None = None,
    first: int | None = None,
) -> None:
    """directory: the run's, for moments of CHANGES. first: the iteration of the first kill."""
    kinds: list[str] = []
    kills = list(kills)
    if first is None:
        # a few kills would otherwise all come before there is a checkpoint to go on from
        first = 3 if len(kills) <= FEW_KILLS else 0
    for kind, moment in kills:
        if kind not in kinds:
            kinds.append(kind)
        at_least = first + kinds.index(kind)
        if moment in CHANGES:
            assert directory is not None
            version = watched.wait_for_change(moment, directory, at_least)
        else:
            version = watched.wait_for(moment, at_least)
        attempt, progress = watched.attempt, watched.progress()
        watched.kill(kind, number)
        print(f"killed {kind} in {moment} of version {version}")
        watched.wait_for_recovery(kind, attempt, progress)
        if kind in VLLM or kind.startswith(TRANSFORMERS):
            assert watched.attempt == attempt, (
                f"coordinator and trainers go on without {kind}:\n{watched.run.output}"
            )


def assert_equal_when_killed(
    calm: list[str],
    killed: list[str],
    kills: Kills,
    launch: Callable[..., Launched],
    directory: Path,
) -> None:
    """Run `calm` to its end, then `killed` with the kills, in directory/calm and directory/run."""
    undisturbed = launch(*calm)
    undisturbed.popen.wait(TIMEOUT_S)
    assert undisturbed.popen.returncode == 0, undisturbed.output

    watched = watched_when_ready(launch(*killed))
    kill_all(watched, kills)
    watched.run.popen.wait(TIMEOUT_S)
    assert watched.run.popen.returncode == 0 and "the run continues from" in watched.run.output, (
        watched.run.output
    )
    Result.read(directory / "run").assert_equal(Result.read(directory / "calm"))
