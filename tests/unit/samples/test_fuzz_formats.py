"""Whatever comes from a file, an engine or another process: well-formed data, or the typed error of its reader."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from pa_npu.config.sections.inputs import DataConfig, TrainingDataset
from pa_npu.data.prompts import load_prompts
from pa_npu.engines import compact_answer
from pa_npu.engines.codec import (
    decode_object,
    decode_response,
)
from pa_npu.engines.compact_answer import CompactResponse
from pa_npu.engines.http_server import COMPACT_TYPE
from pa_npu.engines.protocol import EngineError, Generation, Sampling
from pa_npu.errors import DataError
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.samples.columns import GroupFormatError
from pa_npu.samples.wire import from_bytes, to_bytes
from pa_npu.telemetry.records import MetricsWriter, read_evaluations, read_records
from pa_npu.telemetry.run_summary import summarise
from pa_npu.weight_transfer.manifest import Manifest
from pa_npu.weight_transfer.transport import WeightSyncError
from tests.helpers.mutations import VALUES, changed_bytes, changed_tree, json_near, to_json
from tests.unit.samples.test_types import ENVELOPE_BYTES, assert_same, make_group, signed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


ROWS: list[Any] = [
    {"question": "how many?", "answer": "so 3 #### 4", "level": [1, {"a": None}]},
    {"prompt": "say it", "answer": 5},
    {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "answer": "a",
    },
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "#### 7"}]},
]
VOCABULARY = Tokenizer(WordLevel({"<unk>": 0, "how": 1, "u": 2}, unk_token="<unk>"))
VOCABULARY.pre_tokenizer = Whitespace()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=VOCABULARY, unk_token="<unk>")
TOKENIZER.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    (directory / "row.jsonl").write_bytes(jsonl(ROWS[:1]))
    return directory


@settings(max_examples=settings().max_examples // 5)
@given(
    data=st.data(),
    name=st.sampled_from(["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]),
)
def test_a_models_tokenizer_files_are_a_tokenizer_or_a_data_error(
    tokenizer_files: Path, data: st.DataObject, name: str
) -> None:
    """The files' contents are covered, up to what they make of a row."""
    file = tokenizer_files / name
    good = file.read_bytes()
    near = (
        changed_bytes(good)
        if name.endswith(".jinja")
        else json_near(json.loads(good), max_changes=2)
    )
    file.write_bytes(data.draw(near))
    try:
        tokenizer = load_tokenizer(str(tokenizer_files))
        prompts = load_prompts(
            TrainingDataset(path=str(tokenizer_files / "row.jsonl")),
            tokenizer,
            DataConfig(train="t"),
            "data.train",
        )
        assert all(len(prompt.tokens) for prompt in prompts.prompts)
    except DataError as error:
        assert "\n" not in str(error)
    finally:
        file.write_bytes(good)


def jsonl(rows: Any) -> bytes:
    return (
        b"".join(to_json(row) + b"\n" for row in rows) if isinstance(rows, list) else to_json(rows)
    )


def parquet(rows: Any) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


PARQUET = parquet([{"question": "how many?", "answer": "4"}, {"question": "u", "answer": "#### 5"}])
# bytes that are no UTF-8 in a column of text
PARQUET_LATIN = PARQUET.replace(b"how many?", b"how m\xe9ny?")
DATASETS = (
    changed_tree(ROWS).map(jsonl)
    | changed_bytes(jsonl(ROWS))
    | changed_bytes(PARQUET)
    | changed_bytes(PARQUET_LATIN)
)


@given(
    data=DATASETS,
    template=st.sampled_from(["always", "never"]),
    overlong=st.sampled_from(["refuse", "truncate", "skip"]),
    extra=st.sampled_from([{}, {"instruction": "Think."}, {"system_prompt": "Be good."}]),
)
@example(
    data=jsonl([{"question": "half \ud800", "answer": "1"}]),
    template="never",
    overlong="skip",
    extra={},
)
@example(data=PARQUET_LATIN, template="never", overlong="skip", extra={})
def test_a_dataset_is_prompts_or_a_data_error(
    directory: Path, data: bytes, template: Any, overlong: Any, extra: dict[str, str]
) -> None:
    file = directory / "data"
    file.write_bytes(data)
    config = DataConfig(
        train=str(file),
        chat_template=template,
        overlong_prompt=overlong,
        max_prompt_tokens=20,
        **extra,
    )
    try:
        prompts = load_prompts(TrainingDataset(path=str(file)), TOKENIZER, config, "data.train")
    except DataError as error:
        assert "\n" not in str(error)
        return
    assert prompts.summary
    for prompt in prompts.prompts:
        assert 1 <= len(prompt.tokens) <= 20 and prompt.answer.strip()
        # what samples.jsonl and reward workers are sent
        json.dumps(
            [prompt.text, prompt.answer, prompt.row], ensure_ascii=False, default=str
        ).encode()


GROUP = make_group()
TENSORS = load(to_bytes(GROUP)[ENVELOPE_BYTES:])
HEADER_BYTES = struct.unpack("<Q", to_bytes(GROUP)[ENVELOPE_BYTES : ENVELOPE_BYTES + 8])[0]
HEADER = json.loads(to_bytes(GROUP)[ENVELOPE_BYTES + 8 : ENVELOPE_BYTES + 8 + HEADER_BYTES])
BODY = to_bytes(GROUP)[ENVELOPE_BYTES + 8 + HEADER_BYTES :]
DTYPES = ["i1", "u1", "<i4", "<u4", "<i8", "<f2", "<f4", "<f8", "?"]
NUMBERS = [
    0,
    1,
    -1,
    2,
    255,
    2**31 - 1,
    -(2**31),
    2**63 - 1,
    1e39,
    float("nan"),
    float("inf"),
    float("-inf"),
]


@st.composite
def changed_tensors(draw: st.DrawFn) -> bytes:
    """A group's tensors with others' shapes, types, names and values, as a good safetensors file."""
    tensors = dict(TENSORS)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(tensors)))
        array = tensors.pop(name)
        action = draw(
            st.sampled_from(["value", "value", "type", "shape", "length", "name", "drop"])
        )
        with np.errstate(all="ignore"):
            if action == "value" and array.size:
                array = array.copy()
                array.flat[draw(st.integers(0, array.size - 1))] = np.array(
                    draw(st.sampled_from(NUMBERS))
                ).astype(array.dtype)
            elif action == "type":
                array = array.astype(draw(st.sampled_from(DTYPES)))
            elif action == "shape":
                array = array.reshape(draw(st.sampled_from([(-1, 1), (1, -1)])))
            elif action == "length":
                array = np.resize(array, draw(st.sampled_from([0, 1, 2, 3, 50])))
        if action == "name":
            name = draw(st.sampled_from(["", "x", *TENSORS]))
        if action != "drop":
            tensors[name] = array
        if not tensors:
            break
    return signed(save(tensors))


def with_header(tree: Any) -> bytes:
    text = to_json(tree)
    return signed(struct.pack("<Q", len(text)) + text + BODY)


GROUPS = st.one_of(
    changed_tensors(),
    changed_tree(HEADER).map(with_header),
    changed_bytes(to_bytes(GROUP)[ENVELOPE_BYTES:]).map(signed),
    changed_bytes(to_bytes(GROUP)),
    st.binary(max_size=200),
)


@given(data=GROUPS)
def test_group_bytes_are_a_well_formed_group_or_a_group_format_error(data: bytes) -> None:
    try:
        group = from_bytes(data)
    except GroupFormatError as error:
        assert "\n" not in str(error)
        return
    assert_same(group, from_bytes(to_bytes(group)))
    assert group.offsets()[-1] == len(group.tokens) == len(group.logprobs)
    assert np.isfinite(group.logprobs).all() and group.tokens.min() >= 0
    assert zlib.crc32(data[ENVELOPE_BYTES:]) == struct.unpack_from("<I", data, 8)[0]


SAMPLING = Sampling(max_tokens=4, temperature=1.0, stop_token_ids=(2,))
RESPONSE = {
    "id": "cmpl-1",
    "choices": [
        {
            "index": index,
            "text": "ab",
            "token_ids": [7, 2],
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": {
                "token_logprobs": [-0.5, -1.25],
                "tokens": ["a", "b"],
                "top_logprobs": [{}, {}],
            },
            "prompt_token_ids": [1, 2, 3],
        }
        for index in range(2)
    ],
    "usage": {"total_tokens": 5},
}


@given(data=json_near(RESPONSE), with_logprobs=st.booleans())
@example(
    data=to_json(RESPONSE).replace(b"[7, 2]", b"[9223372036854775808, 2]"), with_logprobs=False
)
@example(data=b'{"a":' * 3000, with_logprobs=False)
def test_an_engines_answer_is_valid_completions_or_an_engine_error(
    data: bytes, with_logprobs: bool
) -> None:
    sampling = SAMPLING if with_logprobs else Sampling(4, 1.0, (2,), logprobs=False)
    try:
        completions = decode_response(data, 2, sampling, vocab_size=100, engine="http://e")
    except EngineError as error:
        assert str(error).startswith("engine http://e") and str(error).isprintable(), str(error)
        return
    assert_are_valid(completions, with_logprobs)


COMPACT = compact_answer.encode(
    "x",
    [
        CompactResponse("a", [7, 2], "stop", [-0.5, -1.0]),
        CompactResponse("é", [8], "length", [-0.25]),
    ],
)


@given(data=changed_bytes(COMPACT), with_logprobs=st.booleans())
@example(data=COMPACT, with_logprobs=True)
@example(data=b"", with_logprobs=True)
@example(data=compact_answer.MAGIC + b"\xff\xff\xff\xff{}", with_logprobs=True)
@example(data=COMPACT.replace(b"[2, 1]", b"[-2,1]"), with_logprobs=False)
@example(data=COMPACT.replace(b"[2, 1]", b"[2e1]"[:5] + b" "), with_logprobs=False)
def test_a_compact_answer_is_valid_completions_or_an_engine_error(
    data: bytes, with_logprobs: bool
) -> None:
    sampling = SAMPLING if with_logprobs else Sampling(4, 1.0, (2,), logprobs=False)
    try:
        completions = decode_response(data, 2, sampling, 100, "http://e", content_type=COMPACT_TYPE)
    except EngineError as error:
        assert str(error).startswith("engine http://e") and str(error).isprintable(), str(error)
        return
    assert_are_valid(completions, with_logprobs)


def assert_are_valid(completions: list[Generation], with_logprobs: bool) -> None:
    assert len(completions) == 2
    for completion in completions:
        assert completion.tokens.dtype == np.int32 and 1 <= len(completion.tokens) <= 4
        assert completion.tokens.min() >= 0 and completion.tokens.max() < 100
        assert completion.logprobs.shape == ((len(completion.tokens),) if with_logprobs else (0,))
        assert np.isfinite(completion.logprobs).all() and (completion.logprobs <= 1e-4).all()
        completion.text.encode()


@given(
    data=json_near({"results": [{"version": 3, "bytes": 10, "seconds": 0.5}], "success": True})
    | st.just(b"")
)
def test_any_other_answer_of_an_engine_is_an_object_or_an_engine_error(data: bytes) -> None:
    try:
        answer = decode_object(data, "http://e")
    except EngineError as error:
        assert str(error).startswith("engine http://e") and str(error).isprintable()
        return
    assert isinstance(answer, dict)


MANIFEST = {
    "stage": 0,
    "model": {"hidden_size": 8, "num_hidden_layers": 1},
    "shapes": {"a.weight": [2, 3], "b.weight": [4], "c": []},
    "buckets": [
        ["float32", [["a.weight", 0, 4]]],
        ["float32", [["a.weight", 4, 2], ["b.weight", 0, 4]]],
        ["bfloat16", [["c", 0, 1]]],
    ],
}


@given(tree=changed_tree(MANIFEST, [*VALUES, "int64", "nn", "float8_e4m3fn", "uint1"]))
def test_a_weight_manifest_is_complete_or_a_weight_sync_error(tree: Any) -> None:
    try:
        manifest = Manifest.from_json(tree)
    except WeightSyncError as error:
        assert "\n" not in str(error)
        return
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert 0 <= manifest.digest < 2**63 and manifest.num_bytes >= 0
    for bucket in manifest.buckets:
        assert (
            bucket.summary
            and bucket.num_elements > 0
            and all(segment.start >= 0 for segment in bucket.segments)
        )


RECORD = {
    "iteration": 0,
    "version": 0,
    "devices": 2,
    "iteration_s": 2.0,
    "generate_s": 1.0,
    "train_s": 0.5,
    "publish_s": 0.1,
    "tokens_prompt": 100,
    "tokens_response": 200,
    "tokens_computed": 250,
    "tpspd": 75.0,
    "tpspd_response": 50.0,
    "tpspd_computed": 60.0,
    "trainer_idle": 0.1,
    "engine_idle": 0.2,
    "evaluation_s": None,
    "eval_accuracy": 0.5,
    "reward_mean": 0.5,
    "accuracy": 0.5,
    "rewards": {"math": 0.5},
}
RECORDS = [
    RECORD,
    {**RECORD, "iteration": 1, "version": 1},
    {**RECORD, "iteration": 2, "version": 2},
]
EVALUATION = {"version": 0, "accuracy": 0.5, "questions": 4, "seconds": 1.0, "time": 0.0}


@given(
    records=changed_tree(RECORDS, max_changes=2).map(jsonl) | changed_bytes(jsonl(RECORDS)),
    evaluations=st.just(jsonl([EVALUATION])) | json_near(EVALUATION, max_changes=2),
)
def test_a_runs_records_are_summarised_or_a_data_error(
    directory: Path, records: bytes, evaluations: bytes
) -> None:
    (directory / "metrics.jsonl").write_bytes(records)
    (directory / "evaluations.jsonl").write_bytes(evaluations)
    for read in (read_records, read_evaluations, summarise):
        try:
            assert read(directory) is not None
        except DataError as error:
            assert "\n" not in str(error)


@given(data=changed_tree(RECORDS, max_changes=2).map(jsonl) | changed_bytes(jsonl(RECORDS)))
def test_a_resumed_run_continues_a_damaged_record_file_or_refuses_it(
    directory: Path, data: bytes
) -> None:
    run = directory / "resumed"
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_bytes(data)
    try:
        with MetricsWriter(run, first_iteration=2) as writer:
            writer.write({**RECORD, "iteration": 2})
    except DataError as error:
        assert "\n" not in str(error)
        return
    assert [record["iteration"] for record in read_records(run)][-1] == 2
