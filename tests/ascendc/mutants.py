"""Mutants of the lse_merge kernel: its source with one bug written into it, all compiled into one library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ops.ascendc.cpu_model.runner import LSE_MERGE

KERNEL = (LSE_MERGE / "lse_merge_kernel.cpp").read_text()
TABLE = (LSE_MERGE / "lse_merge_table.h").read_text()
BARRIER = "PipeBarrier<PIPE_V>();"


@dataclass(frozen=True)
class Mutant:
    """`old` (its `occurrence`-th appearance) becomes `new`. Running it breaks one of `rules`, or
    computes wrong numbers within the rules, or is merely slower."""

    name: str
    old: str
    new: str
    rules: tuple[str, ...] = ()
    occurrence: int = 0
    wrong_numbers: bool = False

    def source(self) -> str:
        starts = [match.start() for match in re.finditer(re.escape(self.old), KERNEL)]
        assert len(starts) > self.occurrence, (
            f"mutant {self.name!r}: the kernel no longer contains {self.old!r}"
        )
        at = starts[self.occurrence]
        return KERNEL[:at] + self.new + KERNEL[at + len(self.old) :]


MUTANTS = [
    *(
        Mutant(f"without barrier {i}", BARRIER, "", ("race",), occurrence=i)
        for i in range(KERNEL.count(BARRIER))
    ),
    Mutant("stats not enqueued", "statsIn_.EnQue(in);", "", ("queue-empty",)),
    Mutant("rows not enqueued", "rowsOut_.EnQue(result);", "", ("queue-empty",)),
    Mutant("rows not freed", "rowsIn_.FreeTensor(in);", "", ("queue-exhausted", "queue-leak")),
    Mutant(
        "result not freed", "rowsOut_.FreeTensor(result);", "", ("queue-exhausted", "queue-leak")
    ),
    Mutant(
        "stats freed too early",
        "Exp(maxA, maxA, size);",
        "statsIn_.FreeTensor(in);",
        ("queue-state",),
    ),
    Mutant(
        "stats not written",
        "StatsOut(stats);\n",
        "\n",
        ("queue-exhausted", "queue-depth", "queue-leak"),
    ),
    Mutant("ten queue buffers", "kNumBuffers = 2", "kNumBuffers = 5", ("queue-buffers",)),
    Mutant(
        "tile too large",
        "uint32_t cells = tileRows_",
        "uint32_t cells = 8 * tileRows_",
        ("ub-capacity",),
    ),
    Mutant(
        "input buffer too small",
        "rowsIn_, kNumBuffers, 2 * cells",
        "rowsIn_, kNumBuffers, cells",
        ("ub-bounds",),
    ),
    Mutant(
        "unaligned partial rows",
        "in[rows.count * width]",
        "in[rows.count * width + 1]",
        ("ub-alignment",),
    ),
    Mutant("a repeat too many", "uint8_t>(count)", "uint8_t>(count + 1)", ("ub-bounds", "overlap")),
    Mutant(
        "row stride doubled",
        "width / kBlockLanes",
        "2 * width / kBlockLanes",
        ("ub-bounds", "poison", "race"),
    ),
    Mutant("mask of a whole row", "width - lane : kLanes", "width - lane : width", ("mask-limit",)),
    Mutant(
        "narrowing cast without rounding",
        "RoundMode::CAST_RINT",
        "RoundMode::CAST_NONE",
        ("cast-round",),
    ),
    Mutant(
        "widening cast with rounding",
        "RoundMode::CAST_NONE",
        "RoundMode::CAST_RINT",
        ("cast-round",),
    ),
    Mutant(
        "rows of the core before",
        "skip_ = table.GetValue(core + kCoreSkip)",
        "skip_ = 0",
        ("core-conflict",),
    ),
    Mutant("all cores do the first share", "GetBlockIdx()) * kCoreWords", "0)", ("core-conflict",)),
    Mutant("gap too wide", "rows.stride * rowWidth - width", "rows.stride * rowWidth", ("race",)),
    Mutant(
        "gap on the wrong side", "globalIsSource ?", "!globalIsSource ?", ("gm-bounds", "ub-bounds")
    ),
    Mutant(
        "input overwritten", "CopyOut(out_, result", "CopyOut(partOut_, result", ("gm-read-only",)
    ),
    Mutant(
        "maxima not clamped",
        "kLowest = -3.402823466e+38f",
        "kLowest = -__builtin_inff()",
        wrong_numbers=True,
    ),
    Mutant(
        "divisor not clamped",
        "kSmallest = 1.175494351e-38f",
        "kSmallest = 0.0f",
        wrong_numbers=True,
    ),
    Mutant(
        "weights swapped", "Div(weights[size], sumB", "Div(weights[size], sumA", wrong_numbers=True
    ),
    Mutant("single buffers", "kNumBuffers = 2", "kNumBuffers = 1"),
]


def write_source(mutants: list[Mutant], path: Path) -> Path:
    """One translation unit with every mutant in a namespace of its own."""
    parts = ['#include <cstdint>\n#include "lse_merge_run.h"\n']
    for index, mutant in enumerate(mutants):
        text = re.sub(r'(?m)^#(include|pragma).*$|extern "C"', "", TABLE + mutant.source())
        # two types show as much and compile faster
        text = text.replace("RunLseMerge<half>", "RunLseMerge<float>")
        parts.append(f"namespace mutant_{index} {{\n{text}\n}}\n")
    kernels = ", ".join(f"mutant_{index}::pa_npu_lse_merge" for index in range(len(mutants)))
    parts.append(f"static LseMergeKernel* const kernels[] = {{{kernels}}};\n")
    parts.append(
        'extern "C" int64_t RunMutant(int64_t index, void* out, void* running_max, void* running_sum, void* part_out,\n'
        "    void* part_max, void* part_sum, uint32_t* table, int64_t words, uint64_t* counters, char* message,\n"
        "    int64_t size)\n"
        "{\n"
        "    return RunLseMergeKernel(kernels[index], out, running_max, running_sum, part_out, part_max, part_sum,\n"
        "                             table, words, counters, message, size);\n"
        "}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    source = "\n".join(parts)
    if not path.exists() or path.read_text() != source:
        path.write_text(source)
    return path
