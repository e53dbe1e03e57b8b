"""Evaluation without training: engines with the model as it is, every question of every set, a table, results per question."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pa_npu.agents.environment import evaluated
from pa_npu.checkpoints.provenance import model_fingerprint
from pa_npu.config.plain_file import reason
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.coordinator.environment_trial import check_environment
from pa_npu.coordinator.evaluate import Evaluation, Evaluator
from pa_npu.data.prompt_format import read_prompt_format
from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, RolloutEngine, Sampling
from pa_npu.engines.registry import engine_kind
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError, DeadlineExceeded, PaNpuError
from pa_npu.evaluation.harness_file import write_harness_results
from pa_npu.evaluation.results import (
    Estimate,
    Judged,
    compare,
    read_results,
    results_file,
    summarise,
    write_results,
)
from pa_npu.evaluation.written_rows import write_rows
from pa_npu.families.model_directory import check_tokenizer, load_tokenizer
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.data import check_held_out, check_rewards
from pa_npu.launcher.checks.engines import check_engines
from pa_npu.launcher.checks.machine import resolve_device
from pa_npu.launcher.cluster.cluster import local_cluster
from pa_npu.launcher.engine_key import engine_key
from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree
from pa_npu.launcher.process.processes import engine_answers
from pa_npu.launcher.quiet import quiet_libraries
from pa_npu.rewards.pool import RewardPool
from pa_npu.telemetry.records import print_line

_POLL_S = 0.5
_VERSION = 0  # of a model that nobody trains


def evaluate(
    config: Config,
    checkpoint: str | None = None,
    compared_file: str | None = None,
    rows_file: str | None = None,
    *,
    only_correct: bool = False,
) -> int:
    """Asks every question of every set, prints the table and writes the results; returns the exit
    code.

    checkpoint: is exported to model.path first.
    compared_file: results of an evaluation to compare with.
    rows_file: the answers are written there as rows for the supervised stage.
    only_correct: only those that are.
    """
    if not config.rollout.has_engines:
        raise ConfigError(
            "rollout.engines: 0, but an evaluation asks engines; give a configuration with engines"
        )
    before = read_results(compared_file) if compared_file else None
    directory = Path(config.run.dir)
    print_line("checking model, data and rewards")
    if checkpoint:
        with quiet_libraries():
            from pa_npu.backends.registry import export_checkpoint

            export_checkpoint(Path(checkpoint), Path(config.model.path), None, merged=True)
    config, platform = resolve_device(_asked_as_trained(config))
    spec = ModelSpec.from_config(config)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    check_tokenizer(spec, tokenizer)
    sets = {
        name: check_held_out(name, tokenizer, config).prompts
        for name in config.evaluate.all_sets(config.data.test)
    }
    sample = next(iter(sets.values()))[0]
    check_rewards(config, sample)
    check_environment(config, sample)
    key = engine_key(config)
    with _engines(config, platform, key, directory) as urls:
        evaluation = asyncio.run(_evaluate(config, spec, urls, key, tokenizer, sets))
    file = results_file(directory, _VERSION)
    write_results(file, evaluation.responses)
    for line in summary_lines(evaluation.responses):
        print_line(line)
    print_line(f"answered in {evaluation.seconds:.1f} s")
    if compared_file is not None and before is not None:
        for line in difference_lines(before, evaluation.responses, compared_file):
            print_line(line)
    print_line(f"results by question: {file}")
    harness_file = file.with_suffix(".json")
    try:
        write_harness_results(harness_file, evaluation.responses, config)
    except OSError as error:
        print_line(f"{harness_file} cannot be written ({reason(error)})")
    else:
        print_line(f"results in lm-eval's layout: {harness_file}")
    if rows_file is not None:
        rows = Path(rows_file)
        written = write_rows(
            rows,
            config,
            evaluation.responses,
            fingerprint=model_fingerprint(config.model.path),
            only_correct=only_correct,
        )
        print_line(written.line(rows))
    return 0


def _asked_as_trained(config: Config) -> Config:
    """Returns the configuration with the prompt format of the run that trained the model, where it
    does not set its own.
    """
    prompts = read_prompt_format(Path(config.model.path))
    data, changed = prompts.given_to(config.data)
    if changed:
        names = ", ".join(f"data.{name}" for name in changed)
        print_line(
            f"{names}: as in the run that trained {config.model.path}; set a key to ask otherwise"
        )
    return config.model_copy(update={"data": data})


def show(results: str, compared_file: str | None = None) -> int:
    """Prints an earlier evaluation and its difference to that of `compared_file`, without asking an
    engine; returns the exit code.
    """
    responses = read_results(results)
    lines = summary_lines(responses)
    if compared_file is not None:
        lines += difference_lines(read_results(compared_file), responses, compared_file)
    for line in lines:
        print_line(line)
    return 0


def difference_lines(
    before: Sequence[Judged], after: Sequence[Judged], compared_file: str
) -> list[str]:
    """Returns the paired differences with their intervals, one line for each set and metric that
    both evaluations have.
    """
    lines = []
    for name, metrics in compare(before, after).items():
        for metric, difference in metrics.items():
            lines.append(
                f"{name} {metric}: {_signed(difference)} against {compared_file}, "
                f"{counted(difference.questions, 'question')} in both"
            )
    return lines


def summary_lines(responses: Sequence[Judged]) -> list[str]:
    """Returns the table: one line for each set and metric, and one about the lengths of a set's
    answers.
    """
    lines = []
    for name, summary in summarise(responses).items():
        for metric, value in summary.metrics.items():
            lines.append(
                f"{name} {metric}: {value.value:.3f} ({value.low:.3f} to {value.high:.3f})"
            )
        lines.append(
            f"{name}: {counted(summary.questions, 'question')}, "
            f"{counted(summary.responses, 'answer')} of {summary.length_mean:.0f} tokens on "
            f"average (median {summary.length_median:.0f}, 95% up to {summary.length_95:.0f}), "
            f"{summary.truncated_ratio:.1%} cut"
        )
    return lines


def _signed(difference: Estimate) -> str:
    return f"{difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"


@contextmanager
def _engines(config: Config, platform: Any, key: str, directory: Path) -> Iterator[Sequence[str]]:
    """Yields the URLs of engines that answer: those of rollout.attach, or engines that are started
    here and stopped at the end.
    """
    if config.rollout.attach:
        yield config.rollout.attach
        return
    placement = check_engines(config, platform)
    with ProcessTree(directory / "logs", GRACE_S) as tree:
        cluster = local_cluster(config, platform, placement, tree, key)
        for engine in cluster.engines():
            tree.launch(engine)
        urls = [cluster.engine_url(engine) for engine in cluster.engines()]
        deadline = time.monotonic() + config.run.startup_timeout_s
        logs = directory / "logs"
        print_line(f"starting {counted(len(urls), 'engine')}, half a minute or more; logs: {logs}")
        while not all(map(engine_answers, urls)):
            if ended := tree.ended():
                raise PaNpuError(
                    f"{ended[0].name} ended while it started; see "
                    f"{directory / 'logs'}/{ended[0].name}.log"
                )
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"engines did not answer within {config.run.startup_timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        yield urls


class Untrained:
    """An engine whose weights came from its model directory: its tokens are of version 0."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.name = engine.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *arguments: Any, **options: Any) -> list[Generation]:
        """Generates with the engine, and sets the version of each generation."""
        generations = await self._engine.generate(*arguments, **options)
        return [replace(generation, version=_VERSION) for generation in generations]


async def _evaluate(
    config: Config,
    spec: ModelSpec,
    urls: Sequence[str],
    key: str,
    tokenizer: Any,
    sets: Mapping[str, Sequence[Prompt]],
) -> Evaluation:
    kind = engine_kind(config.rollout.backend)
    async with AsyncExitStack() as stack:
        clients: list[Any] = [Untrained(kind.client(url, spec.vocab_size, key)) for url in urls]
        pool = await stack.enter_async_context(EnginePool((), config.rollout.probe_timeout_s))
        for index, client in enumerate(clients):
            pool.add(client, settings=config.rollout.settings_of(index))
            await client.wait_ready(deadline_s=config.run.startup_timeout_s)
            pool.serve(client)
        longest = config.rollout.max_response_tokens
        rewards = await stack.enter_async_context(
            RewardPool(config.reward, config.run.dir, longest)
        )
        sampling = Sampling(longest, 1.0, stop_token_ids=spec.eos_token_ids)
        environment = make_environment(config, tokenizer)
        await stack.enter_async_context(opened(environment, config.run.startup_timeout_s))
        evaluator = Evaluator(config, sets, pool, evaluated(environment), rewards, sampling)
        return await evaluator.evaluate(_VERSION)
