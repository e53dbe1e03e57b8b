"""Expert choices in engines' answers become a column of the sample; whatever is none is one error of its engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from pa_npu.engines.client import EngineClient
from pa_npu.engines.codec import (
    decode_answer,
    encode_request,
)
from pa_npu.engines.expert_choice_codec import (
    recorded_expert_choices,
    with_expert_choices,
)
from pa_npu.engines.group_session import join_parts
from pa_npu.engines.protocol import EngineError, Generation, Sampling
from pa_npu.environments.single_turn import samples_of
from pa_npu.families.shape import Experts
from pa_npu.samples.columns import RunColumns
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.samples.types import SampleBuilder

EXPERTS, TAKEN, SPARSE = 8, 2, 2  # of the three layers the middle one is dense
EXPERT_CHOICES = ExpertChoices.from_experts(Experts(EXPERTS, TAKEN, 32, True, (0, 2)))
RUN = RunColumns.from_features([EXPERT_CHOICES])


def written(length: int, columns: dict[Any, np.ndarray], reason: Any = "stop") -> Generation:
    tokens = np.arange(length, dtype=np.int32)
    return Generation(tokens, np.zeros(length, np.float32), "", reason, version=0, columns=columns)


def choices_of_tokens(first: int, last: int) -> np.ndarray:
    """Expert choices that say to which token they belong."""
    return (np.arange(first, last)[:, None, None] + np.zeros((1, SPARSE, TAKEN))).astype(np.uint8)


def test_what_several_parts_and_turns_recorded_becomes_one_column_and_the_first_record_stays() -> (
    None
):
    """A part's last token has its expert choices from the next part; what is computed again under
    newer weights keeps the first.
    """
    column = EXPERT_CHOICES.column
    none = np.full((1, SPARSE, TAKEN), column.elsewhere, np.uint8)
    first = written(2, {column: np.concatenate([choices_of_tokens(0, 4), none])}, "cut")
    rest = written(3, {column: np.concatenate([choices_of_tokens(100, 107), none])})
    whole = join_parts(first, rest, None)
    expected = [0, 1, 2, 3, 104, 105, 106, 255]
    assert whole.columns[column][:, 0, 0].tolist() == expected and len(whole.tokens) == 5
    (sample,) = samples_of(np.arange(3, dtype=np.int32), [whole])
    assert sample.columns[column][:, 1, 1].tolist() == expected
    builder = SampleBuilder(np.arange(3, dtype=np.int32))
    builder.write(whole.tokens, whole.logprobs, 0, whole.columns)
    builder.show(np.arange(2, dtype=np.int32))
    turn = np.concatenate([choices_of_tokens(50, 61), none])
    builder.write(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), 0, {column: turn})
    values = builder.finish(True, "").columns[column]
    assert values[:, 0, 0].tolist() == [*expected[:-1], 57, 58, 59, 60, 255]


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (np.zeros((9, SPARSE, TAKEN), np.uint16), "36 expert ids for 8 tokens"),
        (np.zeros(3, np.uint16), "3 expert ids"),
        (
            np.full((2, SPARSE, TAKEN), 8, np.uint16),
            "token 0 has expert ids .* but a layer has 8 experts",
        ),
    ],
)
def test_expert_choices_that_cannot_be_are_refused(recorded: np.ndarray, expected: str) -> None:
    with pytest.raises(EngineError, match=expected):
        with_expert_choices(written(5, {}), recorded, 3, EXPERT_CHOICES, "e")


def npy(array: np.ndarray, **header: Any) -> bytes:
    """The array's file; header: what its header says otherwise."""
    file = io.BytesIO()
    said = {**np.lib.format.header_data_from_array_1_0(array), **header}
    np.lib.format.write_array_header_1_0(file, said)
    return file.getvalue() + array.tobytes()


def npz() -> bytes:
    np.savez(file := io.BytesIO(), a=np.zeros((2, 3, TAKEN), np.uint8))
    return file.getvalue()


RIGHT = np.zeros((2, 3, TAKEN), np.uint8)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no array",
        npz(),
        npy(RIGHT[0]),
        npy(RIGHT[None]),
        npy(RIGHT.astype(np.float32)),
        npy(RIGHT, shape=(2**40, 3, TAKEN)),
        npy(RIGHT, shape=(2**62, 2**62, 2**62)),
        npy(RIGHT, descr="|O"),
        npy(RIGHT)[:-1],
        npy(RIGHT.astype(np.int64) + 2**17),
        npy(RIGHT[:, :0]),
        npy(RIGHT, shape=(-1, 3, TAKEN)),
        b"\x93NUMPY\x01\x00\xc8\x00" + b"(" * 199 + b"\n",  # numpy parses it as Python
        b"\x93NUMPY\x03\x00" + b"\x00" * 20,
    ],
)
def test_expert_choices_that_are_no_array_of_experts_are_one_error_of_their_engine(
    data: bytes,
) -> None:
    text = base64.b64encode(data).decode()
    choice = {
        "index": 0,
        "text": "",
        "token_ids": [1],
        "finish_reason": "stop",
        "routed_experts": text,
    }
    answer = json.dumps({"id": "cmpl-7", "choices": [choice]}).encode()
    client = EngineClient("http://127.0.0.1:1", 100)
    generation = [written(1, {})]
    with pytest.raises(EngineError, match=r"engine http://127\.0\.0\.1:1:? .*"):
        decoded = decode_answer(answer, 1, "http://e")
        asyncio.run(client._with_expert_choices(generation, decoded, 1, EXPERT_CHOICES, 1.0))


@pytest.mark.parametrize(
    "results",
    [
        [],
        [{}],
        [{"given": "", "own": []}],
        [{"given": "!", "own": [""]}],
        [{"given": 1, "own": [1]}],
    ],
)
def test_workers_that_say_no_expert_choices_are_one_error_of_their_engine(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(*_: Any, **__: Any) -> Any:
        return results, {}

    client = EngineClient("http://127.0.0.1:1", 100)
    monkeypatch.setattr(client, "_on_workers", answers)
    answer = json.dumps(
        {"id": "cmpl-7", "choices": [{"index": 0, "text": "", "token_ids": [1]}]}
    ).encode()
    with pytest.raises(EngineError, match="its answer has no expert choices"):
        decoded = decode_answer(answer, 1, "http://e")
        asyncio.run(client._with_expert_choices([written(1, {})], decoded, 1, EXPERT_CHOICES, 1.0))


def test_expert_choices_of_vllms_answer_have_rows_of_all_layers_and_of_workers_none() -> None:
    arrays = [
        np.arange(12 + number, 24 + number, dtype=np.uint8).reshape(2, 3, TAKEN)
        for number in range(2)
    ]
    texts = []
    for array in arrays:
        np.save(file := io.BytesIO(), array)
        texts.append(base64.b64encode(file.getvalue()).decode())
    choices = [
        {"index": 1 - i, "text": "", "token_ids": [1], "routed_experts": text}
        for i, text in enumerate(texts)
    ]
    data = json.dumps({"id": "cmpl-7", "choices": choices}).encode()
    answer = decode_answer(data, 2, "http://e")
    recorded = recorded_expert_choices(answer, EXPERT_CHOICES.layers)
    assert answer.request == "cmpl-7" and recorded is not None
    for rows, array in zip(recorded, reversed(arrays), strict=True):
        np.testing.assert_array_equal(rows, array[:, [0, 2]])
    silent = [{**choice, "routed_experts": None} for choice in choices]
    data = json.dumps({"id": "cmpl-7", "choices": silent}).encode()
    assert (
        recorded_expert_choices(decode_answer(data, 2, "http://e"), EXPERT_CHOICES.layers) is None
    )
    asked = json.loads(
        encode_request(np.ones(3, np.int32), 1, 0, Sampling(4, 1.0, expert_choices=EXPERT_CHOICES))
    )
    assert asked["vllm_xargs"] == {"expert_choices": 1}
    assert "vllm_xargs" not in json.loads(
        encode_request(np.ones(3, np.int32), 1, 0, Sampling(4, 1.0))
    )
