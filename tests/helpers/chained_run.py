"""A run directory with a chain, made up by the writers of a real run: samples, records and checkpoints, no process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.checkpoints import directories
from pa_npu.checkpoints.provenance import (
    arrangement_of,
    config_tree,
    model_fingerprint,
    trained_configuration,
)
from pa_npu.config.load import dump_config, load_config
from pa_npu.config.schema import Config
from pa_npu.samples.group import Group
from pa_npu.samples.group_digest import digest_group
from pa_npu.samples.types import SampleBuilder
from pa_npu.telemetry.chain import ChainWriter, digest_of_values, group_fields, lines_digest
from pa_npu.telemetry.records import MetricsWriter, RecordFile, json_line
from pa_npu.telemetry.sample_store import KeptResponse, SampleStore

GROUPS, RESPONSES, PROMPT = 4, 3, 5
SOFTWARE = {"pa_npu": "1", "python": "3.11", "torch": "2.7.1", "engines": "vllm 0.11.0"}


@dataclass(frozen=True)
class Step:
    """The numbers of an iteration that a test may change before the run is written.

    Arrays are [groups, responses], tokens and logprobs [groups, responses, tokens].
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    gradient_norms: list[float] = field(default_factory=lambda: [0.25])
    data: dict[str, Any] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)  # before and after
    replicas: int = 2


def step(iteration: int) -> Step:
    rng = np.random.default_rng(iteration)
    size = (GROUPS, RESPONSES, 6)
    return Step(
        tokens=rng.integers(0, 50, size).astype(np.int32),
        logprobs=-rng.random(size).astype(np.float32),
        rewards=rng.integers(0, 2, size[:2]).astype(np.float32),
        data={"position": GROUPS * iteration, "fingerprint": "f"},
        weights=[f"w{iteration}", f"w{iteration + 1}"],
    )


def make_chained_run(
    directory: Path,
    steps: list[Step],
    model: Path,
    first: int = 0,
    software: Mapping[str, str] = SOFTWARE,
    **sections: dict[str, Any],
) -> Path:
    """Writes the iterations from `first` on, as a run does that begins or goes on there; returns
    the directory.
    """
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    values = {
        "run": {"dir": str(directory), "device": "cpu"},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "train.jsonl"},
        "schedule": {"order": "prompt"},
        "rollout": {"env": {"HF_TOKEN": "hf_secret_of_the_run"}},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    config = Config.model_validate(values)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(dump_config(config))
    tree = config_tree(config)
    samples_file = RecordFile(directory / "samples.jsonl")
    store = SampleStore(directory, first, str)
    with MetricsWriter(directory, first) as metrics, ChainWriter(directory, first) as chain:
        for iteration, numbers in enumerate(steps, start=first):
            record = json_line(
                metrics.write(
                    {"iteration": iteration, "reward_mean": float(numbers.rewards.mean())}
                )
            )
            short = json_line({"iteration": iteration, "index": 0})
            samples_file.write(short)
            store.write(
                iteration, [row for index in range(2) for row in _kept(iteration, index, numbers)]
            )
            values = _values(tree, iteration, numbers)
            values |= {"software": dict(software), "model": model_fingerprint(model)}
            values |= {"record": lines_digest([record]), "samples": lines_digest([short])}
            chain.write({**values, "checkpoints": _checkpoint(directory, iteration)})
    store.close()
    samples_file.close()
    return directory


def write_chain(directory: Path, steps: list[Step], software: Mapping[str, str] = SOFTWARE) -> None:
    """Adds a chain to a run directory that has a configuration; its lines know of no other file."""
    tree = config_tree(load_config([str(directory / "config.yaml")]))
    of_run = {"software": {**SOFTWARE, **software}, "model": "m", "record": "", "samples": ""}
    with ChainWriter(directory, 0) as chain:
        for iteration, numbers in enumerate(steps):
            chain.write({**_values(tree, iteration, numbers), **of_run})


def _values(tree: dict[str, Any], iteration: int, numbers: Step) -> dict[str, Any]:
    """The values of a line that follow from the configuration and the iteration's numbers."""
    digests = []
    for index in range(GROUPS):
        place = (index % numbers.replicas, index // numbers.replicas)
        digests.append(digest_group(_group(iteration, index, numbers), {place: None}))
    return {
        "iteration": iteration,
        "configuration": digest_of_values(trained_configuration(tree)),
        "arrangement": arrangement_of(tree),
        "data": digest_of_values(numbers.data),
        **group_fields(digests[::-1]),  # in any order of arrival
        "gradient_norms": tuple(norm.hex() for norm in numbers.gradient_norms),
        "weights_before": numbers.weights[0],
        "weights_after": numbers.weights[1],
    }


def _checkpoint(directory: Path, version: int) -> dict[str, str]:
    """Completes a checkpoint of this version, of every second one."""
    if version % 2:
        return {}
    temporary = directories.start(directory / directories.CHECKPOINTS, version)
    (temporary / "weights").write_bytes(bytes(range(64)))
    meta = directories.CheckpointMeta(
        version=version,
        updates=version,
        data={},
        seed=1,
        layout={},
        model={"path": "m", "fingerprint": "f"},
        reference=None,
        config={},
        config_digest="",
        files=directories.list_files(temporary),
        digests=directories.collect_digests(temporary, 0),
    )
    directories.commit(temporary, meta)
    return {str(version): json.loads(meta.dump())["digest"]}


def _advantages(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()).astype(np.float32)


def _group(iteration: int, index: int, numbers: Step) -> Group:
    samples = []
    for tokens, logprobs in zip(numbers.tokens[index], numbers.logprobs[index], strict=True):
        builder = SampleBuilder(np.arange(PROMPT, dtype=np.int32))
        builder.write(tokens, logprobs, iteration)
        samples.append(builder.finish(True, ""))
    rewards = numbers.rewards[index]
    identity = {
        "run_seed": 1,
        "iteration": iteration,
        "index": index,
        "prompt_id": GROUPS * iteration + index,
    }
    return Group.from_samples(samples, rewards, _advantages(rewards), **identity)


def _kept(iteration: int, index: int, numbers: Step) -> list[KeptResponse]:
    advantages = _advantages(numbers.rewards[index])
    return [
        KeptResponse(
            iteration=iteration,
            index=index,
            response=response,
            prompt_id=GROUPS * iteration + index,
            prompt="what a prompt says",
            prompt_tokens=PROMPT,
            answer="",
            text="what a response says",
            finish_reason="stop",
            version=iteration,
            reward=float(numbers.rewards[index, response]),
            rewards={"format": 1.0},
            advantage=float(advantages[response]),
            correct=True,
            errors=(),
            tokens=numbers.tokens[index, response].tolist(),
            logprobs=numbers.logprobs[index, response].tolist(),
        )
        for response in range(RESPONSES)
    ]
