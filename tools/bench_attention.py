"""Time a training step with shared prompts against the same sequences packed separately.

    python tools/bench_attention.py [--device auto|npu|cuda|cpu] [--shape small|7b] [--impl auto,...]
                                    [--case NAME] [--budget SECONDS] [--json FILE] [--markdown FILE]

A step is forward and backward of a small decoder (RMSNorm, rotary, grouped-query attention, SwiGLU,
LM head on the predicted rows only) with random weights. The baseline packs every sequence with its
own copy of the prompt, without padding, and uses the same attention kernel. Implementations and
baseline take turns in one process, in alternating order; times are medians. On a CPU they are
seconds of processor time on one core, which neighbours disturb less.

Columns: tokens and pairs, baseline over shared; ideal, the same ratio for all floating-point
operations (FlopsModel); seconds of the baseline and of the implementation; speedup; percent of the
ideal; peak memory of a step, baseline over shared; largest difference of a log-prob from the
baseline's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

from pa_npu import platform
from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.errors import UserError
from pa_npu.families.shape import FlopsModel
from tools.groups import pairs, step_flops
from tools.groups import separate as unshared

ROPE_THETA = 1e6
DENSE_LIMIT = 2048  # above it the dense form's score matrices take gigabytes and minutes
SHAPES = {
    "small": FlopsModel(4, 512, 1536, 8, 2, 64, vocab_size=4096),
    "7b": FlopsModel(2, 3584, 18944, 28, 4, 128, vocab_size=4096),
}


@dataclass(frozen=True)
class Case:
    """A layout to measure. gpu_only: too long for one CPU core."""

    name: str
    layout: PrefixLayout
    gpu_only: bool = False


def _cases() -> list[Case]:
    equal = [
        (64, 64, 8),
        (512, 64, 8),
        (512, 512, 8),
        (2048, 256, 16),
        (256, 1024, 8),
        (1024, 8192, 16),
        (16384, 256, 8),
    ]
    cases = [
        Case(f"{p}/{r}/{g}", PrefixLayout.from_groups([(p, [r] * g)]), max(p, r) > 4096)
        for p, r, g in equal
    ]
    cases.append(Case("512/256/1", PrefixLayout.from_groups([(512, [256])])))
    ragged = [16, 48, 64, 96, 128, 160, 224, 320]
    cases.append(Case("256/ragged/8", PrefixLayout.from_groups([(256, ragged)])))
    cases.append(
        Case(
            "3 groups",
            PrefixLayout.from_groups([(256, [64] * 8), (512, [48, 96] * 4), (128, [32] * 8)]),
        )
    )
    # depth 4: a root of 256, two children of 128, each with two of 64, each with two leaves of 64
    parents = (-1, 0, 1, 2, 2, 1, 5, 5, 0, 8, 9, 9, 8, 12, 12)
    cases.append(
        Case("tree of depth 4", PrefixLayout((256, *(128, 64, 64, 64, 64, 64, 64) * 2), parents))
    )
    return cases


class Decoder(torch.nn.Module):
    """The step's model. All tensors are packed: [tokens, ...]."""

    def __init__(self, shape: FlopsModel) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads
        head_dim = shape.head_dim
        self.embedding = torch.nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = torch.nn.ModuleList()
        for _ in range(shape.num_layers):
            layer = torch.nn.ModuleDict(
                {
                    "attention_norm": torch.nn.RMSNorm(shape.hidden_size),
                    "qkv": torch.nn.Linear(
                        shape.hidden_size, (heads + 2 * kv_heads) * head_dim, bias=False
                    ),
                    "proj": torch.nn.Linear(heads * head_dim, shape.hidden_size, bias=False),
                    "mlp_norm": torch.nn.RMSNorm(shape.hidden_size),
                    "gate_up": torch.nn.Linear(shape.hidden_size, 2 * shape.ffn_size, bias=False),
                    "down": torch.nn.Linear(shape.ffn_size, shape.hidden_size, bias=False),
                }
            )
            self.layers.append(layer)
        self.norm = torch.nn.RMSNorm(shape.hidden_size)
        self.head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, batch: Batch, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Log-probs [predictions] of the batch's targets; attend(q, k, v, layout) is the attention."""
        shape = self.shape
        cos, sin = _rotary_tables(batch.positions, shape.head_dim, self.embedding.weight.dtype)
        x = self.embedding(batch.tokens)
        for layer in self.layers:
            assert isinstance(layer, torch.nn.ModuleDict)
            qkv = layer["qkv"](layer["attention_norm"](x)).unflatten(-1, (-1, shape.head_dim))
            q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
            attended = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, batch.layout)
            x = x + layer["proj"](attended.flatten(1))
            gate, up = layer["gate_up"](layer["mlp_norm"](x)).chunk(2, dim=-1)
            x = x + layer["down"](torch.nn.functional.silu(gate) * up)
        logits = self.head(self.norm(x[batch.rows])).float()
        return -torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")


@dataclass(frozen=True)
class Batch:
    """One microbatch on the device: all leaf tokens are predicted."""

    layout: PrefixLayout
    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def make_batches(
    layout: PrefixLayout, vocab_size: int, device: torch.device
) -> tuple[Batch, Batch]:
    """(shared, separate): the same sequences and predictions in the same order."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (layout.total,), generator=generator)
    paths = [layout.path_rows(leaf) for leaf in layout.leaves]
    return (
        _batch(layout, tokens, layout.leaves, layout.lengths, device),
        _batch(
            unshared(layout),
            tokens[torch.cat(paths)],
            range(len(paths)),
            _leaf_lengths(layout),
            device,
        ),
    )


def _leaf_lengths(layout: PrefixLayout) -> list[int]:
    return [layout.lengths[leaf] for leaf in layout.leaves]


def _batch(
    layout: PrefixLayout,
    tokens: torch.Tensor,
    leaves: Sequence[int],
    predicted: Sequence[int],
    device: torch.device,
) -> Batch:
    """predicted[leaf]: how many tokens at the end of the segment are predicted."""
    target_rows = torch.cat(
        [torch.arange(layout.ends[leaf] - predicted[leaf], layout.ends[leaf]) for leaf in leaves]
    )
    return Batch(
        layout,
        tokens.to(device),
        layout.position_ids(device),
        layout.predictor_rows()[target_rows].to(device),
        tokens[target_rows].to(device),
    )


def _rotary_tables(
    positions: torch.Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = (
        torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[:, None].float() * ROPE_THETA**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True)
class Row:
    """One implementation on one case. Seconds are medians of `repetitions` interleaved steps."""

    case: str
    implementation: str
    tokens: int
    tokens_ratio: float
    pairs_ratio: float
    ideal: float
    repetitions: int
    baseline_s: float
    seconds: float
    speedup: float
    percent_of_ideal: float
    memory_mib: float
    memory_ratio: float
    max_logprob_difference: float


class Bench:
    """One device, dtype and model shape."""

    def __init__(self, device_kind: str, shape_name: str, budget_s: float) -> None:
        self.platform = platform.get(device_kind)
        self.platform.seed_all(1)
        self.device = self.platform.device(0)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.shape = SHAPES[shape_name]
        self.clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        self.budget_s = budget_s
        self.model = Decoder(self.shape).to(self.device, self.dtype)

    def step(self, batch: Batch, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """One forward and backward; the log-probs, detached.

        Every prediction has another weight in the loss.
        """
        logprobs = self.model(batch, attend)
        weights = torch.linspace(-1.0, 1.0, logprobs.numel(), device=self.device)
        (logprobs * weights).sum().backward()
        self.model.zero_grad(set_to_none=True)
        self.platform.synchronize()
        return logprobs.detach()

    def measure(self, case: Case, names: list[str]) -> list[Row]:
        shared, separate = make_batches(case.layout, self.shape.vocab_size, self.device)
        runs: dict[str, tuple[Batch, Callable[..., torch.Tensor]]] = {
            "baseline": (separate, _attention("auto"))
        }
        runs |= {
            name: (shared, _attention(name))
            for name in names
            if name != "dense" or shared.layout.total <= DENSE_LIMIT
        }
        logprobs: dict[str, torch.Tensor] = {}
        memory: dict[str, int] = {}
        warm_up = time.perf_counter()
        for name, run in runs.items():
            logprobs[name], memory[name] = self._profiled_step(*run)
        repetitions = min(25, max(3, round(self.budget_s / (time.perf_counter() - warm_up))))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for repetition in range(repetitions):
            for name in list(runs)[:: 1 if repetition % 2 else -1]:
                start = self.clock()
                self.step(*runs[name])
                seconds[name].append(self.clock() - start)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        targets = shared.targets.numel()
        ideal = step_flops(self.shape, unshared(shared.layout), targets) / step_flops(
            self.shape, shared.layout, targets
        )
        rows = []
        for name in runs.keys() - {"baseline"}:
            speedup = median["baseline"] / median[name]
            rows.append(
                Row(
                    case=case.name,
                    implementation=name,
                    tokens=shared.layout.total,
                    tokens_ratio=separate.layout.total / shared.layout.total,
                    pairs_ratio=pairs(separate.layout) / pairs(shared.layout),
                    ideal=ideal,
                    repetitions=repetitions,
                    baseline_s=median["baseline"],
                    seconds=median[name],
                    speedup=speedup,
                    percent_of_ideal=100 * speedup / ideal,
                    memory_mib=memory[name] / 2**20,
                    memory_ratio=memory["baseline"] / memory[name],
                    max_logprob_difference=(logprobs[name] - logprobs["baseline"])
                    .abs()
                    .max()
                    .item(),
                )
            )
        return sorted(rows, key=lambda row: names.index(row.implementation))

    def _profiled_step(
        self, batch: Batch, attend: Callable[..., torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        """Log-probs, and the peak of the step's own tensors on the device by the profiler's
        allocation records.
        """
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            logprobs = self.step(batch, attend)
        records = [
            (event.start_ns(), event.nbytes())
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
            and (str(event.device_type()) == "DeviceType.CPU") == (self.device.type == "cpu")
        ]
        held = peak = 0
        for _, num_bytes in sorted(records, key=lambda record: record[0]):
            held += num_bytes
            peak = max(peak, held)
        return logprobs, peak


def _attention(name: str) -> Callable[..., torch.Tensor]:
    if name == "flex":
        return flex_attend

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout
    ) -> torch.Tensor:
        return shared_prompt_attention(q, k, v, layout, impl=name)

    return attend


def flex_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixLayout
) -> torch.Tensor:
    """torch's FlexAttention with the layout as a block mask, a second opinion on CUDA; it has no
    backward elsewhere.
    """

    def build() -> BlockMask:
        return create_block_mask(
            flex_mask(layout, q.device), None, None, layout.total, layout.total, device=q.device
        )

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = _compiled_flex()(
        q, k, v, block_mask=layout.cached(("flex", q.device), build), enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def flex_mask(layout: PrefixLayout, device: torch.device) -> Callable[..., torch.Tensor]:
    """Returns the mask, in which a column is seen by the rows from itself to the end of its
    segment's subtree.
    """
    ends = (
        torch.tensor(layout.subtree_ends).repeat_interleave(torch.tensor(layout.lengths)).to(device)
    )

    def visible(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return (row >= column) & (row < ends[column])

    return visible


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=False)


HEADER = (
    "case",
    "tokens",
    "tok x",
    "pairs x",
    "ideal",
    "base s",
    "impl",
    "s",
    "speedup",
    "% ideal",
    "mem x",
    "dlogp",
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.case,
        str(row.tokens),
        f"{row.tokens_ratio:.2f}",
        f"{row.pairs_ratio:.2f}",
        f"{row.ideal:.2f}",
        f"{row.baseline_s:.4f}",
        row.implementation,
        f"{row.seconds:.4f}",
        f"{row.speedup:.2f}",
        f"{row.percent_of_ideal:.0f}",
        f"{row.memory_ratio:.2f}",
        f"{row.max_logprob_difference:.1e}",
    )


def _text_line(cells: tuple[str, ...]) -> str:
    widths = (16, 7, 6, 7, 6, 9, 7, 9, 8, 8, 6, 8)
    return " ".join(
        f"{cell:<{w}}" if i in (0, 6) else f"{cell:>{w}}"
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )


def _markdown(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, npu, cuda or cpu")
    parser.add_argument("--shape", default="small", choices=sorted(SHAPES), help="model shape")
    parser.add_argument(
        "--impl",
        default="auto,merge,gather,dense,flex",
        help="implementations, comma-separated; flex is for cuda only",
    )
    parser.add_argument(
        "--case", action="append", help="only cases whose name contains this; may be repeated"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time to spend on a case, about",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write the rows as a markdown table"
    )
    options = parser.parse_args(arguments)
    # the profiler announces each start and stop otherwise
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(options.threads)
    try:
        bench = Bench(options.device, options.shape, options.budget)
    except UserError as error:
        print(f"bench_attention: {error}", file=sys.stderr)
        return 2
    print(_text_line(HEADER), flush=True)
    rows: list[Row] = []
    for case in _cases():
        if case.gpu_only and bench.device.type == "cpu":
            continue
        if options.case and not any(part in case.name for part in options.case):
            continue
        names = [
            name
            for name in options.impl.split(",")
            if name != "flex" or bench.device.type == "cuda"
        ]
        for row in bench.measure(case, names):
            rows.append(row)
            print(_text_line(_cells(row)), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(_markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
