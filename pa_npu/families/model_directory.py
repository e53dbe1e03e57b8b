"""Checks a model directory's small files and headers in a second, before anything starts: one line per fault.

    check_weights(spec)                 every tensor of the model is there once, in its shape, in a
                                        type that can be trained
    check_end_tokens(spec)              the end tokens, of generation_config.json too, are in the
                                        vocabulary
    check_tokenizer(spec, tokenizer)    so are all of the tokenizer's
    check_plain_files(directory)        nothing that is going to be read is a pipe, a device or
                                        absurdly large

Of the weights a few KiB of every tensor are read (check_values); whoever loads them sees them all,
where located_weights says. All raise DataError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.errors import DataError, printable
from pa_npu.families.config_json import read_json_object, token_ids
from pa_npu.families.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LARGEST_INDEX_BYTES = 64 * 2**20
# A tokenizer.json with a vocabulary of 250,000 has some 30 MiB.
_LARGEST_SMALL_FILE_BYTES = 256 * 2**20
_SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
_TRAINABLE = ("F64", "F32", "F16", "BF16")
# Old conversions store the rotary frequencies, which follow from config.json.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def check_plain_files(directory: str | Path) -> None:
    for pattern in _SMALL_FILES:
        for file in sorted(Path(directory).glob(pattern)):
            try:
                status = file.stat()
            except OSError as error:
                raise DataError(
                    f"model.path: {file} cannot be read ({error.strerror}); complete the download"
                ) from None
            try:
                open_plain(file).close()
            except OSError as error:
                raise DataError(
                    f"model.path: {file} cannot be used ({reason(error)}); restore it from the "
                    "model's source"
                ) from None
            if status.st_size > _LARGEST_SMALL_FILE_BYTES:
                raise DataError(
                    f"model.path: {file} has {status.st_size} bytes, more than any file of its "
                    "kind; restore it from the model's source"
                )


def weight_files(directory: str | Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says; where there is none, the names in
    model.safetensors.

    Raises DataError where both are missing, the index is malformed, or it names a file that is not
    there.
    """
    directory = Path(directory)
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            raise DataError(
                f"model.path: {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the "
                "model with save_pretrained(..., safe_serialization=True)"
            )
        return dict.fromkeys(read_header(single), SINGLE_FILE)
    weight_map = read_json_object(index, _LARGEST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise DataError(
            f"model.path: {index} has no weight_map from tensors to files; restore it from its "
            "source"
        )
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise DataError(
                f"model.path: {index} names {file!r:.100}, which is no safetensors file of this "
                "directory; restore the index from its source"
            )
        if not (directory / file).is_file():
            raise DataError(
                f"model.path: {directory} lacks {file}, which its index names; complete the "
                "download"
            )
    return weight_map


def check_weights(spec: ModelSpec) -> None:
    check_values(spec, located_weights(spec))


def located_weights(spec: ModelSpec) -> dict[str, tuple[Path, StoredTensor]]:
    """File and position of the model's tensors by name: each is there once, in its shape, in a type
    that can be trained.
    """
    directory = Path(spec.path)
    named = weight_files(directory)
    files = sorted(set(named.values()))
    _check_other_files(directory, files)
    stored: dict[str, StoredTensor] = {}
    file_of: dict[str, str] = {}
    for file in files:
        for name, tensor in read_header(directory / file).items():
            if name in stored:
                raise DataError(
                    f"model.path: tensor {name!r:.100} is in both {file_of[name]} and {file} of "
                    f"{directory}; remove the file that does not belong to the model, and its "
                    f"entry in {INDEX_FILE}"
                )
            stored[name], file_of[name] = tensor, file
    strays = sorted(
        name for name in stored.keys() | named.keys() if file_of.get(name) != named.get(name)
    )
    if strays:
        where, said = file_of.get(strays[0], "no file"), named.get(strays[0], "no file")
        raise DataError(
            f"model.path: {directory}: tensor {strays[0]!r:.100} is in {where}, but {INDEX_FILE} "
            f"says {said}; restore the index from its source"
        )
    _check_tensors(spec, stored)
    known = spec.hf_tensors() | _tied_head(spec, stored)
    return {name: (directory / file_of[name], stored[name]) for name in known if name in stored}


def _tied_head(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """lm_head.weight of a model that has none of its own, where the files have one."""
    name = "lm_head.weight"
    return {name: (spec.vocab_size, spec.hidden_size)} if spec.tied and name in stored else {}


def check_values(spec: ModelSpec, places: Mapping[str, tuple[Path, StoredTensor]]) -> None:
    """The values at a few places of every tensor are numbers, not all zero, and a tied model's head
    is its embedding.

    places: file and position by name.
    """
    remedy = "restore the file from its source"
    samples = {name: sample_values(file, tensor) for name, (file, tensor) in places.items()}
    for name, values in samples.items():
        if not np.isfinite(values).all():
            raise DataError(
                f"model.path: {places[name][0]}: tensor {name} holds values that are no finite "
                f"numbers; {remedy}"
            )
        if len(places[name][1].shape) > 1 and not values.any():
            raise DataError(
                f"model.path: {places[name][0]}: tensor {name} is all zero where it was looked at; "
                f"{remedy}"
            )
    head, embedding = samples.get("lm_head.weight"), samples.get("model.embed_tokens.weight")
    if (
        spec.tied
        and head is not None
        and embedding is not None
        and not np.array_equal(head, embedding)
    ):
        raise DataError(
            f"model.path: {spec.path}: config.json says tie_word_embeddings, but lm_head.weight "
            "differs from model.embed_tokens.weight; set tie_word_embeddings to false, or remove "
            "lm_head.weight from the files"
        )


def _check_other_files(directory: Path, files: list[str]) -> None:
    """Engines read every safetensors file of a directory without an index."""
    if (directory / INDEX_FILE).exists():
        return
    others = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in files)
    if others:
        raise DataError(
            f"model.path: {directory} has {others[0]} beside {SINGLE_FILE} and no {INDEX_FILE}; "
            "remove it, or restore the index"
        )


def _check_tensors(spec: ModelSpec, stored: dict[str, StoredTensor]) -> None:
    expected = spec.hf_tensors()
    remedy = "use a complete checkpoint whose config.json belongs to it"
    optional = _tied_head(spec, stored)
    for name in sorted(stored):
        if stored[name].dtype not in _TRAINABLE:
            raise DataError(
                f"model.path: {spec.path}: tensor {name!r:.100} has type {stored[name].dtype}: "
                "quantised weights cannot be trained; use the model in "
                f"{' or '.join(_TRAINABLE[1:])}"
            )
    # transformers renames, ignores and fuses as it loads; whoever loads hears what is missing
    if spec.is_any:
        return
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        raise DataError(
            f"model.path: {spec.path} lacks {len(missing)} tensor(s) of the model, the first is "
            f"{missing[0]!r}; {remedy}"
        )
    known = expected | optional
    extra = sorted(
        name for name in stored.keys() - known.keys() if not name.endswith(_IGNORED_SUFFIX)
    )
    if extra:
        raise DataError(
            f"model.path: {spec.path} has {len(extra)} tensor(s) this model does not use, the "
            f"first is {extra[0]!r:.100}; {remedy}"
        )
    for name, shape in known.items():
        if name in stored and stored[name].shape != shape:
            raise DataError(
                f"model.path: {spec.path}: tensor {name} has shape {stored[name].shape}, but "
                f"config.json says {shape}; {remedy}"
            )


def check_end_tokens(spec: ModelSpec) -> None:
    _in_vocabulary(spec, "config.json: eos_token_id", spec.eos_token_ids)
    _in_vocabulary(spec, "generation_config.json: eos_token_id", _generation_end_tokens(spec.path))


def end_token_ids(path: str, config_tokens: Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response, as vLLM takes them together: of config.json,
    generation_config.json and the tokenizer.

    config_tokens: those of config.json. Raises DataError.
    """
    tokens = {*config_tokens, *_generation_end_tokens(path)}
    if tokenizer.eos_token_id is not None:
        tokens.add(int(tokenizer.eos_token_id))
    return tuple(sorted(tokens))


def end_tokens_line(spec: ModelSpec, tokenizer: Any) -> str:
    """The tokens that end a response, for the lines that a run begins with."""
    tokens = end_token_ids(spec.path, spec.eos_token_ids, tokenizer)
    names = [
        f"{printable(str(tokenizer.convert_ids_to_tokens(token)))} ({token})" for token in tokens
    ]
    return f"a response ends at {' or '.join(names)}" if names else "no token ends a response"


def _generation_end_tokens(path: str) -> tuple[int, ...]:
    file = Path(path) / "generation_config.json"
    if not file.exists():
        return ()
    try:
        return token_ids(read_json_object(file, _LARGEST_INDEX_BYTES), "eos_token_id")
    except ValueError as error:
        raise DataError(
            f"model.path: {file} has a value that cannot be used ({error}); correct it"
        ) from None


def _in_vocabulary(spec: ModelSpec, what: str, tokens: tuple[int, ...]) -> None:
    outside = [token for token in tokens if token >= spec.vocab_size]
    if outside:
        raise DataError(
            f"model.path: {spec.path}/{what}: {outside[0]} is not one of the {spec.vocab_size} "
            "tokens of the vocabulary; correct it"
        )


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The model's, of transformers. Raises DataError."""
    from transformers import AutoTokenizer  # seconds of import

    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (
        BaseException
    ) as error:  # transformers raises anything from OSError to Exception, its native code panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if (Path(path) / "config.json").exists():
            from pa_npu.families.any_model import config_of

            # which tokenizers read too: it raises where that is what is wrong
            config_of(path, trust_remote_code)
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"model.path: {path}: its tokenizer cannot be loaded ({reason}); add the model's "
            "tokenizer files"
        ) from None


def check_tokenizer(spec: ModelSpec, tokenizer: Any) -> None:
    """tokenizer: a loaded transformers tokenizer.

    The vocabulary may be larger than it: models pad theirs.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest >= spec.vocab_size:
        raise DataError(
            f"model.path: {spec.path}: token {token!r:.60} of the tokenizer has id {largest}, but "
            f"config.json says vocab_size = {spec.vocab_size}; use the tokenizer that belongs to "
            "the model, or resize its embeddings"
        )


_PIECE_BYTES = 8192
_BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """dtype: as safetensors names it, such as BF16. begin, num_bytes: where its values are in the
    file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name.

    Raises DataError for a file that is not whole; reads nothing but the header.
    """
    try:
        open_plain(file).close()
        with safe_open(str(file), "np"):
            pass
        with open_plain(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except PermissionError:
        raise DataError(
            f"model.path: {file} cannot be read (permission denied); let the user of the run read "
            "it"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"model.path: {file} is damaged or incomplete ({reason(error)}); copy it again"
        ) from None
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            found[name] = StoredTensor(
                entry["dtype"], tuple(entry["shape"]), 8 + length + start, stop - start
            )
    return found


def sample_values(file: Path, tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """Values at the beginning, at two places between, and at the end of a tensor; all of a small
    one. Raises DataError.
    """
    size = _BYTES_OF[tensor.dtype]
    steps = {(tensor.num_bytes - _PIECE_BYTES) * part // 3 // size * size for part in range(4)}
    starts = sorted(steps) if tensor.num_bytes > 4 * _PIECE_BYTES else [0]
    try:
        with open_plain(file) as stream:
            pieces = []
            for start in starts:
                stream.seek(tensor.begin + start)
                pieces.append(stream.read(_PIECE_BYTES if len(starts) > 1 else tensor.num_bytes))
    except OSError as error:
        raise DataError(
            f"model.path: {file} cannot be read ({reason(error)}); copy it again"
        ) from None
    if tensor.dtype == "BF16":  # the upper half of a float
        return (
            (np.frombuffer(b"".join(pieces), "<u2").astype("<u4") << 16)
            .view("<f4")
            .astype(np.float64)
        )
    return np.frombuffer(
        b"".join(pieces), {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype]
    ).astype(np.float64)
