"""Conformance of engines: a suite that each kind of engine passes, with its own client.

A test module makes a fixture `subject` and inherits from Conformance (an engine without a model: a
stand-in) or from ModelConformance. The suite leaves an engine with the weights of the model
directory it was started with.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import (
    EngineCapabilities,
    EngineError,
    EngineGone,
    Generation,
    Sampling,
)
from pa_npu.engines.registry import EngineKind
from pa_npu.errors import DeadlineExceeded, InvariantViolation, PaNpuError
from pa_npu.families.model_directory import read_header
from pa_npu.weight_transfer.adapters import Base, StoredWeight, merge, stored_digest
from tests.helpers.models import make_model
from tests.helpers.weight_sender import WeightSender, tensors_of

VOCAB, EOS = 128, 1
MAX_PROMPT, MAX_RESPONSE = 132, 64
DEADLINE_S = 120.0
SAMPLING = Sampling(max_tokens=24, temperature=1.0, stop_token_ids=(EOS,))


def make_engine_model(
    directory: Path, seed: int = 0, family: str = "qwen2", tied: bool = True, **more: object
) -> Path:
    """A random model with a tokenizer, of a size that every engine can serve."""
    model = make_model(directory, family, hidden=128, tied=tied, seed=seed, **more)  # type: ignore[arg-type]
    vocabulary = {"<pad>": 0, "</s>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), eos_token="</s>"
    ).save_pretrained(model)
    return model


def make_adapters(model: Path, directory: Path) -> tuple[Base, Path, Path]:
    """Random adapters of some weights: what they are merged into, a directory with them, and one
    with the merged model.
    """
    header = read_header(model / "model.safetensors")
    sent, merged, weights = {}, tensors_of(model), []
    for name, found in header.items():
        layer = (
            name.removesuffix(".weight")
            if name.endswith("_proj.weight") and "k_proj" not in name
            else ""
        )
        if layer:
            outputs, inputs = found.shape
            down, up = torch.randn(4, inputs), 0.1 * torch.randn(outputs, 4)
            sent |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            merge(merged[name], up, down, 0.5)
        place = (found.begin, found.begin + found.num_bytes, 0)
        weights.append(
            StoredWeight(
                name, "model.safetensors", *place, "float32", "float32", found.shape, layer
            )
        )
    stored = tuple(weights)
    base = Base(0.5, stored_digest(str(model), stored, torch.device("cpu")), stored)
    alone, whole = directory / "alone", shutil.copytree(model, directory / "merged")
    alone.mkdir()
    save_file(sent, alone / "model.safetensors")
    save_file(merged, whole / "model.safetensors", metadata={"format": "pt"})
    return base, alone, whole


@dataclass
class Subject:
    """A running engine. restart: ends it and starts it again at the same URL; model: what it was
    started with.
    """

    kind: EngineKind
    name: str
    url: str
    key: str
    model: Path
    restart: Callable[[], Awaitable[None]]
    sender: WeightSender = field(default_factory=WeightSender)

    def client(self, key: str | None = None) -> Any:
        return self.kind.client(self.url, VOCAB, key or self.key)


def prompt(number: int = 0, length: int = 20) -> np.ndarray:
    return np.random.default_rng(number).integers(2, VOCAB, length).astype(np.int32)


async def ask(
    client: Any, n: int = 4, seed: int = 40, sampling: Sampling = SAMPLING, number: int = 0
) -> list[Generation]:
    generations: list[Generation] = await client.generate(
        prompt(number), n, seed, sampling, deadline_s=DEADLINE_S
    )
    return generations


def bits(generations: list[Generation]) -> list[tuple[list[int], list[float], str, str]]:
    return [(g.tokens.tolist(), g.logprobs.tolist(), g.text, g.finish_reason) for g in generations]


class Conformance:
    """Needs no model."""

    @pytest.fixture
    async def client(self, subject: Subject) -> Any:
        async with subject.client() as client:
            yield client

    async def publish(self, subject: Subject, client: Any, version: int) -> None:
        await client.load_weights(version, deadline_s=DEADLINE_S)

    async def test_it_says_what_it_is(self, subject, client):
        capabilities: EngineCapabilities = await client.wait_ready(deadline_s=DEADLINE_S)
        assert capabilities.kind == subject.name and capabilities.version
        assert capabilities.num_workers == 1
        served = await asyncio.to_thread(subject.kind.served_model, subject.url, subject.key)
        assert served == str(subject.model)

    async def test_a_request_for_a_group_equals_single_requests_with_the_following_seeds(
        self, client
    ):
        group = await ask(client, 4, 40)
        singles = [(await ask(client, 1, 40 + i))[0] for i in range(4)]
        assert bits(group) == bits(singles)
        assert len({tuple(generation.tokens.tolist()) for generation in group}) == 4

    async def test_a_response_depends_on_its_seed_and_not_on_what_else_is_in_flight(self, client):
        alone = {
            number: bits(await ask(client, 3, 7 * number, number=number)) for number in range(4)
        }
        for order in ([3, 1, 2, 0], [0, 2, 3, 1]):
            together = await asyncio.gather(
                *(ask(client, 3, 7 * number, number=number) for number in order)
            )
            assert [bits(found) for found in together] == [alone[number] for number in order]
        assert len({str(found) for found in alone.values()}) == 4

    async def test_limits_end_tokens_and_logprobs_are_as_asked_for(self, client):
        exact = await ask(client, 4, 5, Sampling(16, 1.0, (EOS,), ignore_eos=True))
        assert {(len(g.tokens), g.finish_reason, len(g.logprobs)) for g in exact} == {
            (16, "length", 16)
        }
        assert (await ask(client, 1, 5, Sampling(1, 1.0, ignore_eos=True)))[
            0
        ].tokens.tolist() == exact[0].tokens.tolist()[:1]
        without = await ask(client, 4, 40, Sampling(24, 1.0, (EOS,), logprobs=False))
        with_logprobs = await ask(client, 4, 40)
        assert [g.tokens.tolist() for g in without] == [g.tokens.tolist() for g in with_logprobs]
        for generation in with_logprobs:
            assert generation.tokens.dtype == np.int32 and generation.logprobs.dtype == np.float32
            assert len(generation.logprobs) == len(generation.tokens) <= 24
            assert generation.finished or len(generation.tokens) == 24
        assert {len(g.logprobs) for g in without} == {0}

    async def test_health_is_open_and_everything_else_wants_the_key(self, subject):
        async with subject.client("another") as client:
            await client.check_health(deadline_s=DEADLINE_S)
            for call in (
                lambda: ask(client, 1),
                lambda: client.loaded_weights(deadline_s=DEADLINE_S),
                lambda: client.load_weights(1, deadline_s=DEADLINE_S),
                lambda: client.probe(deadline_s=DEADLINE_S),
            ):
                with pytest.raises(EngineError, match=r"answered 401: .*API key"):
                    await call()
            with pytest.raises(EngineError, match="answered 401"):
                await client.wait_ready(deadline_s=DEADLINE_S)
        with pytest.raises(OSError, match="401"):
            await asyncio.to_thread(subject.kind.served_model, subject.url, "another")

    async def test_a_deadline_is_kept_and_the_engine_works_on(self, client):
        long = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"not answered within 0\.001 s"):
            await client.generate(prompt(), 4, 0, long, deadline_s=0.001)
        assert time.monotonic() - began < 60
        reference = bits(await ask(client))
        assert bits(await ask(client)) == reference

    async def test_closing_the_client_ends_its_requests(self, subject, client):
        long = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        request = asyncio.create_task(client.generate(prompt(), 32, 0, long, deadline_s=DEADLINE_S))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(PaNpuError):
            await asyncio.wait_for(request, 20)
        async with subject.client() as other:
            await other.probe(deadline_s=DEADLINE_S)

    async def test_responses_handed_on_at_any_token_go_on_as_what_they_would_have_been(
        self, subject, client
    ):
        """Cut by the engine beside its decoding, and at random tokens by hand; the control draws
        from the stream's beginning.
        """
        assert (await client.wait_ready(deadline_s=DEADLINE_S)).continues
        await self.publish(subject, client, 1)
        pool = EnginePool([client])
        pool.continues, count, long = (
            True,
            16,
            replace(SAMPLING, max_tokens=MAX_RESPONSE - 16, ignore_eos=True),
        )
        whole = await ask(client, count, 90, long)

        async def moved() -> list[Generation]:
            lease = await pool.admit(count, 1, lambda _: count, DEADLINE_S)
            with GroupSession(
                pool,
                lease,
                lambda _: count,
                deadline_s=DEADLINE_S,
                again_deadline_s=DEADLINE_S,
                label="g",
            ) as session:
                return await session.generate(prompt(), count, 90, long)

        moving, handed_on = asyncio.create_task(moved()), 0
        while not moving.done() and handed_on < 3:
            await asyncio.sleep(0.05 * (1 + handed_on))
            await client.cut_responses(deadline_s=DEADLINE_S)
            handed_on += 1
        assert [(t, p) for t, p, *_ in bits(await moving)] == [(t, p) for t, p, *_ in bits(whole)]

        async def rest(number: int, cut: int, drawn: bool) -> Generation:
            written, left = (
                whole[number].tokens[:cut],
                replace(long, max_tokens=long.max_tokens - cut),
            )
            if drawn:
                go_on = {"written": written}
                (part,) = await client.generate(
                    prompt(), 1, 90 + number, left, deadline_s=DEADLINE_S, **go_on
                )
            else:
                given = np.concatenate([prompt(), written])
                (part,) = await client.generate(given, 1, 90 + number, left, deadline_s=DEADLINE_S)
            return part

        cuts = np.random.default_rng(0).integers(1, long.max_tokens, count).tolist()
        for drawn in (True, False):
            parts = await asyncio.gather(
                *(rest(number, cut, drawn) for number, cut in enumerate(cuts))
            )
            same = [
                part.tokens.tolist() == w.tokens[cut:].tolist()
                and part.logprobs.tolist() == w.logprobs[cut:].tolist()
                for part, w, cut in zip(parts, whole, cuts, strict=True)
            ]
            assert all(same) if drawn else sum(same) <= 2, (
                f"skipping {drawn}: {sum(same)} of {count} equal"
            )

    async def test_a_probe_is_answered_beside_long_requests(self, client):
        long = Sampling(MAX_RESPONSE, 1.0, ignore_eos=True)
        requests = [
            asyncio.create_task(client.generate(prompt(i), 8, 0, long, deadline_s=DEADLINE_S))
            for i in range(4)
        ]
        await client.probe(deadline_s=DEADLINE_S)
        await asyncio.gather(*requests)

    async def test_every_response_says_which_version_generated_it(self, subject, client):
        for version in (3, 4):
            await self.publish(subject, client, version)
            assert (await client.loaded_weights(deadline_s=DEADLINE_S)).versions == (version,)
            assert (await client.check_health(deadline_s=DEADLINE_S)) == version
            assert {g.version for g in await ask(client)} == {version}

    async def test_an_engine_that_has_slept_generates_nothing_before_it_has_loaded_weights(
        self, subject, client
    ):
        if not (await client.wait_ready(deadline_s=DEADLINE_S)).sleeps:
            pytest.skip("it says that it cannot")
        await self.publish(subject, client, 3)
        before = bits(await ask(client))
        await client.sleep(deadline_s=DEADLINE_S)
        assert (await client.check_health(deadline_s=DEADLINE_S)) is None
        assert (await client.wait_ready(deadline_s=DEADLINE_S)).sleeps, (
            "a coordinator that comes now can wake it"
        )
        await client.wake(deadline_s=DEADLINE_S)
        await client.wake(deadline_s=DEADLINE_S)
        with pytest.raises(InvariantViolation, match="I1 version"):
            await ask(client)
        await self.publish(subject, client, 4)
        assert bits(await ask(client)) == before

    async def test_another_run_that_publishes_to_it_is_noticed(self, subject, client):
        await self.publish(subject, client, 3)
        async with subject.client() as other:
            await self.publish(subject, other, 4)
        with pytest.raises(
            InvariantViolation, match=r"I1 version: .*by weight version 4, but .*gave it 3"
        ):
            await ask(client)

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"choices": [], "responses": [], "results": []}',
            b'{"choices": 5, "responses": 5, "results": 5, "versions": 5}',
            b'{"choices": [{}], "responses": [{}], "results": [{"version": 1.5}], "versions": '
            b'[1.5], "digests": []}',
            b'{"choices": [{"index": 0, "text": "", "token_ids": [500], "finish_reason": "stop"}],'
            b' "responses": [{"tokens": [500], "logprobs": [], "text": "", "finish_reason": "stop"}], "results": "x"}',
            b'{"choices": [{"index": 0, "text": "", "token_ids": [1], "finish_reason": "stop",'
            b' "logprobs": {"token_logprobs": [1e999]}}],'
            b' "responses": [{"tokens": [1], "logprobs": [NaN], "text": "", "finish_reason": "stop"}]}',
        ],
        ids=lambda answer: answer[:24].decode("latin-1"),
    )
    async def test_an_answer_that_is_none_is_an_error_of_the_engine(self, subject, answer):
        async with hostile(200, answer) as url, subject.kind.client(url, VOCAB, "key") as client:  # type: ignore[attr-defined]
            with pytest.raises(EngineError):
                await ask(client, 1)
            with pytest.raises(EngineError):
                await client.load_weights(1, deadline_s=DEADLINE_S)

    async def test_redirections_errors_and_endless_answers_end_in_one_line(
        self, subject, monkeypatch
    ):
        monkeypatch.setattr("pa_npu.engines.client.ANSWER_BYTES", 1000)
        for status, body, kind in (
            (302, b"elsewhere", EngineError),
            (404, b"\n\nnone\n", EngineError),
            (500, b"the engine behind it has died", EngineGone),
            (200, b"x" * 300_000, EngineError),
        ):
            async with (
                hostile(status, body) as url,
                subject.kind.client(url, VOCAB, "key") as client,
            ):  # type: ignore[attr-defined]
                with pytest.raises(kind) as raised:
                    await ask(client, 1)
                assert "\n" not in str(raised.value) and url in str(raised.value)

    async def test_an_answer_that_drips_ends_at_the_deadline(self, subject):
        async with (
            hostile(200, b"x" * 1000, pause_s=0.05) as url,
            subject.kind.client(url, VOCAB, "key") as client,
        ):  # type: ignore[attr-defined]
            with pytest.raises(DeadlineExceeded):
                await client.generate(prompt(), 1, 0, SAMPLING, deadline_s=0.3)

    async def test_an_engine_that_is_not_there_is_waited_for_until_the_deadline(self, subject):
        async with hostile(200, b"") as url:
            pass
        async with subject.kind.client(url, VOCAB, "key") as client:  # type: ignore[attr-defined]
            with pytest.raises(DeadlineExceeded, match=r"not ready after 0\.3 s"):
                await client.wait_ready(deadline_s=0.3)
            with pytest.raises(EngineGone):
                await ask(client, 1)

    async def test_a_second_start_is_another_instance_with_no_version(self, subject, client):
        """Last: starting takes a while with some engines."""
        await self.publish(subject, client, 3)
        await subject.restart()
        with pytest.raises(EngineGone, match="it was started again"):
            await ask(client)
        async with subject.client() as fresh:
            await fresh.wait_ready(deadline_s=DEADLINE_S)
            assert (await fresh.loaded_weights(deadline_s=DEADLINE_S)).versions == (None,)
            assert (await fresh.check_health(deadline_s=DEADLINE_S)) is None


class ModelConformance(Conformance):
    """Needs an engine with a model whose weights can be published."""

    async def publish(self, subject: Subject, client: Any, version: int) -> None:
        await subject.sender.publish(client, version, subject.model)

    @pytest.fixture
    def other_model(self, subject: Subject, tmp_path: Path) -> Path:
        family = AutoConfig.from_pretrained(subject.model).model_type
        return make_engine_model(tmp_path / "other", seed=1, family=family)

    @pytest.mark.nightly
    async def test_a_thousand_responses_moved_at_random_tokens_equal_those_that_were_not(
        self, client, record_property
    ):
        """Each twice, at any two tokens, beside all the others; the control draws from the stream's
        beginning.
        """
        prompts, size, long = (
            125,
            8,
            replace(SAMPLING, max_tokens=MAX_RESPONSE - 16, ignore_eos=True),
        )
        at_once, cuts = asyncio.Semaphore(16), np.random.default_rng(3)

        async def asked(number: int) -> list[Generation]:
            async with at_once:  # a request waits in the engine no longer than its deadline
                return await ask(client, size, 1000 * number, long, number)

        whole = await asyncio.gather(*(asked(number) for number in range(prompts)))

        async def moved(at: tuple[int, int], first: int, second: int, drawn: bool) -> Generation:
            number, place = at
            tokens = whole[number][place].tokens[:first]
            found, seed = [whole[number][place].logprobs[:first]], 1000 * number + place
            async with at_once:
                for end in (second, long.max_tokens):
                    asked, go_on = (
                        (prompt(number), {"written": tokens})
                        if drawn
                        else (np.concatenate([prompt(number), tokens]), {})
                    )
                    left = replace(long, max_tokens=end - len(tokens))
                    (part,) = await client.generate(
                        asked, 1, seed, left, deadline_s=DEADLINE_S, **go_on
                    )
                    tokens = np.concatenate([tokens, part.tokens])
                    found.append(part.logprobs)
            return replace(part, tokens=tokens, logprobs=np.concatenate(found))

        places = [(number, place) for number in range(prompts) for place in range(size)]
        cut = [
            sorted(cuts.choice(np.arange(1, long.max_tokens), 2, replace=False).tolist())
            for _ in places
        ]
        for drawn in (True, False):
            parts = await asyncio.gather(
                *(
                    moved(at, two[0], two[1], drawn)
                    for at, two in zip(places, cut, strict=True)
                    if drawn or at[1] == 0
                )
            )
            wanted = [whole[number][place] for number, place in places if drawn or place == 0]
            same = sum(
                part.tokens.tolist() == one.tokens.tolist()
                and part.logprobs.tolist() == one.logprobs.tolist()
                for part, one in zip(parts, wanted, strict=True)
            )
            record_property(f"equal, drawn {drawn}", f"{same} of {len(wanted)}")
            assert same == len(wanted) if drawn else same <= len(wanted) // 20, (
                f"{same} of {len(wanted)} equal"
            )

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_logprobs_are_those_of_the_sampling_distribution(
        self, subject, client, temperature
    ):
        sampling = Sampling(24, temperature, (EOS,))
        for number in range(4):
            for generation in await ask(client, 2, number, sampling, number):
                assert _difference(subject.model, generation, temperature, number) < 1e-4
                # negative control: another temperature is another distribution
                if len(generation.tokens) > 8:
                    assert _difference(subject.model, generation, 1.7 - temperature, number) > 0.01

    async def test_tokens_are_drawn_from_the_distribution(self, subject, client):
        """The shares of 4,000 first tokens are the probabilities; with half the temperature they
        are not.
        """
        found = await client.generate(
            prompt(),
            4000,
            0,
            Sampling(1, 1.0, ignore_eos=True, logprobs=False),
            deadline_s=DEADLINE_S,
        )
        counts = np.bincount([int(g.tokens[0]) for g in found], minlength=VOCAB)
        logits = _logits(subject.model, prompt())[-1]
        for temperature, fits in ((1.0, True), (0.5, False)):
            expected = 4000 * (logits / temperature).softmax(-1).numpy()
            # the statistic has about VOCAB degrees of freedom: mean 128, deviation 16
            seen = expected > 1
            statistic = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
            assert (statistic < 128 + 6 * 16) == fits, (
                f"chi square {statistic:.0f} at temperature {temperature}"
            )

    async def test_greedy_takes_the_most_likely_token(self, subject, client):
        (generation,) = await ask(client, 1, 0, Sampling(12, 0.0, ignore_eos=True, logprobs=False))
        tokens = np.concatenate([prompt(), generation.tokens])
        logits = _logits(subject.model, tokens)[len(prompt()) - 1 : -1]
        assert logits.argmax(-1).tolist() == generation.tokens.tolist()

    async def test_a_response_ends_with_the_end_token_and_its_text_without(self, client):
        found = await ask(client, 64, 5, Sampling(48, 1.0, (EOS,)))
        assert any(g.finished for g in found), "of 64 responses over 128 tokens some must end"
        for generation in found:
            assert (
                generation.tokens[-1] == EOS
            ) == generation.finished and EOS not in generation.tokens[:-1]
            assert "</s>" not in generation.text and generation.text
        stops = tuple(range(2, 40))
        for generation in await ask(client, 16, 5, Sampling(48, 1.0, stops)):
            assert generation.finished and not set(generation.tokens[:-1].tolist()) & set(stops)

    async def test_a_text_ends_a_response_which_keeps_the_tokens_that_say_it(self, client):
        (free,) = await ask(client, n=1, sampling=replace(SAMPLING, ignore_eos=True))
        # special tokens have no text
        words = [f"w{token}" if token > EOS else "" for token in free.tokens]
        stop = next(word for word in words[8:] if word)
        first = next(i for i, word in enumerate(words) if stop in word)
        (stopped,) = await ask(
            client, n=1, sampling=replace(SAMPLING, ignore_eos=True, stop=(stop, "never said"))
        )
        assert (
            stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
            and stopped.finish_reason == "stop"
        )
        np.testing.assert_array_equal(stopped.logprobs, free.logprobs[: first + 1])
        assert stopped.text.replace(" ", "") == "".join(words[: first + 1])

    async def test_a_prompt_that_is_too_long_is_refused_and_nothing_else_suffers(self, client):
        with pytest.raises(EngineError, match=r"answered 400: .*maximum context length"):
            await client.generate(prompt(length=200), 1, 0, SAMPLING, deadline_s=DEADLINE_S)
        assert len(await ask(client, 2)) == 2

    async def test_a_version_that_arrives_beside_generation_is_generated_from_after_the_swap(
        self, subject, client, other_model
    ):
        await subject.sender.publish(client, 5, subject.model)
        expected, rounds = bits(await ask(client)), 0
        joined = asyncio.Event()
        arriving = asyncio.create_task(
            subject.sender.publish(client, 6, other_model, joined=joined)
        )
        await asyncio.wait_for(joined.wait(), DEADLINE_S)
        while not arriving.done() or not rounds:
            found = await ask(client)
            assert bits(found) == expected and {generation.version for generation in found} == {5}
            rounds += 1
        received = await arriving
        assert received.versions == (6,)
        assert (await client.loaded_weights(deadline_s=DEADLINE_S)).versions == (5,), (
            "until the swap"
        )
        swapped = await client.swap_weights(6, deadline_s=DEADLINE_S)
        assert swapped.versions == (6,) and swapped.digests == received.digests
        for generation in await ask(client):
            assert generation.version == 6
            assert _difference(other_model, generation, 1.0) < 1e-4
        published = await subject.sender.publish(client, 7, other_model)
        assert published.digests == received.digests, "the same weights, whichever way they came"

    async def test_a_swap_to_what_never_arrived_is_refused(self, subject, client):
        await subject.sender.publish(client, 5, subject.model)
        with pytest.raises(EngineError, match="never asked for"):
            await client.swap_weights(8, deadline_s=DEADLINE_S)
        await subject.sender.publish(client, 6, subject.model)
        assert (await ask(client, 1))[0].version == 6, "and the next publish serves"

    async def test_published_weights_are_generated_from(self, subject, client, other_model):
        first = await subject.sender.publish(client, 5, subject.model)
        before = bits(await ask(client))
        loaded = await subject.sender.publish(client, 6, other_model)
        assert loaded.versions == (6,)
        assert len(loaded.digests) == len(loaded.digests[0]) == 1, "of one worker and one stage"
        assert (
            loaded.digests
            != first.digests
            == (await subject.sender.publish(client, 6, subject.model)).digests
        )
        await subject.sender.publish(client, 6, other_model)
        # which has forgotten the prefixes of the former weights
        for generation in await ask(client):
            assert generation.version == 6
            assert _difference(other_model, generation, 1.0) < 1e-4
            assert _difference(subject.model, generation, 1.0) > 0.1, "still the former weights"
        await self.publish(subject, client, 7)
        assert bits(await ask(client)) == before, "the same weights again, the same bits"

    async def test_adapters_alone_are_merged_into_the_weights_that_it_was_started_with(
        self, subject, client, tmp_path
    ):
        """The same bits as of merged weights, at once or after a swap, and nothing of them stays."""
        if not subject.kind.merges_adapters:
            pytest.skip("this kind takes whole weights alone")
        base, alone, merged = make_adapters(subject.model, tmp_path)
        whole = await subject.sender.publish(client, 5, merged)
        expected = await ask(client)
        await self.publish(subject, client, 6)
        before = bits(await ask(client))
        loaded = await subject.sender.publish(client, 7, alone, base=base)
        assert loaded.versions == (7,) and loaded.digests != whole.digests, (
            "digests are of what was sent"
        )
        assert bits(await ask(client)) == bits(expected) != before
        assert all(_difference(merged, generation, 1.0) < 1e-4 for generation in expected)

        await self.publish(subject, client, 8)
        received = await subject.sender.publish(client, 9, alone, base=base, joined=asyncio.Event())
        assert received.digests == loaded.digests and bits(await ask(client)) == before
        await client.swap_weights(9, deadline_s=DEADLINE_S)
        assert bits(await ask(client)) == bits(expected)

        with pytest.raises(EngineError, match="has other weights than the trainers'"):
            await subject.sender.publish(
                client, 10, alone, base=msgspec.structs.replace(base, digest="0" * 16)
            )
        await self.publish(subject, client, 11)
        assert bits(await ask(client)) == before

    async def test_a_load_that_fails_leaves_no_version(self, subject, client):
        await self.publish(subject, client, 8)
        with pytest.raises(EngineError, match=r"sent weight version 12 .*asked to load version 9"):
            await subject.sender.publish(client, 9, subject.model, sent_version=12)
        assert (await client.loaded_weights(deadline_s=DEADLINE_S)).versions == (None,)
        with pytest.raises(InvariantViolation, match="gave it none completely"):
            await ask(client)
        await self.publish(subject, client, 10)
        assert {g.version for g in await ask(client)} == {10}

    async def test_weights_of_another_model_are_refused_before_anything_is_sent(
        self, subject, client
    ):
        with pytest.raises(EngineError, match="hidden_size=96, the engine's model 128"):
            await subject.sender.publish(client, 9, subject.model, hidden_size=96)
        await self.publish(subject, client, 10)

    async def test_a_second_start_is_another_instance_with_no_version(self, subject, client):
        """And without groups, so that nothing is loaded."""
        await super().test_a_second_start_is_another_instance_with_no_version(subject, client)
        async with subject.client() as fresh:
            await fresh.wait_ready(deadline_s=DEADLINE_S)
            with pytest.raises(EngineError, match="no connection to the trainer"):
                await fresh.load_weights(1, deadline_s=DEADLINE_S)
            assert (await fresh.loaded_weights(deadline_s=DEADLINE_S)).versions == (None,)


@functools.cache
def _model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def _logits(path: Path, tokens: np.ndarray) -> torch.Tensor:
    logits: torch.Tensor = (
        _model(path)(torch.tensor(tokens, dtype=torch.long)[None]).logits[0].float()
    )
    return logits


def _difference(path: Path, generation: Generation, temperature: float, number: int = 0) -> float:
    """Largest |engine - HF| log-prob of a response."""
    tokens = np.concatenate([prompt(number), generation.tokens])
    logprobs = (_logits(path, tokens)[len(prompt(number)) - 1 : -1] / temperature).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(generation.tokens, dtype=torch.long)[:, None])[
        :, 0
    ].numpy()
    return float(np.abs(generation.logprobs - expected).max())


@asynccontextmanager
async def hostile(status: int, body: bytes, pause_s: float = 0.0) -> Any:
    """A server that answers everything with this; pause_s: after each byte."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            status=status, headers={"Location": "http://127.0.0.1:9/"} if status == 302 else {}
        )
        await response.prepare(request)
        for part in [body[i : i + 1] for i in range(len(body))] if pause_s else [body]:
            await response.write(part)
            await asyncio.sleep(pause_s)
        return response

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
