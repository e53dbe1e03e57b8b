"""A slow request is no dead engine: who is waited for, for how long, who is replaced, and what ends the run."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from pa_npu.engines import group_session
from pa_npu.engines.client import EngineClient
from pa_npu.engines.group_session import GroupSession, GroupTooLong, generate_patiently
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, EngineGone, Generation, RolloutEngine, Sampling
from pa_npu.errors import BAD_INPUT, DeadlineExceeded, exit_code
from tools.stand_in import Speed, StandInEngine, serving

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(max_tokens=8, temperature=1.0, ignore_eos=True)


class Engine:
    """takes_s per group. works: whether it answers a probe; dies: what is raised instead of a
    response.
    """

    def __init__(
        self, name: str, takes_s: float, works: bool = True, dies: Exception | None = None
    ) -> None:
        self.name = name
        self.probes = self.asked = 0
        self.cancelled = False
        self._takes_s, self._works, self._dies = takes_s, works, dies

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        self.asked += 1
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self._dies:
            raise self._dies
        return [
            Generation(
                np.full(1, seed + i, np.int32), np.zeros(1, np.float32), "", "stop", version=0
            )
            for i in range(n)
        ]

    async def probe(self, *, deadline_s: float) -> None:
        self.probes += 1
        if not self._works:
            raise DeadlineExceeded(f"engine {self.name}: no token within {deadline_s:g} s")

    async def close(self) -> None:
        """Nothing is open."""


async def ask(engine: Engine, deadline_s: float = 0.05) -> list[Generation]:
    return await generate_patiently(
        engine,  # type: ignore[arg-type]
        PROMPT,
        2,
        40,
        SAMPLING,
        deadline_s=deadline_s,
        probe_timeout_s=1.0,
        label="group 3 of iteration 1",
    )


async def test_a_slow_engine_is_probed_and_waited_for(caplog):
    engine = Engine("slow", 0.2)
    responses = await ask(engine)
    assert [int(response.tokens[0]) for response in responses] == [40, 41]
    assert (engine.asked, engine.probes) == (1, 1)
    assert "group 3 of iteration 1 is slow: engine slow works" in caplog.text


async def test_a_quick_engine_is_not_probed():
    engine = Engine("quick", 0.0)
    await ask(engine, deadline_s=5.0)
    assert engine.probes == 0


async def test_only_an_engine_that_does_not_answer_the_probe_is_gone():
    engine = Engine("hung", 60.0, works=False)
    with pytest.raises(
        EngineGone,
        match=r"hung: group 3 of iteration 1 not answered within 0.05 s, nor a probe after it: .*",
    ):
        await ask(engine)
    assert engine.cancelled, "its request is ended"


async def test_a_group_that_is_too_long_ends_the_run_in_one_line_that_names_it(monkeypatch, caplog):
    monkeypatch.setattr(group_session, "SLOWEST_TOKEN_S", 0.02)  # 0.05 + 8 * 0.02 = 0.21 s
    engine = Engine("slow", 60.0)
    began = time.monotonic()
    with pytest.raises(
        GroupTooLong,
        match=r"group 3 of iteration 1 is too long: engine slow works, .* 2 responses of up to 8 "
        r"tokens within 0.21 s",
    ) as raised:
        await ask(engine)
    assert 0.2 < time.monotonic() - began < 50 and engine.cancelled
    # another attempt would generate the same group
    assert exit_code(raised.value, group_session.logger) == BAD_INPUT


async def test_whoever_is_cancelled_while_it_waits_is_cancelled_and_not_judged():
    """Before the deadline, and after it while the engine is being watched; nothing stays behind."""
    for deadline_s in (5.0, 0.02):
        engine = Engine("slow", 60.0)
        asking = asyncio.create_task(ask(engine, deadline_s))
        while not engine.asked or (deadline_s < 1 and not engine.probes):
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert engine.cancelled and asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancellation_at_the_moment_of_the_verdict_is_not_taken_for_it():
    class Cancelling(Engine):
        async def probe(self, *, deadline_s: float) -> None:
            asking.cancel()
            raise DeadlineExceeded("no token")

    engine = Cancelling("hung", 60.0)
    asking = asyncio.create_task(ask(engine))
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.cancelled and asyncio.all_tasks() == {asyncio.current_task()}


def pool_of(*engines: Engine) -> tuple[EnginePool, list[str]]:
    pool, lost = EnginePool(engines, probe_timeout_s=1.0), []  # type: ignore[arg-type]

    async def on_lost(engine: RolloutEngine, reason: str) -> None:
        lost.append(engine.name)
        pool.suspend(engine)

    pool.subscribe(on_lost=on_lost)
    return pool, lost


async def group(pool: EnginePool) -> str:
    lease = await pool.admit(2, 10, lambda _: 8, 5.0)
    with GroupSession(
        pool,
        lease,
        lambda _: 8,
        deadline_s=0.05,
        again_deadline_s=5.0,
        label="group 3 of iteration 1",
    ) as session:
        await session.generate(PROMPT, 2, 40, SAMPLING)
    return session.lease.engine.name


async def test_a_slow_group_takes_no_engine_down():
    pool, lost = pool_of(Engine("a", 0.3), Engine("b", 0.3))
    assert await group(pool) == "a"
    assert lost == [] and len(pool.engines) == 2


async def test_a_hung_engine_is_lost_and_the_next_one_answers():
    pool, lost = pool_of(Engine("a", 60.0, works=False), Engine("b", 0.0))
    assert await group(pool) == "b"
    assert lost == ["a"]


async def test_a_group_that_is_too_long_is_not_tried_on_the_next_engine(monkeypatch):
    monkeypatch.setattr(group_session, "SLOWEST_TOKEN_S", 0.01)
    another = Engine("b", 60.0)
    pool, lost = pool_of(Engine("a", 60.0), another)
    with pytest.raises(GroupTooLong):
        await group(pool)
    assert lost == [] and another.asked == 0


async def test_a_group_that_engine_after_engine_dies_of_is_named():
    engines = [Engine(name, 0.0, dies=EngineGone(f"engine {name}: it died")) for name in "abcdef"]
    pool, lost = pool_of(*engines)
    with pytest.raises(
        EngineError,
        match=r"group 3 of iteration 1: 4 engines were lost while they generated it, the last: "
        r".*died",
    ):
        await group(pool)
    assert len(lost) == 3


async def test_an_engine_whose_batch_is_full_answers_the_probe_through_its_workers():
    """The probe's token waits for room, which a long group takes as long as it runs: that is no
    hang.
    """
    engine = StandInEngine(Speed(step_s=0.2, max_num_seqs=4))
    long = Sampling(max_tokens=1000, temperature=1.0, ignore_eos=True)
    async with serving(engine) as url, EngineClient(url, 1000) as client:
        running = asyncio.create_task(client.generate(PROMPT, 4, 0, long, deadline_s=60))
        while not engine.num_in_flight:
            await asyncio.sleep(0.001)
        await client.probe(deadline_s=0.5)
        assert engine.calls == [("pa_version", [])]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
