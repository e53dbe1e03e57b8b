"""Another data source and another trainer on the rollout side of a run: their own prompts in, scored groups out, their own update.

    pa-npu run ... placement.api_port=0                                          (a run that goes on)
    python examples/use_rollouts.py --run runs/mine --model models/student

The prompts are answered by the run's engines at the run's current weights and scored by its reward functions. Here a plain
transformers model learns from them by REINFORCE with the group's advantages, as a student of the run's policy would.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from pa_npu import Client

COLUMNS = ["about", "lengths", "tokens", "trained", "advantages"]


def loss_of(model: torch.nn.Module, group: dict) -> torch.Tensor:
    """-advantage x log-prob over the trained tokens, their mean; samples stand one after another in every column."""
    tokens = torch.tensor(group["tokens"])
    trained, advantages = torch.tensor(group["trained"]), torch.tensor(group["advantages"])
    total, start = torch.zeros(()), 0
    for length in group["lengths"]:
        own = slice(start, start + length)
        logprobs = model(tokens[None, own]).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[own][1:, None])[:, 0]
        total = total - (chosen * advantages[own][1:])[trained[own][1:]].sum()
        start += length
    return total / trained.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="directory of a run with placement.api_port")
    parser.add_argument("--model", required=True, help="the model that learns here")
    parser.add_argument("--prompts", type=int, default=4)
    arguments = parser.parse_args()
    client = Client.of_run(arguments.run)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    prompts = [{"question": f"w{3 + n} w{4 + n}", "answer": f"{n}"} for n in range(arguments.prompts)]
    waiting = set(client.put_prompts(prompts, samples=4))
    print(f"{len(waiting)} prompts for weight version {client.weights_version()}")
    while waiting:
        for group in client.get_groups("student", COLUMNS, most=2, wait_s=30):
            waiting.discard(group["id"])
            loss = loss_of(model, group)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"group {group['id']} of version {group['about']['iteration']}: loss {loss.item():.3f}", flush=True)
    print(f"trained {len(prompts)} groups")


if __name__ == "__main__":
    main()
