"""Every training backend keeps the protocol that the trainer knows, and is found by its name alone."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from pa_npu.backends.protocol import BackendModule, PlannedSave, TrainBackend
from pa_npu.backends.registry import _MODULES, backend_module
from pa_npu.config.sections.learning import TrainerConfig
from pa_npu.errors import ConfigError, UserError
from tests.helpers.megatron import PLATFORM

from pa_npu.backends.megatron.backend import MegatronBackend  # isort: skip
from pa_npu.backends.megatron.checkpoint import PlannedShards  # isort: skip

IMPLEMENTATIONS = [(TrainBackend, MegatronBackend), (PlannedSave, PlannedShards)]


def parameters(function: object) -> list[tuple[str, object]]:
    """Names and defaults, without self."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(name, item.default) for name, item in signature.parameters.items() if name != "self"]


@pytest.mark.parametrize(
    ("protocol", "implementation"), IMPLEMENTATIONS, ids=lambda value: value.__name__
)
def test_an_implementation_has_the_protocols_members_with_their_parameters(
    protocol: type, implementation: type
) -> None:
    members = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    assert members
    for name, member in members.items():
        if isinstance(member, property):  # an attribute will do
            made = f"self.{name} = " in inspect.getsource(implementation.__init__)  # type: ignore[misc]
            assert made or hasattr(implementation, name), name
        else:
            assert parameters(inspect.getattr_static(implementation, name)) == parameters(member), (
                name
            )


def test_every_registered_backend_offers_what_the_registry_promises() -> None:
    assert TrainerConfig().backend in _MODULES
    for name in _MODULES:
        module = backend_module(name)
        for function in ("create", "export_checkpoint"):
            assert parameters(getattr(module, function)) == parameters(
                getattr(BackendModule, function)
            ), (
                name,
                function,
            )


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer.backend: 'deepspeed' is none of megatron, fsdp and not module:NAME; use "
        r"one",
    ):
        backend_module("deepspeed")


def test_a_backend_of_ones_own_that_lacks_something_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer.backend: json:dumps has no changes, fit, create, export_checkpoint\(\); "
        r"see",
    ):
        backend_module("json:dumps")
    with pytest.raises(
        ConfigError, match=r"trainer.backend: nowhere:BACKEND cannot be imported .*No module named"
    ):
        backend_module("nowhere:BACKEND")


def test_a_platform_that_megatron_does_not_run_on_is_named() -> None:
    from pa_npu.backends.megatron.gpt import fused_ops

    class Other:
        name = "tpu"

    assert fused_ops(PLATFORM) is PLATFORM.ops
    with pytest.raises(
        UserError,
        match=r"trainer.backend: megatron does not run on tpu; set run.device to one of npu",
    ):
        fused_ops(Other())


def test_megatron_is_imported_by_creating_a_backend_only() -> None:
    """The trainer, the registry and the list of patches are imported by processes that must not see
    Megatron.
    """
    code = (
        "import sys; import pa_npu.trainer.main, pa_npu.backends.megatron.patches; "
        "from pa_npu.backends.registry import backend_module; backend_module('megatron'); "
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'megatron']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
