"""An engine's live modules hold what was sent, in whatever layout (I5); what a loader skips, scales or keeps is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from pa_npu.engines.live_weights import LiveReport, LiveTensor, LiveWeights
from pa_npu.engines.protocol import LoadedWeights
from pa_npu.engines.vllm.live import live_tensors
from pa_npu.errors import InvariantViolation
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.contents import Contents, OrderedContents, Position, follows, summed

DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def contents(*tensors: torch.Tensor) -> str:
    computed = Contents()
    for tensor in tensors:
        computed.add("x", tensor)
    return computed.read()["x"]


# --- contents


@pytest.mark.parametrize("dtype", DTYPES)
def test_contents_do_not_depend_on_layout_padding_pieces_or_a_wider_type(
    dtype: torch.dtype,
) -> None:
    tensor = drawn(37, 53, dtype=dtype)
    expected = contents(tensor)
    assert contents(tensor.t().contiguous()) == expected
    assert contents(torch.cat([tensor.flatten(), torch.zeros(11, dtype=dtype)])) == expected
    assert (
        contents(tensor[:5], tensor[5:])
        == expected
        == summed([contents(tensor[:5]), contents(tensor[5:])])
    )
    assert contents(tensor.float()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_contents_change_with_one_value_by_one_bit_and_with_every_scale(dtype: torch.dtype) -> None:
    tensor = drawn(64, 32, dtype=dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    for place in (0, 1000, 2047):
        changed = tensor.clone()
        changed.flatten().view(integers)[place] ^= 1
        assert contents(changed) != contents(tensor)
    for factor in (1.01, 0.5, -1.0):
        assert contents(tensor * factor) != contents(tensor)


def test_contents_of_a_tensor_of_several_chunks_are_those_of_its_parts() -> None:
    tensor = drawn(2**20 + 3)
    parts = [contents(part) for part in tensor.split(7919)]
    assert contents(tensor) == summed(parts)


def ordered(
    *pieces: torch.Tensor, positions: Sequence[Position] = (Position(),)
) -> tuple[str, str]:
    """Ordered contents of a tensor in pieces, and its contents."""
    computed = OrderedContents(in_any_order=True)
    for piece, position in zip(pieces, positions, strict=True):
        computed.add("x", piece, position=position)
    return computed.read()["x"], computed.read_in_any_order()["x"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 5), (1024, 1100)], ids=["one chunk", "several"])
def test_ordered_contents_are_those_of_a_tensors_pieces_in_their_places(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tensor = drawn(*shape, dtype=dtype)
    columns = shape[1]
    whole = ordered(tensor)
    assert whole[1] == contents(tensor)
    by_rows = ordered(tensor[:2], tensor[2:], positions=[Position(), Position(2 * columns)])
    left = Position(0, width=2, stride=columns)
    right = Position(2, width=columns - 2, stride=columns)
    by_columns = ordered(tensor[:, 2:], tensor[:, :2], positions=[right, left])
    assert by_rows == by_columns == whole


def test_ordered_contents_weight_each_element_by_its_index() -> None:
    """Against a sum of Python's whole numbers."""
    tensor = drawn(6, 5)
    numbers = [int(contents(element), 16) for element in tensor.flatten()]
    expected = sum(number * (2 * index + 1) for index, number in enumerate(numbers)) % 2**64
    assert ordered(tensor)[0] == f"{expected:016x}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordered_contents_differ_where_values_changed_places(dtype: torch.dtype) -> None:
    tensor = drawn(8, 6, dtype=dtype)
    exchanged = tensor[[1, 0, *range(2, 8)]]
    for moved in (exchanged, tensor.roll(1), tensor.t().reshape(8, 6), tensor.flip(1)):
        (is_ordered, in_any_order), (expected, values) = ordered(moved), ordered(tensor)
        assert in_any_order == values
        assert is_ordered != expected


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_that_divide_or_repeat_tensors_hold_them(workers: int) -> None:
    q, k, v = (drawn(16, 8, seed=seed) for seed in range(3))
    inputs = [contents(tensor) for tensor in (q, k, v)]
    divided = summed(inputs)
    repeated = summed(inputs * workers)
    few_heads = summed([inputs[0], *inputs[1:] * workers])
    for memory in (divided, repeated, few_heads):
        assert follows(memory, inputs, workers)
    assert not follows(summed([contents(q * 1.01), *inputs[1:]]), inputs, workers)


# --- a stand-in for vLLM's modules: fused, stacked, packed where no parameter shows it, padded,
# transposed


class Packed(torch.nn.Module):
    """A matrix that only its kernel has."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.input_size_per_partition = matrix.shape[1]
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=matrix.dtype), requires_grad=False)
        self.pack(matrix)

    def pack(self, matrix: torch.Tensor) -> None:
        hidden = matrix.clone()
        self.cpu_linear: Callable[..., torch.Tensor] = lambda x, weight, bias: x @ hidden.t()


class Plain(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)


class Stacked(torch.nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(gate_up.clone(), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(down.clone(), requires_grad=False)


class Engine:
    """Loads `weights` into modules like vLLM's; `change` is what its loader makes of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        shapes = {"model.embed_tokens.weight": (30, 8), "model.norm.weight": (8,)}
        for name in "qkv":
            shapes[f"model.layers.0.self_attn.{name}_proj.weight"] = (8, 8)
        for expert in range(4):
            for name in ("gate", "up", "down"):
                shapes[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] = (8, 8)
        return {
            name: drawn(*shape, dtype=self.dtype, seed=100 * seed + number)
            for number, (name, shape) in enumerate(shapes.items())
        }

    def model(self, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
        layer = torch.nn.Module()
        prefix = "model.layers.0."
        layer.self_attn = torch.nn.Module()
        fused = torch.cat([weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
        layer.self_attn.qkv_proj = Packed(fused)
        layer.mlp = torch.nn.Module()
        experts = [
            {
                name: weights[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            }
            for expert in range(4)
        ]
        gate_up = torch.stack([torch.cat([expert["gate"], expert["up"]]).t() for expert in experts])
        layer.mlp.experts = Stacked(
            gate_up.contiguous(), torch.stack([expert["down"] for expert in experts])
        )
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([layer])
        embedding = weights["model.embed_tokens.weight"]
        model.embed_tokens = Plain(torch.cat([embedding, embedding.new_zeros(34, 8)]))
        model.norm = Plain(weights["model.norm.weight"])
        whole = torch.nn.Module()
        whole.model = model
        whole.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        return whole

    def load(
        self, seed: int, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict
    ) -> LoadedWeights:
        live = LiveWeights()
        received = dict(live.received(self.weights(seed).items()))
        report = live.report(live_tensors(self.model(change(received)), live.names), Computation())
        return LoadedWeights((seed,), live=(msgspec.convert(report, LiveReport),))


def replaced(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda weights: {
        key: change(value) if name in key else value for key, value in weights.items()
    }


FAULTS: dict[str, tuple[str, Any]] = {
    "a layer that is old": ("qkv_proj", "k_proj"),
    "an expert that is old": ("w13_weight", "experts.2.up_proj"),
    "scaled weights": ("w2_weight", "experts.1.down_proj"),
    "one element": ("norm", "norm"),
    "an embedding that is old": ("embed_tokens", "embed_tokens"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_is_not_what_was_sent_is_named(fault: str, dtype: torch.dtype) -> None:
    engine = Engine(dtype)
    check = LiveMemoryCheck()
    old = engine.weights(0)
    place, name = FAULTS[fault]

    def first_element(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[0] *= 1.01
        return changed

    changes = {"scaled weights": lambda tensor: tensor * 1.01, "one element": first_element}

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if fault in changes:
            return replaced(name, changes[fault])(weights)
        return {key: old[key] if name in key else value for key, value in weights.items()}

    check.check(0, {"http://engine": engine.load(0)})
    check.check(1, {"http://engine": engine.load(1)})
    with pytest.raises(
        InvariantViolation, match=rf"I5: engine http://engine .*weight version 2 in 1 of .*{place}"
    ):
        check.check(2, {"http://engine": engine.load(2, change)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_at_the_first_load_is_found_too(dtype: torch.dtype) -> None:
    engine = Engine(dtype)
    with pytest.raises(InvariantViolation, match="weight version 0"):
        LiveMemoryCheck().check(
            0, {"e": engine.load(0, replaced("norm", lambda tensor: tensor * 1.01))}
        )


def quantized(number: int, scale: float = 1.0) -> LoadedWeights:
    live = LiveWeights()
    tensor = drawn(16, 16, dtype=torch.bfloat16, seed=number)
    list(live.received([("w", tensor)]))
    memory = (tensor.float() * 10 * scale).to(torch.int8)
    report = live.report([LiveTensor("w", ("w",), memory)], Computation())
    return LoadedWeights((0,), live=(msgspec.convert(report, LiveReport),))


def test_quantized_memory_changes_with_what_it_is_made_of_and_not_without() -> None:
    check = LiveMemoryCheck()
    for version, number in enumerate((0, 1, 1)):
        check.check(version, {"e": quantized(number)})
    with pytest.raises(InvariantViolation, match="weight version 3"):
        check.check(3, {"e": quantized(1, scale=1.5)})


def test_an_engine_that_says_nothing_and_tensors_without_a_place_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = LiveMemoryCheck()
    report = LiveReport({}, ["model.unknown"])
    for version in range(3):
        check.check(
            version,
            {
                "silent": LoadedWeights((version,)),
                "strange": LoadedWeights((version,), live=(report,)),
            },
        )
    assert (
        caplog.text.count("engine silent does not say")
        == caplog.text.count("the first is model.unknown")
        == 1
    )


def test_a_module_without_a_kernel_of_its_own_is_read_as_it_is() -> None:
    model = torch.nn.Module()
    model.norm = Plain(drawn(4))
    model.norm.cpu_linear = torch.nn.functional.linear
    assert [tensor.name for tensor in live_tensors(model, ["norm.weight", "elsewhere.weight"])] == [
        "norm.weight"
    ]
