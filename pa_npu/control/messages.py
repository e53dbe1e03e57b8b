"""The messages between trainers and coordinator: reports, dispatched groups, devices and software.

Each message is a frozen dataclass with its topic below it. The messages of a publish are in
publish/messages.py, those about engines in control/roster.py. Every topic here is under the prefix
of one attempt of the run (control.channel.attempt_prefix).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, get_type_hints

from pa_npu.control.typed import Topic


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


@dataclass(frozen=True)
class UpdateReport:
    """The report of one optimizer step, equal on all ranks. Means are over the update's trained
    tokens unless said otherwise.

    loss, policy_loss: sums divided by the update's normaliser; so are demonstration_loss and
    observation_loss, the parts of data.demonstrations and environment.observations in `loss`, None
    without these.
    kl: K3's estimate of KL(policy || reference).
    teacher_kl: mean of log p_policy - log p_teacher of the policy's tokens, an estimate of
    KL(policy || teacher); None without a teacher. teacher_divergence: mean of
    algorithm.distill_divergence over the teacher's most likely tokens; None where it is `sampled`.
    logprob_diff_mean, logprob_diff_max: |trainer - engine| log-prob. For tokens of older versions
    the updates since then are included, here and in logprob_k3.
    logprob_k3: K3's estimate of KL(engine || trainer).
    importance_*: of truncated or masked importance weights; None without importance sampling.
    effective_sample_size: a share, of the weights of importance and age, or without these of the
    ratio to the sampling policy; None without either.
    age_mean, age_max: by how many versions tokens are older than the version that trains them;
    None with max_staleness=0.
    kl, clip_ratio, logprob_*: None for rows of data, which no policy wrote.
    learning_rate: the step's.
    preference_*: with loss=dpo and preference, else None: the number of pairs, which are groups
    whose responses are not all equal, their mean margin, and the share of them with a positive
    margin. preference_chosen_reward, preference_rejected_reward: with loss=preference, whose
    difference the margin is.
    expert_*, routing_entropy, experts_untouched, replay_changed, expert_choices_missing: of a
    mixture of experts, see backends.protocol.Routing.
    tokens_computed: tokens through the model, without padding.
    rollout_*: reads of groups from the buffer, their bytes, the part of these bytes that came from
    the store on the head, and bytes that ranks got from their replica's reader over collectives.
    memory_trainer_*_bytes: MemoryPeak of the fullest rank since the update before.
    wait_s: time spent waiting for groups. train_s: the remaining time, step included. step_s: time
    of the step. All three are means over ranks.

    The annotation of a field's type merges the updates of an iteration into one report (see
    merge_updates).
    """

    loss: Annotated[float, _mean]
    policy_loss: Annotated[float, _mean]
    demonstration_loss: Annotated[float | None, _mean]
    observation_loss: Annotated[float | None, _mean]
    kl: float | None
    teacher_kl: float | None
    teacher_divergence: float | None
    entropy: float | None
    clip_ratio: float | None
    logprob_diff_mean: float | None
    logprob_diff_max: Annotated[float | None, max]
    logprob_k3: float | None
    importance_weight_mean: float | None
    importance_truncated_ratio: float | None
    effective_sample_size: float | None
    age_mean: float | None
    age_max: Annotated[int | None, max]
    grad_norm: Annotated[float, _mean]
    learning_rate: Annotated[float, _last]
    preference_pairs: Annotated[int | None, sum]
    preference_margin: float | None
    preference_accuracy: float | None
    preference_chosen_reward: float | None
    preference_rejected_reward: float | None
    expert_imbalance: float | None
    expert_imbalance_max: Annotated[float | None, max]
    expert_imbalance_layers: dict[str, float] | None
    routing_entropy: float | None
    experts_untouched: Annotated[int | None, _last]
    replay_changed: float | None
    expert_choices_missing: Annotated[int | None, sum]
    tokens_response: Annotated[int, sum]
    tokens_computed: Annotated[int, sum]
    microbatches: Annotated[int, sum]
    rollout_reads: Annotated[int, sum]
    rollout_buffer_bytes: Annotated[int, sum]
    rollout_head_bytes: Annotated[int, sum]
    rollout_collective_bytes: Annotated[int, sum]
    memory_trainer_host_bytes: Annotated[int, max]
    memory_trainer_device_bytes: Annotated[int | None, max]
    wait_s: Annotated[float, sum]
    train_s: Annotated[float, sum]
    step_s: Annotated[float, sum]


def merge_updates(reports: Sequence[UpdateReport]) -> UpdateReport:
    """Merges the reports of an iteration's updates into one.

    Each field is merged by the function in its type's annotation; a field without one becomes the
    mean over trained tokens.
    """
    if len(reports) == 1:
        return reports[0]
    tokens = [report.tokens_response for report in reports]

    def mean(values: list[Any]) -> Any:
        # an update that has computed nothing has no means
        weighted = [(v, n) for v, n in zip(values, tokens, strict=True) if v is not None]
        first = weighted[0][0]
        if isinstance(first, dict):
            return {key: mean([value and value[key] for value in values]) for key in first}
        return sum(v * n for v, n in weighted) / max(1, sum(n for _, n in weighted))

    merged: dict[str, Any] = {}
    for name, kind in get_type_hints(UpdateReport, include_extras=True).items():
        (rule,) = getattr(kind, "__metadata__", (mean,))
        values = [getattr(report, name) for report in reports]
        is_mean = rule is mean
        present = [value for value in values if value is not None]
        merged[name] = rule(values if is_mean else present) if present else None
    return UpdateReport(**merged)


@dataclass(frozen=True)
class ProbeReport:
    """|trainer - engine| log-prob over the tokens of an iteration's probe; None without a probe."""

    probe_diff_max: float | None = None
    probe_diff_mean: float | None = None


@dataclass(frozen=True)
class AgreementReport:
    """The differences of log-odds that I5 judges and their limits; None if nothing is judged."""

    logodds_diff_mean: float | None = None
    logodds_diff_limit: float | None = None
    logodds_slope: float | None = None
    logodds_slope_limit: float | None = None


@dataclass(frozen=True)
class IterationReport:
    """The trainers' part of an iteration's line in metrics.jsonl, without its border
    (BorderReport).

    gradient_norms: of each update, bit by bit, for the run's chain.
    """

    iteration: int
    training: UpdateReport
    probe: ProbeReport
    agreement: AgreementReport
    gradient_norms: tuple[float, ...] = ()

    def record(self) -> dict[str, Any]:
        """Returns the fields that are not None, under their names in metrics.jsonl."""
        return _set_fields(self.training, self.probe, self.agreement)


REPORT = Topic(
    "iterations/{iteration}/report",
    IterationReport,
    "trainers: the report of iteration {iteration}",
)


@dataclass(frozen=True)
class CheckpointReport:
    """The checkpoint work after a publish.

    checkpoint_s: seconds that training stood still for it.
    checkpoint_failed, checkpoint_completed: a version, None without one.
    checkpoint_digest: the digest of the completed version that its pa_npu.json contains.
    """

    checkpoint_s: float | None = None
    checkpoint_failed: int | None = None
    checkpoint_completed: int | None = None
    checkpoint_digest: str | None = None


@dataclass(frozen=True)
class DivergenceReport:
    """The decision of publish.divergence about a version.

    publish_kl: K3's estimate of KL(engines' policy || trainers' policy) over the last probe; None
    without a probe.
    publish_skipped: engines keep the version that they have.
    """

    publish_kl: float | None = None
    publish_skipped: bool | None = None


@dataclass(frozen=True)
class BorderReport:
    """A border as rank 0 saw it, from its announcement to the end of the publish.

    border_send_s: time in which rank 0 sent. border_wait_s: the remaining time.
    weights: digest of all ranks' weights, for the run's chain.
    """

    border_wait_s: float
    border_send_s: float = 0.0
    checkpoint: CheckpointReport = CheckpointReport()
    divergence: DivergenceReport = DivergenceReport()
    weights: str = ""

    def record(self) -> dict[str, Any]:
        """Returns the fields that are not None, under their names in metrics.jsonl."""
        numbers = {"border_wait_s": self.border_wait_s, "border_send_s": self.border_send_s}
        return {**numbers, **_set_fields(self.checkpoint, self.divergence)}


def _set_fields(*reports: Any) -> dict[str, Any]:
    """Returns the fields of all reports that are not None."""
    fields = {}
    for report in reports:
        for name, value in asdict(report).items():
            if value is not None:
                fields[name] = value
    return fields


BORDER = Topic(
    "borders/{version}/report",
    BorderReport,
    "trainers: rank 0 to have published weight version {version}",
)


@dataclass(frozen=True)
class DispatchedGroup:
    """A group in the rollout buffer, or some consecutive responses of it.

    index: the group's dispatch index.
    replica: the replica that trains these responses.
    response_tokens: number of trained tokens of each response.
    first: number of the first of these responses in the group.
    leading_tokens: as response_tokens, for the leading component only; None if it trains all.
    by_rule: whether its gradient is 0 by rule, so that it is counted and not computed.
    content: digest of what was put (samples.group_digest.content_digest); empty if nobody says it.
    """

    index: int
    replica: int
    response_tokens: tuple[int, ...]
    first: int = 0
    leading_tokens: tuple[int, ...] | None = None
    by_rule: bool = False
    content: str = ""

    @property
    def leading(self) -> tuple[int, ...]:
        """Number of tokens of each response that the leading component trains."""
        return self.response_tokens if self.leading_tokens is None else self.leading_tokens


@dataclass(frozen=True)
class Dispatched:
    """All groups of an iteration, with indices from 0; sent once the last is in the buffer."""

    iteration: int
    groups: tuple[DispatchedGroup, ...]


DISPATCHED = Topic(
    "iterations/{iteration}/dispatched",
    Dispatched,
    "the coordinator: what iteration {iteration} consists of",
)


@dataclass(frozen=True)
class DataPosition:
    """The coordinator's TrainingStream.state() before an iteration."""

    state: dict[str, Any]


DATA_POSITION = Topic(
    "iterations/{iteration}/data_position",
    DataPosition,
    "the coordinator to say how many prompts were taken before iteration {iteration}",
)


@dataclass(frozen=True)
class ProducedAhead:
    """An iteration whose groups are all in the buffer before it is trained.

    numbers, samples: of the coordinator's record. Checkpoints keep such iterations
    (pa_npu.checkpoints.ahead).
    """

    numbers: dict[str, Any]
    samples: list[Any]


PRODUCED_AHEAD = Topic(
    "iterations/{iteration}/produced",
    ProducedAhead,
    "the coordinator to produce iteration {iteration} ahead of training",
)


@dataclass(frozen=True)
class UpdateSize:
    """The number of groups that each replica trains in an iteration, with
    schedule.tokens_per_update.
    """

    groups: int


UPDATE_SIZE = Topic(
    "iterations/{iteration}/size",
    UpdateSize,
    "the coordinator to say how many groups iteration {iteration} trains",
)


CARRIED_KEY = "carried"
"""Marks, in a checkpoint's numbers, groups that wait for an update and belong to no iteration yet.
"""


@dataclass(frozen=True)
class CarriedGroups:
    """Groups in the buffer that wait for a later update when a version is saved.

    iteration: the first iteration that may train them.
    groups: the record of each group.
    group_tokens: TokenBudget.group_tokens.
    """

    iteration: int
    groups: list[Any]
    group_tokens: float | None


CARRIED = Topic(
    "checkpoints/{version}/carried",
    CarriedGroups,
    "the coordinator to say which groups are carried over weight version {version}",
)


@dataclass(frozen=True)
class EarlyEnd:
    """Asks the run to end after the iteration in training, with a checkpoint and an export."""


EARLY_END = Topic("early_end", EarlyEnd, "the launcher to ask for an early end")


@dataclass(frozen=True)
class ShardAddress:
    """The address at which a shard of the rollout buffer listens (samples/rollout_buffer.py)."""

    host: str
    port: int


SHARD = Topic(
    "buffer/shards/{replica}",
    ShardAddress,
    "trainers: the reader of replica {replica} to say where its groups may lie",
)


@dataclass(frozen=True)
class TrainersRunOn:
    """The devices and software of the trainers, as rank 0 reports them.

    device: kind of device. collectives: their backend.
    backend: the training backend with its version.
    kernel, merge: of attention (attention/forms.py).
    fallback: why the merge is not the platform's fast one; empty if it is.
    computation: weight_transfer.computation.Computation of rank 0's live modules as JSON; those of
    engines must agree with it.
    """

    ranks: int
    device: str
    collectives: str
    python: str
    torch: str
    backend: str
    dtype: str
    attention: str
    kernel: str
    merge: str
    fallback: str
    computation: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        torch_text = f"torch {self.torch}"
        software = self.backend
        if torch_text not in software:
            software += f", {torch_text}"
        text = (
            f"trainers: {self.ranks} x {self.device} ({self.collectives}), {software}, Python "
            f"{self.python}, {self.dtype}; attention {self.attention} on {self.kernel}, merged by "
            f"{self.merge}"
        )
        return f"{text} (fallback: {self.fallback})" if self.fallback else text


TRAINERS_RUN_ON = Topic(
    "trainers/run_on", TrainersRunOn, "trainers: rank 0 to say what they run with"
)


@dataclass(frozen=True)
class EngineRunsOn:
    """The device and software of one engine.

    name: its URL. kind: rollout.backend.
    version: of its software; None if it is not known.
    device: as in rollout.engine_settings; None if these do not name one.
    """

    name: str
    kind: str
    version: str | None
    device: str | None = None


@dataclass(frozen=True)
class RunsOn:
    """RUN/runs_on.json: devices, software and kernels, as trainers and engines report at the start.

    The coordinator also prints them, because a fallback is not an error and would go unnoticed.
    """

    trainers: TrainersRunOn
    engines: tuple[EngineRunsOn, ...]

    def lines(self) -> list[str]:
        """Returns a line for the trainers, and one for each kind of engine and device."""
        kinds: Counter[str] = Counter()
        for engine in self.engines:
            kind = f"{engine.kind} {engine.version or '(version unknown)'}"
            if engine.device:
                kind += f" on {engine.device}"
            kinds[kind] += 1
        engine_lines = [f"engines: {count} x {kind}" for kind, count in kinds.items()]
        return [self.trainers.line(), *engine_lines]
