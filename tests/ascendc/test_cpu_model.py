"""The CPU model catches what it promises: every kernel with an injected bug, by the right rule, and no correct one."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from ops.ascendc.cpu_model.runner import MESSAGE_BYTES, MODEL, compile_library

SOURCE = Path(__file__).with_name("bug_kernels.cpp")
CASES = re.findall(r'\{"([^"]+)",\s*"([a-z-]*)",\s*\d+,', SOURCE.read_text())
OUTPUT_ELEMENTS = 1024
TILE = 256
MODES = {"rint": 1, "floor": 2, "ceil": 3, "round": 4, "trunc": 5, "odd": 6}

# For rules that several accesses can break: the part of the message that shows that the injected
# one was found.
DETAILS = {
    "no barrier between dependent vector instructions": "would read .* that pipe V has written",
    "no barrier before overwriting what an instruction reads": "would write .* that pipe V has "
    "read",
    "vector does not wait for the copy in": "would read .* that pipe MTE2 has written",
    "copy out does not wait for the vector": "MTE3.* would read .* that pipe V has written",
    "copy in overwrites what the vector still reads": "would write .* that pipe V has read",
    "vector overwrites what is still being copied out": "would write .* that pipe MTE3 has read",
    "copy in reads global memory still being written": "would read .* of global buffer .* that "
    "pipe MTE3 has written",
    "two copies out to the same place": "would write .* of global buffer .* that pipe MTE3 has "
    "written",
    "scalar read does not wait for the vector": "pipe S.* would read .* that pipe V has written",
    "two cores write the same rows": "writes .* that core 0 has written",
    "a core reads what another writes": "reads .* that core 0 writes",
    "a core writes what another has read": "writes .* that another core reads",
}


@pytest.fixture(scope="module")
def library(cache: Path) -> ctypes.CDLL:
    return ctypes.CDLL(
        str(compile_library([SOURCE], cache, ("-O1", "-Wall", "-Wextra", "-Werror")))
    )


def run_case(library: ctypes.CDLL, name: str) -> tuple[str, torch.Tensor]:
    """Message and output of a kernel of bug_kernels.cpp."""
    output = torch.empty(OUTPUT_ELEMENTS)
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    index = [case for case, _ in CASES].index(name)
    library.CaseName.restype = ctypes.c_char_p
    assert library.CaseName(ctypes.c_int64(index)).decode() == name
    library.RunCase(
        ctypes.c_int64(index),
        ctypes.c_void_p(output.data_ptr()),
        message,
        ctypes.c_int64(MESSAGE_BYTES),
    )
    return message.value.decode(), output


@pytest.mark.parametrize(("name", "rule"), [case for case in CASES if case[1]])
def test_injected_bug_is_caught_and_its_rule_named(
    library: ctypes.CDLL, name: str, rule: str
) -> None:
    message, _ = run_case(library, name)
    assert message.startswith(f"[{rule}] core "), (
        f"{name}: expected rule {rule}, the model said {message!r}"
    )
    assert re.search(DETAILS.get(name, ""), message), f"{name}: {message!r} is about something else"


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("correct queues", [2.0, 2.0, 2.0, 2.0]),
        ("correct flags", [4.0, 0.0, 0.0, 0.0]),
        ("correct cores", [1.0, 2.0, 3.0, 0.0]),
        ("correct in place", [2.0, 0.0, 0.0, 0.0]),
    ],
)
def test_correct_kernel_passes_and_computes(
    library: ctypes.CDLL, name: str, tiles: list[float]
) -> None:
    message, output = run_case(library, name)
    assert message == ""
    assert torch.equal(output, torch.tensor(tiles).repeat_interleave(TILE))


def test_every_rule_of_the_model_is_documented_and_has_a_kernel_that_breaks_it(
    library: ctypes.CDLL,
) -> None:
    headers = "".join(path.read_text() for path in (MODEL / "include").rglob("*.h"))
    rules = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', headers)) | {"race", "poison", "overlap"}
    assert rules == {rule for _, rule in CASES if rule}
    readme = MODEL.with_name("README.md").read_text()
    assert all(f"`{rule}`" in readme for rule in rules)
    assert library.NumCases() == len(CASES)
    assert len([rule for _, rule in CASES if rule]) >= 14


def round_to_16(
    library: ctypes.CDLL, values: torch.Tensor, dtype: torch.dtype, mode: str
) -> torch.Tensor:
    bits = torch.empty(values.shape, dtype=torch.int16)
    library.RoundTo16(
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_void_p(bits.data_ptr()),
        *(
            ctypes.c_int64(number)
            for number in (values.numel(), dtype == torch.bfloat16, MODES[mode])
        ),
    )
    return bits.view(dtype)


def awkward_floats(dtype: torch.dtype) -> torch.Tensor:
    """Normal and subnormal values of the type, halfway points between them, and infinities."""
    scales = torch.logspace(-8, 4, 2000, dtype=torch.float64)
    values = torch.cat(
        [(torch.randn(2000, dtype=torch.float64) * scales).float(), torch.randn(2000)]
    )
    on_grid = values.to(dtype).float()
    halfway = (on_grid.double() * (1 + torch.finfo(dtype).eps / 2)).float()
    return torch.cat(
        [values, on_grid, halfway, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65520.0, 7e4])]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_nearest_equals_torch(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = awkward_floats(dtype)
    assert torch.equal(
        round_to_16(library, values, dtype, "rint").view(torch.int16),
        values.to(dtype).view(torch.int16),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_directed_roundings_bracket_the_value(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = awkward_floats(dtype)
    values = values[values.abs() < 60000]
    floor, ceil, trunc, away = (
        round_to_16(library, values, dtype, mode).double()
        for mode in ("floor", "ceil", "trunc", "round")
    )
    exact = values.double()
    assert torch.all((floor <= exact) & (exact <= ceil))
    assert torch.equal(floor == ceil, values.to(dtype).double() == exact)
    assert torch.equal(trunc, torch.where(exact < 0, ceil, floor))
    assert torch.all((away - exact).abs() <= (floor - exact).abs())
    assert torch.all((away - exact).abs() <= (ceil - exact).abs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_widening_equals_torch_for_all_bit_patterns(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    wide = torch.empty(bits.numel())
    library.WidenFrom16(
        ctypes.c_void_p(bits.data_ptr()),
        ctypes.c_void_p(wide.data_ptr()),
        ctypes.c_int64(bits.numel()),
        ctypes.c_int64(dtype == torch.bfloat16),
    )
    torch.testing.assert_close(wide, bits.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
