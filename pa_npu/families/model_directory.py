"""Checks a model directory's small files and headers within a second, before anything starts.

    check_weights(spec)                 every tensor of the model is there once, in its shape, in a
                                        type that can be trained
    check_end_tokens(spec)              the end tokens, of generation_config.json too, are in the
                                        vocabulary
    check_tokenizer(spec, tokenizer)    so are all of the tokenizer's
    check_plain_files(directory)        no file to be read is a pipe, a device or absurdly large

Of the weights a few KiB of every tensor are read (check_values). located_weights tells a loader
where each tensor is. All raise DataError with one line per fault.
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
    """Returns file names by tensor name, from the index, or from model.safetensors without one.

    Raises DataError if both are missing, the index is malformed, or it names a file that is not
    there.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
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
    """Returns file and position of the model's tensors by name.

    Each is there once, in its shape, in a type that can be trained; else raises DataError.
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
            stored[name] = tensor
            file_of[name] = file
    names = stored.keys() | named.keys()
    strays = sorted(name for name in names if file_of.get(name) != named.get(name))
    if strays:
        where = file_of.get(strays[0], "no file")
        in_index = named.get(strays[0], "no file")
        raise DataError(
            f"model.path: {directory}: tensor {strays[0]!r:.100} is in {where}, but {INDEX_FILE} "
            f"says {in_index}; restore the index from its source"
        )
    _check_tensors(spec, stored)
    known = spec.hf_tensors() | _tied_head(spec, stored)
    return {name: (directory / file_of[name], stored[name]) for name in known if name in stored}


def _tied_head(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Returns lm_head.weight of a tied model if the files have one."""
    name = "lm_head.weight"
    if not spec.tied or name not in stored:
        return {}
    return {name: (spec.vocab_size, spec.hidden_size)}


def check_values(spec: ModelSpec, places: Mapping[str, tuple[Path, StoredTensor]]) -> None:
    """Checks the values at a few places of every tensor.

    They must be finite and not all zero, and a tied model's head must be its embedding.

    `places`: file and position by name.
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
    if spec.tied and _differ(samples, "lm_head.weight", "model.embed_tokens.weight"):
        raise DataError(
            f"model.path: {spec.path}: config.json says tie_word_embeddings, but lm_head.weight "
            "differs from model.embed_tokens.weight; set tie_word_embeddings to false, or remove "
            "lm_head.weight from the files"
        )


def _differ(samples: Mapping[str, npt.NDArray[np.float64]], *names: str) -> bool:
    """Returns whether two tensors are both there and differ."""
    first, second = (samples.get(name) for name in names)
    return first is not None and second is not None and not np.array_equal(first, second)


def _check_other_files(directory: Path, files: list[str]) -> None:
    """Refuses further files: engines read every safetensors file of a directory without an index."""
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
    # transformers renames, ignores and fuses as it loads; its loader reports what is missing.
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
    """Returns the tokens that end a response, as vLLM takes them together.

    They come from config.json (`config_tokens`), generation_config.json and the tokenizer. Raises
    DataError.
    """
    tokens = {*config_tokens, *_generation_end_tokens(path)}
    if tokenizer.eos_token_id is not None:
        tokens.add(int(tokenizer.eos_token_id))
    return tuple(sorted(tokens))


def end_tokens_line(spec: ModelSpec, tokenizer: Any) -> str:
    """Returns the line about tokens that end a response, for the beginning of a run."""
    names = []
    for token in end_token_ids(spec.path, spec.eos_token_ids, tokenizer):
        names.append(f"{printable(str(tokenizer.convert_ids_to_tokens(token)))} ({token})")
    if not names:
        return "no token ends a response"
    return f"a response ends at {' or '.join(names)}"


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


def _in_vocabulary(spec: ModelSpec, place: str, tokens: tuple[int, ...]) -> None:
    outside = [token for token in tokens if token >= spec.vocab_size]
    if outside:
        raise DataError(
            f"model.path: {spec.path}/{place}: {outside[0]} is not one of the {spec.vocab_size} "
            "tokens of the vocabulary; correct it"
        )


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Returns the model's tokenizer, by transformers. Raises DataError."""
    from transformers import AutoTokenizer  # seconds of import

    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    # transformers raises anything from OSError to Exception, and its native code panics.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if (Path(path) / "config.json").exists():
            from pa_npu.families.any_model import config_of

            # Tokenizers read the configuration too: this raises if that is what is wrong.
            config_of(path, trust_remote_code)
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"model.path: {path}: its tokenizer cannot be loaded ({reason}); add the model's "
            "tokenizer files"
        ) from None


def check_tokenizer(spec: ModelSpec, tokenizer: Any) -> None:
    """Checks that the vocabulary has all tokens of a transformers tokenizer.

    The vocabulary may be larger: models pad theirs. Raises DataError.
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
    """A tensor in a file.

    dtype: as safetensors names it, such as BF16. begin, num_bytes: place of its values in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the file's tensors by name; reads nothing but the header.

    Raises DataError for a file that is not whole.
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
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        tensors[name] = StoredTensor(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            begin=8 + length + start,
            num_bytes=stop - start,
        )
    return tensors


def sample_values(file: Path, tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """Returns values at the beginning, at two places between, and at the end of a tensor.

    Returns all values of a small one. Raises DataError.
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
    data = b"".join(pieces)
    if tensor.dtype == "BF16":  # the upper half of a float
        widened = np.frombuffer(data, "<u2").astype("<u4") << 16
        return widened.view("<f4").astype(np.float64)
    numpy_dtype = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype]
    return np.frombuffer(data, numpy_dtype).astype(np.float64)
