"""Which features a run uses: the only place on the coordinator's side that reads their keys and constructs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.gateway import Gateway
from pa_npu.agents.sessions import Sessions
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.coordinator.carried import BudgetedUpdates
from pa_npu.coordinator.interruption import Interruptions
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.coordinator.updates import InformativeUpdates, Updates
from pa_npu.data.stream import TrainingStream
from pa_npu.engines.handing_on import Decode
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Sampling
