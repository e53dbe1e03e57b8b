"""Bugs written into the real kernel are caught: each by a rule of the CPU model, or by its numbers."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ops.ascendc.cpu_model.runner import LseMergeModel, RuleViolation, compile_library, run_kernel
from pa_npu.attention.lse_merge import lse_merge_
from tests.ascendc.cases import Merge, random_result, to_ntd
from tests.ascendc.mutants import MUTANTS, write_source

INDICES = {mutant.name: index for index, mutant in enumerate(MUTANTS)}


@pytest.fixture(scope="module")
def library(cache: Path) -> ctypes.CDLL:
    source = write_source(MUTANTS, cache / "mutants.cpp")
    return ctypes.CDLL(str(compile_library([source], cache, ("-O0",))))


@dataclass(frozen=True)
class Problem:
    """Rows of 3 heads with empty sides: many tiles per core, strided pieces, or rows cut into
    columns.
    """

    dtype: torch.dtype
    dim: int
    rows: int
    part_layout: str

    def merge(self) -> Merge:
        tokens, heads = self.rows + 10, 3
        intervals = ((2, 2 + self.rows // 3), (10 + self.rows // 3, tokens))
        rows = sum(end - start for start, end in intervals)
        running = random_result(tokens, heads, self.dim, self.dtype)
        part = random_result(rows, heads, self.dim, self.dtype)
        running[1][3:5], running[2][3:5] = -torch.inf, 0
        part[1][2:6], part[2][2:6] = -torch.inf, 0
        return Merge((*running, *part), intervals, (tokens,), (rows // 4, rows - rows // 4))


PROBLEMS = [
    Problem(torch.float32, dim=80, rows=60, part_layout="TND"),
    Problem(torch.bfloat16, dim=80, rows=60, part_layout="NTD"),
    Problem(torch.bfloat16, dim=2064, rows=8, part_layout="TND"),
]


def run(library: ctypes.CDLL, model: LseMergeModel, index: int, problem: Problem) -> bool:
    """Returns whether a mutant that breaks no rule computes the right numbers."""
    merge = problem.merge()
    tensors = merge.clone()
    expected = merge.clone()
    lse_merge_(*expected, merge.intervals)
    part_segments = None
    if problem.part_layout == "NTD":
        part_segments = merge.part_segments
        tensors = (
            *tensors[:4],
            to_ntd(tensors[4], part_segments),
            to_ntd(tensors[5], part_segments),
        )
    tokens, heads, dim = merge.shape
    table = model.table(
        merge.intervals, tokens, heads, dim, problem.dtype, part_segments=part_segments, max_cores=2
    )
    run_kernel(library.RunMutant, tensors, table, index)
    ulp = torch.finfo(problem.dtype).eps
    return all(
        torch.allclose(a, b, rtol=ulp, atol=ulp)
        for a, b in zip(tensors[:3], expected[:3], strict=True)
    )


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if mutant.rules])
def test_mutant_breaks_a_rule(library: ctypes.CDLL, model: LseMergeModel, name: str) -> None:
    mutant = MUTANTS[INDICES[name]]
    messages = []
    for problem in PROBLEMS:
        try:
            run(library, model, INDICES[name], problem)
        except RuleViolation as violation:
            messages.append(str(violation))
    rules = {
        match.group(1)
        for message in messages
        if (match := re.match(r"\[([a-z-]+)\] core ", message))
    }
    assert rules, f"{name}: no rule broken"
    assert rules <= set(mutant.rules), f"{name}: expected {mutant.rules}, the model said {messages}"


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if mutant.wrong_numbers])
def test_mutant_gives_wrong_numbers(library: ctypes.CDLL, model: LseMergeModel, name: str) -> None:
    assert not run(library, model, INDICES[name], PROBLEMS[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_double_buffers_hide_all_but_the_busiest_pipe(
    library: ctypes.CDLL, model: LseMergeModel, dtype: torch.dtype
) -> None:
    """Under the cost model, where pipes run beside each other only as far as the queues let them."""
    merge = Problem(dtype, dim=256, rows=150, part_layout="TND").merge()
    tokens, heads, dim = merge.shape
    table = model.table(merge.intervals, tokens, heads, dim, dtype, max_cores=1)
    double = model.merge_(merge.clone(), table)
    single = run_kernel(library.RunMutant, merge.clone(), table, INDICES["single buffers"])
    assert double.busiest_pipe == single.busiest_pipe
    assert double.makespan < 1.15 * double.busiest_pipe
    assert single.makespan > double.makespan
