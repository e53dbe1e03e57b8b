"""Another trainer on the rollout side of a run: it samples from the current weights, and learns from copies of the run's groups.

    pa-npu run ... agent.port=0                                                  (a run that goes on)
    python examples/use_rollouts.py --run runs/mine --model models/student

Samples come through the `openai` package. Groups come by columns, each once, and a plain
transformers model learns from them by REINFORCE with the group's advantages, as a student of the
run's policy would.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

COLUMNS = ["about", "lengths", "tokens", "trained", "advantages"]


def loss_of(model: torch.nn.Module, group: dict[str, Any]) -> torch.Tensor:
    """-advantage x log-prob over the trained tokens, their mean; samples stand one after another in
    every column.
    """
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


def take_groups(url: str, key: str, most: int) -> list[dict[str, Any]]:
    body = {
        "task": "student",
        "columns": COLUMNS,
        "policy": "age",
        "max_groups": most,
        "wait_s": 30,
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/groups", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        groups: list[dict[str, Any]] = json.load(answer)["groups"]
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="directory of a run with agent.port")
    parser.add_argument("--model", required=True, help="the model that learns here")
    parser.add_argument("--prompt", default="w5 w6", help="a text to sample from")
    parser.add_argument("--groups", type=int, default=4)
    arguments = parser.parse_args()
    url = json.loads((Path(arguments.run) / "gateway.json").read_text())["url"]
    key = (Path(arguments.run) / "api_key").read_text().strip()
    sample = OpenAI(base_url=f"{url}/v1", api_key=key).completions.create(
        model="policy", prompt=arguments.prompt
    )
    print(
        f"sampled {sample.usage.completion_tokens if sample.usage else 0} tokens: "
        f"{sample.choices[0].text}"
    )

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    left = arguments.groups
    while left:
        for group in take_groups(url, key, left):
            left -= 1
            loss = loss_of(model, group)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(
                f"group {group['about']['index']} of iteration {group['about']['iteration']}: loss "
                f"{loss.item():.3f}",
                flush=True,
            )
    print(f"trained {arguments.groups} groups")


if __name__ == "__main__":
    main()
