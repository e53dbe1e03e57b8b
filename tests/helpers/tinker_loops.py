"""Loops of clients that use tinker's SDK alone, as its cookbook writes them.

    python tinker_loops.py URL KEY_FILE LOOP OUT [option=value ...]

Each loop writes what it saw into OUT as JSON. It runs in an interpreter that has the SDK, and knows
nothing of the server.

sampling     what a sampler answers of a snapshot, beside the trainer's own log-probs
exact        steps, a custom loss, a state that is loaded, samples with log-probs: all to the bit
too_large    steps, of which large=1 has a call that is refused or fails between them
supervised   cross-entropy on rows of questions and answers; accuracy before and after
rl           samples in groups, rewards, importance sampling; plain=0 streams minibatches
preference   DPO as a custom loss on pairs
distill      the teacher's most likely tokens as targets
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types
from transformers import AutoTokenizer


def main() -> None:
    url, key_file, loop, out, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    service = tinker.ServiceClient(base_url=url, api_key=Path(key_file).read_text().strip())
    seen = LOOPS[loop](service, given)
    Path(out).write_text(json.dumps(seen))


def client_of(service: Any, given: dict[str, str]) -> Any:
    return service.create_lora_training_client(
        base_model="model", rank=int(given.get("rank", 8)), seed=int(given.get("seed", 3))
    ).result()


def datum_of(tokens: list[int], start: int, **inputs: Any) -> Any:
    """Returns a datum whose loss is of the tokens from `start` on."""
    weights = [float(place >= start) for place in range(1, len(tokens))]
    fields = {"target_tokens": tokens[1:], **(inputs or {"weights": weights})}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: types.TensorData(
                data=values,
                dtype="int64" if name == "target_tokens" else "float32",
                shape=[len(values)],
            )
            for name, values in fields.items()
        },
    )


def digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def exact(service: Any, given: dict[str, str]) -> list[Any]:
    """Everything that a client sees, as digests. pause: a file; before each step it is waited for
    to say at least so much, so that a test can end processes in between.
    """
    client = client_of(service, given)
    seen: list[Any] = []
    for step in range(int(given.get("steps", 4))):
        note(given, step)
        tokens = [(7 * step + 3 * place) % 200 + 5 for place in range(24)]
        data = [datum_of(tokens[:length], 4) for length in (24, 20, 16)]
        forward_backward = client.forward_backward(data, "cross_entropy")
        client.forward_backward(data[:1], "cross_entropy")
        optim_step = client.optim_step(types.AdamParams(learning_rate=3e-3, grad_clip_norm=1.0))
        answer = forward_backward.result()
        seen.append([output["logprobs"].data for output in answer.loss_fn_outputs])
        seen.append([answer.metrics, optim_step.result().metrics])
        if step % 2:
            sampler = resolved(client.save_weights_and_get_sampling_client())
            sampled = sampler.sample(
                prompt=types.ModelInput.from_ints(tokens[:6]),
                num_samples=3,
                sampling_params=types.SamplingParams(max_tokens=8, seed=step),
                include_prompt_logprobs=True,
            ).result()
            seen.append([[s.tokens, s.logprobs, s.stop_reason] for s in sampled.sequences])
            seen.append(sampled.prompt_logprobs)
    state = client.save_state(f"state-{given.get('label', 'a')}").result()
    loaded = service.create_training_client_from_state_with_optimizer(state.path).result()
    for trained in (client, loaded):
        answer = trained.forward_backward_custom(data, squares)
        trained.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        seen.append(
            [answer.result().metrics, trained.forward(data, "cross_entropy").result().metrics]
        )
    assert seen[-1] == seen[-2], "a loaded state goes on as the one that was saved"
    return [digest(part) for part in seen]


def too_large(service: Any, given: dict[str, str]) -> dict[str, Any]:
    """What the client sees of three steps, as digests, and of the large call."""
    client = client_of(service, given)
    seen: dict[str, Any] = {"steps": [], "error": None}
    for step in range(3):
        data = [datum_of([(11 * step + 5 * place) % 200 + 5 for place in range(24)], 4)]
        if step == 1:
            note(given, step)
            wait_for(given.get("until"))
            is_large = given.get("large") == "1"
            size = 150 if is_large else 8
            call = client.forward_backward if is_large else client.forward
            rows = [
                [(17 * row + 3 * place + row * place) % 200 + 5 for place in range(size)]
                for row in range(size)
            ]
            try:
                call([datum_of(row, 1) for row in rows], "cross_entropy").result()
            except Exception as error:
                seen["error"] = str(error)
        forward_backward = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        answer = forward_backward.result()
        seen["steps"].append(digest(list(answer.loss_fn_outputs[0]["logprobs"].data)))
    return seen


def sampling(service: Any, given: dict[str, str]) -> dict[str, Any]:
    """Two snapshots with a step between them, the older one asked again behind the newer. An error
    of the service is its text.
    """
    client = client_of(service, given)
    tokens = [(3 * place) % 200 + 5 for place in range(24)]
    prompt = types.ModelInput.from_ints(tokens)
    data = [datum_of(tokens, 1)]
    samplers = []
    seen: dict[str, Any] = {"trained": [], "scored": []}
    for _ in range(2):
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        answer = client.forward(data, "cross_entropy").result()
        seen["trained"].append(list(answer.loss_fn_outputs[0]["logprobs"].data))
        samplers.append(resolved(client.save_weights_and_get_sampling_client()))
    try:
        for sampler in (samplers[0], samplers[1], samplers[0]):
            seen["scored"].append(sampler.compute_logprobs(prompt).result()[1:])
    except Exception as error:
        seen["error"] = str(error)
        return seen
    sampler = samplers[1]
    parameters = types.SamplingParams(max_tokens=12, seed=5)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 30, "topk_sample_logprobs": 3}
    answer = sampler.sample(prompt, 3, parameters, **asked).result()
    seen["likely"] = answer.topk_prompt_logprobs
    seen["prompt_logprobs"] = answer.prompt_logprobs[1:]
    seen["samples"] = [[s.tokens, s.logprobs, s.stop_reason] for s in answer.sequences]
    seen["sample_likely"] = [s.topk_logprobs for s in answer.sequences]
    again = sampler.sample(prompt, 3, parameters).result()
    seen["again"] = [s.tokens for s in again.sequences]
    stops: list[Any] = [[], [seen["samples"][0][0][0]]]
    seen["stopped"] = []
    for stop in stops:
        parameters = types.SamplingParams(max_tokens=12, seed=5, stop=stop)
        (sequence,) = sampler.sample(prompt, 1, parameters).result().sequences
        seen["stopped"].append([len(sequence.tokens), sequence.stop_reason])
    return seen


def squares(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
    loss = sum((values**2).sum() for values in logprobs)
    return loss, {"squares:sum": float(loss.detach())}


def note(given: dict[str, str], step: int) -> None:
    """Says in the file `steps_file` which step begins."""
    if name := given.get("steps_file"):
        Path(name).write_text(str(step))


def wait_for(file: str | None) -> None:
    """Waits until a test has made the file."""
    deadline = time.monotonic() + 120.0
    while file is not None and not Path(file).exists():
        assert time.monotonic() < deadline, f"{file} was not made"
        time.sleep(0.05)


def resolved(sampler: Any) -> Any:
    return sampler.result() if hasattr(sampler, "result") else sampler


# Arithmetic


class Sums:
    """Questions with answers, as the tiny model of this project writes them."""

    def __init__(self, given: dict[str, str]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(given["model"])
        self.train = rows_of(given["train"])
        self.test = rows_of(given["test"])[: int(given.get("tested", 100))]
        self.end = self.tokenizer.eos_token_id

    def prompt(self, row: dict[str, str]) -> list[int]:
        message = [{"role": "user", "content": row["question"]}]
        return list(
            self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def answer(self, row: dict[str, str]) -> list[int]:
        return [*self.tokenizer(row["answer"], add_special_tokens=False)["input_ids"], self.end]

    def is_right(self, row: dict[str, str], tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text.rpartition("####")[2].strip() == row["answer"].rpartition("####")[2].strip()

    def accuracy(self, sampler: Any) -> float:
        greedy = types.SamplingParams(max_tokens=24, temperature=0.0)
        futures = [
            sampler.sample(types.ModelInput.from_ints(self.prompt(row)), 1, greedy)
            for row in self.test
        ]
        right = [
            self.is_right(row, future.result().sequences[0].tokens)
            for row, future in zip(self.test, futures, strict=True)
        ]
        return sum(right) / len(right)


def rows_of(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def supervised(service: Any, given: dict[str, str]) -> dict[str, Any]:
    sums, client = Sums(given), client_of(service, given)
    before = sums.accuracy(resolved(client.save_weights_and_get_sampling_client()))
    losses = []
    size, steps = int(given.get("batch", 64)), int(given.get("steps", 20))
    for step in range(steps):
        rows = sums.train[step * size : (step + 1) * size]
        data, num_trained = [], 0
        for row in rows:
            prompt, answer = sums.prompt(row), sums.answer(row)
            data.append(datum_of(prompt + answer, len(prompt)))
            num_trained += len(answer)
        rate = float(given.get("rate", 5e-3)) * (1 - step / steps)
        forward_backward = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=rate)).result()
        losses.append(forward_backward.result().metrics["loss:sum"] / num_trained)
    after = sums.accuracy(resolved(client.save_weights_and_get_sampling_client()))
    return {"before": before, "after": after, "losses": losses}


def rl(service: Any, given: dict[str, str]) -> dict[str, Any]:
    """plain=1: all groups are sampled, then trained in minibatches. plain=0: a minibatch is sent as
    soon as its groups are there, while engines write the others; one step either way.
    """
    sums, client = Sums(given), client_of(service, given)
    prompts, size = int(given.get("prompts", 32)), int(given.get("group", 8))
    minibatches = int(given.get("minibatches", 4))
    sampler = resolved(client.save_weights_and_get_sampling_client())
    before = sums.accuracy(sampler)
    rewards, times = [], []
    parameters = types.SamplingParams(max_tokens=24, temperature=1.0)
    for step in range(int(given.get("steps", 10))):
        begun_s = time.perf_counter()
        rows = sums.train[step * prompts : (step + 1) * prompts]
        futures = [
            sampler.sample(types.ModelInput.from_ints(sums.prompt(row)), size, parameters)
            for row in rows
        ]
        if given.get("plain", "1") == "1":
            for future in futures:
                future.result()
        pending, of_step = [], []
        each = prompts // minibatches
        for first in range(0, prompts, each):
            data = []
            for row, future in list(zip(rows, futures, strict=True))[first : first + each]:
                group, group_rewards = group_of(sums, row, future.result().sequences)
                of_step += group_rewards
                data += group
            if data:
                pending.append(client.forward_backward(data, "importance_sampling"))
        if pending:
            client.optim_step(
                types.AdamParams(learning_rate=float(given.get("rate", 2e-3)), grad_clip_norm=0.0)
            ).result()
            for future in pending:
                future.result()
        sampler = resolved(client.save_weights_and_get_sampling_client())
        rewards.append(sum(of_step) / len(of_step))
        times.append(time.perf_counter() - begun_s)
    return {"before": before, "after": sums.accuracy(sampler), "rewards": rewards, "times": times}


def group_of(sums: Sums, row: dict[str, str], sequences: Any) -> tuple[list[Any], list[float]]:
    prompt = sums.prompt(row)
    rewards = [float(sums.is_right(row, sequence.tokens)) for sequence in sequences]
    mean = sum(rewards) / len(rewards)
    data = []
    for sequence, reward in zip(sequences, rewards, strict=True):
        if len(set(rewards)) == 1:
            break  # nothing to compare
        before = [0.0] * (len(prompt) - 1)
        data.append(
            datum_of(
                prompt + list(sequence.tokens),
                len(prompt),
                logprobs=before + list(sequence.logprobs),
                advantages=before + [reward - mean] * len(sequence.tokens),
            )
        )
    return data, rewards


def preference(service: Any, given: dict[str, str]) -> dict[str, Any]:
    """DPO against the model that the client began with, whose log-probs one forward gives."""
    sums, client = Sums(given), client_of(service, given)
    data = []
    for row in sums.train[: int(given.get("pairs", 16))]:
        wrong = {**row, "answer": row["answer"][:-1] + str((int(row["answer"][-1]) + 1) % 10)}
        prompt = sums.prompt(row)
        for chosen in (row, wrong):
            data.append(datum_of(prompt + sums.answer(chosen), len(prompt)))
    reference = client.forward(data, "cross_entropy").result().loss_fn_outputs
    known = [torch.tensor(output["logprobs"].data) for output in reference]

    def dpo(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        sums_of = []
        for datum, values, fixed in zip(data, logprobs, known, strict=True):
            weights = torch.tensor(datum.loss_fn_inputs["weights"].data)
            sums_of.append(((values - fixed) * weights).sum())
        margins = torch.stack(sums_of[0::2]) - torch.stack(sums_of[1::2])
        loss = -torch.nn.functional.logsigmoid(0.1 * margins).mean()
        return loss, {"margin:mean": float(margins.detach().mean())}

    losses, margins = [], []
    for _ in range(int(given.get("steps", 8))):
        answer = client.forward_backward_custom(data, dpo)
        client.optim_step(types.AdamParams(learning_rate=float(given.get("rate", 5e-3)))).result()
        metrics = answer.result().metrics
        losses.append(metrics["loss:sum"])
        margins.append(metrics["margin:mean"])
    return {"losses": losses, "margins": margins, "first": math.log(2)}


def distill(service: Any, given: dict[str, str]) -> dict[str, Any]:
    """From a client's own better model: its most likely tokens at each place, as soft targets."""
    sums = Sums(given)
    teacher = client_of(service, given)
    for step in range(int(given.get("teacher_steps", 6))):
        rows = sums.train[step * 32 : (step + 1) * 32]
        data = [
            datum_of(sums.prompt(row) + sums.answer(row), len(sums.prompt(row))) for row in rows
        ]
        teacher.forward_backward(data, "cross_entropy")
        teacher.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    scorer = resolved(teacher.save_weights_and_get_sampling_client())
    student = client_of(service, {**given, "seed": "9"})
    rows, count, data = sums.train[:16], 8, []
    for row in rows:
        prompt = sums.prompt(row)
        tokens = prompt + sums.answer(row)
        scored = scorer.sample(
            types.ModelInput.from_ints(tokens),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=count,
        ).result()
        targets, weights = [], []
        for place in range(1, len(tokens)):
            likely = scored.topk_prompt_logprobs[place]
            targets += [token for token, _ in likely]
            weights += [math.exp(value) * (place >= len(prompt)) for _, value in likely]
        shape = [len(tokens) - 1, count]
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData(data=targets, dtype="int64", shape=shape),
                    "weights": types.TensorData(data=weights, dtype="float32", shape=shape),
                },
            )
        )
    losses = []
    for _ in range(int(given.get("steps", 8))):
        answer = student.forward_backward(data, "cross_entropy")
        student.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        losses.append(answer.result().metrics["loss:sum"])
    return {"losses": losses}


LOOPS = {
    "sampling": sampling,
    "exact": exact,
    "too_large": too_large,
    "supervised": supervised,
    "rl": rl,
    "preference": preference,
    "distill": distill,
}

if __name__ == "__main__":
    main()
