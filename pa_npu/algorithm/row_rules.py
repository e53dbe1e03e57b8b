"""Rules of runs whose samples are rows of data: no engines, and no keys of what only engines, rewards or prompts have."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.config.rules.unread import Condition, never_read, unread_keys

_WITHOUT_ENGINES = "samples are rows of data and nothing is generated, take an algorithm whose samples engines write"
_UNREAD = (
    Condition(
        "rollout.backend rollout.attach rollout.max_engines rollout.engine_settings "
        "rollout.tensor_parallel rollout.python rollout.temperature rollout.ignore_eos "
        "rollout.window rollout.max_num_batched_tokens rollout.max_num_seqs "
        "rollout.memory_fraction rollout.sleep rollout.kv_cache_gib rollout.graph_mode "
        "rollout.statistics rollout.batch_invariant rollout.extra_args rollout.env "
        "agent.port placement.colocate publish.mode publish.lora publish.divergence "
        "publish.probe_tokens publish.probe_tolerance publish.noise_margin publish.only_logged "
        "schedule.dispatch schedule.dynamic_sampling schedule.max_staleness "
        "schedule.skip_zero_advantage "
        "schedule.tokens_per_update schedule.compare_iterations algorithm.router_replay "
        "evaluate.samples evaluate.temperature evaluate.top_p evaluate.max_response_tokens "
        "evaluate.overlap",
        never_read,
        _WITHOUT_ENGINES,
    ),
    Condition(
        "environment.name reward.functions data.demonstrations",
        never_read,
        "rows of data go through no environment and get no rewards, take an algorithm whose samples "
        "engines write",
    ),
)
_OF_ROWS = Condition(
    "schedule.epochs",
    never_read,
    "it is for rows of data, set schedule.iterations where engines write the samples",
)

_OF_PAIRS = Condition(
    "algorithm.preference_loss algorithm.label_smoothing",
    never_read,
    "it is for pairs that rows of data give, set algorithm.name=dpo",
)


def broken_source(algorithm: Algorithm) -> Iterator[str]:
    """Yields a line for each conflict between where samples come from and other keys."""
    config = algorithm.config
    engines = config.rollout.engines
    named = f"algorithm.loss={config.algorithm.loss}"
    if config.algorithm.name is not None:
        named = f"algorithm.name={config.algorithm.name}"
    if algorithm.row_is != "pair":
        yield from unread_keys(config, (_OF_PAIRS,))
    if algorithm.samples_from == "engines":
        if not engines:
            yield (
                f"rollout.engines: 0, but with {named} engines write the samples; set it to 1 or "
                "more, or take an algorithm that trains rows of data"
            )
        yield from unread_keys(config, (_OF_ROWS,))
        return
    if engines:
        yield (
            f"rollout.engines: {engines}, but with {named} samples are rows of data and nothing is "
            "generated; set it to 0"
        )
    leading = algorithm.components[0]
    if leading.needs_provenance:
        yield (
            f"{named}: its samples are rows of data, which no weight version wrote, but component "
            f"{leading.number} ({leading.name}) needs one; declare it with needs_provenance=False"
        )
    yield from unread_keys(config, _UNREAD)
