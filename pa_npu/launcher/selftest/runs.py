"""Parts that start runs of a tiny model through the command line, as a user would, and read what the runs left."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from pa_npu import platform as platforms
from pa_npu.errors import UserError
from pa_npu.launcher.selftest import model
from pa_npu.launcher.selftest.parts import Bench, Finding
from pa_npu.telemetry.sample_store import read_samples

ITERATIONS = 12
LEARNT = 0.3  # reward at the end; 0.04 at the start
# mean |difference| of an engine's and another's log-probs of the same tokens
AGREEMENT = {"fp32": 1e-4, "bf16": 5e-2}
# of a gradient's change and a finite difference, as a share of it
FINITE_DIFFERENCE = {"fp32": 0.05, "bf16": 0.45}
_ENGINES = ("api_server", "pa_npu.engines")
_TRAINERS = ("pa_npu.trainer",)


def learns(bench: Bench) -> list[Finding]:
    """Makes a periodic run, and finds its reward, the engines' log-probs against the trainers'
    after each publish and against transformers', and the gradient against finite differences.
    """
    records = _run(
        bench, "periodic", ["schedule.stream=true", "schedule.finite_difference_every=1"]
    )
    dtype = _dtype(bench)
    errors = _finite_difference_errors(bench, "periodic")
    return [
        Finding("reward of the first iteration", records[0]["reward_mean"]),
        Finding("reward of the last three", _mean(records[-3:], "reward_mean"), LEARNT, least=True),
        Finding(
            "engine against trainer, mean difference, worst publish",
            max(record["logprob_diff_mean"] for record in records),
            AGREEMENT[dtype],
        ),
        Finding(
            "engine against transformers, mean difference, first weights",
            _against_transformers(bench),
            AGREEMENT[dtype],
        ),
        Finding("finite differences of the gradient", len(errors), 1, least=True),
        Finding(
            "gradient against a finite difference, worst",
            max(errors, default=0.0),
            FINITE_DIFFERENCE[dtype],
        ),
    ]


def _finite_difference_errors(bench: Bench, name: str) -> list[float]:
    """Returns the relative errors of the finite differences that rounding does not hide."""
    lines = (bench.folder / "runs" / name / "finite_differences.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        abs(record["measured"] - record["predicted"]) / abs(record["predicted"])
        for record in records
        if record["limit"] is not None
    ]


def equal(bench: Bench) -> list[Finding]:
    """Makes the same run synchronously; its weights must be the periodic run's.

    Another seed's are not, which is the control.
    """
    _run(bench, "synchronous", ["schedule.stream=false"])
    _run(bench, "other_seed", ["schedule.stream=false", "run.seed=2", "schedule.iterations=1"])
    changed = _changed(bench, "periodic", "synchronous")
    return [
        Finding("tensors that differ from the periodic run's", changed, 0),
        Finding(
            "control: tensors that another seed changes",
            _changed(bench, "periodic", "other_seed"),
            1,
            least=True,
        ),
    ]


def recovers(bench: Bench) -> list[Finding]:
    """Makes the periodic run with a trainer killed in one iteration and an engine in a later one."""
    killed: list[str] = []
    kept = ["schedule.stream=true", "checkpoint.every=1", "checkpoint.keep_last=2"]
    _run(bench, "killed", kept, lambda launcher: _kill(bench, launcher, killed))
    return [
        Finding("processes that were killed", len(killed), 2, least=True),
        Finding(
            "tensors that differ from the run without a kill",
            _changed(bench, "periodic", "killed"),
            0,
        ),
    ]


def speed(bench: Bench) -> list[Finding]:
    """Runs a larger random model for a few iterations; medians without the first."""
    small = bench.device == "cpu"
    hidden, layers, tokens = (256, 4, 32) if small else (2048, 16, 1024)
    folder = bench.folder / "speed_model"
    directory, data = model.make(folder, hidden=hidden, layers=layers)
    records = _run(
        bench,
        "speed",
        [
            f"model.path={directory}",
            f"data.train={data}",
            f"rollout.max_response_tokens={tokens}",
            "schedule.iterations=4",
            "run.deterministic=false",
            "rollout.batch_invariant=false",
        ],
    )[1:]
    trained = [
        record["tokens_computed"] / record["train_s"] for record in records if record["train_s"]
    ]
    weights = sum(
        file.stat().st_size
        for file in (bench.folder / "runs" / "speed" / "hf").glob("*.safetensors")
    )
    sent = [
        weights / record["border_send_s"] / 1e9 for record in records if record["border_send_s"]
    ]
    return [
        Finding("tokens per second per device", _mean(records, "tpspd"), unit="tokens/s"),
        Finding("trainers, tokens computed", statistics.median(trained), unit="tokens/s"),
        Finding("a publish, sending", statistics.median(sent) if sent else 0.0, unit="GB/s"),
        Finding("trainers idle", _mean(records, "trainer_idle")),
        Finding("engines idle", _mean(records, "engine_idle")),
    ]


def accept_periodic(bench: Bench) -> list[Finding]:
    """Makes the recipe's own run, periodic, by which a contributed recipe is judged."""
    return _accept(bench, "periodic", "schedule.stream=true")


def accept_synchronous(bench: Bench) -> list[Finding]:
    """Makes the same run, synchronous."""
    return _accept(bench, "synchronous", "schedule.stream=false")


def _accept(bench: Bench, name: str, mode: str) -> list[Finding]:
    settings = [
        *(word for file in bench.configs for word in ("--config", file)),
        f"run.device={bench.device}",
        f"model.path={bench.model}",
        f"data.train={bench.data}",
        f"schedule.iterations={bench.iterations}",
        "schedule.compare_iterations=0",
        mode,
        *bench.overrides,
    ]
    records = _launch(bench, name, settings)
    tenth = max(len(records) // 10, 1)
    return [
        Finding("iterations", len(records), bench.iterations, least=True),
        Finding("reward of the first tenth", _mean(records[:tenth], "reward_mean")),
        Finding(
            "reward of the last tenth",
            _mean(records[-tenth:], "reward_mean"),
            _mean(records[:tenth], "reward_mean"),
            True,
        ),
        Finding(
            "tokens per second per device", _mean(records[1:] or records, "tpspd"), unit="tokens/s"
        ),
        *(
            Finding(
                f"peak memory, {place}, a process",
                _peak_bytes(records, f"{place}_bytes") / 2**30,
                unit="GiB",
            )
            for place in ("device", "host")
        ),
        Finding(
            "engine against trainer, mean difference, worst",
            max(record["logprob_diff_mean"] for record in records),
        ),
    ]


def _peak_bytes(records: Sequence[dict[str, Any]], ending: str) -> int:
    """Returns the largest peak of any process; 0 if none is measured, such as a device's on CPU.

    `ending`: of the keys, which says which memory they are about.
    """
    largest = 0
    for record in records:
        for key, peak in record.items():
            if key.startswith("memory_") and key.endswith(ending):
                largest = max(largest, peak or 0)
    return largest


def _dtype(bench: Bench) -> str:
    return "fp32" if bench.device == "cpu" else "bf16"


def _run(
    bench: Bench,
    name: str,
    further: Sequence[str],
    beside: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs the tiny model; see tiny_settings and _launch."""
    return _launch(bench, name, [*tiny_settings(bench), *further, *bench.overrides], beside)


def tiny_settings(bench: Bench) -> list[str]:
    """Make the tiny model where it is not there yet; returns the keys of its run, for any number of
    devices.

    Half of the devices have engines and half trainers; a single one has both.
    """
    directory = bench.folder / "tiny" / "model"
    data = bench.folder / "tiny" / "questions.jsonl"
    if not data.is_file():
        model.make(data.parent)
    count = 2 if bench.device == "cpu" else platforms.get(bench.device).device_count()
    half = max(count // 2, 1)
    return [
        f"run.device={bench.device}",
        f"model.path={directory}",
        f"model.dtype={_dtype(bench)}",
        f"data.train={data}",
        "run.deterministic=true",
        f"rollout.batch_invariant={str(bench.device != 'cpu').lower()}",
        f"rollout.engines={half}",
        f"trainer.devices={half}",
        "rollout.responses_per_prompt=8",
        "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=16",
        f"schedule.prompts_per_iteration={8 * half}",
        f"schedule.iterations={ITERATIONS}",
        "schedule.compare_iterations=0",
        "schedule.order=prompt",
        "optimizer.learning_rate=3e-3",
        "optimizer.warmup_iterations=1",
        "telemetry.samples=all",
        "reward.functions=[{name: 'pa_npu.launcher.selftest.model:digits'}]",
        *(["rollout.kv_cache_gib=0.25"] if bench.device == "cpu" else []),
        *(["placement.colocate=true"] if count == 1 else []),
    ]


def _launch(
    bench: Bench,
    name: str,
    settings: Sequence[str],
    beside: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> list[dict[str, Any]]:
    """Returns the records of a run's iterations.

    Raises UserError with its last line where it does not end with 0.
    """
    directory = bench.folder / "runs" / name
    output = bench.folder / "logs" / f"run_{name}.out"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "pa_npu.launcher", "run", f"run.dir={directory}", *settings],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        if beside is not None:
            threading.Thread(target=beside, args=(launcher,), daemon=True).start()
        code = launcher.wait()
    if code:
        last = output.read_text(errors="replace").strip().splitlines()[-1:] or [
            "nothing was written"
        ]
        raise UserError(
            f"the run '{name}' ended with code {code}: {last[0]}; see {output.name} and "
            f"runs/{name}/logs"
        )
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _mean(records: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(record[key] for record in records)


def _changed(bench: Bench, first_run: str, second_run: str) -> int:
    """Returns how many tensors of two runs' exports are not equal to the bit."""
    first = _exported(bench, first_run)
    second = _exported(bench, second_run)
    if not first or first.keys() != second.keys():
        raise UserError(
            f"the runs {first_run} and {second_run} exported {len(first)} and {len(second)} tensors"
        )
    return sum(not torch.equal(first[name], second[name]) for name in first)


def _exported(bench: Bench, run: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a run's export by name."""
    tensors = {}
    for file in (bench.folder / "runs" / run / "hf").glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def _against_transformers(bench: Bench) -> float:
    """Mean |difference| between the engines' log-probs of the first iteration and transformers' in
    fp32 on the host.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = bench.folder / "tiny" / "model"
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    differences = []
    for row in read_samples(bench.folder / "runs" / "periodic", 0):
        prompt = tokenizer(row["prompt"]).input_ids
        if len(prompt) != row["prompt_tokens"]:
            raise UserError(
                f"the prompt {row['prompt']!r} has {len(prompt)} tokens here and had "
                f"{row['prompt_tokens']}"
            )
        tokens = torch.tensor([[*prompt, *row["tokens"]]])
        with torch.no_grad():
            logprobs = reference(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        taken = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        differences.append((taken - torch.tensor(row["logprobs"])).abs())
    return torch.cat(differences).mean().item()


def _kill(bench: Bench, launcher: subprocess.Popen[bytes], killed: list[str]) -> None:
    """Kill a trainer rank once there is a checkpoint to go on from, and an engine some iterations
    later.
    """
    directory = bench.folder / "runs" / "killed"
    for words, iteration in ((_TRAINERS, 3), (_ENGINES, 7)):
        while launcher.poll() is None and _iterations(directory) < iteration:
            time.sleep(0.1)
        for child in (
            psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else ()
        ):
            with suppress(psutil.NoSuchProcess):  # some of its children are short-lived
                command = child.cmdline()
                if any(word in argument for argument in command for word in words):
                    child.send_signal(signal.SIGKILL)
                    killed.append(" ".join(command[:4]))
                    break


def _iterations(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0
