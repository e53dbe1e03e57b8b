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
from pa_npu.families.peft_directory import AdapterShape
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


class InProcess:
    """Trainers and sampler of a service in this process. asked: the commands so far. failure: what a
    call with the body `too_large` comes to; None: it never ends.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.asked: list[Any] = []
        self.too_large = b""
        self.failure: Exception | None = None

    async def ask(self, command: Any) -> bytes:
        import asyncio

        from pa_npu.service.trainer import ServedRank, carry_out

        self.asked.append(command)
        if self.too_large and getattr(command, "body", b"") == self.too_large:
            if self.failure is None:
                await asyncio.Event().wait()
            raise self.failure
        return carry_out(command, ServedRank(self._slots, publisher=None, probes=None))

    def forget(self) -> None:
        """Loses every slot, as a process that ends does."""
        for name in list(self._slots._slots):
            self._slots.drop(name)


class ServiceOfTest:
    """A service as its process makes it, on a free port, with trainers in this process and no engine.

    Use it with `async with`; a second one on the same directory is a restart.
    """

    KEY = "tml-key-of-this-test"

    def __init__(self, config: Config, trainers: InProcess, directory: Path, vocab: int) -> None:
        from pa_npu.service.acceptance import Acceptance, Subject
        from pa_npu.service.log import Log
        from pa_npu.service.main import LoggedRegistry, remove_unneeded
        from pa_npu.service.server import Service
        from pa_npu.service.turns import Turns

        self.log = Log(directory / "log")
        logged = LoggedRegistry(self.log, config.service.snapshots)
        self.registry = logged.registry
        keep_every = config.service.checkpoint_every
        self.turns = Turns(
            self.registry,
            trainers,  # type: ignore[arg-type]
            logged.write,
            directory,
            keep_every=keep_every,
        )
        subject = Subject(vocab, config.engine_tokens, AdapterShape.from_config(config))
        self.acceptance = Acceptance(config, self.registry, subject, logged.write, directory)
        self.sampler = NoEngine()

        async def drop(model: str) -> None:
            from pa_npu.service.commands import Drop

            await trainers.ask(Drop(slot=model))

        self.service = Service(
            config=config,
            key=self.KEY,
            registry=self.registry,
            acceptance=self.acceptance,
            turns=self.turns,
            sampler=self.sampler,  # type: ignore[arg-type]
            write=logged.write,
            drop=drop,
            tidy=lambda: remove_unneeded(self.registry, directory),
            base_file="base",
        )

    async def __aenter__(self) -> ServiceOfTest:
        import asyncio

        from aiohttp.test_utils import TestClient, TestServer

        await self.turns.recover()
        self.client = TestClient(TestServer(self.service.app()))
        await self.client.start_server()
        work = (self.turns.run(), self.service.tidy_forever())
        self._tasks = [asyncio.create_task(part) for part in work]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.service.close()
        await self.client.close()
        self.log.close()

    async def post(self, route: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Returns status and answer of a request, whose body is an object or bytes."""
        import json

        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"X-API-Key": self.KEY, **headers}
        async with self.client.post(f"/api/v1/{route}", data=data, headers=sent) as answer:
            content = await answer.read()
            if answer.content_type == "application/json":
                return answer.status, json.loads(content)
            return answer.status, content

    async def call(self, route: str, body: Any) -> Any:
        """Returns the answer to a request that is a promise, once it is there."""
        status, promise = await self.post(route, body)
        assert status == 200, promise
        status, answer = await self.post("retrieve_future", {"request_id": promise["request_id"]})
        assert status == 200, answer
        return answer

    async def session(self) -> str:
        body = {"sdk_version": "0.38.0", "tags": [], "user_metadata": None}
        status, answer = await self.post("create_session", body)
        assert status == 200, answer
        return str(answer["session_id"])

    async def model(self, session: str, base: str, rank: int, *, seed: int = 3) -> str:
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": base,
            "lora_config": {"rank": rank, "seed": seed, "train_unembed": False},
        }
        return str((await self.call("create_model", body))["model_id"])


class NoEngine:
    """A sampler that answers with tokens that follow from version and seed."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def generate(
        self,
        version: int,
        file: str,
        prompt: Any,
        count: int,
        seed: int,
        sampling: Any,
        deadline_s: float,
    ) -> list[Any]:
        from pa_npu.engines.protocol import Generation

        self.versions.append(version)
        made = []
        for number in range(count):
            random = np.random.default_rng([version, seed + number])
            tokens = random.integers(0, 9, sampling.max_tokens).astype(np.int32)
            logprobs = -random.random(len(tokens)).astype(np.float32)
            made.append(Generation(tokens, logprobs, "", "length"))
        return made
