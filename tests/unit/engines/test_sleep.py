"""Engines that sleep while their devices train: who is put to sleep when, who wakes before a load, and what starts meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.roster import Roster
from pa_npu.engines.client import EngineClient
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Sampling
from pa_npu.errors import ConfigError, DeadlineExceeded
from pa_npu.planning.publish import contributors_of, publishers_of
from pa_npu.publish.engines import Connection
from pa_npu.publish.messages import READY, VERDICT, StageManifest, TrainersReady
from tests.helpers.policies import probe_plan
from tests.helpers.publish import ServesNobodyLate
from tests.helpers.stand_in_engine import API_KEY, Served
from tools.stand_in import Speed

EVERYWHERE = range(2)


def config(**rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"engines": 2, **rollout},
            "trainer": {"devices": 2},
            "placement": {"colocate": True},
        }
    )


class Job:
    """The coordinator's side over stand-ins; the trainers are the test."""

    def __init__(self, engines: list[Served], *, shared: bool = True, **rollout: Any) -> None:
        self.engines, self.config = engines, config(**rollout)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.channel = StoreChannel(self.store)
        self.roster = Roster(StoreChannel(dist.HashStore()), API_KEY)
        for engine in engines:
            self.roster.announce(engine.url, shared=shared)
        self.coordinate()

    def coordinate(self) -> None:
        """A coordinator of its own."""
        self.pool = EnginePool()
        self.membership = EngineMembership(
            self.config.rollout,
            self.pool,
            Roster(self.roster._channel, API_KEY),
            lambda url: EngineClient(url, 100, API_KEY),
        )
        stages = [StageManifest("stage", {})]
        connection = Connection(("127.0.0.1", self.store.port), "gloo", stages, stages, "cpu")
        self.publish = ServesNobodyLate(
            rollout=self.config.rollout,
            timeout_s=self.config.publish.timeout_s,
            seed=self.config.run.seed,
            senders=contributors_of(self.config),
            publishers=publishers_of(self.config),
            membership=self.membership,
            pool=self.pool,
            channel=self.channel,
            connection=connection,
            sampling=Sampling(8, 1.0),
            probes=probe_plan(self.config),
        )

    async def __aenter__(self) -> Job:
        await self.membership.__aenter__()
        await self.membership.wait_all_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.membership.__aexit__()
        await self.pool.close()

    async def version(self, version: int) -> None:
        """Publish it; trainers are ready only after engines could have been asked to load."""
        publishing = asyncio.create_task(self.publish.publish(version, None, 20.0))
        await asyncio.sleep(0.1)
        assert not self.calls("wake_up"), "trainers have not given their memory back"
        READY.put(self.channel, TrainersReady(version), version=version)
        await publishing

    def calls(self, *names: str) -> list[str]:
        """Calls of the engines in their order, those with these names; all since `forget` without
        names.
        """
        actual = [call for served in self.engines for call, _ in served.engine.calls]
        return [call for call in actual if call in names] if names else actual

    def forget(self) -> None:
        for served in self.engines:
            served.engine.calls.clear()

    def probes_due(self) -> list[bool]:
        """Returns whether each engine would be probed once its time has come."""
        members = [member for _, member in sorted(self.membership._members.items())]
        for member in members:
            member.probed_s = -1e9
        due = [self.membership._is_probe_due(member) for member in members]
        for member in members:
            member.probed_s = time.monotonic()
        return due

    async def until(self, condition: Callable[[], bool], description: str) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, description
            await asyncio.sleep(0.01)


@pytest.fixture
def engines() -> Any:
    served = [Served(Speed(step_s=0.0005), sleeps=True) for _ in EVERYWHERE]
    yield served
    for one in served:
        one.stop()


async def test_engines_sleep_until_the_trainers_are_ready_and_wake_before_they_load(
    engines: list[Served],
) -> None:
    async with Job(engines) as job:
        await job.version(0)
        job.forget()
        assert job.probes_due() == [True, True]
        await job.pool.sleep([1])
        assert [served.engine.is_asleep for served in engines] == [False, True]
        assert [engine.name for engine in job.pool.engines] == [engines[0].url], (
            "it is given nothing"
        )
        await job.pool.sleep(EVERYWHERE)
        assert job.calls("sleep") == ["sleep", "sleep"], "each once"
        assert job.probes_due() == [False, False]
        assert all(job.roster.is_lent(place) for place in EVERYWHERE)
        job.forget()
        await job.version(1)
        for served in engines:
            order = [
                call
                for call, _ in served.engine.calls
                if call in ("wake_up", "pa_connect", "pa_receive")
            ]
            assert order == ["wake_up", "pa_receive"], "nothing is joined anew"
        assert (
            not any(job.roster.is_lent(place) for place in EVERYWHERE)
            and len(job.pool.engines) == 2
        )
        assert job.probes_due() == [True, True]


async def test_engines_that_cannot_sleep_are_asked_nothing(engines: list[Served]) -> None:
    for served in engines:
        served.engine._sleeps = False
    async with Job(engines) as job:
        READY.put(job.channel, TrainersReady(0), version=0)
        await job.publish.publish(0, None, 20.0)
        await job.pool.sleep(EVERYWHERE)
        assert (
            not job.calls("sleep", "wake_up")
            and len(job.pool.engines) == 2
            and not job.roster.is_lent(0)
        )
        with pytest.raises(
            ConfigError, match="says that it cannot sleep; start it with --enable-sleep-mode"
        ):
            job.membership.check_sleep()


async def test_engines_that_can_sleep_but_have_devices_of_their_own_stay_awake(
    engines: list[Served],
) -> None:
    async with Job(engines, shared=False) as job:
        await job.version(0)
        await job.pool.sleep(EVERYWHERE)
        assert (
            not any(served.engine.is_asleep for served in engines)
            and not job.membership.has_lent_devices
        )


async def test_who_dies_asleep_is_found_at_the_border_and_may_start_then(
    engines: list[Served],
) -> None:
    async with Job(engines) as job:
        await job.version(0)
        await job.pool.sleep(EVERYWHERE)
        engines[1].stop()
        job.forget()
        READY.put(job.channel, TrainersReady(1), version=1)
        await job.publish.publish(1, None, 20.0)
        assert [VERDICT.get(job.channel, version=1, attempt=n).done for n in range(2)] == [
            False,
            True,
        ]
        assert job.roster.replacement_wanted(1, 0) and not job.roster.is_lent(1)
        assert [engine.name for engine in job.pool.engines] == [engines[0].url]


async def test_a_device_trains_when_the_engine_that_is_being_started_there_sleeps(
    engines: list[Served],
) -> None:
    async with Job(engines) as job:
        await job.version(0)
        engines[1].stop()
        await job.membership.report_lost(job.membership._members[1].engine, "it died")
        job.roster.renew(1, 1, engines[1].url)
        await job.until(lambda: job.membership._members[1].state == "starting", "it is known")
        sleeping = asyncio.create_task(job.pool.sleep(EVERYWHERE))
        await asyncio.sleep(0.3)
        assert engines[0].engine.is_asleep and not sleeping.done()
        engines[1] = await asyncio.to_thread(engines[1].start_again, Speed())
        await asyncio.wait_for(sleeping, 10)
        assert engines[1].engine.is_asleep
        job.forget()
        await job.version(1)
        assert len(job.pool.engines) == 2 and job.calls("wake_up") == ["wake_up", "wake_up"]


async def test_who_does_not_go_to_sleep_is_replaced_when_there_is_room(
    engines: list[Served],
) -> None:
    async with Job(engines) as job:
        await job.version(0)

        async def fails(*, deadline_s: float) -> None:
            raise EngineError("it does not")

        job.membership._members[0].engine.sleep = fails  # type: ignore[method-assign]
        await job.pool.sleep(EVERYWHERE)
        assert job.roster.replacement_wanted(0, 0) == "it does not" and job.roster.is_lent(0)
        assert engines[1].engine.is_asleep


async def test_when_none_is_left_that_sleeps_the_first_to_start_at_the_border_serves(
    engines: list[Served],
) -> None:
    async with Job(engines) as job:
        await job.version(0)

        async def fails(*, deadline_s: float) -> None:
            raise EngineError("it does not")

        for member in job.membership._members.values():
            member.engine.sleep = fails  # type: ignore[method-assign]
        await job.pool.sleep(EVERYWHERE)
        assert not job.pool.engines and job.roster.is_lent(0)
        publishing = asyncio.create_task(job.publish.publish(1, None, 20.0))
        READY.put(job.channel, TrainersReady(1), version=1)
        await job.until(lambda: not job.roster.is_lent(0), "it may start")
        job.roster.renew(0, 1, engines[0].url)
        await asyncio.wait_for(publishing, 20)
        assert [engine.name for engine in job.pool.engines] == [engines[0].url]


async def test_engines_are_left_awake_where_the_configuration_says_so(
    engines: list[Served],
) -> None:
    async with Job(engines, sleep=False) as job:
        await job.version(0)
        await job.pool.sleep(EVERYWHERE)
        assert not job.calls("sleep") and not job.membership.has_lent_devices


async def test_the_next_coordinator_wakes_those_that_the_one_before_had_put_to_sleep(
    engines: list[Served],
) -> None:
    async with Job(engines) as job:
        await job.version(0)
        await job.pool.sleep(EVERYWHERE)
    job.coordinate()
    job.forget()
    async with job:
        assert not any(job.roster.is_lent(place) for place in EVERYWHERE), (
            "engines may start beside new trainers"
        )
        await job.version(1)
        assert len(job.pool.engines) == 2 and not any(served.engine.is_asleep for served in engines)


async def test_a_wait_for_one_that_never_starts_ends(engines: list[Served]) -> None:
    async with Job(engines) as job:
        await job.version(0)
        job.membership._startup_timeout_s = 1.0
        job.membership._members[1].state = "starting"
        with pytest.raises(
            DeadlineExceeded, match=f"waited 1 s for engines {engines[1].url} to sleep"
        ):
            await job.pool.sleep(EVERYWHERE)
