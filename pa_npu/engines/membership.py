"""The membership: which engines belong to the run, and which of them serve.

    starting ──answers──> ready ──next publish, or late delivery──> serving ──wants to leave──┐
        ^                   └─ asleep until that publish <──its device trains──┤              │
        └───started again──────── gone <──request or probe fails───────────────┘           leaving
                                                                                              │
                                                            left <──nothing in flight─────────┘

Engines appear in the roster, which the launcher and joining engines write. The membership makes a
client for each start of each engine. It lets the pool give an engine requests once the engine holds
the iteration's weights (I1).

A serving engine is probed by generating a token, because its health page stays green when its
worker hangs. When it is gone, the launcher is asked for a replacement if the launcher started it;
else it has left. An engine that joins serves from the next publish on. An engine may want to leave
in any state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.control.messages import EngineRunsOn
from pa_npu.control.roster import Entry, Roster
from pa_npu.control.tasks import cancel, gather
from pa_npu.engines.member import Member, check_capabilities
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, EngineGone, RolloutEngine
from pa_npu.errors import ConfigError, DeadlineExceeded, PaNpuError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_GREETING_S = 2.0


DeliverLate = Callable[[Member, int], Awaitable[bool]]
"""Gives an engine the weights of a version while its iteration runs.

Returns False if the trainers have begun to change that version, or could not send it.
"""


@dataclass(frozen=True)
class _RunningIteration:
    """The iteration that runs: the version that serves in it, and what gives that version to an
    engine that comes late.
    """

    version: int
    deliver_late: DeliverLate


class EngineMembership:
    """Owns the membership of `pool`. Use it with `async with`, inside the event loop.

    Args:
        config: of the rollout.
        pool: of the engines that serve.
        roster: of the engines that the run has.
        make_engine: makes the client of the engine at a URL.
        needs_expert_choices: whether engines must record the experts of tokens.
        startup_timeout_s: run.startup_timeout_s, within which an engine must become ready.
    """

    def __init__(
        self,
        config: RolloutConfig,
        pool: EnginePool,
        roster: Roster,
        make_engine: Callable[[str], RolloutEngine],
        needs_expert_choices: bool = False,
        startup_timeout_s: float = 600.0,
    ) -> None:
        self._config = config
        self._startup_timeout_s = startup_timeout_s
        self._pool = pool
        self._roster = roster
        self._make_engine = make_engine
        self._needs_expert_choices = needs_expert_choices
        self._members: dict[int, Member] = {}
        self._running: _RunningIteration | None = None  # None between two iterations
        self._weights_lock = asyncio.Lock()
        self._needed: list[Member] = []  # members that a publish or a late delivery waits for
        self._changed = asyncio.Event()
        self._failure: PaNpuError | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineMembership:
        self._pool.subscribe(on_lost=self.report_lost, on_sleep=self.sleep)
        for entry in self._roster.entries():
            if entry.shared:
                self._roster.lend_device(entry.index, to_trainer=False)
        self._update()
        self._watcher = asyncio.create_task(self._or_fail(self._watch), name="membership")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = {task for member in self._members.values() for task in member.tasks}
        tasks |= {self._watcher} if self._watcher else set()
        await cancel(tasks)

    @property
    def size(self) -> int:
        """The number of engines with devices of their own, those that start included."""
        return sum(not member.shared for member in self._members.values())

    async def wait_all_ready(self) -> None:
        """Waits until every engine answers, at the start of a run."""
        deadline = time.monotonic() + self._startup_timeout_s
        while late := self._not_ready():
            await self._wait_change(deadline, f"engines {', '.join(late)} to become ready")

    def _not_ready(self) -> list[str]:
        members = self._members.values()
        return [member.name for member in members if member.state not in ("ready", "serving")]

    def check_sleep(self) -> None:
        """Raises ConfigError if a ready engine cannot sleep.

        Call it if there is no room for engines beside their trainers.
        """
        for member in self._members.values():
            if member.capabilities is not None and not member.sleeps:
                raise ConfigError(
                    f"rollout.sleep: engine {member.name} says that it cannot sleep; start it with "
                    "--enable-sleep-mode, or set rollout.sleep=false"
                )

    def check_scores(self, temperature: float) -> None:
        """Raises ConfigError if a ready engine cannot score at this temperature.

        Call it if the policy is its own teacher.
        """
        for member in self._members.values():
            capabilities = member.capabilities
            can_scale = capabilities is None or capabilities.scores_at_temperature
            if temperature != 1.0 and not can_scale:
                raise ConfigError(
                    f"teacher.NAME.hint_column: engine {member.name} scores at temperature 1 only, "
                    f"and rollout.temperature = {temperature:g}; set it to 1, or use another "
                    "release of the engine"
                )

    def run_on(self) -> tuple[EngineRunsOn, ...]:
        """Returns what each ready engine runs on, in the order of the roster."""
        runs_on = []
        for _, member in sorted(self._members.items()):
            if member.capabilities is None:
                continue
            engine_runs_on = EngineRunsOn(
                member.name,
                member.capabilities.kind,
                member.capabilities.version,
                self._config.settings_of(member.index).device,
            )
            runs_on.append(engine_runs_on)
        return tuple(runs_on)

    async def members(self) -> list[Member]:
        """Returns the members that can take part in a publish, in the order of the roster.

        Waits until there is one. None of them leaves until the border ends.
        """
        deadline = time.monotonic() + self._startup_timeout_s
        while not (ready := self._in_state("ready", "serving")):
            await self._wait_change(deadline, "an engine that can take weights")
        self._needed = ready
        return ready

    def _in_state(self, *states: str) -> list[Member]:
        members = [member for _, member in sorted(self._members.items())]
        return [member for member in members if member.state in states]

    @asynccontextmanager
    async def border(self) -> AsyncIterator[None]:
        """Encloses the time between two iterations, which has no late deliveries and no probes.

        An engine that loads weights answers no probe.
        """
        await self._look_for_joiners()
        async with self._weights_lock:
            self._running = None
            for member in self._members.values():
                if member.state == "serving":
                    await cancel(member.tasks)
            try:
                yield
            finally:
                self._needed = []

    async def _look_for_joiners(self) -> None:
        """Lets engines that joined before a publish take part in it.

        They answer already, so that this waits briefly.
        """
        if self._roster.changed():
            self._update()
        new: set[asyncio.Task[None]] = set()
        for member in self._members.values():
            if member.state == "starting" and not member.restarts:
                new |= member.tasks
        if new:
            await asyncio.wait(new, timeout=_GREETING_S)

    def serve(self, members: Sequence[Member], version: int, deliver_late: DeliverLate) -> None:
        """Lets members serve that hold `version`, whose iteration begins.

        `deliver_late` gives it to engines that come late.
        """
        for member in members:
            if member.state in ("ready", "serving"):
                self._serves(member, version)
        self._running = _RunningIteration(version, deliver_late)

    async def sleep(self, places: Collection[int]) -> None:
        """Lets engines give their memory back: their devices train until `wake`.

        The engines, named by their places, have nothing in flight. One that is being started is
        waited for. One that is gone starts again when there is room for it. Does nothing if engines
        cannot sleep. Raises DeadlineExceeded.
        """
        can_sleep = any(member.sleeps for member in self._members.values())
        if self._config.sleep is False or not can_sleep:
            return
        members = self._members
        places = {place for place in places if place in members and members[place].shared}
        for place in self._pool.devices.lend(places):
            self._roster.lend_device(place, to_trainer=True)
        deadline = time.monotonic() + self._startup_timeout_s
        while True:
            affected = [member for place, member in sorted(members.items()) if place in places]
            for member in affected:
                if member.state in ("ready", "serving") and member.sleep is None:
                    member.sleep = self._start(member, partial(self._put_to_sleep, member), "sleep")
            awake = [member.name for member in affected if member.is_falling_asleep]
            if not awake:
                return
            await self._wait_change(deadline, f"engines {', '.join(awake)} to sleep")

    @property
    def has_lent_devices(self) -> bool:
        """Returns whether a trainer has a device alone, on which an engine sleeps or would sleep."""
        return self._pool.devices.any_lent

    def reclaim_devices(self) -> None:
        """Lets engines start again on devices that trained."""
        for place in self._pool.devices.return_all():
            self._roster.lend_device(place, to_trainer=False)

    async def wake(self, member: Member) -> None:
        """Lets an engine that sleeps take its memory again.

        An earlier coordinator may have put it to sleep. Raises EngineError, DeadlineExceeded.
        """
        if member.sleeps:
            await member.engine.wake(deadline_s=self._config.probe_timeout_s)
            member.sleep = None

    async def _put_to_sleep(self, member: Member) -> None:
        try:
            # A probe or a late delivery; each has a deadline.
            if others := member.tasks - {asyncio.current_task()}:
                await asyncio.wait(others)
            self._pool.suspend(member.engine)
            if member.state == "serving":
                member.state = "ready"
            if member.sleeps:
                await member.engine.sleep(deadline_s=self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            await self.report_lost(member.engine, str(error))
        finally:
            asyncio.get_running_loop().call_soon(self._changed.set)

    def serving(self) -> list[Member]:
        """Returns the members that generate now, in the order of the roster."""
        return self._in_state("serving")

    def catch_up(self, members: Sequence[Member]) -> None:
        """After a border, gives its version to those of these members that serve an older one.

        Each gets it as a late engine does.
        """
        for member in members:
            if member.state == "serving":
                member.state = "ready"
                self._pool.suspend(member.engine)
                self._start(member, partial(self._deliver, member), "catch up")

    async def check(self, members: Sequence[Member]) -> None:
        """After a failed publish, reports members as lost whose workers do not all answer."""

        async def ask(member: Member) -> None:
            try:
                await member.engine.loaded_weights(deadline_s=self._config.probe_timeout_s)
            except (EngineError, DeadlineExceeded) as error:
                await self.report_lost(member.engine, str(error))

        await gather([ask(member) for member in members])

    async def report_lost(self, engine: RolloutEngine, reason: str) -> None:
        """Ends the requests of an engine that is gone, and has it replaced.

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

    async def _wait_change(self, deadline: float, awaited: str) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._members:
            raise EngineGone("no engine is left, and nothing starts one; see the engines' logs")
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"waited {self._startup_timeout_s:g} s for {awaited} (run.startup_timeout_s); see the "
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
            index=entry.index,
            generation=entry.generation,
            restarts=entry.restarts,
            engine=self._make_engine(entry.url),
            shared=entry.shared,
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
            engine_index=entry.index,
            shared=member.shared,
            settings=self._config.settings_of(entry.index),
        )
        bring_up = partial(self._bring_up, member, is_replacement=predecessor is not None)
        self._start(member, bring_up, "bring up")

    async def _bring_up(self, member: Member, *, is_replacement: bool) -> None:
        try:
            member.capabilities = await member.engine.wait_ready(deadline_s=self._startup_timeout_s)
            self._pool.continues &= check_capabilities(
                member, self._config, needs_expert_choices=self._needs_expert_choices
            ).continues
            if member.state != "starting":  # it leaves already
                return
            member.state = "ready"
            self._changed.set()
            # An engine that joins inside an iteration serves from the next publish on. That is too
            # late if engines have been asked to load already, which can be long before the trainers
            # send.
            missed = self._weights_lock.locked()
            can_start = not self._pool.devices.is_lent(member.index)
            if (is_replacement or missed) and can_start:
                await self._deliver(member)
        except (EngineError, DeadlineExceeded) as error:
            await self.report_lost(member.engine, str(error))

    async def _deliver(self, member: Member) -> None:
        """Gives a ready member the version of the iteration that runs, inside the iteration."""
        try:
            async with self._weights_lock:
                running = self._running
                if running is None or member.state != "ready":
                    return
                self._needed = [member]
                try:
                    delivered = await running.deliver_late(member, running.version)
                finally:
                    self._needed = []
                if delivered:
                    logger.info(
                        "engine %s serves, with weight version %d", member.name, running.version
                    )
                    self._serves(member, running.version)
        except (EngineError, DeadlineExceeded) as error:
            await self.report_lost(member.engine, str(error))

    def _is_free(self, member: Member) -> bool:
        """Returns whether a member may leave: it has nothing in flight, and no publish needs it."""
        return not self._pool.in_flight(member.engine) and member not in self._needed

    def _serves(self, member: Member, version: int) -> None:
        member.state = "serving"
        member.probed_s = time.monotonic()
        self._pool.serve(member.engine, version)

    def _is_probe_due(self, member: Member) -> bool:
        waited_s = time.monotonic() - member.probed_s
        idle = member.state == "serving" and not member.tasks and not self._weights_lock.locked()
        return idle and waited_s > self._config.probe_timeout_s / 2

    async def _probe(self, member: Member) -> None:
        try:
            await member.engine.probe(deadline_s=self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            await self.report_lost(
                member.engine, f"it did not generate a token when probed: {error}"
            )

    def _start(
        self, member: Member, work: Callable[[], Awaitable[None]], name: str
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._or_fail(work), name=f"{name} {member.name}")
        member.tasks.add(task)
        task.add_done_callback(member.tasks.discard)
        return task

    async def _or_fail(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`, for which nobody waits; an unexpected failure ends the run.

        The loss of the store is such a failure.
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
