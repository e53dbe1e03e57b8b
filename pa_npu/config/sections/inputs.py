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
        description="Kind of device of trainers and engines. auto takes npu if there is one, then "
        "cuda, then cpu.",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How often the coordinator and the trainers are started again from the newest "
        "checkpoint after one of them ended. Only restarts of the last hour count, and "
        "a new checkpoint sets the count back to zero. Each engine has the same limit; "
        "a run goes on without an engine that has reached it, as long as others "
        "remain.",
    )
    startup_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline for engines and trainers to become ready, and for a cluster to give "
        "the run its nodes, at the start and after a node was lost.",
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
        description="Directory of LoRA adapters of this model, written by peft, to continue from. "
        "It sets their rank, alpha and targets.",
    )
    dtype: Literal["fp32", "bf16"] = Field(
        "bf16", description="Type of weights and activations. Master weights are always fp32."
    )
    vision: Literal["frozen", "trained"] = Field(
        "frozen",
        description="Whether the part of the model that reads images is trained too. frozen keeps "
        "its weights, needs no memory for its gradients, sends it to engines once, and LoRA leaves "
        "it out. Needs trainer.backend=fsdp.",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run the Python code inside the model directory (auto_map). Needs "
        "trainer.backend=fsdp. Read that code first.",
    )
    head_chunk_tokens: int = Field(
        2048,
        ge=1,
        description="Number of rows for which the LM head computes log-probs at once, so that the "
        "logits of a long microbatch are never all in memory.",
    )


_EVERYWHERE = frozenset({"train", "training", "test", "data", "rows", "prompts"})


class Dataset(Section):
    """A dataset with options of its own."""

    path: FilePath = Field(
        ..., min_length=1, description="File, directory or name, in the forms of data.train."
    )
    split: str | None = Field(
        None,
        min_length=1,
        description="Split to read from a directory. null reads train for data.train, and test or "
        "validation for held-out sets.",
    )
    question_column: str | None = Field(
        None, min_length=1, description="Replaces data.question_column for this dataset."
    )
    answer_column: str | None = Field(
        None, min_length=1, description="Replaces data.answer_column for this dataset."
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Number of rows to read, from the first on. null reads all rows, or makes 1,000 "
        "if tasks make them.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Seed of rows that tasks make (reasoning_gym:NAME). Training and held-out rows "
        "of one seed differ.",
    )
    task_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Options of tasks that make rows, by task, such as {chain_sum: {max_terms: 3}}.",
    )
    system_prompt: str | None = Field(
        None, description="Replaces data.system_prompt for this dataset."
    )
    instruction: str | None = Field(None, description="Replaces data.instruction for this dataset.")


class TrainingDataset(Dataset):
    name: str | None = Field(
        None,
        min_length=1,
        description="Name of the dataset in records. null takes the name of its file or directory.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Share of the prompts that come from this dataset, relative to the weights of "
        "the others.",
    )

    @property
    def called(self) -> str:
        """Returns `name`; without one, the name of the file, or of its directory if the file has a
        name that says nothing, such as train.jsonl.
        """
        if self.name is not None:
            return self.name
        path = Path(self.path)
        named = [
            part
            for part in (path.stem, path.parent.name)
            if part and part.lower() not in _EVERYWHERE
        ]
        return named[0] if named else path.stem or self.path


class DemonstrationDataset(TrainingDataset):
    """Rows of data that are trained beside what the policy writes."""

    weight: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Factor of their tokens' loss, where a token that the policy wrote has 1.",
    )
    share: float = Field(
        0.25,
        gt=0,
        le=64,
        description="Groups of rows that each iteration trains, as a share of "
        "schedule.prompts_per_iteration. A group has rollout.responses_per_prompt rows.",
    )


class DataConfig(Section):
    train: (
        Annotated[FilePath, Field(min_length=1)]
        | Annotated[Several[TrainingDataset], Field(min_length=1)]
    ) = Field(
        ...,
        description="Training prompts: a JSONL, CSV or parquet file (question/answer, "
        "prompt/answer or messages), a directory of the datasets library, datasets:NAME for "
        "what that library loads, reasoning_gym:NAME[,NAME...] for tasks that make their rows, "
        "verifiers:NAME for those of an environment of environment.options.environments, or a "
        "list of several that are mixed by weight.",
    )
    test: Annotated[FilePath, Field(min_length=1)] | Dataset | None = Field(
        None, description="Held-out prompts in the same formats. null turns evaluation off."
    )
    demonstrations: Annotated[FilePath, Field(min_length=1)] | DemonstrationDataset | None = Field(
        None,
        description="Rows that are trained by cross-entropy in the same updates as what the policy "
        "writes, such as solutions by a person or a stronger model, in the formats of the "
        "supervised stage. Trainers have them before the first response is there. null has none.",
    )
    question_column: str | None = Field(
        None,
        min_length=1,
        description="Column with the question, a text or chat messages; a.b is column b inside "
        "column a. null recognises the layout of the rows. Held-out rows without this "
        "column are read by their layout.",
    )
    answer_column: str | None = Field(
        None,
        min_length=1,
        description="Column with the reference answer. null recognises the layout of the rows.",
    )
    images_column: str | None = Field(
        "images",
        min_length=1,
        description="Column with a row's images: paths, bytes, or objects with `bytes` or `path`; "
        "one of them or a list. `<image>` in the text says where each stands. null reads no "
        "images.",
    )
    max_image_pixels: int | None = Field(
        None,
        ge=784,
        description="Largest image in pixels; larger ones are made smaller. null takes the bound "
        "of the model's image processor.",
    )
    teacher_column: str | None = Field(
        None,
        min_length=1,
        description="Column of a row that names its teacher, a key of `teacher`. Several teachers "
        "need it.",
    )
    chat_template: FilePath = Field(
        "auto",
        description="Whether prompts are rendered with the tokenizer's chat template: auto (if it "
        "has one), always, or never. The name of a file that ends in .jinja takes the "
        "template from there.",
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, such as {enable_thinking: false}. A variable "
        "that the template does not read is refused.",
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
        description="How to treat longer prompts: refuse ends the run before it starts, truncate "
        "keeps the last tokens, skip leaves the prompt out. Both are counted in the "
        "records.",
    )
    shuffle: bool = Field(
        True,
        description="Shuffle the training prompts anew in every epoch. run.seed seeds the order.",
    )

    @property
    def datasets(self) -> tuple[TrainingDataset, ...]:
        """Returns the training datasets, of which there is at least one."""
        return (TrainingDataset(path=self.train),) if isinstance(self.train, str) else self.train

    @property
    def shares(self) -> list[float]:
        """Returns the share of the prompts that come from each training dataset; they sum to 1."""
        total = sum(dataset.weight for dataset in self.datasets)
        return [dataset.weight / total for dataset in self.datasets]

    @property
    def demonstrated(self) -> DemonstrationDataset | None:
        """Returns data.demonstrations with its options."""
        if isinstance(self.demonstrations, str):
            return DemonstrationDataset(path=self.demonstrations)
        return self.demonstrations

    def key_of(self, number: int) -> str:
        """Returns the key under which training dataset `number` was written."""
        return "data.train" if isinstance(self.train, str) else f"data.train.{number}"
