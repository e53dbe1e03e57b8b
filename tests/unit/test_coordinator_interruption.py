"""Responses in parts: who writes which token, with what in front of it, and what is left when a border is quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.samples.wire import from_bytes, to_bytes

PROMPT, PART, MOST, RESPONSES = np.array([5, 6], np.int32), 4, 10, 3
# tokens that the scripted responses have before they end by themselves; 99: never
LENGTHS = (3, 7, 99)


@dataclass
class Writer:
    """Writes token 100 * version + its place in the response; response i ends after LENGTHS[i] tokens."""

    name: str = "writer"
    version: int = 0
    asked: list[tuple[int, int, int, int]] = field(default_factory=list)  # tokens in front, n, seed, most

    async def generate(
        self, tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        self.asked.append((len(tokens), n, seed, sampling.max_tokens))
        await asyncio.sleep(0)
        written = tokens[len(PROMPT) :]
        numbers = range(n) if n > 1 else [self._number(written)]
        return [self._part(LENGTHS[number], len(written), sampling.max_tokens, number) for number in numbers]

    def _number(self, written: np.ndarray) -> int:
        return int(written[0]) % 10

    def _part(self, length: int, start: int, most: int, number: int) -> Generation:
        end = min(length, start + most)
        places = [1000 * self.version + 10 * place + number for place in range(start, end)]
        tokens, logprobs = np.array(places, np.int32), np.full(end - start, -0.5 - self.version, np.float32)
        return Generation(tokens, logprobs, "", "stop" if end == length else "length", version=self.version)

    async def close(self) -> None:
        pass


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


async def group(interruptions: Interruptions, pool: EnginePool, iteration: int, seed: int) -> list[Generation]:
    lease = await pool.admit(RESPONSES, 30, lambda _: 8, 1.0)
    with pool.session(lease, lambda _: 8, deadline_s=1.0, again_deadline_s=1.0) as session:
        write = interruptions.generate(session, (iteration, 0), seed, Sampling(MOST, 1.0))
        return await write(PROMPT, n=RESPONSES)


async def run(staleness: int, resumed_at: int | None = None) -> tuple[list[Generation], Writer, dict[int, list[bytes]]]:
    """One group of iteration 2, begun by version 2 - staleness; what lay in the journal before each version."""
    writer, iteration = Writer(), 2
    interruptions = Interruptions(PART, decode, 1.0)
    journal: dict[int, list[bytes]] = {}
    results: list[list[Generation]] = []
    async with EnginePool([writer]) as pool, TaskScope() as scope:  # type: ignore[list-item]

        async def produce() -> None:
            try:
                results.append(await group(interruptions, pool, iteration, 70))
            finally:
                interruptions.ended()

        for version in range(iteration - staleness, iteration + 1):
            writer.version = version
            if version == resumed_at:  # another process, with what the checkpoint has
                interruptions = Interruptions(PART, decode, 1.0)
                for data in journal[version]:
                    interruptions.begin_with(from_bytes(data))
            interruptions.publish(version)
            if version in (iteration - staleness, resumed_at):
                interruptions.admits()
                scope.start(produce(), "a group")
            await interruptions.quiet()  # without a turn of the event loop before it
            assert pool.num_in_flight == 0, "nothing is in flight at a border"
            journal[version + 1] = [to_bytes(one) for one in interruptions.so_far(iteration)]
            if resumed_at is not None and version + 1 == resumed_at:
                for task in list(scope._tasks):  # the process ends here
                    task.cancel()
                await asyncio.gather(*scope._tasks, return_exceptions=True)
    return results[0], writer, journal


async def test_versions_write_their_parts_and_the_one_that_trains_writes_the_rest() -> None:
    (short, middle, long), writer, _ = await run(staleness=2)
    assert short.versions.tolist() == [0] * 3 and short.finish_reason == "stop"
    assert middle.versions.tolist() == [0] * 4 + [1] * 3 and middle.finish_reason == "stop"
    assert long.versions.tolist() == [0] * 4 + [1] * 4 + [2] * 2 and long.finish_reason == "length"
    for generation in (short, middle, long):
        assert (generation.tokens // 1000).tolist() == generation.versions.tolist(), "stamped with who wrote it"
        assert (-0.5 - generation.logprobs).astype(int).tolist() == generation.versions.tolist(), "and its log-probs"
    assert long.text == decode(long.tokens.tolist()) and short.text == decode(short.tokens[:-1].tolist())
    assert writer.asked[0] == (2, RESPONSES, 70, PART), "the first parts are one request, with the group's seed"
    assert [(front, n, most) for front, n, _, most in writer.asked[1:]] == [(6, 1, 4), (6, 1, 4), (10, 1, 2)]
    assert len({seed for _, _, seed, _ in writer.asked}) == 4, "every part has a seed of its own"


async def test_the_version_that_trains_a_response_writes_it_whole() -> None:
    found, writer, _ = await run(staleness=0)
    assert [generation.versions.tolist() for generation in found] == [[2] * 3, [2] * 7, [2] * 10]
    assert len(writer.asked) == 1


@pytest.mark.parametrize("resumed_at", [1, 2])
async def test_a_resumed_run_begins_with_what_was_written(resumed_at: int) -> None:
    whole, _, _ = await run(staleness=2)
    resumed, writer, journal = await run(staleness=2, resumed_at=resumed_at)
    for ours, expected in zip(resumed, whole, strict=True):
        assert ours.tokens.tolist() == expected.tokens.tolist()
        assert ours.logprobs.tolist() == expected.logprobs.tolist()
        assert ours.versions.tolist() == expected.versions.tolist()
        assert (ours.text, ours.finish_reason) == (expected.text, expected.finish_reason)
    assert len(journal[resumed_at]) == 1
    assert sum(1 for _, n, _, _ in writer.asked if n > 1) == 1, "nothing is written twice"
