"""Keys of the data: datasets by path or with options of their own, columns, templates, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pa_npu.config.sections.base import Section

_EVERYWHERE = frozenset({"train", "training", "test", "data", "rows", "prompts"})


class Dataset(Section):
    """A dataset with options of its own, where a path alone does not say enough."""

    path: str = Field(..., min_length=1, description="File or directory, as data.train.")
    split: str | None = Field(
        None,
        min_length=1,
        description="Split of a directory; null means train for data.train, test or validation for held-out sets.",
    )
    question_column: str | None = Field(None, min_length=1, description="As data.question_column, for this one alone.")
    answer_column: str | None = Field(None, min_length=1, description="As data.answer_column, for this one alone.")
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Read so many rows, the first ones; null reads all.",
    )
    system_prompt: str | None = Field(None, description="As data.system_prompt, for this one alone.")
    instruction: str | None = Field(None, description="As data.instruction, for this one alone.")


class TrainingDataset(Dataset):
    name: str | None = Field(
        None, min_length=1, description="What records call it; null means the name of its file or directory."
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Its part of the prompts, against the others' weights.")

    @property
    def called(self) -> str:
        """name, resolved; a file that is called as files are everywhere is known by its directory."""
        if self.name is not None:
            return self.name
        path = Path(self.path)
        named = [part for part in (path.stem, path.parent.name) if part and part.lower() not in _EVERYWHERE]
        return named[0] if named else path.stem or self.path


class DataConfig(Section):
    train: Annotated[str, Field(min_length=1)] | Annotated[tuple[TrainingDataset, ...], Field(min_length=1)] = Field(
        ...,
        description="Training prompts: a JSONL, CSV or parquet file (question/answer, prompt/answer or messages), or a directory "
        "of the datasets library; or a list of several, mixed by weight.",
    )
    test: str | Dataset | None = Field(
        None, description="Held-out prompts in the same formats; none disables evaluation."
    )
    question_column: str | None = Field(
        None,
        min_length=1,
        description="Column with the question, a text or chat messages; a.b is column b inside a. Null goes by the row's layout. "
        "Held-out rows that lack the column are read by their layout.",
    )
    answer_column: str | None = Field(
        None, min_length=1, description="Column with the reference answer; null goes by the row's layout."
    )
    chat_template: str = Field(
        "auto",
        description="Render prompts with the tokenizer's chat template: auto does where it has one; always; never; or another "
        "template, by its file's name, which ends in .jinja.",
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, such as {enable_thinking: false}; one that the template does not read is "
        "refused.",
    )
    system_prompt: str | None = Field(None, description="System message put before each prompt.")
    instruction: str | None = Field(None, description="Text appended to each question, on a line of its own.")
    max_prompt_tokens: int = Field(512, ge=1, description="Longest prompt in tokens, template included.")
    overlong_prompt: Literal["refuse", "truncate", "skip"] = Field(
        "refuse", description="What happens to longer prompts: refuse the run, keep the last tokens, or skip; counted."
    )
    shuffle: bool = Field(True, description="Shuffle the training prompts anew in every epoch, seeded by run.seed.")

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
