"""Keys of operation: schedule, evaluation, publish, checkpoints, telemetry, placement."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from pa_npu.config.sections import FilePath, Section, Several
from pa_npu.config.sections.inputs import Dataset

AgreementCheck = Literal["mean", "square", "slope", "strays", "drawn"]
Senders = Literal["leader", "shards", "all"]


class ScheduleConfig(Section):
    iterations: int = Field(
        10,
        ge=1,
        description="Number of iterations of the run, each of which publishes one weight version.",
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
        description="Number of optimizer steps per iteration, on equal shares of its groups in "
        "schedule.order. With order=completion the time of arrival decides which "
        "groups share a step. More than 1 keeps an old policy, against which ratios "
        "are taken.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Maximum number of versions between the weights that sampled a token and the "
        "weights that it trains (I1). 0 is strictly on-policy.",
    )
    tokens_per_update: int | None = Field(
        None,
        ge=1,
        description="Train whole groups in the order of dispatch until an update has this number "
        "of tokens, and carry the rest over to the next update. Needs max_staleness of "
        "at least 1. An iteration generates as many groups as that takes, at most "
        "prompts_per_iteration. null trains the groups of each iteration.",
    )
    prompts_per_iteration: int = Field(
        16, ge=1, description="B, the number of groups per iteration."
    )
    stream: bool = Field(
        True,
        description="true trains while engines generate (periodic asynchrony). false waits for the "
        "whole batch first (synchronous).",
    )
    compare_iterations: int = Field(
        0,
        ge=0,
        description="Run this number of the last iterations synchronously and periodically in "
        "turn, so that the summary can compare their times. Needs stream=true. The "
        "update is the same in both modes.",
    )
    order: Literal["prompt", "completion"] = Field(
        "completion",
        description="Order in which groups are trained. With prompt the update is bit-identical to "
        "the synchronous one.",
    )
    dispatch: Literal["auto", "longest-first", "in-order"] = Field(
        "auto",
        description="Order in which prompts go to engines, by the response lengths expected from "
        "earlier iterations. It changes no sample. auto sends the longest first if "
        "engines are the slower side, otherwise the shortest first; with "
        "schedule.order=prompt it keeps the order of the data.",
    )
    dynamic_sampling: bool = Field(
        False,
        description="Replace groups whose responses are all right or all wrong by further prompts "
        "until an iteration has prompts_per_iteration other groups (DAPO).",
    )
    skip_zero_advantage: bool | None = Field(
        None,
        description="Train groups whose advantages are all 0 (zero variance of rewards) by rule: "
        "they count in the normaliser and in the records, and no model computes them. "
        "The update is the same to the bit where a microbatch is a group or less, and "
        "within rounding where several groups share one. Entropy, agreement (I5) and other "
        "means over tokens are over what was computed. Null does so where it may be done: with a "
        "loss of ours without KL, entropy bonus and router_aux_coef, and not where an fsdp trainer "
        "has a mixture of experts. A function or class of your own must promise it, and needs true.",
    )
    finite_difference_every: int = Field(
        0,
        ge=0,
        description="Every n iterations, move the weights along their gradient, compare the change "
        "of log-probs with what the gradient predicts, and end the run if they "
        "disagree (I7). The check costs about nine passes over one microbatch and "
        "leaves the weights as they were. 0 turns it off.",
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="Evaluate every n iterations. 0 evaluates only before the first and after the "
        "last iteration.",
    )

    @property
    def trained_groups(self) -> int | None:
        """The number of groups that every iteration trains.

        None with tokens_per_update, where it follows from the groups' tokens and the coordinator
        tells it.
        """
        return None if self.tokens_per_update is not None else self.prompts_per_iteration

    def updates(self, iterations: int) -> int:
        """Returns the number of optimizer steps of so many iterations."""
        return iterations * self.updates_per_iteration

    def streams(self, iteration: int) -> bool:
        """Returns whether the groups of this iteration are handed over as they finish."""
        is_compared = iteration >= self.iterations - self.compare_iterations
        return self.stream and (iteration % 2 == 1 or not is_compared)


class EvaluateConfig(Section):
    sets: dict[str, Annotated[FilePath, Field(min_length=1)] | Dataset] = Field(
        default_factory=dict,
        description="Further held-out sets beside data.test, by name. They may have the formats of "
        "data.test or those of published benchmarks.",
    )
    samples: int = Field(
        0,
        ge=0,
        le=4096,
        description="Number of sampled answers per question, for avg@n, pass@k and maj@k. 0 "
        "samples none.",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature of sampled answers.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus (top-p) of sampled answers.")
    max_response_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum length of an answer in tokens, at most rollout.max_response_tokens, "
        "which null means.",
    )
    overlap: bool = Field(
        False,
        description="Evaluate in the background, after the iteration has been generated and while "
        "it is trained. Answers that are not complete when the trainers are ready are "
        "left out, so that training never waits. The last version is always evaluated "
        "in full.",
    )
    metric: str | None = Field(
        None,
        min_length=1,
        description="Number by which checkpoint.keep_best chooses, as SET/NAME, such as "
        "test/greedy or aime/pass@8. null takes the first number of the first set.",
    )

    def all_sets(self, test: str | Dataset | None) -> dict[str, Dataset]:
        """Returns all held-out sets by name: data.test as `test`, then `sets`."""
        sets: dict[str, str | Dataset] = {"test": test} if test else {}
        sets.update(self.sets)
        return {
            name: Dataset(path=dataset) if isinstance(dataset, str) else dataset
            for name, dataset in sets.items()
        }

    def key_of(self, name: str) -> str:
        """Returns the key that names the file of a held-out set."""
        return f"evaluate.sets.{name}" if name in self.sets else "data.test"


class PublishConfig(Section):
    timeout_s: float = Field(300.0, gt=0, description="Deadline of one weight publish.")
    senders: Senders | None = Field(
        None,
        description="Trainer ranks that send weights to engines. shards: every rank of one copy of "
        "the weights sends the shards that it holds, all at the same time. all: the ranks of all "
        "data-parallel replicas take part, so that each sends less. leader: one rank of each "
        "pipeline stage gathers the stage's weights and sends them. null: shards, or "
        "leader where engines have NPUs of their own and there would be more than 5 senders, since "
        "an engine is in a process group with each of them, and each group's buffers take 400 MiB "
        "of its device.",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="What engines receive of LoRA adapters. merged sends all weights with the "
        "adapters added. adapter sends A and B alone, and engines add them to the "
        "weights of their model directory.",
    )
    mode: Literal["blocking", "delayed", "rolling"] = Field(
        "blocking",
        description="How a weight version comes to the engines. blocking loads it between two "
        "iterations. delayed and rolling, which need schedule.max_staleness, send it "
        "into a second buffer while engines generate. With delayed all engines swap to "
        "it once the groups of the version before are complete. With rolling each "
        "engine swaps as soon as its own groups are complete, and begins the next "
        "iteration.",
    )
    divergence: float | None = Field(
        None,
        gt=0,
        description="Publish only versions whose KL(engines' policy || trainers' policy) per token "
        "of the probe is at least this number of nats. Needs schedule.max_staleness. "
        "null publishes every version.",
    )
    probe_tokens: int = Field(
        16,
        ge=0,
        description="Number of tokens of each of the 16 responses that compare log-probs of engine "
        "and trainer after the first and the last publish. Between them the first "
        "groups of an iteration are compared. 0 turns both off.",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Absolute limit of |engine - trainer| for every log-prob of the probe, in "
        "addition to noise_margin. null sets none.",
    )
    noise_margin: float | None = Field(
        4.0,
        ge=1.0,
        description="End the run if the log-odds of tokens differ between engine and trainer on "
        "average by more than this multiple of the trainer's own rounding error (bf16 "
        "against fp32, fp32 against fp64), in a probe or over an iteration (I5). 4 "
        "lets an engine round three times as much as the trainer. null only records "
        "the difference.",
    )
    only_logged: list[AgreementCheck] = Field(
        default_factory=list,
        description="Checks of I5 that only warn and record in RUN/agreement/, and end no run: "
        "mean, square, slope, strays, drawn (docs/results/agreement.md).",
    )


class CheckpointConfig(Section):
    every: int = Field(
        0,
        ge=0,
        description="Save a checkpoint every n iterations. 0 saves only after the last iteration.",
    )
    load: FilePath | None = Field(
        None, description="Checkpoint directory (.../iteration_000010) to continue from."
    )
    resume: Literal["auto"] | None = Field(
        None,
        description="auto continues from the newest complete checkpoint of run.dir. If there is "
        "none, it starts from checkpoint.load or from the beginning. null never looks "
        "for one.",
    )
    keep_last: int = Field(
        0,
        ge=0,
        description="Number of newest checkpoints to keep; older ones are deleted. 0 keeps all.",
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Number of checkpoints with the best evaluation accuracy to keep, in addition "
        "to keep_last.",
    )
    export_hf: bool | Literal["merged"] = Field(
        True,
        description="Write the final weights as an HF directory. LoRA adapters are written as peft "
        "does; merged writes the whole model with the adapters added.",
    )


TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)


class TelemetryConfig(Section):
    samples: Literal["all"] | Annotated[int, Field(ge=0)] = Field(
        4,
        description="Number of groups of each iteration to keep in RUN/samples (parquet), with "
        "rewards, advantages, tokens and log-probs. all keeps every group, 0 none.",
    )
    trackers: Several[TrackerName] = Field(
        ("tensorboard",),
        description="Experiment trackers that receive the run's records and samples. The run's own "
        "files are written in any case.",
    )
    project: str = Field(
        "pa_npu", min_length=1, description="Name of the project under which trackers file the run."
    )
    metric_names: Literal["trl", "verl"] = Field(
        "trl",
        description="Library whose metric names are used in trackers. The run's own files keep the "
        "names of docs/output.md.",
    )
    profile_iterations: Several[int] = Field(
        (),
        description="Iterations whose training is profiled into RUN/profile. Profiling slows them.",
    )


class BufferConfig(Section):
    shards: Literal["auto", "head", "node"] = Field(
        "auto",
        description="Where groups are kept between coordinator and trainers. head: in the store on "
        "the head node. node: in the memory of the replica that trains them, on its "
        "node, while the head only knows which are there. auto: node if there are "
        "several nodes, otherwise head.",
    )

    def lies_on_nodes(self, num_nodes: int) -> bool:
        """Returns whether groups lie on the nodes of the replicas that train them, and not in the
        store on the head.
        """
        return self.shards == "node" or (self.shards == "auto" and num_nodes > 1)


LOOPBACK = "127.0.0.1"


class PlacementConfig(Section):
    cluster: Literal["local", "ray"] = Field(
        "local",
        description="Where engines and trainers run: on this machine, or on the nodes of a Ray "
        "cluster.",
    )
    nnodes: int = Field(
        1, ge=1, description="Number of nodes. More than one needs placement.cluster=ray."
    )
    devices_per_node: int | None = Field(
        None,
        ge=1,
        description="Number of devices (cpu: cores) of each node that the run uses. null divides "
        "the devices evenly.",
    )
    host: str | None = Field(
        None,
        min_length=1,
        description="Address of this machine on which the store listens, and with cluster=local "
        "engines and trainers too. null means loopback, or on a Ray cluster the "
        "address that this node has there. Other nodes use their own addresses.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="First port of the run. The store listens on it, the engines on those that "
        "follow. 0 takes free ports.",
    )
    devices: Several[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="Device indices of the engines, followed by those of teachers' engines and of the "
        "trainer ranks; with placement.colocate without those of the engines. null takes the first "
        "ones.",
    )
    colocate: bool = Field(
        False,
        description="Run engines on the trainers' devices and on no others. With schedule.stream "
        "all devices decode first, and replica after replica begins to train once the "
        "remaining sequences fit on fewer engines. With stream=false engines generate "
        "the whole batch, and then trainers train it. auto chooses by prediction.",
    )

    @property
    def address(self) -> str:
        """Returns placement.host, or loopback. On a cluster the launcher has filled it in."""
        return self.host or LOOPBACK
