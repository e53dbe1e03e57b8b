"""A run directory as a run leaves it, made up: curves that learn, two engines and two trainers on a clock, hostile texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.evaluation.results import GREEDY, Judged, results_file, wilson, write_results
from pa_npu.telemetry.sample_store import KeptResponse, SampleStore, Stretch, TrainerLogprobs

ITERATIONS, GROUPS, RESPONSES = 12, 6, 4
ENGINES = ("http://127.0.0.1:8100", "http://127.0.0.1:8101")
BEGAN_S = 1_790_000_000.0
ITERATION_S = 10.0
HOSTILE = (
    "<img src=x "
    'onerror="window.hacked=1"><script>window.hacked=2</script></script><!--\u202eevil\u202c '
    "\x1b[31mred\x07 \x00"
)
SECRET = "hf_not_for_the_page"
QUESTIONS = 10


def templated(question: str) -> str:
    """The question as a chat template puts it."""
    return (
        "<|im_start|>system\nBe "
        f"brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def make_run(directory: Path, iterations: int = ITERATIONS, **sections: dict[str, Any]) -> Path:
    """The directory. The whole of it takes a fraction of a second."""
    directory.mkdir(parents=True)
    config = Config.model_validate(
        {
            "run": {"dir": str(directory), "device": "cpu"},
            "model": {"path": "models/tiny"},
            "data": {"train": "train.jsonl", "test": "test.jsonl"},
            "rollout": {
                "engines": 2,
                "max_response_tokens": 64,
                "env": {"HF_TOKEN": SECRET, "OMP_NUM_THREADS": "1"},
            },
            "trainer": {"devices": 2},
            "schedule": {"iterations": ITERATIONS, "prompts_per_iteration": GROUPS},
            **sections,
        }
    )
    (directory / "config.yaml").write_text(dump_config(config))
    lines(directory / "metrics.jsonl", [metrics(iteration) for iteration in range(iterations)])
    evaluations = [evaluation(version) for version in range(0, iterations + 1, 4)]
    lines(directory / "evaluations.jsonl", evaluations)
    for version in range(0, iterations + 1, 4):
        write_results(results_file(directory, version), judged(version))
    write_timeline(directory, iterations)
    write_samples(directory, min(iterations, 3))
    logs = directory / "logs"
    logs.mkdir()
    (logs / "coordinator.log").write_text(
        "2026-01-01 00:00:00.000 I coordinator main: begun\n2026-01-01 00:00:01.000 W coordinator "
        f"pool: slow {HOSTILE}\n"
    )
    (logs / "launcher.log").write_text(
        "2026-01-01 00:00:00 engine-0 on core 0\n2026-01-01 00:01:00 done\n"
    )
    (logs / "trainer-0.log").write_text(
        "2026-01-01 00:00:00.000 E trainer-0 loop: something failed\n"
    )
    return directory


def evaluation(version: int) -> dict[str, Any]:
    """Makes an evaluation of two sets; the second has samples, and is cut short at version 4."""

    def share(value: float) -> dict[str, Any]:
        low, high = wilson(value, 200)
        return {"value": value, "low": low, "high": high, "questions": 200}

    part = version / ITERATIONS
    lengths = {"length_mean": 40.0, "length_median": 38.0, "length_95": 60, "truncated_ratio": 0.02}
    sampled = {
        "avg@8": share(0.1 + 0.3 * part),
        "pass@8": share(0.3 + 0.4 * part),
        "maj@8": share(0.15 + 0.35 * part),
    }
    gained = {
        "value": 0.6 * part,
        "low": 0.6 * part - 0.04,
        "high": 0.6 * part + 0.04,
        "questions": 200,
    }
    since = {"gsm8k": {"greedy": gained}}
    return {
        "version": version,
        "accuracy": round(0.31 + 0.6 * part, 3),
        "differences": {"first": {"version": 0, "sets": since}} if version else {},
        "questions": 200 if version == 4 else 400,
        "planned": 400,
        "seconds": 1.5,
        "sets": {
            "gsm8k": {
                "questions": 200,
                "responses": 200,
                "metrics": {"greedy": share(0.31 + 0.6 * part)},
                **lengths,
            },
            "aime24": {"questions": 200, "responses": 1600, "metrics": sampled, **lengths},
        },
    }


def judged(version: int) -> list[Judged]:
    """Makes the greedy answers to gsm8k: version 12 has lost question 0 and gained 4 to 8; 1, 2, 3
    are always right, 9 wrong.
    """

    def is_right(question: int) -> bool:
        return question < 4 + 5 * version // ITERATIONS and not (
            question == 0 and version == ITERATIONS
        )

    def response(question: int) -> Judged:
        final = str(question if is_right(question) else -1)
        return Judged(
            name="gsm8k",
            question=question,
            prompt=templated(f"What is {question}?" + (HOSTILE if question == 0 else "")),
            answer=str(question),
            kind=GREEDY,
            number=0,
            text=f"<think>\nhm {HOSTILE}\n</think>\nversion {version} says {final}",
            final=final,
            correct=is_right(question),
            reward=float(is_right(question)),
            tokens=12,
            finished=True,
        )

    return [response(question) for question in range(QUESTIONS)]


def metrics(iteration: int) -> dict[str, Any]:
    part = iteration / (ITERATIONS - 1)
    wave = math.sin(iteration * 2.1)
    reward = 0.3 + 0.62 * part + 0.03 * wave
    return {
        "iteration": iteration,
        "version": iteration,
        "reward_mean": reward + 0.05,
        "rewards": {"math": reward, "format": 0.8 + 0.2 * part},
        "accuracy": reward,
        "accuracy_dispatched": reward,
        "equal_reward_ratio": 0.2 + 0.2 * part,
        "entropy": 0.5 - 0.3 * part + 0.02 * wave,
        "kl": 0.02 * part,
        "loss": 0.01 * wave,
        "grad_norm": 0.4 + 0.1 * wave,
        "response_length_mean": 30 + 12 * part + wave,
        "truncated_ratio": 0.02 + 0.01 * wave,
        "logprob_diff_mean": 1.2e-4 * (1 + 0.1 * wave),
        "logprob_diff_max": 4e-3,
        "logprob_k3": 3e-8,
        "logodds_diff_mean": 2e-4 * (1 + 0.1 * wave),
        "logodds_diff_limit": 2e-3,
        "logodds_slope": 1e-5,
        "logodds_slope_limit": 1e-4,
        "iteration_s": ITERATION_S + 0.3 * wave,
        "generate_s": 8.2,
        "train_s": 5.1,
        "publish_s": 0.5,
        "trainer_idle": 0.4,  # as write_timeline has it
        "engine_idle": 0.265,
        "tail_waste": 0.12,
        "tpspd": 610 + 80 * part + 10 * wave,
        "tpspd_response": 400 + 60 * part,
        "tokens_prompt": 8000,
        "tokens_response": 16000,
        "tokens_computed": 18000,
        "window": 64,
        "learning_rate": 2e-4,
        "memory_trainer_host_bytes": 3.1e9,
        "memory_engine_host_bytes": 2.2e9 + 1e8 * wave,
        "memory_coordinator_bytes": 4.1e8,
        "learned": {"decode_step_s": 0.003},
        "engines": {"http://127.0.0.1:8100": {"requests": 3, "tokens": 900}},
        "devices": 4,
        "time": BEGAN_S + ITERATION_S * (iteration + 1),
    }


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def span(name: str, lane: str, start_s: float, end_s: float, **args: Any) -> dict[str, Any]:
    return {
        "name": name,
        "lane": lane,
        "start": start_s,
        "end": end_s,
        **({"args": args} if args else {}),
    }


def write_timeline(directory: Path, iterations: int) -> None:
    """Publishes end at BEGAN_S + 10 i.

    Of an iteration's 10 s trainers wait 3 s for the first group and 1 s for the border.
    """
    coordinator: list[dict[str, Any]] = [
        {"process": "coordinator", "pid": 10, "start": BEGAN_S - 5}
    ]
    trainers: list[list[dict[str, Any]]] = [
        [{"process": f"trainer-{rank}", "pid": 20 + rank, "start": BEGAN_S - 5}]
        for rank in range(2)
    ]
    coordinator.append(span("publish", "main", BEGAN_S - 0.5, BEGAN_S, version=0))
    for iteration in range(iterations):
        start_s = BEGAN_S + ITERATION_S * iteration
        for group in range(GROUPS):
            engine = f"engine {ENGINES[group % 2]}"
            first_s = start_s + 0.2 + (group // 2) * 1.6
            coordinator.append(
                span(
                    f"group {group}",
                    engine,
                    first_s,
                    first_s + 2.8 + 0.3 * group,
                    iteration=iteration,
                )
            )
            ended_s = first_s + 2.8 + 0.3 * group
            coordinator.append(
                span(f"reward {group}", "rewards", ended_s, ended_s + 0.15, iteration=iteration)
            )
        for events in trainers:
            events.append(span("wait for group", "wait", start_s, start_s + 3.0, slot=0))
            for part in range(5):
                events.append(
                    span(
                        f"group {part}",
                        "microbatches",
                        start_s + 3 + 1.1 * part,
                        start_s + 4 + 1.1 * part,
                    )
                )
            events.append(span("step", "main", start_s + 8.5, start_s + 9.0))
            if iteration % 4 == 3:
                ended_s = start_s + ITERATION_S
                events.append(
                    span("checkpoint", "main", ended_s - 0.01, ended_s, version=iteration + 1)
                )
            events.append(span("wait for engines", "main", start_s + 9.0, start_s + 10.0))
        coordinator.append(
            span("wait for trainers", "main", start_s + 8.6, start_s + 9.5, version=iteration + 1)
        )
        coordinator.append(
            span("publish", "main", start_s + 9.5, start_s + 10.0, version=iteration + 1)
        )
    lines(directory / "timeline" / "coordinator.jsonl", coordinator)
    for rank, events in enumerate(trainers):
        lines(directory / "timeline" / f"trainer-{rank}.jsonl", events)
    launcher = [
        {"process": "launcher", "pid": 1, "start": BEGAN_S - 6},
        span("begin", "run", BEGAN_S - 6, BEGAN_S - 6, owner=None),
        span("engines", "run", BEGAN_S - 6, BEGAN_S - 6, urls=list(ENGINES)),
        span("start engine-0", "engine-0", BEGAN_S - 5, BEGAN_S - 2),
    ]
    if iterations == ITERATIONS:
        launcher.append(span("run", "run", BEGAN_S - 5, BEGAN_S + 500, outcome="finished"))
    lines(directory / "timeline" / "launcher.jsonl", launcher)


def end_run(
    directory: Path, outcome: str, cause: str, process: str = "", log: tuple[str, ...] = ()
) -> None:
    """Records that the run has ended early."""
    end = span(
        "run",
        "run",
        BEGAN_S - 5,
        BEGAN_S + 50,
        outcome=outcome,
        cause=cause,
        process=process,
        lines=list(log),
    )
    with (directory / "timeline" / "launcher.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")


def resume_run(directory: Path, first: int, down_s: float, by_launcher: bool = False) -> None:
    """Continues the timeline from version `first`, `down_s` after the end. by_launcher: it is a
    restart, not a resume.
    """
    at_s = BEGAN_S + 500 + down_s
    started = [{"process": "coordinator", "pid": 11, "start": at_s}]
    begins = [span("publish", "main", at_s, at_s + 0.5, version=first)]
    ends = [span("publish", "main", at_s + 10, at_s + 10.5, version=first + 1)]
    events = {"coordinator": [*started, *begins, *ends]}
    if not by_launcher:
        events["launcher"] = [{"process": "launcher", "pid": 2, "start": at_s - 1}]
    for name, more in events.items():
        with (directory / "timeline" / f"{name}.jsonl").open("a") as file:
            file.write("".join(json.dumps(event) + "\n" for event in more))


def session_turns(response: int) -> list[dict[str, Any]]:
    """Makes the turns of group 2: responses 0 and 1 are branches of one session, which share its
    first turn.
    """

    def turn(
        number: int, written: int, trained: bool = True, reward: float | None = None
    ) -> dict[str, Any]:
        shown = f"before {number} {HOSTILE}"
        session = {
            "session": max(0, response - 1),
            "number": number,
            "shown": shown,
            "written": written,
        }
        return {**session, "trained": trained, "reward": reward}

    if response > 1:
        return [turn(0, 9 + response)]
    return [turn(0, 4, response == 0, 0.5), turn(1, 5) if response == 0 else turn(2, 10)]


def kept_responses(iteration: int) -> list[KeptResponse]:
    """Group 0 is hostile, group 1 all equal, group 2 of agents' sessions, the others mixed."""
    rng = np.random.default_rng(iteration)
    rows = []
    for index in range(GROUPS):
        for response in range(RESPONSES):
            right = index == 1 or bool((response + index) % 2)
            answer = 12 * index + (0 if right else 1)
            text = HOSTILE if index == 0 and response == 0 else f"12 x {index} is\n#### {answer}"
            tokens = list(range(3, 3 + 9 + response))
            advantage = 0.87 if right else -0.87
            if index == 1:
                advantage = 0.0
            rows.append(
                KeptResponse(
                    iteration=iteration,
                    index=index,
                    response=response,
                    prompt_id=100 + index,
                    prompt=templated(f"What is 12 x {index}?" + (HOSTILE if index == 0 else "")),
                    prompt_tokens=7,
                    answer=str(12 * index),
                    text=text,
                    finish_reason="length" if index == 3 and response == 2 else "stop",
                    version=iteration,
                    reward=1.2 if right else 0.2,
                    rewards={"math": float(right), "my_reward:brevity": 0.2},
                    advantage=advantage,
                    correct=right,
                    errors=("format: " + HOSTILE,) if index == 0 else (),
                    tokens=tokens,
                    logprobs=(-rng.exponential(0.4, len(tokens))).astype(np.float32).tolist(),
                    turns=session_turns(response) if index == 2 else (),
                )
            )
    return rows


def piece(token: int) -> str:
    return [
        "<b>",
        "12",
        " x",
        " is",
        "\n",
        "####",
        " 4",
        "8",
        "\u202e",
        "<|end|>",
        "\ud800",
        " so",
    ][token % 12]


def write_samples(directory: Path, iterations: int) -> None:
    store = SampleStore(directory, 0, piece)
    trainer = TrainerLogprobs(directory, 0, 4)
    for iteration in range(iterations):
        rows = kept_responses(iteration)
        store.write(iteration, rows)
        for row in rows:
            difference = torch.linspace(-1e-3, 2e-3, len(row.logprobs))
            trainer.add(
                iteration,
                [(row.index, row.response)],
                [len(row.tokens)],
                torch.tensor(row.logprobs) + difference,
            )
        trainer.write()
    trainer.close()
    store.close()


def make_supervised_run(directory: Path, iterations: int = ITERATIONS) -> Path:
    """The directory of a run on rows of data: no engine, no reward, a loss on held-out rows."""
    directory.mkdir(parents=True)
    config = Config.model_validate(
        {
            "run": {"dir": str(directory), "device": "cpu"},
            "model": {"path": "models/tiny"},
            "data": {"train": "train.jsonl", "test": "test.jsonl"},
            "algorithm": {"name": "sft"},
            "schedule": {"iterations": iterations, "prompts_per_iteration": GROUPS},
        }
    )
    (directory / "config.yaml").write_text(dump_config(config))
    records = []
    for iteration in range(iterations):
        record = {
            "iteration": iteration,
            "version": iteration,
            "loss": 0.5 * 0.8**iteration,
            "entropy": 0.4 * 0.9**iteration,
            "grad_norm": 0.3,
            "response_length_mean": 19.5,
            "truncated_ratio": 0.0,
            "rows": GROUPS * RESPONSES,
            "epoch": 0.1 * (iteration + 1),
            "iteration_s": 1.9,
            "generate_s": 0.1,
            "train_s": 1.5,
            "trainer_idle": 0.05,
            "tpspd": 2000.0,
            "learning_rate": 1e-3,
            "devices": 1,
            "time": BEGAN_S + 2.0 * (iteration + 1),
        }
        records.append(record)
    lines(directory / "metrics.jsonl", records)
    evaluations = []
    for version in range(0, iterations + 1, 4):
        loss = 0.6 * 0.8**version
        summary = {
            "loss": loss,
            "rows": 200,
            "tokens": 3870,
            "metrics": {"loss": {"value": loss}, "perplexity": {"value": math.exp(loss)}},
        }
        evaluations.append(
            {"version": version, "loss": loss, "seconds": 0.7, "sets": {"test": summary}}
        )
    lines(directory / "evaluations.jsonl", evaluations)
    store = SampleStore(directory, 0, piece)
    store.write(0, [kept_row(index, number) for index in range(2) for number in range(RESPONSES)])
    store.close()
    return directory


def kept_row(index: int, number: int) -> KeptResponse:
    """A row of two trained answers, the second of half the weight, with a question between them."""
    stretches = (
        Stretch(tokens=[1, 2, 3], weight=1.0),
        Stretch(tokens=[4, 5], weight=0.0),
        Stretch(tokens=[6, 7, 9], weight=0.5),
    )
    return KeptResponse(
        iteration=0,
        index=index,
        response=number,
        prompt_id=100 + index,
        prompt=templated(f"What is 12 x {index}?" + HOSTILE),
        prompt_tokens=7,
        answer="",
        text="12 x is",
        finish_reason="stop",
        version=-1,
        reward=0.0,
        rewards={},
        advantage=0.0,
        correct=False,
        errors=(),
        tokens=[1, 2, 3, 6, 7, 9],
        logprobs=[0.0] * 6,
        stretches=stretches,
    )
