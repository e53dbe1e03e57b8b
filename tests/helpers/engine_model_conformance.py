"""Conformance of engines that have a model: what they sample, and the weights that they load."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pa_npu.engines.codec import (
    decode_response,
    encode_request,
)
from pa_npu.engines.http_server import COMPACT_TYPE
from pa_npu.engines.protocol import (
    EngineError,
    Generation,
    Sampling,
    Scoring,
)
from pa_npu.errors import InvariantViolation
from tests.helpers.engine_conformance import Conformance
from tests.helpers.engine_subjects import (
    DEADLINE_S,
    EOS,
    MAX_RESPONSE,
    SAMPLING,
    VOCAB,
    Subject,
    ask,
    bits,
    make_adapters,
    make_engine_model,
    prompt,
)


class ModelConformance(Conformance):
    """Needs an engine with a model whose weights can be published."""

    async def publish(self, subject: Subject, client: Any, version: int) -> None:
        await subject.sender.publish(client, version, subject.model)

    @pytest.fixture
    def other_model(self, subject: Subject, tmp_path: Path) -> Path:
        family = AutoConfig.from_pretrained(subject.model).model_type
        return make_engine_model(tmp_path / "other", seed=1, family=family)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_given_tokens_are_scored_as_transformers_scores_them(
        self, subject, client, temperature
    ):
        """At the temperature that is asked for, several requests at once; and what the engine wrote
        itself has the log-probs that it wrote it with.
        """
        await self.publish(subject, client, 1)
        assert (await client.wait_ready(deadline_s=DEADLINE_S)).scores_at_temperature
        sampling = Sampling(12, temperature, (EOS,), ignore_eos=True)
        written = [(await ask(client, 1, 7, sampling, number))[0] for number in range(3)]
        rows = [
            np.concatenate([prompt(number), response.tokens])
            for number, response in enumerate(written)
        ]
        several = [(Scoring(temperature, count), row) for row in rows for count in (0, 5)]
        actual = await asyncio.gather(
            *(client.score(row, scoring, deadline_s=DEADLINE_S) for scoring, row in several),
            client.score(rows[0], Scoring(2.0), deadline_s=DEADLINE_S),
        )
        model = AutoModelForCausalLM.from_pretrained(subject.model, dtype=torch.float32).eval()
        for (scoring, row), scores in zip(several, actual, strict=False):
            with torch.no_grad():
                logits = model(torch.from_numpy(row).long()[None]).logits[0, :-1].double()
            expected = torch.log_softmax(logits / temperature, -1)
            own = expected.gather(-1, torch.from_numpy(row[1:]).long()[:, None])[:, 0]
            assert np.abs(scores.logprobs[1:] - own.numpy()).max() < 2e-5
            assert scores.version == 1 and scores.logprobs[0] == 0
            if not scoring.num_choices:
                assert scores.choices.shape == (len(row), 0)
                continue
            top = expected.topk(scoring.num_choices)
            assert (scores.choices[1:] == top.indices.numpy()).all()
            rest = torch.log1p(-top.values.exp().sum(-1))
            outcomes = torch.cat([top.values, rest[:, None]], 1).numpy()
            assert np.abs(scores.choice_logprobs[1:] - outcomes).max() < 2e-5
            assert (scores.choices[0] == -1).all()
        for response, scores in zip(written, actual[::2], strict=False):
            assert np.abs(scores.logprobs[-12:] - response.logprobs).max() < 2e-5
        hotter = actual[-1].logprobs
        assert np.abs(hotter - actual[0].logprobs).max() > 0.05, "another temperature must show"

    async def test_programs_that_compare_texts_by_their_likelihood_are_answered(self, subject):
        """As lm-eval asks: several prompts at once, echoed with the log-probs of their tokens."""
        prompts = [prompt(1).tolist()[:9], prompt(2).tolist()[:6]]
        body = {"model": "policy", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True}
        body |= {"temperature": 0, "seed": 1234}
        async with aiohttp.ClientSession() as session:
            key = {"Authorization": f"Bearer {subject.key}"}
            url = f"{subject.url}/v1/completions"
            async with session.post(url, json=body, headers=key) as reply:
                assert reply.status == 200, await reply.text()
                choices = (await reply.json())["choices"]
        model = AutoModelForCausalLM.from_pretrained(subject.model, dtype=torch.float32).eval()
        assert [choice["index"] for choice in choices] == [0, 1]
        for choice, tokens in zip(choices, prompts, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, :-1]
            expected = torch.log_softmax(logits, -1)
            output = choice["logprobs"]
            own = expected.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
            assert output["token_logprobs"][0] is None
            assert output["token_logprobs"][1:-1] == pytest.approx(own, abs=2e-5)
            best = [max(top.values()) for top in output["top_logprobs"][1:-1]]
            assert best == pytest.approx(expected.max(-1).values.tolist(), abs=2e-5)

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
            actual, seed = [whole[number][place].logprobs[:first]], 1000 * number + place
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
                    actual.append(part.logprobs)
            return replace(part, tokens=tokens, logprobs=np.concatenate(actual))

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
        actual = await client.generate(
            prompt(),
            4000,
            0,
            Sampling(1, 1.0, ignore_eos=True, logprobs=False),
            deadline_s=DEADLINE_S,
        )
        counts = np.bincount([int(g.tokens[0]) for g in actual], minlength=VOCAB)
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
        actual = await ask(client, 64, 5, Sampling(48, 1.0, (EOS,)))
        assert any(g.finished for g in actual), "of 64 responses over 128 tokens some must end"
        for generation in actual:
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

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(24, 1.0, (EOS,)),
            Sampling(24, 0.7, (EOS,), top_p=0.9),
            Sampling(16, 1.0, ignore_eos=True),
            Sampling(24, 1.0, (EOS,), logprobs=False),
        ],
        ids=["plain", "top_p", "no end", "without log-probs"],
    )
    async def test_a_compact_answer_has_the_responses_of_the_json(self, client, sampling):
        """The server's own handler is the independent one."""
        body = encode_request(prompt(), 4, 40, sampling)
        answers = {}
        for accept in (COMPACT_TYPE, None):
            data, headers = await client._request(
                "POST", "/v1/completions", body, DEADLINE_S, accept=accept
            )
            form = headers["Content-Type"].partition(";")[0]
            assert form == (accept or "application/json")
            generations = decode_response(data, 4, sampling, VOCAB, "it", content_type=form)
            answers[accept] = [
                (g.tokens.tolist(), g.logprobs.tolist(), g.text, g.finish_reason)
                for g in generations
            ]
        assert answers[COMPACT_TYPE] == answers[None]

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
            actual = await ask(client)
            assert bits(actual) == expected and {generation.version for generation in actual} == {5}
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
