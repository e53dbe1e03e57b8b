"""Member: one start of one engine that belongs to the run, and the check of its abilities."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.engines.protocol import EngineCapabilities, RolloutEngine
from pa_npu.errors import ConfigError


@dataclass(eq=False)
class Member:
    """One start of one engine.

    It has a client of its own, so that a late answer of an earlier start is not mistaken for its
    answer.

    index: of the engine in the roster.
    generation: number of the start.
    restarts: whether the launcher starts the engine again when it is gone.
    shared: whether it is on a trainer's device.
    capabilities: None until it is ready.
    sleep: the task that puts it to sleep; None while it is awake.
    """

    index: int
    generation: int
    restarts: bool
    engine: RolloutEngine
    shared: bool = False
    state: Literal["starting", "ready", "serving", "leaving", "gone"] = "starting"
    capabilities: EngineCapabilities | None = None
    probed_s: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    sleep: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def sleeps(self) -> bool:
        """Returns whether it can sleep."""
        return self.capabilities is not None and self.capabilities.sleeps

    @property
    def is_falling_asleep(self) -> bool:
        """Returns whether it is being put to sleep, or has to start before it can be."""
        if self.state == "starting":
            return True
        return self.sleep is not None and not self.sleep.done()


def check_capabilities(
    member: Member, config: RolloutConfig, *, needs_expert_choices: bool
) -> EngineCapabilities:
    """Returns the abilities of a ready member.

    Raises ConfigError if it is not what the run needs: it may have been started elsewhere.
    """
    capabilities = member.capabilities
    assert capabilities is not None, "an engine that is ready has said what it can do"
    if capabilities.num_workers not in (None, config.tensor_parallel):
        raise ConfigError(
            f"engine {member.name} has {capabilities.num_workers} workers, but "
            f"rollout.tensor_parallel = {config.tensor_parallel}; start it with the "
            "same, or change the key"
        )
    if needs_expert_choices and not capabilities.records_expert_choices:
        raise ConfigError(
            f"engine {member.name} ({capabilities.version}) does not say which experts a token "
            "took, as algorithm.router_replay wants; set that to none, or use another release of "
            "the engine"
        )
    return capabilities
