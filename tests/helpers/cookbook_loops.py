"""The loops of tinker's cookbook, as it ships them, on sums.

    python -P cookbook_loops.py URL KEY_FILE LOOP DIRECTORY [option=value ...]

    supervised   supervised.train on conversations
    rl           rl.train on the cookbook's arithmetic; minibatches=N streams them
    preference   preference.train_dpo on right and wrong answers
    on_policy    distillation.train_on_policy; teacher=PATH: weights that a sampler can load
    off_policy   distillation.train_off_policy, from the same kind of teacher

DIRECTORY gets what the cookbook logs, and seen.json: the metrics of each step, and the paths of the
last weights. Options: model, train (a file of questions and answers), load (a saved state to begin
with), steps, rate, batch. It runs in an interpreter that has the cookbook, and knows nothing of
the server. Environments and conversations are the cookbook's own; the renderer is the tiny model's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.distillation import train_off_policy, train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.recipes.math_rl.arithmetic_env import (
    ArithmeticDataset,
    ArithmeticDatasetBuilder,
)
from tinker_cookbook.renderers.base import ParseTermination, RenderedMessage, ensure_text
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "pa_npu/tiny"
END_OF_TURN = "<|end|>"
GROUPS, GROUP_SIZE = 24, 8
NUM_TESTED = 128
MAX_TOKENS = 24
MAX_LENGTH = 120
# ArithmeticDataset seeds a batch with its number: those from here on are never trained.
HELD_OUT_FROM = 10_000


@dataclass(frozen=True)
class Options:
    """url: of the server. directory: for what the cookbook logs. given: options by name."""

    url: str
    directory: Path
    given: dict[str, str]

    @property
    def model(self) -> str:
        return self.given["model"]

    @property
    def load(self) -> str | None:
        return self.given.get("load")

    @property
    def teacher(self) -> TeacherConfig:
        return TeacherConfig(base_model=self.model, load_checkpoint_path=self.given["teacher"])

    @property
    def batch(self) -> int:
        return int(self.given.get("batch", 32))

    def steps(self, default: int) -> int:
        return int(self.given.get("steps", default))

    def rate(self, default: float) -> float:
        return float(self.given.get("rate", default))

    def rows(self) -> list[dict[str, str]]:
        """Returns questions, in the cookbook's form, with their answers."""
        rows = []
        for line in Path(self.given["train"]).read_text().splitlines():
            row = json.loads(line)
            rows.append({**row, "question": row["question"].replace("+", " + ")})
        return rows


def main() -> None:
    url, key_file, loop, directory, *given = sys.argv[1:]
    os.environ["TINKER_API_KEY"] = Path(key_file).read_text().strip()
    renderers.register_renderer(RENDERER, lambda tokenizer, image_processor=None: Tiny(tokenizer))
    options = Options(url, Path(directory), dict(option.split("=", 1) for option in given))
    LOOPS[loop](options)
    seen = {"steps": records(options.directory / "metrics.jsonl")}
    seen["last"] = records(options.directory / "checkpoints.jsonl")[-1]
    (options.directory / "seen.json").write_text(json.dumps(seen))


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Tiny(renderers.Renderer):  # type: ignore[misc]
    """The chat template of the tiny model, which knows sums without spaces."""

    @property
    def has_extension_property(self) -> bool:
        return True

    def get_stop_sequences(self) -> list[int]:
        return self._encode(END_OF_TURN)

    def render_message(self, message: Any, ctx: Any) -> Any:
        text = ensure_text(message["content"]).replace(" + ", "+")
        if message["role"] == "assistant":
            text += END_OF_TURN
        header = tinker.types.EncodedTextChunk(tokens=self._encode(f"<|{message['role']}|>"))
        output = [tinker.types.EncodedTextChunk(tokens=self._encode(text))]
        return RenderedMessage(header=header, output=output)

    def parse_response(self, response: list[int]) -> tuple[Any, ParseTermination]:
        termination = ParseTermination.MALFORMED
        if response[-1:] == self.get_stop_sequences():
            response = response[:-1]
            termination = ParseTermination.STOP_SEQUENCE
        content = self.tokenizer.decode(response)
        return renderers.Message(role="assistant", content=content), termination

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def renderer_of(model: str) -> Any:
    return renderers.get_renderer(RENDERER, tokenizer=get_tokenizer(model))


# Supervised


class Conversations(SupervisedDataset):  # type: ignore[misc]
    def __init__(self, model: str, rows: Sequence[dict[str, str]], batch: int) -> None:
        self._renderer = renderer_of(model)
        self._rows = rows
        self._batch = batch

    def get_batch(self, index: int) -> list[Any]:
        data = []
        for row in self._rows[index * self._batch : (index + 1) * self._batch]:
            messages = [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            trained = renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
            data.append(conversation_to_datum(messages, self._renderer, MAX_LENGTH, trained))
        return data

    def set_epoch(self, seed: int = 0) -> None:
        """Keeps the order."""

    def __len__(self) -> int:
        return len(self._rows) // self._batch


@chz.chz
class ConversationsBuilder(SupervisedDatasetBuilder):  # type: ignore[misc]
    model: str
    rows: list[dict[str, str]]
    batch: int

    def __call__(self) -> tuple[Any, None]:
        return Conversations(self.model, self.rows, self.batch), None


def conversations(options: Options) -> Any:
    return ConversationsBuilder(model=options.model, rows=options.rows(), batch=options.batch)


def supervised(options: Options) -> None:
    config = supervised_train.Config(
        log_path=str(options.directory),
        model_name=options.model,
        recipe_name="supervised",
        renderer_name=RENDERER,
        load_checkpoint_path=options.load,
        dataset_builder=conversations(options),
        learning_rate=options.rate(2e-3),
        lora_rank=8,
        base_url=options.url,
        max_steps=options.steps(8),
        save_every=0,
        eval_every=0,
    )
    asyncio.run(supervised_train.main(config))


# Reinforcement


class HeldOut(ArithmeticDataset):  # type: ignore[misc]
    """One batch of sums that no step trains."""

    def get_batch(self, index: int) -> Sequence[Any]:
        return super().get_batch(HELD_OUT_FROM + index)


@chz.chz
class HeldOutBuilder:
    """Builds the evaluator that the loop asks before its first step and behind its last."""

    model: str

    def __call__(self) -> Any:
        dataset = HeldOut(
            batch_size=NUM_TESTED,
            renderer=renderer_of(self.model),
            group_size=1,
            n_batches=1,
            include_fewshot=False,
        )
        return RLTestSetEvaluator(dataset, max_tokens=MAX_TOKENS)


def rl(options: Options) -> None:
    steps = options.steps(10)
    streamed = None
    if minibatches := options.given.get("minibatches"):
        streamed = rl_train.StreamMinibatchConfig(
            groups_per_batch=GROUPS, num_minibatches=int(minibatches)
        )
    config = rl_train.Config(
        learning_rate=options.rate(2e-3),
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=GROUPS,
            model_name_for_tokenizer=options.model,
            renderer_name=RENDERER,
            n_batches=steps,
            group_size=GROUP_SIZE,
            include_fewshot=False,
        ),
        model_name=options.model,
        recipe_name="rl",
        max_tokens=MAX_TOKENS,
        log_path=str(options.directory),
        load_checkpoint_path=options.load,
        renderer_name=RENDERER,
        lora_rank=8,
        base_url=options.url,
        stream_minibatch_config=streamed,
        evaluator_builders=[HeldOutBuilder(model=options.model)],  # type: ignore[call-arg]
        eval_every=steps,
        save_every=0,
    )
    asyncio.run(rl_train.main(config))


# Preference


def preference(options: Options) -> None:
    """Each pair: the answer, and the same with another last digit."""
    lines = []
    for row in options.rows():
        wrong = row["answer"][:-1] + str((int(row["answer"][-1]) + 1) % 10)
        comparison = {
            "prompt_conversation": [{"role": "user", "content": row["question"]}],
            "completion_A": [{"role": "assistant", "content": row["answer"]}],
            "completion_B": [{"role": "assistant", "content": wrong}],
        }
        lines.append(json.dumps({"comparison": comparison, "label": "A"}))
    options.directory.mkdir(parents=True, exist_ok=True)
    pairs = options.directory / "pairs.jsonl"
    pairs.write_text("\n".join(lines))
    config = train_dpo.Config(
        log_path=str(options.directory),
        model_name=options.model,
        recipe_name="preference",
        renderer_name=RENDERER,
        load_checkpoint_path=options.load,
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=options.model,
                renderer_name=RENDERER,
                max_length=MAX_LENGTH,
                batch_size=options.batch,
            ),
            comparison_builder=ComparisonBuilderFromJsonl(train_path=str(pairs)),
        ),
        learning_rate=options.rate(2e-3),
        lora_rank=8,
        base_url=options.url,
        num_epochs=4,
        max_steps=options.steps(6),
        save_every=0,
        eval_every=0,
        infrequent_eval_every=0,
    )
    train_dpo.main(config)


# Distillation


@chz.chz
class PromptsBuilder(RLDatasetBuilder):  # type: ignore[misc]
    """The cookbook's own builder of prompts loads them from a hub; the dataset is its."""

    model: str
    prompts: list[str]
    batch: int

    async def __call__(self) -> tuple[Any, None]:
        dataset = PromptOnlyDataset(
            prompts=self.prompts,
            batch_size=self.batch,
            group_size=4,
            renderer=renderer_of(self.model),
            tokenizer=get_tokenizer(self.model),
        )
        return dataset, None


def on_policy(options: Options) -> None:
    builder = PromptsBuilder(
        model=options.model,
        prompts=[row["question"] for row in options.rows()],
        batch=options.batch,
    )
    dataset = DistillationDatasetConfig(
        dataset_builder=builder, teacher_config=options.teacher, groups_per_batch=options.batch
    )
    config = train_on_policy.Config(
        learning_rate=options.rate(2e-3),
        dataset_configs=[dataset],
        model_name=options.model,
        recipe_name="on_policy",
        renderer_name=RENDERER,
        load_checkpoint_path=options.load,
        max_tokens=MAX_TOKENS,
        lora_rank=8,
        log_path=str(options.directory),
        base_url=options.url,
        max_steps=options.steps(6),
        save_every=0,
        eval_every=0,
    )
    asyncio.run(train_on_policy.main(config))


def off_policy(options: Options) -> None:
    dataset = train_off_policy.DatasetWithTeacher(
        dataset_builder=conversations(options), teacher_config=options.teacher
    )
    config = train_off_policy.Config(
        learning_rate=options.rate(2e-3),
        dataset_configs=[dataset],
        model_name=options.model,
        recipe_name="off_policy",
        renderer_name=RENDERER,
        load_checkpoint_path=options.load,
        lora_rank=8,
        batch_size=options.batch,
        log_path=str(options.directory),
        base_url=options.url,
        max_steps=options.steps(6),
        save_every=0,
        eval_every=0,
    )
    asyncio.run(train_off_policy.main(config))


LOOPS = {
    "supervised": supervised,
    "rl": rl,
    "preference": preference,
    "on_policy": on_policy,
    "off_policy": off_policy,
}

if __name__ == "__main__":
    main()
