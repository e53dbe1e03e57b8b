"""Megatron, FSDP2 and a toy of plain torch pass the suite that says what a training backend must do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pa_npu.backends.protocol import BackendModule, TrainBackend
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner
from tests.helpers import (
    backend_conformance,
    backend_fault_conformance,
    backend_resume_conformance,
    step_faults,
)
from tests.helpers.adapters import make_adapter, merged_by_hand, peft_model
from tests.helpers.backend import make_learner
from tests.helpers.backend_conformance import BackendConformance
from tests.helpers.backend_updates import Make, by_hand
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


def test_every_member_of_the_interface_occurs_in_the_suite() -> None:
    used: set[str] = set()
    for suite in (
        backend_conformance,
        backend_fault_conformance,
        backend_resume_conformance,
    ):
        tree = ast.parse(Path(suite.__file__).read_text())
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    members = {
        name
        for kind in (TrainBackend, BackendModule)
        for name in vars(kind)
        if not name.startswith("_")
    }
    assert len(members) > 20 and members <= used, (
        f"no backend is asked for {sorted(members - used)}"
    )


class TestMegatron(BackendConformance):
    name = "megatron"

    @pytest.fixture
    def make(self) -> Make:
        return lambda config: make_learner(config)[0]


def made_by(name: str) -> Make:
    def made(config: Config) -> Learner:
        spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
        backend = backend_module(name).create(
            config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline
        )
        return Learner(config, backend, PLATFORM, timeline)

    return made


class TestFsdp(BackendConformance):
    name = "fsdp"
    has_no = frozenset({step_faults.COPIES})

    @pytest.fixture
    def make(self) -> Make:
        return made_by("fsdp")


class TestFsdpWithAdapters(BackendConformance):
    """Against peft on the plain model, from the same adapters."""

    name = "fsdp"
    has_no = frozenset({"norms decayed", "norms decayed, by their group", step_faults.COPIES})

    @pytest.fixture
    def make(self, model: Path, tmp_path: Path) -> Make:
        adapter = make_adapter(model, tmp_path / "adapter")

        def made(config: Config) -> Learner:
            changed = {
                "model": {"adapter": str(adapter)},
                "checkpoint": {"export_hf": "merged"},
                "trainer": {"backend": "fsdp"},
            }
            sections = {
                name: getattr(config, name).model_copy(update=keys)
                for name, keys in changed.items()
            }
            return made_by("fsdp")(
                Config.model_validate(config.model_copy(update=sections).model_dump())
            )

        self.adapter = adapter
        return made

    def by_hand(self, model: Path) -> list[dict[str, torch.Tensor]]:
        return [
            merged_by_hand(state, factor=2.0) for state in by_hand(peft_model(model, self.adapter))
        ]


class TestToy(BackendConformance):
    """It does not let anyone watch its LM head."""

    offloads = False
    has_no = frozenset(
        {*(fault for fault in step_faults.LOSS if " behind " in fault), step_faults.COPIES}
    )
    name = "tests.helpers.toy_backend:BACKEND"

    @pytest.fixture
    def make(self) -> Make:
        return made_by(self.name)
