"""The supervised and the reinforcement loop of tinker's cookbook, as it ships them, on sums.

    python cookbook_loops.py URL KEY_FILE DIRECTORY model=DIR train=FILE [option=value ...]

The supervised loop teaches the cookbook's own form of questions; the reinforcement loop goes on from its
checkpoint on the cookbook's arithmetic, with streamed minibatches for stream=1. DIRECTORY/seen.json has
what both have logged. It runs in an interpreter that has the cookbook, and knows nothing of the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

RENDERER = "role_colon"
GROUPS, GROUP = 8, 8


def main() -> None:
    url, key_file, directory, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    os.environ["TINKER_API_KEY"] = Path(key_file).read_text().strip()
    out = Path(directory)
    seen = {"supervised": supervised(url, out, given), "rl": reinforcement(url, out, given)}
    (out / "seen.json").write_text(json.dumps(seen))


def conversations(given: dict[str, str]) -> Any:
    """Returns a builder of the sums as conversations, in the cookbook's form."""
    import chz
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    size = int(given.get("batch", 32))

    class Sums(SupervisedDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.renderer = get_renderer(RENDERER, tokenizer=get_tokenizer(given["model"]))
            self.lines = Path(given["train"]).read_text().splitlines()

        def get_batch(self, index: int) -> list[Any]:
            data = []
            for line in self.lines[index * size : (index + 1) * size]:
                row = json.loads(line)
                messages = [
                    {"role": "user", "content": row["question"].replace("+", " + ")},
                    {"role": "assistant", "content": row["answer"]},
                ]
                what = TrainOnWhat.ALL_ASSISTANT_MESSAGES
                data.append(conversation_to_datum(messages, self.renderer, 160, what))
            return data

        def set_epoch(self, seed: int = 0) -> None: ...

        def __len__(self) -> int:
            return len(self.lines) // size

    @chz.chz
    class Builder(SupervisedDatasetBuilder):  # type: ignore[misc]
        def __call__(self) -> tuple[Any, None]:
            return Sums(), None

    return Builder()


def supervised(url: str, out: Path, given: dict[str, str]) -> list[dict[str, Any]]:
    from tinker_cookbook.supervised import train

    config = train.Config(
        log_path=str(out / "supervised"),
        model_name=given["model"],
        recipe_name="sl",
        renderer_name=RENDERER,
        dataset_builder=conversations(given),
        learning_rate=float(given.get("rate", 5e-3)),
        lora_rank=8,
        base_url=url,
        max_steps=int(given.get("steps", 40)),
        save_every=0,
        eval_every=0,
    )
    asyncio.run(train.main(config))
    return records(out / "supervised" / "metrics.jsonl")


def reinforcement(url: str, out: Path, given: dict[str, str]) -> list[dict[str, Any]]:
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl import train

    checkpoint = records(out / "supervised" / "checkpoints.jsonl")[-1]["state_path"]
    streamed = None
    if given.get("stream") == "1":
        streamed = train.StreamMinibatchConfig(groups_per_batch=GROUPS, num_minibatches=2)
    config = train.Config(
        learning_rate=float(given.get("rl_rate", 1e-3)),
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=GROUPS,
            model_name_for_tokenizer=given["model"],
            renderer_name=RENDERER,
            n_batches=int(given.get("rl_steps", 4)),
            group_size=GROUP,
            include_fewshot=False,
        ),
        model_name=given["model"],
        recipe_name="rl",
        max_tokens=40,
        log_path=str(out / "rl"),
        load_checkpoint_path=checkpoint,
        renderer_name=RENDERER,
        lora_rank=8,
        base_url=url,
        stream_minibatch_config=streamed,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train.main(config))
    return records(out / "rl" / "metrics.jsonl")


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
