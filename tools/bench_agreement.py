#!/usr/bin/env python
"""The smallest fault that I5 catches, and how near honest rounding comes to its limits, in fp32 and bf16.

    python tools/make_tiny_model.py --out .cache/tiny --seed 1
    python tools/bench_agreement.py --model .cache/tiny/model [--dtypes fp32 bf16] [--pool 256] [--tokens 24] [--draws 20000]
        [--markdown FILE]

A transformers engine samples a pool of responses with the model as it is, and with each fault at
several sizes:

  temperature   the engine samples at 1 + x, the trainer computes at 1
  weights       all of the engine's weights times 1 + x
  stale         the engine's weights lack one optimizer step of the learning rate x (a publish that was skipped)

The Megatron trainer computes the log-probs of what was sampled, and its own rounding (the
yardstick). Real are the log-probs of the pool; an iteration of R responses is R of them drawn with
replacement, its yardstick 32 others, drawn anew every 32nd. Caught means in at least 95 of 100 such
iterations, by the tokens of one iteration at the default keys. False stops: of --draws iterations
without a fault, and of as many probes of 8 responses, at the default margin; and the largest share
of a limit that any of them reached. Draws know no more responses than the pool has, of one policy:
what stops a run only in a response, or with a policy, that is not in it is not counted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pa_npu import platform as platforms
from pa_npu.algorithm.agreement import (
    AgreementLimits,
    limits,
)
from pa_npu.algorithm.agreement_sums import (
    NUM_SUMS,
    UNCERTAINTY_FLOOR,
    DifferenceSums,
    difference_sums,
    stray_evidence,
)
from pa_npu.algorithm.model_outputs import Outputs, Targets
from pa_npu.algorithm.objective import Objective
from pa_npu.backends.megatron.patches.table import prepare
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.agreement import FALSE_STOP_RATE, YARDSTICK_EVERY, YARDSTICK_RESPONSES
from tools.groups import group_of_responses

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.hardware import processor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RESPONSES = (32, 256, 2048)
GROUP = 8
DRAWN_AT_ONCE = 10_000
STEP = 1e-3  # the learning rate of the measured optimizer step, which "stale" scales
SIZES = {
    "temperature": (1e-5, 1e-4, 1e-3, 3e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3),
    "weights": (1e-6, 1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05),
    "stale": (1e-7, 1e-6, 1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3),
}


def configuration(model: Path, dtype: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"train": "unused.jsonl"},
            "rollout": {"responses_per_prompt": GROUP},
            "optimizer": {"learning_rate": STEP, "warmup_iterations": 0},
        }
    )


def sampled(
    weights: dict[str, torch.Tensor],
    model: Path,
    dtype: torch.dtype,
    temperature: float,
    pool: int,
    tokens: int,
) -> list[Microbatch]:
    """`pool` responses with the engine's log-probs, in groups of 8 with one prompt each."""
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            parameter.copy_(weights[name])
        rng = np.random.default_rng(1)
        prompts = rng.integers(3, engine.config.vocab_size, (pool // GROUP, 6)).repeat(
            GROUP, axis=0
        )
        sequences = torch.from_numpy(prompts)
        generator = torch.Generator().manual_seed(1)
        last = sequences
        cache = None
        for _ in range(tokens):
            output = engine(last, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = (output.logits[:, -1].float() / temperature).softmax(-1)
            last = torch.multinomial(distribution, 1, generator=generator)
            sequences = torch.cat([sequences, last], dim=1)
        table = (engine(sequences).logits[:, :-1].float() / temperature).log_softmax(-1)
        logprobs = table.gather(-1, sequences[:, 1:, None])[:, -tokens:, 0].numpy()
    microbatches = []
    for index, start in enumerate(range(0, pool, GROUP)):
        rows = slice(start, start + GROUP)
        group = group_of_responses(
            iteration=0,
            version=0,
            index=index,
            prompt_id=index,
            prompt_tokens=prompts[start].astype(np.int32),
            response_tokens=sequences[rows, -tokens:].reshape(-1).numpy().astype(np.int32),
            response_lengths=np.full(GROUP, tokens, np.int32),
            logprobs=logprobs[rows].reshape(-1),
            rewards=np.zeros(GROUP, np.float32),
            advantages=rng.standard_normal(GROUP).astype(np.float32),
            finished=np.zeros(GROUP, np.uint8),
        )
        microbatches += build_microbatches(group, GROUP, True, 1)
    return microbatches


class Rows:
    """[responses, fields of DifferenceSums], one row per response; `draws` makes iterations of some
    of them.
    """

    def __init__(self, dtype: str) -> None:
        self._floor = UNCERTAINTY_FLOOR[dtype]
        self._rows: list[list[float]] = []
        self._table = np.zeros((0, 0))

    def add(
        self, microbatch: Targets, mine: torch.Tensor, others: torch.Tensor, entropy: torch.Tensor
    ) -> None:
        lengths = list(microbatch.response_lengths)
        for a, b, h in zip(
            mine.split(lengths), others.split(lengths), entropy.split(lengths), strict=True
        ):
            index = torch.zeros(len(a), dtype=torch.int64)
            sums = difference_sums(
                a.float(),
                b.float(),
                h.float(),
                index,
                1,
                floor=self._floor,
                copies=microbatch.repeats,
            )
            self._rows.append(sums.tolist())
        self._table = np.array(self._rows)

    def draws(self, rng: np.random.Generator, number: int, iterations: int) -> np.ndarray:
        """[iterations, fields]: each of `number` responses, drawn with replacement."""
        size = len(self._table)
        times = rng.multinomial(number, np.full(size, 1 / size), size=iterations)
        sums = times @ self._table[:, :NUM_SUMS]
        maxima = []
        for column in self._table[:, NUM_SUMS:].T:
            falling = np.argsort(-column)
            maxima.append(column[falling][(times[:, falling] > 0).argmax(1)])
        return np.column_stack([sums, *maxima])


class Trainer:
    """One Megatron rank, and the weights that an engine lacks after a skipped publish."""

    def __init__(self, model: Path, dtype: str) -> None:
        platform = platforms.get("cpu")
        prepare(platform.name)
        from pa_npu.backends.megatron.backend import MegatronBackend
        from pa_npu.backends.megatron.factory import load_stage
        from pa_npu.backends.megatron.parallel import initialise_parallel

        self.config = configuration(model, dtype)
        spec = ModelSpec.read(str(model))
        initialise_parallel(self.config, platform, dist.HashStore(), rank=0)
        stage = load_stage(self.config, spec, platform)
        self.backend = MegatronBackend(
            stage, self.config, spec, platform, torch.device("cpu"), Timeline(None, "")
        )

    def compared(self, microbatches: list[Microbatch]) -> tuple[Rows, Rows]:
        """(trainer against engine, the trainer's own rounding), response by response."""
        dtype = self.config.model.dtype
        against = Rows(dtype)
        rounding = Rows(dtype)
        entropies: list[torch.Tensor] = []

        def compare_with_engine(microbatch: Microbatch, outputs: Outputs) -> None:
            against.add(
                microbatch, outputs.policy.values, microbatch.engine_logprobs, outputs.entropy
            )
            entropies.append(outputs.entropy)

        def compare_with_wide(
            microbatch: Microbatch, narrow: torch.Tensor, wide: torch.Tensor
        ) -> None:
            rounding.add(microbatch, narrow, wide, entropies.pop(0))

        self.backend.evaluate(microbatches, compare_with_engine)
        self.backend.rounding(microbatches, compare_with_wide)
        return against, rounding

    def step(self, microbatches: list[Microbatch], directory: Path) -> Path:
        """One update by random advantages; the weights after it as an HF directory."""
        self.backend.accumulate(_Source(microbatches), Objective(self.config, torch.device("cpu")))  # type: ignore[arg-type]
        self.backend.scale_gradients(
            1.0 / sum(sum(microbatch.response_lengths) for microbatch in microbatches)
        )
        self.backend.step()
        self.backend.export(directory)
        return directory


class _Source(list[Microbatch]):
    is_last = False


def parameters(model: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        n: p.detach().float()
        for n, p in AutoModelForCausalLM.from_pretrained(model, dtype=dtype).named_parameters()
    }


def measure(
    model: Path, dtype: str, pool: int, tokens: int, draws: int
) -> tuple[list[str], list[str]]:
    """Returns rows of the two tables."""
    trainer = Trainer(model, dtype)
    kind = DTYPES[dtype]
    rng = np.random.default_rng(2)
    publish = trainer.config.publish
    weights = parameters(model, torch.float32)
    clean = sampled(weights, model, kind, 1.0, pool, tokens)
    against, rounding = trainer.compared(clean)
    margin = publish.noise_margin or 4.0

    def bounds(measured: DifferenceSums, sums: DifferenceSums) -> AgreementLimits:
        bound = limits(measured, sums, margin, FALSE_STOP_RATE)
        # of a probe it says nothing
        return replace(bound, square=math.inf) if sums.responses == GROUP else bound

    def judged(rows: Rows, yardstick: Rows, number: int, iterations: int) -> tuple[int, float]:
        """How many of the iterations are stopped, and the largest share of a limit that any
        reaches.
        """
        stops = 0
        largest_share = 0.0
        for start in range(0, iterations, DRAWN_AT_ONCE):
            drawn = rows.draws(rng, number, min(DRAWN_AT_ONCE, iterations - start))
            for first, sums_of_draw in enumerate(
                yardstick.draws(rng, YARDSTICK_RESPONSES, -(-len(drawn) // YARDSTICK_EVERY))
            ):
                some = drawn[first * YARDSTICK_EVERY :][:YARDSTICK_EVERY]
                measured = DifferenceSums(*sums_of_draw)
                for row in some:
                    sums = DifferenceSums(*row.tolist())
                    bound = bounds(measured, sums)
                    stops += bool(bound.broken(sums))
                    largest_share = max(largest_share, _largest_shares(row[None], bound)[0])
        return stops, largest_share

    noise, rounding_sums = (
        DifferenceSums(*part.draws(rng, 50_000, 1)[0].tolist()) for part in (against, rounding)
    )
    chance = []
    for number in (GROUP, *RESPONSES):
        stops, largest_share = judged(against, rounding, number, draws)
        numbers = f"{noise.odds_mean:.2g} | {rounding_sums.odds_mean:.2g} | {noise.odds_mean / rounding_sums.odds_mean:.2f}"
        slopes = f"{abs(noise.slope):.1g} | {abs(rounding_sums.slope):.1g}"
        chance.append(
            f"| {dtype} | {number:,} | {numbers} | {slopes} | {stops} of {draws:,} | {largest_share:.2f} |"
        )

    caught: list[str] = []
    pools: dict[tuple[str, float], tuple[Rows, Rows]] = {}
    for fault, sizes in SIZES.items():
        if fault != "stale":  # which is measured after the step, below
            for x in sizes:
                scaled = (
                    {name: value * (1 + x) for name, value in weights.items()}
                    if fault == "weights"
                    else weights
                )
                temperature = 1 + x if fault == "temperature" else 1.0
                pools[fault, x] = trainer.compared(
                    sampled(scaled, model, kind, temperature, pool, tokens)
                )
    with tempfile.TemporaryDirectory() as directory:
        after = parameters(trainer.step(clean, Path(directory) / "hf"), torch.float32)
    for x in SIZES["stale"]:
        # the trainer has taken the step; an engine that lacks x of STEP of it has all but that
        behind = {name: value - x / STEP * (value - weights[name]) for name, value in after.items()}
        pools["stale", x] = trainer.compared(sampled(behind, model, kind, 1.0, pool, tokens))
    for fault, sizes in SIZES.items():
        cells = []
        for number in RESPONSES:
            hits = (x for x in sizes if judged(*pools[fault, x], number, 100)[0] >= 95)
            smallest = next(hits, None)
            cells.append(f"more than {sizes[-1]:g}" if smallest is None else f"{smallest:g}")
        caught.append(f"| {dtype} | {fault} | {' | '.join(cells)} |")
    trainer.backend.close()
    return caught, chance


def _largest_shares(drawn: np.ndarray, bound: AgreementLimits) -> np.ndarray:
    """[iterations]: of [iterations, fields], the largest of its values' shares of their limits."""
    sums = DifferenceSums(*drawn.T)
    shares = []
    pooled = stray_evidence(
        *(
            torch.from_numpy(v)
            for v in (sums.n, sums.strays_own, sums.strays_others, sums.strays_expected)
        )
    ).numpy()
    for value, limit in (
        (sums.odds / sums.n, bound.mean),
        ((sums.square - sums.square_largest) / sums.n, bound.square),
        (np.abs(sums.moment / sums.weight), bound.slope),
        (np.maximum(sums.strays, pooled), bound.strays),
    ):
        shares.append(value / limit)
    return np.max(shares, axis=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="HF directory")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--pool", type=int, default=256, help="responses per condition")
    parser.add_argument("--tokens", type=int, default=24, help="of each response")
    parser.add_argument("--draws", type=int, default=20_000, help="iterations without a fault")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    options = parser.parse_args(arguments)
    caught = []
    chance = []
    for dtype in options.dtypes:
        rows = measure(options.model, dtype, options.pool, options.tokens, options.draws)
        caught += rows[0]
        chance += rows[1]
    sizes = " | ".join(f"{number:,} responses" for number in RESPONSES)
    text = [
        f"{processor()}, {options.model.name}, responses of {options.tokens} tokens, pool of "
        f"{options.pool}",
        "",
        f"| type | fault, smallest caught | {sizes} |",
        "|---|---|---:|---:|---:|",
        *caught,
        "",
        "| type | responses | mean \\|d\\| | yardstick | ratio | slope | yardstick's | false stops "
        "| largest share of a limit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *chance,
    ]
    print("\n".join(text))
    if options.markdown:
        options.markdown.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
