"""A service's slots in this process over a tiny model, requests of a client that writes its own bytes, and the formulas."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.service.slots import Slots
from pa_npu.service.wire import Datum, ForwardBackward
from pa_npu.telemetry.timeline import Timeline

RANK = 4


def service_config(model: Path, directory: Path, /, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu", "dir": str(directory)},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unread"},
        "trainer": {"backend": "fsdp"},
        "rollout": {"backend": "transformers", "max_response_tokens": 64},
        "lora": {"rank": RANK},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def make_slots(config: Config) -> tuple[Slots, Any]:
    """Returns slots and the backend below them; one at a time in a process."""
    platform = platforms.get("cpu")
    spec = ModelSpec.from_config(config)
    backend = backend_module("fsdp").create(
        config, spec, platform, dist.HashStore(), 0, 0, Timeline(None, "")
    )
    return Slots(config, backend, "base of the test"), backend


def random_datum(
    random: np.random.Generator,
    length: int,
    vocab: int,
    *,
    begin: Sequence[int] = (),
    sampled: bool = False,
) -> Datum:
    """Returns a datum of `length` tokens that begins with `begin`; sampled: with what a policy
    gradient reads, at log-probs whose ratios lie on both sides of usual clips.
    """
    tokens = random.integers(0, vocab, length + 1).astype(np.int32)
    tokens[: len(begin)] = begin
    inputs: dict[str, Any] = {"target_tokens": tokens[1:].astype(np.int64)}
    if sampled:
        inputs["logprobs"] = random.normal(-np.log(vocab), 0.3, length).astype(np.float32)
        inputs["advantages"] = random.normal(0.0, 1.0, length).astype(np.float32)
    else:
        inputs["weights"] = random.random(length).astype(np.float32)
    return Datum(tokens[:-1], inputs)


def call_of(
    data: Sequence[Datum], loss: str, config: Mapping[str, float] | None = None, *, seq: int = 1
) -> ForwardBackward:
    return ForwardBackward("m", seq, loss, list(data), dict(config or {}))


def documented(loss: str, datum: Datum, logprobs: torch.Tensor, c: Mapping[str, float]) -> Any:
    """Returns the sum that tinker's documentation gives for a datum; `logprobs` [N] carry gradients.

    https://tinker-docs.thinkingmachines.ai/tinker/losses
    """
    values = {name: torch.tensor(np.array(array)) for name, array in datum.inputs.items()}
    if loss == "cross_entropy":
        return (-logprobs * values["weights"]).sum()
    q, advantages = values["logprobs"], values["advantages"]
    if loss == "dro":
        penalty = (logprobs - q) ** 2
        return -(logprobs * advantages - 0.5 * c["beta"] * penalty).sum()
    ratio = torch.exp(logprobs - q)
    if loss == "gspo":
        marked = values["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - q)[marked].mean()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    clipped = torch.clamp(ratio, c["clip_low_threshold"], c["clip_high_threshold"])
    if loss == "cispo":
        return -(clipped.detach() * logprobs * advantages).sum()
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


# What a client sends, byte by byte


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field_of(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor_bytes(array: Any) -> bytes:
    kind = 2 if array.dtype.kind == "i" else 1
    wide = array.astype("<i8" if kind == 2 else "<f4")
    shape = b"".join(varint(size) for size in array.shape)
    return field_of(1, wide.tobytes()) + field_of(3, kind) + field_of(4, shape)


def datum_bytes(datum: Datum) -> bytes:
    chunk = field_of(1, field_of(1, datum.tokens.astype("<i4").tobytes()))
    content = field_of(1, chunk)
    for name, array in datum.inputs.items():
        content += field_of(2, field_of(1, name.encode()) + field_of(2, tensor_bytes(array)))
    return content


def call_bytes(call: ForwardBackward, extra: bytes = b"") -> bytes:
    """Returns a call as the SDK sends it. extra: further bytes at its end."""
    content = field_of(1, call.model_id.encode()) + field_of(2, call.seq_id)
    for datum in call.data:
        content += field_of(3, datum_bytes(datum))
    content += field_of(4, call.loss.encode())
    for name, value in call.config.items():
        number = varint(1 << 3 | 1) + struct.pack("<d", value)
        content += field_of(7, field_of(1, name.encode()) + field_of(2, number))
    return content + field_of(6, int(call.forward_only)) + extra
