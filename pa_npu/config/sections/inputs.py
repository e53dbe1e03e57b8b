"""Keys of what a run is given: its directory and seed, the model, the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pa_npu.config.sections import FilePath, Section, Several


class RunConfig(Section):
    dir: FilePath = Field(
        "runs/default",
        min_length=1,
        description="Run directory; everything the run writes goes there.",
    )
    seed: int = Field(
        1, ge=0, lt=2**31, description="Seed of data order, sampling and initialisation."
    )
    device: Literal["auto", "npu", "cuda", "cpu"] = Field(
        "auto",
        description="Device kind of trainers and engines; auto takes npu, then cuda, then cpu.",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How often coordinator and trainers are started again, from the newest "
        "checkpoint, when one of them ends; counted within an hour, and as long as no "
        "newer checkpoint has been written. Each engine has the same limit; after that "
        "the run continues without it if others remain.",
    )
    startup_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline for engines and trainers to become ready, and of a cluster to give "
        "the run its nodes, at the start and when one was lost.",
    )
    deterministic: bool = Field(
        True, description="Use deterministic kernels where the platform has a choice."
    )


class ModelConfig(Section):
    path: FilePath = Field(
        ..., min_length=1, description="HF model directory (config.json, safetensors, tokenizer)."
    )
    adapter: FilePath | None = Field(
        None,
        min_length=1,
        description="Directory of peft with adapters (LoRA) of this model to go on from, which "
        "says their rank, alpha and targets.",
    )
    dtype: Literal["fp32", "bf16"] = Field(
        "bf16", description="Type of weights and activations; master weights are fp32."
    )
    trust_remote_code: bool = Field(
        False,
        description="Run the code that a model directory brings along (auto_map), with "
        "trainer.backend=fsdp; read it before.",
    )
    head_chunk_tokens: int = Field(
        2048,
        ge=1,
        description="Rows per chunk of the LM head's log-prob, so that full logits never exist at "
        "once.",
    )


_EVERYWHERE = frozenset({"train", "training", "test", "data", "rows", "prompts"})


class Dataset(Section):
    """A dataset with options of its own, where a path alone does not say enough."""

    path: FilePath = Field(..., min_length=1, description="File or directory, as data.train.")
    split: str | None = Field(
        None,
        min_length=1,
        description="Split of a directory; null means train for data.train, test or validation for "
        "held-out sets.",
    )
    question_column: str | None = Field(
        None, min_length=1, description="As data.question_column, for this one alone."
    )
    answer_column: str | None = Field(
        None, min_length=1, description="As data.answer_column, for this one alone."
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Read so many rows, the first ones; null reads all.",
    )
    system_prompt: str | None = Field(
        None, description="As data.system_prompt, for this one alone."
    )
    instruction: str | None = Field(None, description="As data.instruction, for this one alone.")


class TrainingDataset(Dataset):
    name: str | None = Field(
        None,
        min_length=1,
        description="What records call it; null means the name of its file or directory.",
    )
    weight: float = Field(
        1.0, gt=0, le=1e6, description="Its part of the prompts, against the others' weights."
    )

    @property
    def called(self) -> str:
        """name, resolved; a file that is called as files are everywhere is known by its directory."""
        if self.name is not None:
            return self.name
        path = Path(self.path)
        named = [
            part
            for part in (path.stem, path.parent.name)
            if part and part.lower() not in _EVERYWHERE
        ]
        return named[0] if named else path.stem or self.path


class DataConfig(Section):
    train: (
        Annotated[FilePath, Field(min_length=1)]
        | Annotated[Several[TrainingDataset], Field(min_length=1)]
    ) = Field(
        ...,
        description="Training prompts: a JSONL, CSV or parquet file (question/answer, "
        "prompt/answer or messages), or a directory of the datasets library; or a list "
        "of several, mixed by weight.",
    )
    test: Annotated[FilePath, Field(min_length=1)] | Dataset | None = Field(
        None, description="Held-out prompts in the same formats; none disables evaluation."
    )
    question_column: str | None = Field(
        None,
        min_length=1,
        description="Column with the question, a text or chat messages; a.b is column b inside a. "
        "Null goes by the row's layout. Held-out rows that lack the column are read by "
        "their layout.",
    )
    answer_column: str | None = Field(
        None,
        min_length=1,
        description="Column with the reference answer; null goes by the row's layout.",
    )
    chat_template: FilePath = Field(
        "auto",
        description="Render prompts with the tokenizer's chat template: auto does where it has "
        "one; always; never; or another template, by its file's name, which ends in "
        ".jinja.",
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, such as {enable_thinking: false}; one that "
        "the template does not read is refused.",
    )
    system_prompt: str | None = Field(None, description="System message put before each prompt.")
    instruction: str | None = Field(
        None, description="Text appended to each question, on a line of its own."
    )
    max_prompt_tokens: int = Field(
        512, ge=1, description="Longest prompt in tokens, template included."
    )
    overlong_prompt: Literal["refuse", "truncate", "skip"] = Field(
        "refuse",
        description="What happens to longer prompts: refuse the run, keep the last tokens, or "
        "skip; counted.",
    )
    shuffle: bool = Field(
        True, description="Shuffle the training prompts anew in every epoch, seeded by run.seed."
    )

    @property
    def datasets(self) -> tuple[TrainingDataset, ...]:
        """The training datasets, one or several."""
        return (TrainingDataset(path=self.train),) if isinstance(self.train, str) else self.train

    @property
    def shares(self) -> list[float]:
        """The share of the prompts that each training dataset gives."""
        total = sum(dataset.weight for dataset in self.datasets)
        return [dataset.weight / total for dataset in self.datasets]

    def key_of(self, number: int) -> str:
        """The key that names a training dataset."""
        return "data.train" if isinstance(self.train, str) else f"data.train.{number}"
