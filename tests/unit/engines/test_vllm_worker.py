"""The worker extension inside an engine, with a stand-in for vLLM: versions are stamped only when everything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh
from pa_npu.engines.vllm import worker as extension
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Assembler
from pa_npu.weight_transfer.receiver import Message, Receiver
from tests.helpers.weights import Stage, make_checkpoint


class FakeModel(torch.nn.Module):
    """Keeps what it is given; `parameters` are the names it needs."""

    def __init__(self, parameters: set[str]) -> None:
        super().__init__()
        self.needed = parameters
        self.weights: dict[str, torch.Tensor] = {}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter((name, torch.nn.Parameter()) for name in self.needed)

    def get_submodule(self, target: str) -> torch.nn.Module:
        return torch.nn.Module()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.weights[name] = tensor.clone()
        return set(self.weights)


class FakeReceiver(Receiver):
    """Gets its buckets from a stage in the same process."""

    def __init__(self, tensors: StageTensors, fail: Exception | None = None) -> None:
        super().__init__([tensors.manifest], [], 1, torch.device("cpu"), 5.0)
        self.tensors, self.fail = tensors, fail

    def _messages(self, version: int, deadline: transport.Deadline) -> Iterator[Message]:
        manifest = self.tensors.manifest
        assembler = Assembler(manifest)
        header = torch.tensor([version, manifest.digest, len(manifest.buckets)])
        yield Message(0, manifest, assembler, None, header, "header")
        for index, (bucket, buffer) in enumerate(
            zip(manifest.buckets, self.tensors.buckets(deadline), strict=True)
        ):
            if self.fail and index == 3:
                raise self.fail
            assert buffer is not None
            yield Message(0, manifest, assembler, bucket, buffer.clone(), "bucket")


@pytest.fixture
def make_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @contextmanager
    def reloading(worker: Any) -> Iterator[Any]:
        yield worker.model

    monkeypatch.setattr(extension, "_reloading", reloading)

    def make(
        tied: bool = False, fail: Exception | None = None, extra: frozenset[str] = frozenset()
    ) -> Any:
        spec = make_checkpoint(tmp_path, "qwen2", tied=tied)
        tensors = StageTensors(Stage().load(spec, 0), spec, Mesh().place(0), 4096)
        worker: Any = extension.WorkerExtension()
        worker.model = FakeModel(set(tensors.manifest.shapes) | extra)
        worker.rank, worker.device, worker.model_runner = (
            0,
            "cpu",
            SimpleNamespace(model=worker.model),
        )
        worker.model_config = SimpleNamespace()
        worker._pa_receiver = FakeReceiver(tensors, fail)
        return worker

    return make


def test_version_is_stamped_after_a_complete_receive(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    assert worker.pa_version()["version"] is None
    result = worker.pa_receive(4)
    assert (
        result["digests"] == list(worker._pa_receiver.digests)
        and len(result["digests"][0].split()) > 3
    )
    assert result["version"] == 4
    assert worker.pa_version() == {
        "version": 4,
        "continues": False,
        "sleeps": False,
        "expert_choices": False,
        "images": False,
        "scores_at_temperature": False,
    }
    worker.model_config.enable_sleep_mode = True
    assert worker.pa_version()["sleeps"]


def test_failed_receive_unsets_the_version(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    worker.pa_receive(1)
    worker._pa_receiver.fail = transport.WeightSyncError("the trainer died")
    with pytest.raises(transport.WeightSyncError, match="the trainer died"):
        worker.pa_receive(2)
    assert worker.pa_version()["version"] is None, (
        "half the weights are new: neither version 1 nor 2"
    )


def test_parameter_without_weights_is_an_error(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(extra=frozenset({"model.layers.9.mlp.gate_up_proj.weight"}))
    with pytest.raises(
        transport.WeightSyncError,
        match=r"version 3: the trainer sent no weights for 1 .*model\.layers\.9",
    ):
        worker.pa_receive(3)
    assert worker.pa_version()["version"] is None


def test_tied_head_that_the_engine_holds_apart_gets_the_embedding(
    make_worker: Callable[..., Any],
) -> None:
    """During vLLM's layerwise reload embedding and head are two parameters; without reload the head
    is no parameter.
    """
    worker = make_worker(tied=True, extra=frozenset({"lm_head.weight"}))
    worker.pa_receive(0)
    weights = worker.model.weights
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    together = make_worker(tied=True)
    together.pa_receive(0)
    assert "lm_head.weight" not in together.model.weights


def test_calls_without_a_connection_say_what_to_do() -> None:
    worker = extension.WorkerExtension()
    assert worker.pa_close() == {}
    with pytest.raises(transport.WeightSyncError, match="call pa_connect before pa_receive"):
        worker.pa_receive(0)


@pytest.mark.parametrize("fails", [False, True])
def test_layerwise_reload_is_always_finished(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload that is left open would leave the engine with tensors that have no memory.

    All of it is under the worker's device: a kernel may make memory on torch's default one while a
    layer loads or is finished.
    """
    calls: list[str] = []

    class Model(torch.nn.Module):
        def __str__(self) -> str:
            return "model"

    def note(description: str) -> None:
        calls.append(f"{description} on {torch.empty(0).device}")

    reload, config = ModuleType("reload"), ModuleType("config")
    reload.initialize_layerwise_reload = lambda model: note(f"initialize {model}")  # type: ignore[attr-defined]
    reload.finalize_layerwise_reload = lambda model, config: note(f"finalize {model} {config}")  # type: ignore[attr-defined]

    @contextmanager
    def current(vllm_config: str) -> Iterator[None]:
        calls.append(f"enter {vllm_config}")
        yield
        calls.append("leave")

    config.set_current_vllm_config = current  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=Model()),
        model_config="config",
        vllm_config="vllm",
        device=torch.device("meta"),
    )
    try:
        with extension._reloading(worker) as model:
            note(f"load {model}")
            if fails:
                raise RuntimeError("broken")
    except RuntimeError:
        calls.append("raised")
    note("after")
    expected = [
        "enter vllm",
        "initialize model on meta",
        "load model on meta",
        "finalize model config on meta",
    ]
    assert calls == [*expected, "raised" if fails else "leave", "after on cpu"]


def test_sampler_that_was_built_without_the_logprobs_mode_is_given_it() -> None:
    """As vllm-ascend builds it: raw whatever was asked for, in the sampler and in its random part."""
    sampler = SimpleNamespace(
        logprobs_mode="raw_logprobs",
        topk_topp_sampler=SimpleNamespace(logprobs_mode="raw_logprobs"),
    )
    worker = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        model_runner=SimpleNamespace(sampler=sampler),
    )
    extension.apply_logprobs_mode(worker)
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"


def test_sampler_without_a_logprobs_mode_is_left_as_it_is() -> None:
    sampler = SimpleNamespace()
    config = SimpleNamespace(logprobs_mode="processed_logprobs")
    # the last rank of a pipeline alone has one
    for runner in (SimpleNamespace(sampler=sampler), SimpleNamespace()):
        extension.apply_logprobs_mode(SimpleNamespace(model_config=config, model_runner=runner))
    assert vars(sampler) == {}


def test_engine_needs_nothing_but_torch_and_vllm() -> None:
    """The engine's environment has none of the trainer's libraries."""
    banned = ("megatron", "transformers", "safetensors", "pydantic", "vllm", "yaml", "aiohttp")
    program = (
        "import sys, pa_npu.engines.vllm.worker\n"
        f"print([name for name in {banned!r} if name in sys.modules])\n"
        "import json; print(json.dumps([name for name in sys.modules if "
        "name.startswith('pa_npu')]))"
    )
    lines = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert lines[0] == "[]"
    rooms = (
        ".engines",
        ".engines.weight_calls",
        ".engines.live_weights",
        ".engines.vllm",
        ".weight_transfer",
    )
    rooms += tuple(
        f".engines.vllm.{part}"
        for part in ("worker", "expert_choices", "scores", "streams", "live")
    )
    rooms += (".platform", ".platform.memory_peaks", ".platform.typical")
    parts = (
        "adapters",
        "collectives",
        "computation",
        "contents",
        "digest",
        "gloo_device",
        "manifest",
        "receiver",
        "transport",
    )
    rooms = (*rooms, *(f".weight_transfer.{part}" for part in parts))
    modules = {f"pa_npu{name}" for name in ("", ".errors", *rooms)}
    assert set(json.loads(lines[1])) == modules
