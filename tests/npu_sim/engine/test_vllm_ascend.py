"""vllm-ascend's own worker with our extension, over stub libraries: weights loaded and loaded again, log-probs, calls, waking.

Not here, since the stubs have no kernels of CANN's and no ATB: a forward pass, graphs, and the
allocator of sleep mode, for which a stand-in keeps the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample.metadata import SamplingMetadata

from pa_npu.weight_transfer.transport import WeightSyncError
from tests.npu_sim.reference_ops import all_references
from tests.npu_sim.simulator import NpuSim

FAMILY = os.environ["PA_NPU_SIM_ENGINE"]
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}[os.environ["PA_NPU_SIM_DTYPE"]]
MODEL = Path(os.environ["PA_NPU_SIM_MODEL"])
TEMPERATURE = 0.7


class Given:
    """Stands for a Receiver: HF tensors that have arrived on the device."""

    is_tied, digests = False, ("digest",)

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def receive(
        self, version: int, *, begins_within_s: float | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to("npu")) for name, tensor in self._weights.items())

    def whole(
        self, received: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return received

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def executor() -> Iterator[UniProcExecutor]:
    with NpuSim(all_references()):
        arguments = EngineArgs(
            model=str(MODEL),
            dtype=str(DTYPE).removeprefix("torch."),
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            worker_extension_cls="pa_npu.engines.vllm.worker.WorkerExtension",
            logprobs_mode="processed_logprobs",
            additional_config={"weight_nz_mode": 0},
        )
        yield UniProcExecutor(arguments.create_engine_config())


@pytest.fixture
def worker(executor: UniProcExecutor) -> Any:
    return executor.driver_worker.worker


def hf_weights() -> dict[str, torch.Tensor]:
    return load_file(MODEL / "model.safetensors")


def held(worker: Any) -> dict[str, torch.Tensor]:
    """Copies of the engine's parameters on the host."""
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in worker.model_runner.model.named_parameters()
    }


def publish(
    executor: UniProcExecutor, worker: Any, weights: dict[str, torch.Tensor], version: int
) -> dict[str, Any]:
    worker._pa_receiver = Given(weights)
    (output,) = executor.collective_rpc("pa_receive", args=(version,))
    return output


def expected(weights: dict[str, torch.Tensor], layer: int = 0) -> dict[str, torch.Tensor]:
    """Returns what vllm-ascend holds of these: joined projections, and experts transposed for its
    grouped matrix product.
    """
    of_layer = f"model.layers.{layer}"
    joined = torch.cat([weights[f"{of_layer}.self_attn.{part}_proj.weight"] for part in "qkv"])
    actual = {
        f"{of_layer}.self_attn.qkv_proj.weight": joined,
        "lm_head.weight": weights["lm_head.weight"],
    }
    if FAMILY != "qwen3_moe":
        up = [weights[f"{of_layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        return actual | {f"{of_layer}.mlp.gate_up_proj.weight": torch.cat(up)}
    experts = range(sum(f"{of_layer}.mlp.experts." in name for name in weights) // 3)

    def part(name: str, expert: int) -> torch.Tensor:
        return weights[f"{of_layer}.mlp.experts.{expert}.{name}_proj.weight"]

    gate_up = torch.stack(
        [torch.cat([part("gate", expert), part("up", expert)]).T for expert in experts]
    )
    down = torch.stack([part("down", expert).T for expert in experts])
    return actual | {
        f"{of_layer}.mlp.experts.w13_weight": gate_up,
        f"{of_layer}.mlp.experts.w2_weight": down,
    }


def assert_held(worker: Any, weights: dict[str, torch.Tensor]) -> None:
    actual = held(worker)
    for name, tensor in expected(weights).items():
        (own,) = [
            value
            for key, value in actual.items()
            if key == name or key == name.replace(".experts.", ".experts.routed_experts.")
        ]
        assert torch.equal(own, tensor.to(DTYPE)), name


def changed(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in hf_weights().items()
    }


def test_its_worker_takes_our_extension_and_loads_the_model(
    executor: UniProcExecutor, worker: Any
) -> None:
    assert type(worker).__module__ == "vllm_ascend.worker.worker" and worker.device.type == "npu"
    (output,) = executor.collective_rpc("pa_version")
    assert output["version"] is None and output["sleeps"] is False
    assert_held(worker, hf_weights())


def test_a_publish_is_loaded_in_place_as_often_as_one_comes(
    executor: UniProcExecutor, worker: Any
) -> None:
    before = held(worker)
    places = {
        name: parameter.data_ptr()
        for name, parameter in worker.model_runner.model.named_parameters()
    }
    for version in (1, 2):
        weights = changed(version)
        assert publish(executor, worker, weights, version)["version"] == version
        assert_held(worker, weights)
        assert executor.collective_rpc("pa_version")[0]["version"] == version
    publish(executor, worker, hf_weights(), 3)
    after = held(worker)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), (
        "the first weights again"
    )
    assert {
        name: parameter.data_ptr()
        for name, parameter in worker.model_runner.model.named_parameters()
    } == places


def test_a_publish_that_lacks_weights_is_refused(executor: UniProcExecutor, worker: Any) -> None:
    weights = hf_weights()
    del weights["model.norm.weight"]
    with pytest.raises(WeightSyncError, match="no weights for 1 parameter"):
        publish(executor, worker, weights, 4)
    assert executor.collective_rpc("pa_version")[0]["version"] is None
    publish(executor, worker, hf_weights(), 5)


def test_a_publish_after_sleep_is_what_was_sent_whatever_waking_does_to_experts(
    executor: UniProcExecutor, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_ascend.worker.worker as module

    monkeypatch.setattr(module, "CaMemAllocator", MagicMock())  # memory stays where it is
    executor.collective_rpc("sleep", args=(2,))
    executor.collective_rpc("wake_up", args=(["weights"],))
    weights = changed(6)
    publish(executor, worker, weights, 6)
    assert_held(worker, weights)


def test_its_sampler_says_log_probs_of_the_distribution_that_it_samples(worker: Any) -> None:
    from pa_npu.engines.vllm.worker import apply_logprobs_mode

    sampler = worker.model_runner.sampler
    assert type(sampler).__module__ == "vllm_ascend.sample.sampler"
    logits = torch.randn(4, 320, generator=torch.Generator().manual_seed(1))
    raw, scaled = (
        torch.log_softmax(logits / temperature, -1) for temperature in (1.0, TEMPERATURE)
    )
    metadata = SamplingMetadata(
        temperature=torch.full((4,), TEMPERATURE, device="npu"),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: torch.Generator(device="npu").manual_seed(row) for row in range(4)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(4, device="npu"),
        presence_penalties=torch.zeros(4, device="npu"),
        repetition_penalties=torch.ones(4, device="npu"),
        output_token_ids=[[] for _ in range(4)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=worker.model_runner.input_batch.logitsprocs,
    )

    def output() -> tuple[torch.Tensor, torch.Tensor]:
        answer = sampler(logits.to("npu"), metadata)
        return answer.sampled_token_ids.cpu().long(), answer.logprobs_tensors.logprobs.cpu()[:, :1]

    tokens, actual = output()
    assert torch.allclose(actual, raw.gather(1, tokens), atol=1e-5), (
        "negative control: without us they are raw"
    )
    apply_logprobs_mode(worker)
    tokens, actual = output()
    assert torch.allclose(actual, scaled.gather(1, tokens), atol=1e-5)
