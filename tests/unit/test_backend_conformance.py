"""Megatron, FSDP2 and a toy of plain torch pass the suite that says what a training backend must do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner
from tests.helpers.backend import make_learner
from tests.helpers.backend_conformance import BackendConformance, Make
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


class TestMegatron(BackendConformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda config: make_learner(config)[0]


def made_by(name: str) -> Make:
    def made(config: Config) -> Learner:
        spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
        backend = backend_module(name).create(config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline)
        return Learner(config, backend, PLATFORM, timeline)

    return made


class TestFsdp(BackendConformance):
    @pytest.fixture
    def make(self) -> Make:
        return made_by("fsdp")


class TestToy(BackendConformance):
    @pytest.fixture
    def make(self) -> Make:
        return made_by("tests.helpers.toy_backend:BACKEND")
