"""The experts of a mixture's tokens in an engine's answers: reads, checks and attaches them."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.engines.codec import (
    DecodedAnswer,
)
from pa_npu.engines.protocol import EngineError, Generation
from pa_npu.samples.expert_choices import NO_CHOICE, ExpertChoices


def recorded_expert_choices(
    answer: DecodedAnswer, layers: Sequence[int]
) -> list[npt.NDArray[np.uint16]] | None:
    """Returns each response's expert choices, uint16 [tokens, layers, experts per token]; None if
    the answer has none.

    `layers`: those with experts; the engine may send rows for all layers. Raises ValueError if the
    expert choices are no such arrays.
    """
    arrays = []
    for file in answer.expert_choice_files:
        if file is None:
            return None
        array = _expert_ids(file)
        if len(array) and array.shape[1] < len(layers):
            raise ValueError(f"rows of {array.shape[1]} layers, but {len(layers)} have experts")
        if array.shape[1] > len(layers):
            if array.shape[1] <= max(layers):
                raise ValueError(
                    f"rows of {array.shape[1]} layers, but layer {max(layers)} has experts"
                )
            array = array[:, layers]
        arrays.append(array.astype(np.uint16))
    return arrays


def _expert_ids(data: bytes) -> npt.NDArray[Any]:
    """Returns the array of an .npy file that has exactly the length that its header states.

    Raises ValueError for anything else.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"an array of format {version}")
    try:
        shape, is_fortran, dtype = readers[version](stream)
    except Exception as error:  # numpy parses the header as Python, which raises much
        raise ValueError(f"a header that cannot be read ({type(error).__name__})") from None
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"an array of shape {shape!r:.60}")
    if len(shape) != 3 or dtype.kind not in "iu":
        raise ValueError(
            f"an array of {dtype} and shape {list(shape)!r:.60}, not [tokens, layers, experts per "
            "token]"
        )
    size = math.prod(shape)
    if size * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(
            f"{len(data) - stream.tell()} bytes of an array of {dtype} and shape "
            f"{list(shape)!r:.60}"
        )
    array = np.frombuffer(data, dtype, size, stream.tell()).reshape(
        shape, order="F" if is_fortran else "C"
    )
    if size and not (array.min() >= -1 and array.max() <= NO_CHOICE):  # -1 is NO_CHOICE in 16 bits
        raise ValueError("expert ids beyond 16 bits")
    return array


def with_expert_choices(
    generation: Generation,
    recorded: npt.NDArray[np.uint16],
    num_given: int,
    expert_choices: ExpertChoices,
    engine: str,
) -> Generation:
    """Returns the generation with the expert choices that an engine recorded, from the prompt's
    first token.

    Tokens beyond those recorded get no expert choices.

    Args:
        generation: a response.
        recorded: expert ids, uint16 of any shape; NO_CHOICE for a token without expert choices.
        num_given: tokens of the prompt and of the beginning of the response.
        expert_choices: the column.
        engine: its name, for messages.

    Raises EngineError if the ids are no expert choices of this model.
    """
    column = expert_choices.column
    length = num_given + len(generation.tokens)
    per_token = int(np.prod(column.shape))
    if recorded.size % per_token or recorded.size > length * per_token:
        raise EngineError(
            f"engine {engine}: {recorded.size} expert ids for {length} tokens of "
            f"{list(column.shape)}; does it serve another model?"
        )
    rows = recorded.reshape(-1, *column.shape)
    if rows.size and rows.max() >= expert_choices.num_experts:
        of_tokens = rows.reshape(len(rows), -1)
        wrong = (of_tokens >= expert_choices.num_experts).any(axis=1) & (
            of_tokens != NO_CHOICE
        ).any(axis=1)
        if wrong.any():
            raise EngineError(
                f"engine {engine}: token {int(wrong.argmax())} has expert ids "
                f"{rows[wrong.argmax()].tolist()!r:.200}, but a layer has "
                f"{expert_choices.num_experts} "
                "experts; does it serve another model?"
            )
    values = column.blank(length)
    values[: len(rows)] = rows.astype(column.type)  # NO_CHOICE becomes the column's `elsewhere`
    return replace(generation, columns={**generation.columns, column: values})
