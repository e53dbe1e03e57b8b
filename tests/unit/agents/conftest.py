"""Fixtures of agents."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.environments.registry import make_environment, opened
from tests.helpers.agents import TOKENIZER, config


@pytest.fixture
async def agents() -> AsyncIterator[AgentEnvironment]:
    async with opened(make_environment(config(), TOKENIZER), 30.0) as environment:
        assert isinstance(environment, AgentEnvironment)
        yield environment
