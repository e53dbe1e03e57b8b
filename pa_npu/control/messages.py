"""The messages between trainers and coordinator that are not part of a publish: reports, what was dispatched, what each runs with.

Each message is a frozen dataclass with its topic below it. Those of the publish are in
publish/messages.py, those about engines in control/roster.py. Every topic here lives under the
prefix of one attempt of the run (control.channel.attempt_prefix).
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

    loss, policy_loss: sums over the update's normaliser. kl: K3's estimate of KL(policy ||
    reference). logprob_diff_mean,
    logprob_diff_max: |trainer - engine| log-prob; logprob_k3: K3's estimate of KL(engine ||
    trainer). importance_*: None without importance sampling; truncated, or masked.
    effective_sample_size: of the weights of importance and age, or of the ratio to the sampling
    policy where there are none, as a share; None without either. age_mean, age_max: by how many
    versions tokens are older than what they train; None with max_staleness=0. With older tokens
    logprob_* have the updates since in them. kl, clip_ratio and logprob_* are None of rows of data,
    which no policy wrote.
    learning_rate: of the step. preference_*: of loss=dpo, else None: groups whose responses are not
    all equal, and over these the mean margin, and the share with a positive one. expert_*,
    routing_entropy, replay_changed, routes_missing: of a mixture, see backends.protocol.Routing.
    tokens_computed: tokens through the model, padding left out. rollout_*: reads of groups from the
    buffer and their bytes, bytes that came from the store on the head for it, and bytes that ranks
    got from their replica's reader over collectives.
    memory_trainer_host_bytes, memory_trainer_device_bytes: MemoryPeak of the fullest rank since the
    update before. wait_s: waiting for groups; train_s: the rest, the step (step_s) included; all
    three means over ranks.

    Beside a field's type stands how the updates of an iteration become one report; without it, by
    their mean over trained tokens.
    """

    loss: Annotated[float, _mean]
    policy_loss: Annotated[float, _mean]
    kl: float | None
    entropy: float
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
    expert_imbalance: float | None
    expert_imbalance_max: Annotated[float | None, max]
    expert_imbalance_layers: dict[str, float] | None
    routing_entropy: float | None
    experts_untouched: Annotated[int | None, _last]
    replay_changed: float | None
    routes_missing: Annotated[int | None, sum]
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
    """One report of an iteration's updates: each field by the rule in its type, or the mean over
    trained tokens.
    """
    if len(reports) == 1:
        return reports[0]
    tokens = [report.tokens_response for report in reports]

    def mean(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: mean([value[key] for value in values]) for key in values[0]}
        return sum(v * n for v, n in zip(values, tokens, strict=True)) / max(1, sum(tokens))

    merged: dict[str, Any] = {}
    for name, kind in get_type_hints(UpdateReport, include_extras=True).items():
        (rule,) = getattr(kind, "__metadata__", (mean,))
        values = [getattr(report, name) for report in reports]
        merged[name] = None if values[0] is None else rule(values)
    return UpdateReport(**merged)


@dataclass(frozen=True)
class ProbeReport:
    """The probe before an iteration: |trainer - engine| log-prob over its tokens; None without a
    probe.
    """

    probe_diff_max: float | None = None
    probe_diff_mean: float | None = None


@dataclass(frozen=True)
class AgreementReport:
    """The differences of log-odds that I5 judges, and their limits in this iteration; None where
    nothing is judged.
    """

    logodds_diff_mean: float | None = None
    logodds_diff_limit: float | None = None
    logodds_slope: float | None = None
    logodds_slope_limit: float | None = None


@dataclass(frozen=True)
class IterationReport:
    """The trainers' part of an iteration's line in metrics.jsonl, but for the border at its end
    (BorderReport).

    gradient_norms: of each update, for the run's chain, which has their bits.
    """

    iteration: int
    training: UpdateReport
    probe: ProbeReport
    agreement: AgreementReport
    gradient_norms: tuple[float, ...] = ()

    def record(self) -> dict[str, Any]:
        """Its fields under the names of metrics.jsonl, those that are None left out."""
        return _given(self.training, self.probe, self.agreement)


REPORT = Topic(
    "iterations/{iteration}/report",
    IterationReport,
    "trainers: the report of iteration {iteration}",
)


@dataclass(frozen=True)
class CheckpointReport:
    """The checkpoint work after a publish: seconds that training stood still, a version that
    failed, and one that was completed with the digest that its pa_npu.json has of itself."""

    checkpoint_s: float | None = None
    checkpoint_failed: int | None = None
    checkpoint_completed: int | None = None
    checkpoint_digest: str | None = None


@dataclass(frozen=True)
class DivergenceReport:
    """With publish.divergence: K3's estimate of KL(engines' policy || trainers' policy) over the
    last probe, None where there was none, and whether engines keep the version that they have."""

    publish_kl: float | None = None
    publish_skipped: bool | None = None


@dataclass(frozen=True)
class BorderReport:
    """A border as rank 0 saw it, from its announcement to the end of the publish. border_send_s:
    its own sending, border_wait_s: the rest. divergence: DivergenceReport of publish.divergence.
    weights: digest of all ranks' weights, for the run's chain."""

    border_wait_s: float
    border_send_s: float = 0.0
    checkpoint: CheckpointReport = CheckpointReport()
    divergence: DivergenceReport = DivergenceReport()
    weights: str = ""

    def record(self) -> dict[str, Any]:
        """Its fields under the names of metrics.jsonl, those that are None left out."""
        numbers = {"border_wait_s": self.border_wait_s, "border_send_s": self.border_send_s}
        return {**numbers, **_given(self.checkpoint, self.divergence)}


def _given(*parts: Any) -> dict[str, Any]:
    return {
        name: value for part in parts for name, value in asdict(part).items() if value is not None
    }


BORDER = Topic(
    "borders/{version}/report",
    BorderReport,
    "trainers: rank 0 to have published weight version {version}",
)


@dataclass(frozen=True)
class DispatchedGroup:
    """A group in the rollout buffer, or some consecutive responses of it.

    index: its dispatch index. replica: the one that trains these responses. response_tokens:
    trained
    tokens of each. first: the number of the first one in the group. leading_tokens: those of the
    leading component; None where it trains all of them.
    """

    index: int
    replica: int
    response_tokens: tuple[int, ...]
    first: int = 0
    leading_tokens: tuple[int, ...] | None = None

    @property
    def leading(self) -> tuple[int, ...]:
        """Tokens of each response that the leading component trains."""
        return self.response_tokens if self.leading_tokens is None else self.leading_tokens


@dataclass(frozen=True)
class Dispatched:
    """All groups of an iteration, with indices from 0 on, told when the last is in the buffer."""

    iteration: int
    groups: tuple[DispatchedGroup, ...]


DISPATCHED = Topic(
    "iterations/{iteration}/dispatched",
    Dispatched,
    "the coordinator: what iteration {iteration} consists of",
)


@dataclass(frozen=True)
class DataPosition:
    """TrainingStream.state() of the coordinator before an iteration."""

    state: dict[str, Any]


DATA_POSITION = Topic(
    "iterations/{iteration}/data_position",
    DataPosition,
    "the coordinator to say how many prompts were taken before iteration {iteration}",
)


@dataclass(frozen=True)
class ProducedAhead:
    """An iteration all of whose groups are in the buffer before it is trained: numbers and samples
    of the coordinator's record.

    For checkpoints, which keep such iterations (pa_npu.checkpoints.ahead).
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
    """With schedule.tokens_per_update: how many groups each replica trains in an iteration, told as
    soon as that is known.
    """

    groups: int


UPDATE_SIZE = Topic(
    "iterations/{iteration}/size",
    UpdateSize,
    "the coordinator to say how many groups iteration {iteration} trains",
)


CARRIED_KEY = "carried"
"""In the numbers of what a checkpoint has that is no iteration, but groups that are carried to one.
"""


@dataclass(frozen=True)
class CarriedGroups:
    """Groups that wait for a later update than those that have been produced when a version is
    saved; they lie in the buffer.

    iteration: the first that may train them. groups: what a record says of each. group_tokens:
    TokenBudget.group_tokens.
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
    """The launcher wants the run to end after the iteration that is being trained, with a
    checkpoint and an export.
    """


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
    """Rank 0's. device: its kind. collectives: their backend. backend: training backend with its
    version.

    kernel, merge: of attention (attention/forms.py); fallback: why the merge is not the platform's
    fast one, or empty.
    computation: weight_transfer.computation.Computation of its live modules as JSON, which engines'
    must agree with.
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
        text = (
            f"trainers: {self.ranks} x {self.device} ({self.collectives}), {self.backend}, torch "
            f"{self.torch}, Python {self.python}, {self.dtype}; attention {self.attention} on "
            f"{self.kernel}, merged by {self.merge}"
        )
        return f"{text} (fallback: {self.fallback})" if self.fallback else text


TRAINERS_RUN_ON = Topic(
    "trainers/run_on", TrainersRunOn, "trainers: rank 0 to say what they run with"
)


@dataclass(frozen=True)
class EngineRunsOn:
    """One engine. name: its URL. kind: rollout.backend; version: of its software, None where it
    does not say. device: as rollout.engine_settings has it, None where that says nothing."""

    name: str
    kind: str
    version: str | None
    device: str | None = None


@dataclass(frozen=True)
class RunsOn:
    """RUN/runs_on.json: devices, software and kernels of a run, as trainers and engines say them
    themselves, once, at the start.

    Fallbacks are no errors, but nobody should have to guess: the coordinator prints these lines and
    keeps them.
    """

    trainers: TrainersRunOn
    engines: tuple[EngineRunsOn, ...]

    def lines(self) -> list[str]:
        """One of the trainers, one of each kind of engine and device."""
        kinds = Counter(
            f"{engine.kind} "
            f"{engine.version or '(version unknown)'}{f' on {engine.device}' if engine.device else ''}"
            for engine in self.engines
        )
        return [
            self.trainers.line(),
            *(f"engines: {count} x {kind}" for kind, count in kinds.items()),
        ]
