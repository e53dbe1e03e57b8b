"""Keys of an iteration and its border: schedule, publish, evaluation, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pa_npu.config.sections.base import Section
from pa_npu.config.sections.data import Dataset


class ScheduleConfig(Section):
    iterations: int = Field(10, ge=1, description="Iterations of the run (weight versions published).")
    updates_per_iteration: int = Field(
        1,
        ge=1,
        description="Optimizer steps per iteration, on equal shares of its groups in schedule.order (completion: which groups "
        "share a step depends on arrival); more than 1 keeps an old policy to take ratios against.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Versions that engines may be ahead of training, and so a token's weights older than those it trains (I1); 0 "
        "is strictly on-policy.",
    )
    tokens_per_update: int | None = Field(
        None,
        ge=1,
        description="Train whole groups in dispatch order until an update has so many tokens, and carry the rest to the next one "
        "(max_staleness of at least 1); an iteration generates as many groups as that takes, prompts_per_iteration at most. "
        "None trains every iteration's own groups.",
    )
    prompts_per_iteration: int = Field(16, ge=1, description="B, the number of groups per iteration.")
    stream: bool = Field(
        True, description="Train while engines generate (periodic); false waits for the whole batch (sync)."
    )
    compare_iterations: int = Field(
        0,
        ge=0,
        description="So many of the last iterations are synchronous and periodic in turn (with stream=true), so that the run's "
        "summary says what each takes; the update is the same either way.",
    )
    order: Literal["prompt", "completion"] = Field(
        "completion", description="Order in which groups are trained; prompt makes the update bit-identical to sync."
    )
    dispatch: Literal["auto", "longest-first", "in-order"] = Field(
        "auto",
        description="Order in which prompts go to engines, by the length that earlier responses let expect; it changes no sample. "
        "auto goes longest first where engines are the slower side, else shortest first, and in order with schedule.order=prompt.",
    )
    dynamic_sampling: bool = Field(
        False,
        description="Replace groups whose responses are all right or all wrong by further prompts, until an iteration has "
        "prompts_per_iteration others (DAPO).",
    )
    evaluate_every: int = Field(
        0, ge=0, description="Evaluate every n iterations; 0 only before the first and after the last."
    )


class EvaluateConfig(Section):
    sets: dict[str, str | Dataset] = Field(
        default_factory=dict,
        description="Further held-out sets beside data.test, by name: files in its formats, and those of published benchmarks.",
    )
    samples: int = Field(
        0, ge=0, le=4096, description="Sampled answers per question, for avg@n, pass@k and maj@k; 0 samples none."
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature of the sampled answers.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampled answers.")
    max_response_tokens: int | None = Field(
        None, ge=1, description="Longest answer in tokens; none means rollout.max_response_tokens, which is the most."
    )
    overlap: bool = Field(
        False,
        description="Evaluate while trainers work on the iteration, after it has been generated; what is not complete when they "
        "are ready is left out, so that training never waits. The last version is evaluated in full.",
    )
    metric: str | None = Field(
        None,
        min_length=1,
        description="What checkpoint.keep_best goes by, SET/NAME such as test/greedy or aime/pass@8; none means the first set's "
        "first number.",
    )


class PublishConfig(Section):
    timeout_s: float = Field(300.0, gt=0, description="Deadline of one weight publish.")
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="What engines get of adapters: merged, all weights with the adapters in them; adapter, A and B alone, which "
        "engines merge into the weights of their model directory.",
    )
    mode: Literal["blocking", "delayed", "rolling"] = Field(
        "blocking",
        description="How a version comes to the engines. blocking: it is loaded between two iterations. delayed and rolling, with "
        "schedule.max_staleness: it is sent into a second buffer while they generate. With delayed they swap to it when all groups "
        "of the version before are complete; with rolling one after another as they run out of these, and begin with the next "
        "iteration's meanwhile.",
    )
    divergence: float | None = Field(
        None,
        gt=0,
        description="With schedule.max_staleness: publish only versions whose KL(engines' policy || trainers' policy) per token of "
        "the probe is at least so many nats; none publishes every version.",
    )
    probe_tokens: int = Field(
        16,
        ge=0,
        description="Tokens of each of the 16 responses that probe log-probs after the first and the last publish; between them an "
        "iteration's first groups are the probe. 0 turns both off.",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Absolute limit of every |engine - trainer| log-prob of the probe, beside noise_margin; none sets none.",
    )
    noise_margin: float | None = Field(
        4.0,
        ge=1.0,
        description="Stop where engine and trainer log-probs differ on average by more than so many times the trainer's own "
        "rounding (bf16 against fp32, fp32 against fp64; K3: its square), over a probe or an iteration's tokens (I5); 4 lets an "
        "engine round three times as much as the trainer. None only records.",
    )


class CheckpointConfig(Section):
    every: int = Field(0, ge=0, description="Save every n iterations; 0 only after the last one.")
    load: str | None = Field(None, description="Checkpoint directory (.../iteration_000010) to continue from.")
    resume: Literal["auto"] | None = Field(
        None,
        description="auto: continue from the newest complete checkpoint of run.dir; where there is none, start from "
        "checkpoint.load or from the beginning.",
    )
    keep_last: int = Field(0, ge=0, description="Keep the newest n checkpoints and delete older ones; 0 keeps all.")
    keep_best: int = Field(
        0, ge=0, description="Keep, beside keep_last, the n checkpoints with the best evaluation accuracy."
    )
    export_hf: bool | Literal["merged"] = Field(
        True,
        description="Write the final weights as an HF directory: adapters as one of peft, or with merged the whole model with the "
        "adapters in it.",
    )
