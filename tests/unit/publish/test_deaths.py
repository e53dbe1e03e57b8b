"""An engine that dies in the middle of a publish: the others get the version, and it gets the next one when it is back.

A sender that hangs in the middle: it sends again once it is through, or the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.roster import Roster
from pa_npu.engines.client import EngineClient
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Sampling
from pa_npu.errors import InvariantViolation
from pa_npu.planning.publish import contributors_of, publishers_of
from pa_npu.publish import trainer_reports
from pa_npu.publish.engines import Connection
from pa_npu.publish.messages import VERDICT, PublishVerdict
from pa_npu.publish.publisher import Publisher
from pa_npu.publish.trainer_side import TrainerPublish
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.contents import OrderedContents
from tests.helpers.engine_subjects import VOCAB, bits, make_engine_model
from tests.helpers.forked_engine import KEY, ForkedEngine
from tests.helpers.policies import probe_plan
from tests.helpers.publish import ServesNobodyLate
from tests.helpers.weight_sender import manifest_of, tensors_of


def config(urls: list[str], timeout_s: float) -> Config:
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {
                "engines": len(urls),
                "backend": "transformers",
                "attach": urls,
                "probe_timeout_s": 30.0,
            },
            "publish": {"timeout_s": timeout_s},
        }
    )


class Source:
    """A stage's weights, another bit of them for each version; stops before a bucket until it may
    go on, where it is told to, or then ends.
    """

    is_leader = True

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}
        self.manifest = manifest_of(self.tensors, {})
        self.old: dict[str, torch.Tensor] = {}
        self.stop = False
        self.stopped = threading.Event()
        self.go_on = threading.Event()
        self.ends = False

    def contents(self) -> dict[str, str]:
        """Of the weights as they are; `old` are sent instead of them."""
        contents = OrderedContents()
        for name, tensor in self.tensors.items():
            contents.add(name, tensor)
        return contents.read()

    def buckets(
        self, deadline: transport.Deadline, *, whole: bool = True
    ) -> Iterator[torch.Tensor]:
        for number, bucket in enumerate(self.manifest.buckets):
            if self.stop and number == len(self.manifest.buckets) // 2:
                self.stop = False
                self.stopped.set()
                assert self.go_on.wait(60)
                if self.ends:  # as a thread of a process that is killed does
                    raise SystemExit
            sent = {**self.tensors, **self.old}
            parts = [sent[s.name].flatten()[s.start : s.start + s.size] for s in bucket.segments]
            yield torch.cat(parts)

    def update(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1e-3)


class Job:
    """The coordinator's side over a membership of attached engines, and the trainers' side in a
    thread.

    Use it with `async with`.
    """

    def __init__(
        self,
        model: Path,
        urls: list[str],
        *,
        timeout_s: float = 60.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """timeout_s: publish.timeout_s. dtype: that weights are sent in."""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = ("127.0.0.1", self.store.port)
        self.config = config(urls, timeout_s)
        self.source = Source(model, dtype)
        self.publisher = Publisher(
            self.source,  # type: ignore[arg-type]
            store_host=address[0],
            store_port=address[1],
            timeout_s=timeout_s,
            backend="gloo",
            device=torch.device("cpu"),
            scope="pa/0/",
        )
        self.pool = EnginePool((), 30.0)
        self.channel = StoreChannel(dist.TCPStore(*address, wait_for_workers=False))
        self.roster = Roster(
            StoreChannel(dist.TCPStore(*address, wait_for_workers=False), "engines/"), KEY
        )
        for url in urls:
            self.roster.announce(url)
        self.membership = EngineMembership(
            self.config.rollout, self.pool, self.roster, lambda url: EngineClient(url, VOCAB, KEY)
        )
        stages = [self.publisher.manifest()]
        self.connection = Connection(address, "gloo", stages, stages, "cpu")
        self.publish = ServesNobodyLate(
            rollout=self.config.rollout,
            timeout_s=self.config.publish.timeout_s,
            seed=self.config.run.seed,
            senders=contributors_of(self.config),
            publishers=publishers_of(self.config),
            membership=self.membership,
            pool=self.pool,
            channel=self.channel,
            connection=self.connection,
            sampling=Sampling(8, 1.0),
            probes=probe_plan(self.config),
        )
        trainers = StoreChannel(dist.TCPStore(*address, wait_for_workers=False))
        self.trainers = TrainerPublish(
            trainers,
            self.publisher.publish,
            lambda: "",
            0,
            0,
            60.0,
            Timeline(None, ""),
            contents=self.publisher.contents,
        )

    async def __aenter__(self) -> Job:
        await self.membership.__aenter__()
        await self.membership.wait_all_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.membership.__aexit__()
        await self.pool.close()
        self.publisher.close()

    async def version(
        self, version: int, dies: ForkedEngine | None = None, hangs: bool = False
    ) -> None:
        """Publish it; `dies` is killed when half of it has been sent, or the sender `hangs`."""
        self.source.update()
        self.source.stop = hangs or dies is not None
        both = asyncio.gather(
            self.publish.publish(version, None, 60.0),
            asyncio.to_thread(self.trainers.publish, version),
        )
        if dies is not None:
            await asyncio.to_thread(self.source.stopped.wait, 60)
            dies.kill()
            self.source.stopped.clear()
            self.source.go_on.set()
        await both
        self.source.go_on.clear()

    async def started_again(self, index: int, url: str) -> None:
        """As the launcher says it; until it answers."""
        self.roster.renew(index, 1, url)
        deadline = asyncio.get_running_loop().time() + 60
        while self.membership._members[index].state != "ready":
            assert asyncio.get_running_loop().time() < deadline, "the membership does not see it"
            await asyncio.sleep(0.02)

    async def responses(self) -> dict[str, Any]:
        """Returns each serving engine's response to one prompt from one seed."""
        tokens = np.arange(2, 20, dtype=np.int32)
        sampling = Sampling(12, 1.0, ignore_eos=True)
        return {
            engine.name: bits(await engine.generate(tokens, 1, 7, sampling, deadline_s=60.0))
            for engine in self.pool.engines
        }


async def test_a_publish_goes_on_without_who_dies_in_it_and_with_who_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_engine_model(tmp_path / "model")
    engines = [ForkedEngine(model, tmp_path / f"engine-{number}") for number in range(3)]
    try:
        urls = [engine.url() for engine in engines]
        async with Job(model, urls) as job:

            async def all_alike(*which: int) -> None:
                written = await job.responses()
                assert set(written) == {urls[number] for number in which}
                assert len(set(map(str, written.values()))) == 1, "engines hold different weights"

            await job.version(0)
            await all_alike(0, 1, 2)
            with caplog.at_level(logging.WARNING):
                await job.version(1, dies=engines[0])
            await all_alike(1, 2)
            output = [record.getMessage() for record in caplog.records]
            failed = [text for text in output if "publish of weight version 1 failed" in text]
            assert len(failed) == 1 and "\n" not in failed[0], output
            assert [text.split()[1] for text in output if " is lost: " in text] == [urls[0]]

            engines.append(ForkedEngine(model, tmp_path / "engine-0-again"))
            urls[0] = engines[-1].url()
            await job.started_again(0, urls[0])
            await job.version(2)
            await all_alike(0, 1, 2)
    finally:
        for engine in engines:
            engine.kill()


HANGING_S = 1.5
"""publish.timeout_s while a sender hangs."""
MORE = pytest.mark.nightly


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was logged of attempts to publish version 1 that failed."""
    logged = [record.getMessage() for record in caplog.records]
    return [text for text in logged if "publish of weight version 1 failed" in text]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=MORE)])
async def test_a_sender_that_hung_once_sends_again(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That engines then have what is trained is checked in the publish."""
    model = make_engine_model(tmp_path / "model")
    engine = ForkedEngine(model, tmp_path / "engine")
    try:
        async with Job(model, [engine.url()], timeout_s=HANGING_S, dtype=dtype) as job:
            await job.version(0)
            threading.Timer(2 * HANGING_S, job.source.go_on.set).start()
            with caplog.at_level(logging.WARNING):
                await job.version(1, hangs=True)
            assert job.source.stopped.is_set()
            first, *_ = failures(caplog)
            assert "\n" not in first and f"not done within {HANGING_S} s" in first, first
    finally:
        engine.kill()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=MORE), torch.bfloat16])
async def test_a_sender_that_hangs_ends_the_run(
    dtype: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_reports, "_ANSWER_S", 0.2)
    model = make_engine_model(tmp_path / "model")
    engine = ForkedEngine(model, tmp_path / "engine")
    try:
        async with Job(model, [engine.url()], timeout_s=HANGING_S, dtype=dtype) as job:
            await job.version(0)
            job.source.update()
            job.source.stop = True

            def send() -> None:
                with contextlib.suppress(SystemExit):
                    job.trainers.publish(1)

            sender = threading.Thread(target=send, name="trainer that hangs", daemon=True)
            sender.start()
            message = (
                r"weight version 1 could not be published in 4 attempts: .*stage 0.* did not join"
                r".*; nothing is heard of these trainer ranks: 0; look"
            )
            start = time.monotonic()
            with caplog.at_level(logging.WARNING), pytest.raises(EngineError, match=message):
                await job.publish.publish(1, None, 60.0)
            assert job.source.stopped.is_set() and sender.is_alive()
            assert time.monotonic() - start < 40 * HANGING_S
            assert f"not done within {HANGING_S} s" in failures(caplog)[0]
            job.source.ends = True
            job.source.go_on.set()
            sender.join(10)
    finally:
        engine.kill()


async def test_a_tensor_that_the_trainers_sent_from_an_old_copy_ends_the_run_and_is_named(
    tmp_path: Path,
) -> None:
    """The digests agree: the engine has what was sent, and it is not what is trained."""
    model = make_engine_model(tmp_path / "model")
    engine = ForkedEngine(model, tmp_path / "engine")
    try:
        async with Job(model, [engine.url()]) as job:
            await job.version(0)
            name = next(
                name for name in job.source.tensors if "layers.1" in name and "down_proj" in name
            )
            job.source.old = {name: job.source.tensors[name].clone()}
            with pytest.raises(
                InvariantViolation,
                match=rf"I5: as weight version 1 .*\({re.escape(name)}\), of which 1 are",
            ):
                await job.version(1)
            # the trainers wait for a verdict, as they do until the run ends
            VERDICT.put(job.channel, PublishVerdict(True), version=1, attempt=0)
    finally:
        engine.kill()
