#!/usr/bin/env python
"""Time steps of reinforcement through `pa-npu serve` whose minibatches are streamed, against plain ones.

    python tools/bench_streaming.py [--engine vllm] [--groups 32] [--responses 8] [--tokens 64] [--hidden 128]

A client with the unmodified SDK samples groups of responses, all of one length, trains them in
minibatches, and makes a snapshot. Plain: all groups are sampled first, then all minibatches are
trained. Streamed: a minibatch is sent as soon as its groups are there, while the engine writes the
others. Steps of both ways alternate behind one of each that warms up. Printed are, as medians: of
a plain step the seconds of generation, training and snapshot; of both the whole step; the gain,
and the gain that streaming could bring,

    (G + T + S) / (max(G, T) + min(G, T) / minibatches + S)

which would need a core for the engine and one for the trainer. Generation has the load of the
snapshot and its probe in it. --max-num-seqs is small, so that groups end one after another.
Balanced is a case whose G and T are about the same: move --hidden, --layers and --prompt for T,
and --tokens for both.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import make_tiny_model
from tools.processes import ROOT, end_on_sigterm, started

READY_S = 300.0
CLIENT_S = 900.0
RANK = 8


@dataclass(frozen=True)
class Step:
    """Seconds: until the last sample, from there (plain) or from the first minibatch (streamed) to
    the end of training, of the snapshot, and of all of it.
    """

    generate_s: float
    train_s: float
    snapshot_s: float
    total_s: float


def main() -> int:
    options = parse_arguments()
    if options.client:
        print(json.dumps(steps_of_client(options)))
        return 0
    end_on_sigterm()
    if not (options.sdk / "tinker").is_dir():
        print(
            f"--sdk {options.sdk} has no tinker; install requirements/tinker.txt there",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(options, Path(folder))
    plain = [Step(*step) for step in steps["plain"]]
    streamed = [Step(*step) for step in steps["streamed"]]
    print(summary(options, plain, streamed))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sdk = os.environ.get("PA_NPU_TINKER", str(ROOT / ".venv-tinker"))
    parser.add_argument("--sdk", type=Path, default=Path(sdk), help="folder that has tinker's SDK")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    for name, value in (
        ("groups", 32),
        ("responses", 8),
        ("minibatches", 8),
        ("prompt", 64),
        ("tokens", 64),
        ("max-num-seqs", 32),
        ("hidden", 128),
        ("layers", 4),
        ("steps", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--client", nargs=2, metavar=("URL", "KEY_FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[list[float]]]:
    """Serves a model with random weights, and returns the steps of a client by their way."""
    sizes = ("--hidden", str(options.hidden), "--layers", str(options.layers))
    assert make_tiny_model.main(["--out", str(folder / "tiny"), "--random", *sizes]) == 0
    keys = {
        "model.path": folder / "tiny" / "model",
        "model.dtype": "fp32",
        "run.device": "cpu",
        "run.dir": folder / "run",
        "lora.rank": RANK,
        "data.max_prompt_tokens": options.prompt,
        "rollout.max_response_tokens": options.tokens,
        "rollout.backend": options.engine,
        "rollout.max_num_seqs": options.max_num_seqs,
        "service.port": 0,
        "service.unembed": "leave_out",
    }
    command = [sys.executable, "-m", "pa_npu.launcher", "serve"]
    command += [f"{name}={value}" for name, value in keys.items()]
    log = folder / "serve.log"
    with started(command, log) as server:
        url = address(server, log)
        argv = [sys.executable, __file__, *sys.argv[1:]]
        argv += ["--client", url, str(folder / "run" / "service" / "key")]
        path = os.pathsep.join(filter(None, (str(options.sdk), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "TINKER_TELEMETRY": "0"}
        client = subprocess.run(argv, env=env, stdout=subprocess.PIPE, timeout=CLIENT_S, check=True)
    return dict(json.loads(client.stdout.splitlines()[-1]))


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Returns the service's URL once it is ready."""
    deadline = time.monotonic() + READY_S
    while "ready: " not in log.read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the service did not become ready:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)
    return log.read_text().split("ready: ")[1].split()[0]


def steps_of_client(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Runs in the process that has the SDK."""
    client = BenchClient(options)
    steps: dict[str, list[list[float]]] = {"plain": [], "streamed": []}
    for number in range(options.steps + 1):
        for way in steps:
            step = client.step(number, is_streamed=way == "streamed")
            if number:  # the first ones warm up
                steps[way].append([step.generate_s, step.train_s, step.snapshot_s, step.total_s])
    return steps


class BenchClient:
    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        import tinker

        self._options = options
        self._tinker = tinker
        self._random = np.random.default_rng(0)
        url, key_file = options.client
        service = tinker.ServiceClient(base_url=url, api_key=Path(key_file).read_text().strip())
        self._client = service.create_lora_training_client(
            base_model="model", rank=RANK, seed=1
        ).result()
        self._sampler = self._client.save_weights_and_get_sampling_client().result()

    def step(self, number: int, *, is_streamed: bool) -> Step:
        options, types = self._options, self._tinker.types
        prompts = self._random.integers(10, 200, (options.groups, options.prompt)).tolist()
        # nothing ends a response but its length
        parameters = types.SamplingParams(max_tokens=options.tokens, temperature=1.0, stop=[])
        begun_s = time.perf_counter()
        arrived: queue.SimpleQueue[tuple[list[int], Any]] = queue.SimpleQueue()
        for prompt in prompts:
            future = self._sampler.sample(
                types.ModelInput.from_ints(prompt), options.responses, parameters
            )
            future.future().add_done_callback(
                lambda done, prompt=prompt: arrived.put((prompt, done))
            )
        each = options.groups // options.minibatches
        groups: list[Any] = []
        calls = []
        first_sent_s = None
        for _ in range(options.groups):
            prompt, done = arrived.get(timeout=CLIENT_S)
            groups.append((prompt, done.result().sequences))
            if is_streamed and len(groups) == each:
                first_sent_s = first_sent_s or time.perf_counter()
                calls.append(self._train(groups))
                groups = []
        generated_s = time.perf_counter()
        while groups:  # plain: all of them
            calls.append(self._train(groups[:each]))
            groups = groups[each:]
        update = self._client.optim_step(types.AdamParams(learning_rate=1e-5))
        for call in calls:
            call.result()
        update.result()
        trained_s = time.perf_counter()
        self._sampler = self._client.save_weights_and_get_sampling_client().result()
        ended_s = time.perf_counter()
        return Step(
            generated_s - begun_s,
            trained_s - (first_sent_s or generated_s),
            ended_s - trained_s,
            ended_s - begun_s,
        )

    def _train(self, groups: list[Any]) -> Any:
        types = self._tinker.types
        data = []
        for prompt, sequences in groups:
            before = [0.0] * (len(prompt) - 1)
            for sequence in sequences:
                tokens = [*prompt, *sequence.tokens]
                advantage = float(self._random.normal())
                advantages = before + [advantage] * len(sequence.tokens)
                inputs = {
                    "target_tokens": types.TensorData(
                        data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]
                    ),
                    "logprobs": types.TensorData(
                        data=before + list(sequence.logprobs),
                        dtype="float32",
                        shape=[len(tokens) - 1],
                    ),
                    "advantages": types.TensorData(
                        data=advantages, dtype="float32", shape=[len(tokens) - 1]
                    ),
                }
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
                    )
                )
        return self._client.forward_backward(data, "importance_sampling")


def summary(options: argparse.Namespace, plain: list[Step], streamed: list[Step]) -> str:
    generate_s = statistics.median(step.generate_s for step in plain)
    train_s = statistics.median(step.train_s for step in plain)
    snapshot_s = statistics.median(step.snapshot_s for step in plain)
    plain_s = statistics.median(step.total_s for step in plain)
    streamed_s = statistics.median(step.total_s for step in streamed)
    ideal = ideal_gain(generate_s, train_s, snapshot_s, options.minibatches)
    totals = [
        f"{name} {', '.join(f'{step.total_s:.2f}' for step in steps)}"
        for name, steps in (("plain", plain), ("streamed", streamed))
    ]
    last_s = statistics.median(step.generate_s for step in streamed)
    return "\n".join(
        (
            f"{options.groups} x {options.responses} responses of {options.tokens} tokens to "
            f"{options.prompt}, {options.minibatches} minibatches, {options.engine} with "
            f"{options.max_num_seqs} in flight, hidden {options.hidden} x {options.layers} layers",
            f"plain step: generation {generate_s:.2f} s, training {train_s:.2f} s, snapshot "
            f"{snapshot_s:.2f} s, all {plain_s:.2f} s",
            f"streamed step: {streamed_s:.2f} s, its last sample after {last_s:.2f} s",
            f"gain {plain_s / streamed_s:.2f}x; it could be {ideal:.2f}x",
            *totals,
        )
    )


def ideal_gain(generate_s: float, train_s: float, snapshot_s: float, minibatches: int) -> float:
    """Returns the gain of streaming if nothing but the order of the work limited it."""
    shorter_s, longer_s = sorted((generate_s, train_s))
    streamed_s = longer_s + shorter_s / minibatches + snapshot_s
    return (generate_s + train_s + snapshot_s) / streamed_s


if __name__ == "__main__":
    sys.exit(main())
