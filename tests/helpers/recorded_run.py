"""A run directory as a run leaves it whose engines and trainers have known costs: iterations in virtual time, written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.dispatch.schedule import Schedule, same_windows
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.subjects import VirtualCluster, VirtualGroup
from pa_npu.planning.prediction.costs import (
    EngineCost,
    GroupSeconds,
    TrainerCost,
    computed_prompt_tokens,
)
from pa_npu.platform.typical import typical_speed
from tools.simulate import simulate

ENGINE = EngineCost(0.004, 0.0003, 2e-7, 6e-5, 128)
TRAINER = TrainerCost(0.012, 4e-11, 0.02, 0.15)
BEGAN_S = 1_790_000_000.0


def tree(directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """Keys of a run of a small model on cores; sections of `changes` are merged in."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory), "device": "cpu"},
        "model": {"path": str(directory.parent / "model"), "dtype": "fp32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 512},
        "rollout": {
            "engines": 1,
            "max_response_tokens": 256,
            "responses_per_prompt": 8,
            "window": 64,
        },
        "trainer": {"devices": 1},
        "schedule": {"iterations": 6, "prompts_per_iteration": 24, "dispatch": "in-order"},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections


def model(directory: Path) -> ModelSpec:
    """A model directory of the size of a test's."""
    directory.mkdir(exist_ok=True)
    shape = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(shape))
    return ModelSpec.read(str(directory))


def shapes(config: Config, iteration: int) -> list[tuple[int, list[int]]]:
    """Prompts and responses of an iteration: heavy-tailed, all different."""
    rng = np.random.default_rng([7, iteration])
    actual = []
    for _ in range(config.schedule.prompts_per_iteration):
        center = 40 * np.exp(0.6 * rng.standard_normal())
        drawn = center * np.exp(0.4 * rng.standard_normal(config.rollout.responses_per_prompt))
        actual.append((int(rng.integers(16, 300)), [int(n) for n in np.clip(drawn, 1, 256)]))
    return actual


def iteration_s(config: Config, spec: ModelSpec, groups: list[tuple[int, list[int]]]) -> Any:
    """The outcome of an iteration with the true costs, its context summed exactly per group."""
    typical = typical_speed("cpu")
    seconds = GroupSeconds(config, spec, TRAINER, typical)
    tokens = sum(sum(lengths) for _, lengths in groups)
    context = sum(n * (prompt + n / 2) for prompt, lengths in groups for n in lengths) / tokens
    names = [f"http://127.0.0.1:{8100 + n}" for n in range(config.rollout.engines)]
    cluster = VirtualCluster(
        dict.fromkeys(names, ENGINE.speed(context)),
        config.rollout.max_num_seqs,
        config.mesh.data,
        step_s=TRAINER.step_s,
    )
    virtual = [
        VirtualGroup(
            index,
            computed_prompt_tokens(prompt, 8, typical.prefix_block),
            tuple(map(float, lengths)),
            seconds(prompt, lengths),
            8.0 * prompt,
        )
        for index, (prompt, lengths) in enumerate(groups)
    ]
    window = config.rollout.window if isinstance(config.rollout.window, int) else 64
    schedule = Schedule("constant", tuple(range(len(groups))), (same_windows(names, window),))
    return simulate(cluster, virtual, schedule)


def write_run(directory: Path, *, slower: float = 1.0, timeline: bool = True) -> Path:
    """slower: by which iterations took longer than their engines and trainers explain. timeline:
    groups are recorded one by one.
    """
    spec = model(directory.parent / "model")
    config = Config.model_validate(tree(directory))
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(config))
    records, events, trained, clock_s = [], [], [], BEGAN_S
    seconds = GroupSeconds(config, spec, TRAINER, typical_speed("cpu"))
    for number in range(config.schedule.iterations):
        groups = shapes(config, number)
        outcome = iteration_s(config, spec, groups)
        lengths = [length for _, group in groups for length in group]
        for timing in outcome.timings:
            prompt, of_group = groups[timing.index]
            args = {
                "iteration": number,
                "tokens": sum(of_group),
                "prompt": prompt,
                "lengths": of_group,
            }
            span = {"start": clock_s + timing.start_s, "end": clock_s + timing.end_s, "args": args}
            events.append(
                {"name": f"group {timing.index}", "lane": f"engine {timing.engine}", **span}
            )
        at_s = clock_s
        for index, (prompt, of_group) in enumerate(groups):
            took_s = seconds(prompt, of_group)
            trained.append(
                {
                    "name": f"group {index}",
                    "lane": "microbatches",
                    "start": at_s,
                    "end": at_s + took_s,
                }
            )
            at_s += took_s
        end_s = clock_s + outcome.end_s * 1.5 + 10.0
        trained.append(
            {
                "name": "iteration",
                "lane": "main",
                "start": clock_s,
                "end": end_s,
                "args": {"iteration": number},
            }
        )
        records.append(
            {
                "iteration": number,
                "iteration_s": slower * outcome.end_s + TRAINER.border_s,
                "generate_s": outcome.generated_s,
                "train_s": outcome.train_s,
                "step_s": TRAINER.step_s,
                "publish_s": TRAINER.border_s,
                "periodic": True,
                "groups": len(groups),
                "prompt_length_mean": float(np.mean([prompt for prompt, _ in groups])),
                "response_length_mean": float(np.mean(lengths)),
                "learned": {
                    "decode_step_s": 0.004,
                    "decode_sequence_s": 0.00033,
                    "prompt_token_s": 6e-5,
                },
            }
        )
        clock_s = end_s + 1.0
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    if timeline:
        (directory / "timeline").mkdir()
        for name, actual in (("coordinator", events), ("trainer-0", trained)):
            (directory / "timeline" / f"{name}.jsonl").write_text(
                "".join(json.dumps(event) + "\n" for event in actual)
            )
    return directory
