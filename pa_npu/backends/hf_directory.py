"""Writes the policy as an HF directory: config, tokenizer files, safetensors and their index.

All trainer ranks write it together; or one process writes it from a checkpoint, which is checked
first, whichever backend wrote it (checked_run). Each stage's publishing rank gathers its stage
bucket by bucket and writes its own files, so no rank holds more than one file's worth of another
rank's weights. World rank 0 then numbers the files, checks from their headers that every tensor is
there once, writes the index and copies the rest. Everything happens in DIRECTORY.tmp, which takes
DIRECTORY's name only when it is complete. With several nodes DIRECTORY must be on a file system
that they share.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import save_file

from pa_npu.backends.model_card import write_model_card
from pa_npu.checkpoints.directories import CheckpointMeta, check_files, read_meta
from pa_npu.checkpoints.provenance import model_fingerprint
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.data.prompt_format import FILE as PROMPTS_FILE
from pa_npu.data.prompt_format import kept_template, template_text, write_prompt_format
from pa_npu.errors import DataError, ExportError, UserError
from pa_npu.families.model_directory import INDEX_FILE, SINGLE_FILE, read_header
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.publisher import WeightSource
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Assembler, Manifest

# Of the model's directory all files go into an export but these: weights in any form, and what is
# no
# longer true of other weights, such as how these were quantised, or the card that describes them.
_WEIGHT_ENDINGS = frozenset(
    {
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".gguf",
        ".ggml",
        ".onnx",
        ".ot",
        ".npz",
    }
)
_NOT_COPIED = frozenset(
    {
        "config.json",
        "README.md",
        "adapter_config.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "trainer_state.json",
        "training_args.json",
        "all_results.json",
        "train_results.json",
        "eval_results.json",
        PROMPTS_FILE,
    }
)
_INDEX_ENDING = ".index.json"
_WEIGHT_DIRECTORIES = frozenset(
    {"original", "onnx", "openvino", "metal", "gguf", "coreml", "runs", "__pycache__"}
)
_CHECKPOINT = "checkpoint-"  # the directories that trainers leave in a model's
BUCKET_BYTES = 64 * 2**20
_TIMEOUT_S = 1800.0


def write_hf(
    source: WeightSource | None,
    spec: ModelSpec,
    directory: str | Path,
    place: Place,
    device: torch.device,
    *,
    config: Config | None = None,
    template: str | None = None,
    max_file_bytes: int = 2 * 2**30,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write this rank's share of the HF directory `directory`. source: its weights, None on a rank
    that sends none.

    Collective over all trainer ranks. An existing directory is replaced. Tensors keep the source's
    type, which config.json then names.

    Args:
        device: of collectives.
        config: the run's, where a run trained the model; the directory then has its card and the
        format of its prompts.
        template: the text of the file that its chat_template names, where that was kept; None reads
        the file.
        max_file_bytes: a leader holds at most so many, or one tensor if that is larger, in host
        memory.
        complete: makes another kind of directory of the files of weights, on world rank 0.
    Raises ExportError on every rank when any rank fails.
    """
    target = Path(directory)
    temporary = target.with_name(target.name + ".tmp")

    def prepare() -> None:
        if place.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def write() -> None:
        if source is None:
            return
        buckets = source.buckets(transport.Deadline(_TIMEOUT_S))
        try:
            if place.publishes:
                _write_stage(source.manifest, buckets, temporary, place.stage, max_file_bytes)
        finally:
            # also when the leader cannot write: its peers gather with it to the end
            for _ in buckets:
                pass

    def finish() -> None:
        if place.rank == 0:
            if complete is not None:
                complete(temporary)
            else:
                _number_files(temporary, spec)
                assert source is not None, "world rank 0 publishes"
                _copy_config(Path(spec.path), temporary, source.manifest.buckets[0].dtype)
            _copy_rest(Path(spec.path), temporary)
            if config is not None:
                kept = template if template is not None else kept_template(config.data)
                write_prompt_format(temporary, config.data, kept)
                write_model_card(temporary, config)
            _put_in_place(temporary, target)

    for step, action in (("preparing", prepare), ("writing", write), ("completing", finish)):
        _together(action, f"{step} {temporary}", device)


def _together(action: Callable[[], None], step: str, device: torch.device) -> None:
    """Runs the action on all ranks; if it fails on any, raises ExportError on all, so that none
    waits for another in vain. step: for messages.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # whatever it is, the other ranks must hear of it; raised below
        failure = error
    failed = torch.tensor([int(failure is not None)], device=device)
    if dist.is_initialized():
        dist.all_reduce(failed)
    if failure is not None:
        raise ExportError(f"HF export: {step}: {failure}") from failure
    if failed.item():
        raise ExportError(
            f"HF export: {step}: {failed.item()} other rank(s) failed; their logs say why"
        )


def _write_stage(
    manifest: Manifest,
    buckets: Iterator[torch.Tensor | None],
    directory: Path,
    stage: int,
    max_file_bytes: int,
) -> None:
    assembler = Assembler(manifest)
    held: dict[str, torch.Tensor] = {}
    held_bytes = 0
    number = 0
    for bucket, buffer in zip(manifest.buckets, buckets, strict=False):
        assert buffer is not None, "only TP leaders have the gathered weights"
        for name, tensor in assembler.completed(bucket, buffer):
            if held and held_bytes + tensor.nbytes > max_file_bytes:
                save_file(held, _stage_file(directory, stage, number), metadata={"format": "pt"})
                held = {}
                held_bytes = 0
                number += 1
            # a copy: the bucket's memory is used again
            held[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            held_bytes += tensor.nbytes
    if held:
        save_file(held, _stage_file(directory, stage, number), metadata={"format": "pt"})


def _stage_file(directory: Path, stage: int, number: int) -> Path:
    """Named so that the alphabetical order is the order of the layers."""
    return directory / f"stage-{stage:05d}-{number:05d}.safetensors"


def _number_files(directory: Path, spec: ModelSpec) -> None:
    """Gives the stages' files their HF names, and writes the index if there are several files.

    Raises ExportError unless every tensor is there once.
    """
    files = sorted(directory.glob("stage-*.safetensors"))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, file in enumerate(files, start=1):
        name = SINGLE_FILE
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for tensor, stored in read_header(file).items():
            if tensor in weight_map:
                raise ExportError(
                    f"two stages wrote tensor {tensor}; the pipeline stages must hold different "
                    "layers"
                )
            weight_map[tensor] = name
            total_bytes += stored.num_bytes
        file.rename(directory / name)
    missing = sorted(spec.hf_tensors().keys() - weight_map.keys())
    if missing:
        raise ExportError(
            f"no stage wrote tensor {missing[0]} (and {len(missing) - 1} more); all ranks must "
            "export at the same time"
        )
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_config(source: Path, directory: Path, dtype: str) -> None:
    """Writes config.json with the type of the weights that were written."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_rest(source: Path, directory: Path) -> None:
    """Copies all files but the weights: those of tokenizers and processors, templates, code
    (auto_map), a licence.
    """
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith((".", _CHECKPOINT)) and name.lower() not in _WEIGHT_DIRECTORIES
        ]
        for name in names:
            file = Path(folder) / name
            target = directory / file.relative_to(source)
            if _is_copied(file) and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def _is_copied(file: Path) -> bool:
    is_weights = file.suffix.lower() in _WEIGHT_ENDINGS or file.name.endswith(_INDEX_ENDING)
    return (
        file.is_file()
        and not is_weights
        and file.name not in _NOT_COPIED
        and not file.name.startswith(".")
    )


def _put_in_place(temporary: Path, target: Path) -> None:
    """Puts the complete directory in place of `target`, whose former content is deleted last."""
    for file in temporary.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    former = target.with_name(target.name + ".old")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    temporary.rename(target)
    shutil.rmtree(former, ignore_errors=True)


def checked_run(checkpoint: Path, output: Path, model: str | None) -> tuple[Config, ModelSpec]:
    """Returns the run's configuration for one process on the host, and its model.

    model: the HF model that the run began with, if it has moved since.

    Raises UserError if the checkpoint is not complete or `output` is not empty, and DataError if
    the checkpoint is of another model or one of its files is not what was written.
    """
    meta = read_meta(checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"--output: {output} exists; name a directory that does not, or an empty one"
        )
    config = _single_process(checkpoint, meta, model)
    spec = ModelSpec.from_config(config)
    if model_fingerprint(config.model.path) != meta.model["fingerprint"]:
        raise DataError(
            f"--model: {config.model.path} is not the model that {checkpoint} began with "
            f"({meta.model['path']}); name that one"
        )
    check_files(checkpoint)
    return config, spec


def trained_template(checkpoint: Path, config: Config) -> str | None:
    """Returns the template that the checkpoint's run was given in a file.

    Raises DataError if neither the checkpoint nor the file has it anymore.
    """
    template = read_meta(checkpoint).chat_template
    if template is not None:
        return template
    return template_text(config.data.chat_template)


def _single_process(checkpoint: Path, meta: CheckpointMeta, model: str | None) -> Config:
    """Returns the run's configuration for one process on the host."""
    tree: dict[str, Any] = {**meta.config}
    try:
        tree["run"] = {**tree["run"], "device": "cpu"}
        tree["model"] = {**tree["model"], "path": model or meta.model["path"]}
        tree["placement"] = {}
        tree["trainer"] = {"backend": tree["trainer"]["backend"]}
        tree["microbatch"] = {}
        return Config.model_validate(tree)
    except (KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--checkpoint: the configuration in {checkpoint} is of another release of this "
            f"package ({reason}); use that one"
        ) from None
