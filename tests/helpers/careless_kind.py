"""rollout.backend=tests.helpers.careless_kind:KEEPS_WEIGHTS: vLLM whose workers load the first version alone."""

from __future__ import annotations

from dataclasses import replace

from pa_npu.config.schema import Config
from pa_npu.engines.registry import EngineCommand
from pa_npu.engines.vllm.kind import VLLM, WORKER_EXTENSION
from pa_npu.families.spec import ModelSpec

CARELESS = "tests.helpers.careless_engine.KeepsWeights"


def command(config: Config, spec: ModelSpec, index: int, port: int) -> EngineCommand:
    plain = VLLM.command(config, spec, index, port)
    argv = [CARELESS if argument == WORKER_EXTENSION else argument for argument in plain.argv]
    assert CARELESS in argv, plain.argv
    return replace(plain, argv=tuple(argv))


KEEPS_WEIGHTS = replace(VLLM, command=command)
