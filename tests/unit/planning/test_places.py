"""rollout.max_num_seqs grows to what the KV cache holds, and only then."""

from __future__ import annotations

import pytest

from pa_npu.config.load import load_config
from pa_npu.planning.automatic import with_places
from pa_npu.planning.engine_memory import engine_memory, kv_bytes_per_token, wanted_tokens
from pa_npu.planning.known_models import known_spec

GIB = 2**30
BASE = {
    "run.device": "npu",
    "model.path": "models/Qwen2.5-7B",
    "model.dtype": "bf16",
    "data.train": "t",
    "data.max_prompt_tokens": 512,
    "rollout.engines": 4,
    "rollout.max_response_tokens": 1024,
    "schedule.prompts_per_iteration": 512,
}


def places(device_gib: int | None = 64, **overrides: object) -> int:
    settings = [
        f"{key}={value}"
        for key, value in (BASE | {k.replace("__", "."): v for k, v in overrides.items()}).items()
    ]
    config = load_config([], settings)
    spec = known_spec("models/Qwen2.5-7B")
    assert spec is not None
    device_bytes = None if device_gib is None else device_gib * GIB
    grown = with_places(config, spec, device_bytes, own_memory=True)
    if device_bytes and grown is not config:
        cache = dict(engine_memory(grown, spec, device_bytes).parts)["KV cache"]
        assert wanted_tokens(grown) <= cache // kv_bytes_per_token(grown, spec)
    return grown.rollout.max_num_seqs


@pytest.mark.parametrize(
    ("expected", "device_gib", "overrides"),
    [
        pytest.param(512, 64, {}, id="512 x 1024 tokens fit, 1024 do not"),
        pytest.param(1024, 64, {"rollout__max_response_tokens": 512}, id="1024 fit"),
        pytest.param(256, 64, {"rollout__max_response_tokens": 8192}, id="not even 512 fit"),
        pytest.param(
            256, 64, {"schedule__prompts_per_iteration": 128}, id="an engine's share is no more"
        ),
        pytest.param(256, 64, {"rollout__max_num_seqs": 256}, id="given, though as by default"),
        pytest.param(256, None, {}, id="memory not known"),
        pytest.param(
            256,
            64,
            {"rollout__attach": "[http://a:1,http://a:2,http://a:3,http://a:4]"},
            id="engines that run already",
        ),
    ],
)
def test_as_many_as_the_cache_holds_and_an_iteration_has(
    expected: int, device_gib: int | None, overrides: dict[str, object]
):
    assert places(device_gib, **overrides) == expected
