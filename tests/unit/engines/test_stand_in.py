"""The stand-in that benchmarks and tests put in place of vLLM does what every engine does, as far as it can without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.engines.registry import engine_kind
from tests.helpers.engine_conformance import Conformance
from tests.helpers.engine_subjects import Subject
from tests.helpers.stand_in_engine import API_KEY, Served
from tools.stand_in import Speed

SPEED = Speed(step_s=0.0005)


@pytest.fixture(scope="module", params=[False, True], ids=["awake", "sleeps"])
def subject(request) -> Iterator[Subject]:
    served = Served(SPEED, sleeps=request.param)

    async def restart() -> None:
        nonlocal served
        await asyncio.to_thread(served.stop)
        served = await asyncio.to_thread(served.start_again, SPEED)

    yield Subject(engine_kind("vllm"), "vllm", served.url, API_KEY, Path("none"), restart)
    served.stop()


class TestStandIn(Conformance):
    pass
