"""The fleet: which engines belong to the run, which of them serve, and how an engine comes to serve or stops serving.

    starting ──answers──> ready ──next publish, or late delivery──> serving ──wants to leave──> leaving ──nothing in flight──> left
        ^                   └─ asleep until that publish <──its device trains──┤
        └───started again──────── gone <──request or probe fails───────────────┘

Engines appear in the roster, which the launcher and engines that join write. The fleet makes a
client for each start of each engine, and lets the pool give it requests once it holds the
iteration's weights (I1). While it serves, it is probed by generating a token, because its health
page stays green when its worker hangs. When it is gone, the launcher is asked for a replacement, if
the engine was started by the launcher; else it has left. An engine that joins serves from the next
publish on. It may want to leave in any state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.control.messages import EngineRunsOn
from pa_npu.control.roster import Entry, Roster
from pa_npu.control.tasks import cancel, gather
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineCapabilities, EngineError, EngineGone, RolloutEngine
from pa_npu.errors import ConfigError, DeadlineExceeded, PaNpuError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_GREETING_S = 2.0


@dataclass(eq=False)
class Member:
    """One start of one engine, with its own client, so that a late answer of an earlier start is
    not mistaken for its answer.

    index: in the roster. generation: counts its starts. restarts: whether the launcher starts it
    again when it is gone.
    shared: it is on a trainer's device. sleep: that puts it to sleep; None while it is awake.
    """

    index: int
    generation: int
    restarts: bool
    engine: RolloutEngine
    shared: bool = False
    state: Literal["starting", "ready", "serving", "leaving", "gone"] = "starting"
    capabilities: EngineCapabilities | None = None  # once it is ready
    probed_s: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    sleep: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def sleeps(self) -> bool:
        """Whether it can."""
        return self.capabilities is not None and self.capabilities.sleeps


DeliverLate = Callable[[Member, int], Awaitable[bool]]
"""Gives an engine the weights of a version while its iteration runs; returns False where the trainers
have gone on already.
"""


@dataclass(frozen=True)
class _Running:
    """The iteration that runs: the version that serves in it, and what gives that version to an
    engine that comes late.
    """

    version: int
    deliver_late: DeliverLate


class Fleet:
    """Owns the membership of `pool`. Use it with `async with`, inside the event loop.

    make_engine: the client of the engine at a URL. needs_routes: whether engines must record them.
    startup_timeout_s: run.startup_timeout_s, within which an engine becomes ready.
    """

    def __init__(
        self,
        config: RolloutConfig,
        pool: EnginePool,
        roster: Roster,
        make_engine: Callable[[str], RolloutEngine],
        needs_routes: bool = False,
        startup_timeout_s: float = 600.0,
    ) -> None:
        self._config = config
        self._startup_timeout_s = startup_timeout_s
        self._pool = pool
        self._roster = roster
        self._make_engine = make_engine
        self._needs_routes = needs_routes
        self._members: dict[int, Member] = {}
        self._running: _Running | None = None  # None between two iterations
        self._border = asyncio.Lock()
        self._counted: list[Member] = []  # on which a publish, or a late delivery, counts
        self._changed = asyncio.Event()
        self._failure: PaNpuError | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        self._pool.on_lost = self.lost
        self._pool.on_sleep = self.sleep
        for entry in self._roster.entries():
            if entry.shared:
                self._roster.lend_device(entry.index, to_trainer=False)
        self._update()
        self._watcher = asyncio.create_task(self._or_fail(self._watch), name="fleet")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = {task for member in self._members.values() for task in member.tasks}
        tasks |= {self._watcher} if self._watcher else set()
        await cancel(tasks)

    @property
    def size(self) -> int:
        """Engines with devices of their own: those that serve, and those that are being started or
        replaced.
        """
        return sum(not member.shared for member in self._members.values())

    async def wait_all_ready(self) -> None:
        """At the start of a run: wait until every engine answers."""
        deadline = time.monotonic() + self._startup_timeout_s
        while late := [
            member.name
            for member in self._members.values()
            if member.state not in ("ready", "serving")
        ]:
            await self._wait_change(deadline, f"engines {', '.join(late)} to become ready")

    def check_sleep(self) -> None:
        """Raises ConfigError where an engine that is ready cannot sleep, though there is no room
        for it beside its trainer.
        """
        for member in self._members.values():
            if member.capabilities is not None and not member.sleeps:
                raise ConfigError(
                    f"rollout.sleep: engine {member.name} says that it cannot sleep; start it with "
                    "--enable-sleep-mode, or set rollout.sleep=false"
                )

    def run_on(self) -> tuple[EngineRunsOn, ...]:
        """List what the engines that are ready say they are, in the order of the roster."""
        ready = [(member, member.capabilities) for _, member in sorted(self._members.items())]
        return tuple(
            EngineRunsOn(
                member.name,
                found.kind,
                found.version,
                self._config.settings_of(member.index).device,
            )
            for member, found in ready
            if found is not None
        )

    async def members(self) -> list[Member]:
        """The members that can take part in a publish, in the order of the roster; waits until
        there is one.

        Until the border ends none of them leaves.
        """
        deadline = time.monotonic() + self._startup_timeout_s
        while not (
            ready := [
                m for _, m in sorted(self._members.items()) if m.state in ("ready", "serving")
            ]
        ):
            await self._wait_change(deadline, "an engine that can take weights")
        self._counted = ready
        return ready

    @asynccontextmanager
    async def border(self) -> AsyncIterator[None]:
        """The time between two iterations, without late deliveries and probes: an engine that loads
        weights answers no probe.
        """
        await self._look_for_joiners()
        async with self._border:
            self._running = None
            for member in self._members.values():
                if member.state == "serving":
                    await cancel(member.tasks)
            try:
                yield
            finally:
                self._counted = []

    async def _look_for_joiners(self) -> None:
        """Let engines that joined before a publish take part in it: they answer already, so that
        this waits briefly.
        """
        if self._roster.changed():
            self._update()
        new = {
            task
            for member in self._members.values()
            if member.state == "starting" and not member.restarts
            for task in member.tasks
        }
        if new:
            await asyncio.wait(new, timeout=_GREETING_S)

    def serve(self, members: Sequence[Member], version: int, deliver_late: DeliverLate) -> None:
        """These members hold `version`, whose iteration begins; engines that come late get it from
        `deliver_late`.
        """
        for member in members:
            if member.state in ("ready", "serving"):
                self._serves(member, version)
        self._running = _Running(version, deliver_late)

    async def sleep(self, places: Collection[int]) -> None:
        """The devices of these engines, which have nothing in flight, train until `wake`: engines
        give their memory back.

        One that is being started is waited for, and one that is gone starts when there is room for
        it. Nothing where engines cannot sleep. Raises DeadlineExceeded.
        """
        if self._config.sleep is False or not any(
            member.sleeps for member in self._members.values()
        ):
            return
        places = {
            place for place in places if place in self._members and self._members[place].shared
        }
        for place in self._pool.devices.lend(places):
            self._roster.lend_device(place, to_trainer=True)
        deadline = time.monotonic() + self._startup_timeout_s
        while True:
            members = [member for place, member in sorted(self._members.items()) if place in places]
            for member in members:
                if member.state in ("ready", "serving") and member.sleep is None:
                    member.sleep = self._start(member, partial(self._put_to_sleep, member), "sleep")
            awake = [
                one
                for one in members
                if one.state == "starting" or not (one.sleep is None or one.sleep.done())
            ]
            if not awake:
                return
            await self._wait_change(
                deadline, f"engines {', '.join(one.name for one in awake)} to sleep"
            )

    @property
    def lends(self) -> bool:
        """Whether a trainer has a device alone, on which an engine sleeps or would sleep."""
        return self._pool.devices.any_lent

    def take_devices(self) -> None:
        """No device trains any more: engines may start there."""
        for place in self._pool.devices.take_back():
            self._roster.lend_device(place, to_trainer=False)

    async def wake(self, member: Member) -> None:
        """It takes its memory again where it gave it back, asked by an earlier coordinator perhaps.

        Raises EngineError, DeadlineExceeded.
        """
        if member.sleeps:
            await member.engine.wake(deadline_s=self._config.probe_timeout_s)
            member.sleep = None

    async def _put_to_sleep(self, member: Member) -> None:
        try:
            # a probe, a late delivery; each has a deadline
            if others := member.tasks - {asyncio.current_task()}:
                await asyncio.wait(others)
            self._pool.suspend(member.engine)
            if member.state == "serving":
                member.state = "ready"
            if member.sleeps:
                await member.engine.sleep(deadline_s=self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            await self.lost(member.engine, str(error))
        finally:
            asyncio.get_running_loop().call_soon(self._changed.set)

    def serving(self) -> list[Member]:
        """The members that generate now, in the order of the roster."""
        return [member for _, member in sorted(self._members.items()) if member.state == "serving"]

    def catch_up(self, members: Sequence[Member]) -> None:
        """After a border: of these members whoever serves holds an older version; it gets the
        border's, as one that comes late.
        """
        for member in members:
            if member.state == "serving":
                member.state = "ready"
                self._pool.suspend(member.engine)
                self._start(member, partial(self._deliver, member), "catch up")

    async def check(self, members: Sequence[Member]) -> None:
        """After a publish that failed: report the members as lost whose workers do not all answer."""

        async def ask(member: Member) -> None:
            try:
                await member.engine.loaded_weights(deadline_s=self._config.probe_timeout_s)
            except (EngineError, DeadlineExceeded) as error:
                await self.lost(member.engine, str(error))

        await gather([ask(member) for member in members])

    async def lost(self, engine: RolloutEngine, reason: str) -> None:
        """The engine is gone: end its requests and have it replaced.

        Further reports of the same start do nothing.
        """
        member = next((m for m in self._members.values() if m.engine is engine), None)
        if member is None or member.state == "gone":
            return
        is_replaced = member.restarts and member.state != "leaving"
        member.state = "gone"
        logger.warning("engine %s is lost: %s", member.name, reason)
        self._pool.suspend(engine)
        await cancel(member.tasks)
        await engine.close()
        if is_replaced:
            self._roster.ask_replacement(member.index, member.generation, reason)
        else:
            await self._remove(member, reason)
        self._changed.set()

    async def _remove(self, member: Member, reason: str) -> None:
        self._roster.confirm_left(member.index)
        del self._members[member.index]
        await cancel(member.tasks)
        await self._pool.remove(member.engine)
        self._changed.set()
        if not self._members:
            self._pool.fail(
                EngineGone(
                    f"no engine is left, and nothing starts one again; the last, {member.name}: "
                    f"{reason}"
                )
            )

    async def _wait_change(self, deadline: float, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._members:
            raise EngineGone("no engine is left, and nothing starts one; see the engines' logs")
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"waited {self._startup_timeout_s:g} s for {what} (run.startup_timeout_s); see the "
                "engines' logs"
            ) from None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._roster.changed():
                self._update()
            for member in list(self._members.values()):
                if member.state == "leaving" and self._is_free(member):
                    logger.info("engine %s has left", member.name)
                    await self._remove(member, "it has left")
                elif self._is_probe_due(member):
                    member.probed_s = time.monotonic()
                    self._start(member, partial(self._probe, member), "probe")

    def _update(self) -> None:
        for entry in self._roster.entries():
            member = self._members.get(entry.index)
            if member is None and entry.leaving:  # it asked while no coordinator ran
                self._roster.confirm_left(entry.index)
            elif member is None or entry.generation > member.generation:
                self._welcome(entry, member)
            elif entry.leaving and member.state != "leaving":
                logger.info("engine %s leaves: it finishes what it has in flight", member.name)
                member.state = "leaving"
                self._pool.suspend(member.engine)

    def _welcome(self, entry: Entry, predecessor: Member | None) -> None:
        member = Member(
            entry.index,
            entry.generation,
            entry.restarts,
            self._make_engine(entry.url),
            entry.shared,
        )
        if predecessor is not None:
            logger.info("engine %s was started again", member.name)
            self._pool.suspend(predecessor.engine)
            for task in predecessor.tasks:
                task.cancel()
            self._start(member, predecessor.engine.close, "close")
        self._members[entry.index] = member
        self._pool.add(
            member.engine,
            seat=entry.index,
            shared=member.shared,
            settings=self._config.settings_of(entry.index),
        )
        bring_up = partial(self._bring_up, member, is_replacement=predecessor is not None)
        self._start(member, bring_up, "bring up")

    async def _bring_up(self, member: Member, *, is_replacement: bool) -> None:
        try:
            member.capabilities = await member.engine.wait_ready(deadline_s=self._startup_timeout_s)
            self._check_capabilities(member, member.capabilities)
            if member.state != "starting":  # it leaves already
                return
            member.state = "ready"
            self._changed.set()
            # one that joins inside an iteration serves from the next publish on; that is too late
            # where engines have been asked to load it already, which can be long before the
            # trainers are through
            missed = self._border.locked()
            can_start = not self._pool.devices.is_lent(member.index)
            wanted = (is_replacement or missed) and can_start
            if wanted:
                await self._deliver(member)
        except (EngineError, DeadlineExceeded) as error:
            await self.lost(member.engine, str(error))

    async def _deliver(self, member: Member) -> None:
        """Gives a member that is ready the version of the iteration that runs."""
        try:
            async with self._border:
                running = self._running
                if running is None or member.state != "ready":
                    return
                self._counted = [member]
                try:
                    delivered = await running.deliver_late(member, running.version)
                finally:
                    self._counted = []
                if delivered:
                    logger.info(
                        "engine %s serves, with weight version %d", member.name, running.version
                    )
                    self._serves(member, running.version)
        except (EngineError, DeadlineExceeded) as error:
            await self.lost(member.engine, str(error))

    def _check_capabilities(self, member: Member, found: EngineCapabilities) -> None:
        """Raises ConfigError where the engine is not what the run needs, as one that was started
        elsewhere may be.
        """
        if found.num_workers not in (None, self._config.tensor_parallel):
            raise ConfigError(
                f"engine {member.name} has {found.num_workers} workers, but "
                f"rollout.tensor_parallel = {self._config.tensor_parallel}; start it with the "
                "same, or change the key"
            )
        self._pool.continues &= found.continues
        if self._needs_routes and not found.records_routes:
            raise ConfigError(
                f"engine {member.name} ({found.version}) does not say which experts a token took, "
                "as algorithm.router_replay wants; set that to none, or use another release of the "
                "engine"
            )

    def _is_free(self, member: Member) -> bool:
        """Whether the member may go: nothing is in flight on it, and no publish counts on it."""
        return not self._pool.in_flight(member.engine) and member not in self._counted

    def _serves(self, member: Member, version: int) -> None:
        member.state = "serving"
        member.probed_s = time.monotonic()
        self._pool.serve(member.engine, version)

    def _is_probe_due(self, member: Member) -> bool:
        waited_s = time.monotonic() - member.probed_s
        idle = member.state == "serving" and not member.tasks and not self._border.locked()
        return idle and waited_s > self._config.probe_timeout_s / 2

    async def _probe(self, member: Member) -> None:
        try:
            await member.engine.probe(deadline_s=self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            await self.lost(member.engine, f"it did not generate a token when probed: {error}")

    def _start(
        self, member: Member, work: Callable[[], Awaitable[None]], name: str
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._or_fail(work), name=f"{name} {member.name}")
        member.tasks.add(task)
        task.add_done_callback(member.tasks.discard)
        return task

    async def _or_fail(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, for which nobody waits: what it does not expect, the loss of the store for
        example, ends the run.
        """
        try:
            await work()
        except PaNpuError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the watch over the engines failed")
            self._fail(PaNpuError(f"the watch over the engines failed: {error!r}"))

    def _fail(self, error: PaNpuError) -> None:
        self._failure = error
        self._pool.fail(error)
        self._changed.set()
