"""Shared-prompt attention in a training loop of your own: under a plain transformers model, with its speed-up printed.

    python examples/shared_prompt_attention.py [--prompt 512] [--response 64] [--responses 8] [--steps 3]

A group has one prompt and several responses. A usual loop gives the model every response with a copy of the
prompt; here the prompt is there once. Loss and gradients are the same, up to rounding; both are checked.
Times are processor seconds of forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from pa_npu.attention import PrefixLayout
from pa_npu.attention.huggingface import use_shared_prompt_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response")
    parser.add_argument("--responses", type=int, default=8, help="responses of the group")
    parser.add_argument("--steps", type=int, default=3, help="timed steps; the median counts")
    options = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    usual = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    shared = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    shared.load_state_dict(usual.state_dict())
    use_shared_prompt_attention(shared)

    prompt = torch.randint(1024, (options.prompt,))
    responses = torch.randint(1024, (options.responses, options.response))

    # a usual loop: [responses, prompt + response], the loss over the responses' tokens
    copies = torch.cat([prompt.expand(options.responses, -1), responses], dim=1)

    def separately() -> torch.Tensor:
        logits = usual(copies, use_cache=False).logits[:, options.prompt - 1 : -1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), responses.flatten())

    # the same, packed: the prompt once, then the responses
    layout = PrefixLayout.from_groups([(options.prompt, [options.response] * options.responses)])
    packed = torch.cat([prompt, responses.flatten()])

    def together() -> torch.Tensor:
        positions = layout.position_ids()
        logits = shared(
            packed[None], position_ids=positions[None], layout=layout, use_cache=False
        ).logits[0]
        # the first token of each response is predicted by the prompt's last row, every other by the
        # row before it
        first = torch.full((options.responses, 1), options.prompt - 1)
        others = (
            options.prompt
            + torch.arange(options.responses * options.response).view(options.responses, -1)[:, :-1]
        )
        rows = torch.cat([first, others], dim=1).flatten()
        return torch.nn.functional.cross_entropy(logits[rows], responses.flatten())

    seconds = {}
    for name, model, loss in (("separately", usual, separately), ("shared", shared, together)):
        seconds[name] = statistics.median(step(model, loss) for _ in range(options.steps + 1))
        print(
            f"{name:<11} {len(packed) if name == 'shared' else copies.numel():6d} tokens  "
            f"{seconds[name]:.3f} s per step"
        )
    difference = abs(separately().item() - together().item())
    gradients = max(
        (a.grad - b.grad).abs().max().item() / a.grad.abs().max().item()
        for a, b in zip(usual.parameters(), shared.parameters(), strict=True)
    )
    print(f"loss differs by {difference:.1e}, gradients by {gradients:.1e} of their largest")
    print(f"speed-up {seconds['separately'] / seconds['shared']:.2f}x")
    assert difference < 1e-4 and gradients < 1e-3, "shared and separate prompts must train the same"


def step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> float:
    """Processor seconds of a forward and a backward."""
    model.zero_grad()
    start = time.process_time()
    loss().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
