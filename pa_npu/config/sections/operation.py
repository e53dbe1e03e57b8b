"""Keys of operating a run: schedule, evaluations, publish, checkpoints, telemetry, and where its processes stand."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from pa_npu.config.sections import FilePath, Section, Several
from pa_npu.config.sections.inputs import Dataset

AgreementCheck = Literal["mean", "square", "slope", "strays"]


class ScheduleConfig(Section):
    iterations: int = Field(
        10, ge=1, description="Iterations of the run (weight versions published)."
    )
    epochs: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Where samples are rows of data: go through data.train so many times; "
        "iterations follows from it, in place of what it is set to.",
    )
    updates_per_iteration: int = Field(
        1,
        ge=1,
        description="Optimizer steps per iteration, on equal shares of its groups in "
        "schedule.order (completion: which groups share a step depends on arrival); "
        "more than 1 keeps an old policy to take ratios against.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Versions that engines may be ahead of training, and so a token's weights "
        "older than those it trains (I1); 0 is strictly on-policy.",
    )
    tokens_per_update: int | None = Field(
        None,
        ge=1,
        description="Train whole groups in dispatch order until an update has so many tokens, and "
        "carry the rest to the next one (max_staleness of at least 1); an iteration "
        "generates as many groups as that takes, prompts_per_iteration at most. None "
        "trains every iteration's own groups.",
    )
    prompts_per_iteration: int = Field(
        16, ge=1, description="B, the number of groups per iteration."
    )
    stream: bool = Field(
        True,
        description="Train while engines generate (periodic); false waits for the whole batch "
        "(sync).",
    )
    compare_iterations: int = Field(
        0,
        ge=0,
        description="So many of the last iterations are synchronous and periodic in turn (with "
        "stream=true), so that the run's summary says what each takes; the update is "
        "the same either way.",
    )
    order: Literal["prompt", "completion"] = Field(
        "completion",
        description="Order in which groups are trained; prompt makes the update bit-identical to "
        "sync.",
    )
    dispatch: Literal["auto", "longest-first", "in-order"] = Field(
        "auto",
        description="Order in which prompts go to engines, by the length that earlier responses "
        "let expect; it changes no sample. auto goes longest first where engines are "
        "the slower side, else shortest first, and in order with "
        "schedule.order=prompt.",
    )
    dynamic_sampling: bool = Field(
        False,
        description="Replace groups whose responses are all right or all wrong by further prompts, "
        "until an iteration has prompts_per_iteration others (DAPO).",
    )
    finite_difference_every: int = Field(
        0,
        ge=0,
        description="Move weights along their gradient every n iterations, and end the run where "
        "log-probs do not change as the gradient says (I7); costs some nine passes "
        "over one microbatch, and changes no weight. 0 never does.",
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="Evaluate every n iterations; 0 only before the first and after the last.",
    )


class EvaluateConfig(Section):
    sets: dict[str, Annotated[FilePath, Field(min_length=1)] | Dataset] = Field(
        default_factory=dict,
        description="Further held-out sets beside data.test, by name: files in its formats, and "
        "those of published benchmarks.",
    )
    samples: int = Field(
        0,
        ge=0,
        le=4096,
        description="Sampled answers per question, for avg@n, pass@k and maj@k; 0 samples none.",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature of the sampled answers.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampled answers.")
    max_response_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest answer in tokens; none means rollout.max_response_tokens, which is "
        "the most.",
    )
    overlap: bool = Field(
        False,
        description="Evaluate while trainers work on the iteration, after it has been generated; "
        "what is not complete when they are ready is left out, so that training never "
        "waits. The last version is evaluated in full.",
    )
    metric: str | None = Field(
        None,
        min_length=1,
        description="What checkpoint.keep_best goes by, SET/NAME such as test/greedy or "
        "aime/pass@8; none means the first set's first number.",
    )


class PublishConfig(Section):
    timeout_s: float = Field(300.0, gt=0, description="Deadline of one weight publish.")
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="What engines get of adapters: merged, all weights with the adapters in them; "
        "adapter, A and B alone, which engines merge into the weights of their model "
        "directory.",
    )
    mode: Literal["blocking", "delayed", "rolling"] = Field(
        "blocking",
        description="How a version comes to the engines. blocking: it is loaded between two "
        "iterations. delayed and rolling, with schedule.max_staleness: it is sent into "
        "a second buffer while they generate. With delayed they swap to it when all "
        "groups of the version before are complete; with rolling one after another as "
        "they run out of these, and begin with the next iteration's meanwhile.",
    )
    divergence: float | None = Field(
        None,
        gt=0,
        description="With schedule.max_staleness: publish only versions whose KL(engines' policy "
        "|| trainers' policy) per token of the probe is at least so many nats; none "
        "publishes every version.",
    )
    probe_tokens: int = Field(
        16,
        ge=0,
        description="Tokens of each of the 16 responses that probe log-probs after the first and "
        "the last publish; between them an iteration's first groups are the probe. 0 "
        "turns both off.",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Absolute limit of every |engine - trainer| log-prob of the probe, beside "
        "noise_margin; none sets none.",
    )
    noise_margin: float | None = Field(
        4.0,
        ge=1.0,
        description="Stop where the log-odds of tokens differ between engine and trainer on "
        "average by more than so many times the trainer's own rounding (bf16 against "
        "fp32, fp32 against fp64), over a probe or an iteration's tokens (I5); 4 lets "
        "an engine round three times as much as the trainer. None only records.",
    )
    only_logged: list[AgreementCheck] = Field(
        default_factory=list,
        description="Checks of I5 that warn and record in RUN/agreement/, and end no run: mean, "
        "square, slope, strays (docs/results/agreement.md).",
    )


class CheckpointConfig(Section):
    every: int = Field(0, ge=0, description="Save every n iterations; 0 only after the last one.")
    load: FilePath | None = Field(
        None, description="Checkpoint directory (.../iteration_000010) to continue from."
    )
    resume: Literal["auto"] | None = Field(
        None,
        description="auto: continue from the newest complete checkpoint of run.dir; where there is "
        "none, start from checkpoint.load or from the beginning.",
    )
    keep_last: int = Field(
        0, ge=0, description="Keep the newest n checkpoints and delete older ones; 0 keeps all."
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Keep, beside keep_last, the n checkpoints with the best evaluation accuracy.",
    )
    export_hf: bool | Literal["merged"] = Field(
        True,
        description="Write the final weights as an HF directory: adapters as one of peft, or with "
        "merged the whole model with the adapters in it.",
    )


TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)


class TelemetryConfig(Section):
    samples: Literal["all"] | Annotated[int, Field(ge=0)] = Field(
        4,
        description="Groups of each iteration kept in RUN/samples (parquet) with rewards, "
        "advantages, tokens and log-probs; all keeps every one, 0 none.",
    )
    trackers: Several[TrackerName] = Field(
        ("tensorboard",),
        description="Experiment trackers that get the run's records and samples beside its own "
        "files.",
    )
    project: str = Field("pa_npu", min_length=1, description="The run's project with the trackers.")
    metric_names: Literal["trl", "verl"] = Field(
        "trl",
        description="Whose names metrics have in trackers; the run's own files keep those of "
        "docs/output.md.",
    )
    profile_iterations: Several[int] = Field(
        (),
        description="Iterations whose training is profiled into RUN/profile, which slows them; "
        "none by default.",
    )


class BufferConfig(Section):
    shards: Literal["auto", "head", "node"] = Field(
        "auto",
        description="Where groups lie between coordinator and trainers: in the store on the head, "
        "or each on the node of the replica that trains it, in its first rank's "
        "process, while the head keeps what is filled and who is done; auto is node "
        "with several nodes.",
    )


LOOPBACK = "127.0.0.1"


class PlacementConfig(Section):
    cluster: Literal["local", "ray"] = Field(
        "local",
        description="What runs engines and trainers: this machine, or the nodes of a Ray cluster.",
    )
    nnodes: int = Field(1, ge=1, description="Number of nodes; several need placement.cluster=ray.")
    devices_per_node: int | None = Field(
        None,
        ge=1,
        description="Devices (cpu: cores) of each node that the run uses; none divides them "
        "evenly.",
    )
    host: str | None = Field(
        None,
        min_length=1,
        description="Address of this machine that the store listens on, and with cluster=local "
        "engines and trainers too; none is loopback, and on a Ray cluster the address "
        "that this node has there. Other nodes use theirs.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="First of the run's ports: the store's, behind which those of the engines "
        "follow; 0 takes free ones.",
    )
    devices: Several[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="Device indices of the engines, then of the trainer ranks; with "
        "placement.colocate of the ranks alone. None takes the first ones.",
    )
    colocate: bool = Field(
        False,
        description="Engines on the trainers' devices and on no others; auto goes by prediction. "
        "With schedule.stream all decode, and when the rest fits on fewer engines, "
        "replica after replica trains; with stream=false engines generate the whole "
        "batch, then trainers train it.",
    )

    @property
    def address(self) -> str:
        """placement.host, resolved; on a cluster the launcher has put it there."""
        return self.host or LOOPBACK
