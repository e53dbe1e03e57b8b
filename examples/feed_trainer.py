"""Another engine side that feeds a run's trainer: it takes the run's prompts, samples with an engine of its own, and gives samples.

    pa-npu run ... placement.api_port=0 environment.name=clients environment.timeout_s=600
    python examples/feed_trainer.py --run runs/mine --model MODEL_PATH_OF_THE_RUN

The engine is a plain transformers model, one token at a time. It has the weights that the run began with, version 0, and says so:
samples of other weights than those that are trained would be refused. So it serves the iterations of version 0; an engine
that also takes the weights of later versions is a kind of its own (rollout.backend, docs/architecture.md).
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pa_npu import Client


@torch.no_grad()
def sample(model: torch.nn.Module, prompt: list[int], most: int, temperature: float, ends: set[int]) -> dict:
    """One response: its tokens, and the log-prob of each in the distribution that it was drawn from."""
    tokens, logprobs = [], []
    while len(tokens) < most and not (tokens and tokens[-1] in ends):
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1] / temperature
        distribution = logits.log_softmax(-1)
        tokens.append(int(torch.multinomial(distribution.exp(), 1)))
        logprobs.append(min(0.0, float(distribution[tokens[-1]])))
    return {"tokens": tokens, "logprobs": logprobs, "version": 0, "finished": tokens[-1] in ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="directory of a run with placement.api_port")
    parser.add_argument("--model", required=True, help="model.path of the run")
    parser.add_argument("--prompts", type=int, default=8, help="how many to write samples of")
    arguments = parser.parse_args()
    client = Client.of_run(arguments.run)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    end = model.config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    torch.manual_seed(0)

    written = 0
    while written < arguments.prompts:
        answer = client.take_work(most=4, wait_s=30)
        for work in answer["work"]:
            if answer["version"] != 0:
                client.give_back(work["id"])
                raise SystemExit(f"the run trains version {answer['version']}; this engine has version 0")
            samples = []
            for _ in range(work["samples"]):
                one = sample(model, work["tokens"], work["max_tokens"], work["temperature"], ends)
                samples.append({**one, "text": tokenizer.decode(one["tokens"], skip_special_tokens=True)})
            client.put_samples(work["id"], samples)
            written += 1
            print(f"prompt {work['prompt_id']}: {sum(len(one['tokens']) for one in samples)} tokens", flush=True)
    print(f"wrote the samples of {written} prompts")


if __name__ == "__main__":
    main()
