"""EngineClient: the coordinator's client of one engine that answers as vLLM's server does.

The workers' calls are those of this package (weight_calls.py). A client belongs to one start of one
engine: it remembers which start answered first, and raises EngineGone for the answer of another
one. It also remembers which weight version it let the engine load, and raises InvariantViolation
for a response that another version generated (I1).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.texts import path_problem
from pa_npu.control.bounded_http import bounded_get
from pa_npu.engines.codec import (
    SERVED_MODEL,
    DecodedAnswer,
    checked_generations,
    decode_answer,
    decode_object,
    encode_request,
)
from pa_npu.engines.expert_choice_codec import (
    recorded_expert_choices,
    with_expert_choices,
)
from pa_npu.engines.http_client import ANSWER_BYTES, EngineHttp
from pa_npu.engines.http_server import (
    COMPACT_TYPE,
    OPEN_PATH,
    VERSION_HEADER,
)
from pa_npu.engines.images import (
    SentImages,
    check_expanded,
    is_unknown_image,
    short_tokens,
)
from pa_npu.engines.protocol import (
    NO_TOKENS,
    EngineCapabilities,
    EngineError,
    EngineGone,
    Generation,
    LoadedWeights,
    Sampling,
    Scores,
    Scoring,
    WeightGroups,
)
from pa_npu.engines.score_codec import (
    decode_places,
    decode_scores,
    encode_score_request,
    score_bytes,
    texts,
)
from pa_npu.engines.worker_answers import (
    loaded_weights,
    recorded_by_workers,
    stated_version,
)
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.vision.images import ShownImage

_GET_TIMEOUT_S = 10.0
_UNAUTHORISED = 401
_READY_PAUSE_S = 0.25
_CAPABILITIES_WITHIN_S = 60.0
_WORKERS_ANSWER_S = 10.0
# Pauses between two requests whether a version has been received.
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
# Of an answer with expert choices, beside the expert choices.
_FRAME_BYTES = 2**16
_PROBE_PROMPT = np.zeros(1, np.int32)
_PROBE_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False)
# Size of an answer beside ANSWER_BYTES, per token that is asked for and per token of the prompt,
# which is echoed. A token takes 80 to 200 bytes (its text three times, its log-prob twice); an
# engine never answers with more.
_TOKEN_BYTES = 2048
_PROMPT_TOKEN_BYTES = 16


class EngineClient(EngineHttp):
    """A RolloutEngine behind OpenAI-like paths and those of vLLM's development mode.

    Owns its connections: use `async with` in the event loop.

    Args:
        url: http://host:port.
        vocab_size: every token id must be below it.
        api_key: None takes VLLM_API_KEY, if set.
        kind: of the engine, the value of rollout.backend.
        served_model: name of the model there.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int,
        api_key: str | None = None,
        kind: str = "vllm",
        served_model: str = SERVED_MODEL,
    ) -> None:
        super().__init__(url, api_key)
        self._vocab_size = vocab_size
        self._kind = kind
        self._served_model = served_model
        self._sent_images = SentImages()
        self._asked_to_load = False
        self._version: int | None = None  # that it loaded for this client
        self._generating = 0

    async def __aenter__(self) -> EngineClient:
        return self

    async def generate(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: npt.NDArray[np.int32] = NO_TOKENS,
        images: Sequence[ShownImage] = (),
    ) -> list[Generation]:
        num_given = len(prompt_tokens) + len(written)
        max_bytes = ANSWER_BYTES
        max_bytes += n * (_TOKEN_BYTES * sampling.max_tokens + _PROMPT_TOKEN_BYTES * num_given)
        if sampling.expert_choices is not None:
            max_bytes += n * (sampling.max_tokens + num_given) * sampling.expert_choices.max_bytes
        self._generating += 1
        try:
            if images:
                data, headers = await self._ask_with_images(
                    prompt_tokens, n, seed, sampling, written, images, deadline_s, max_bytes
                )
            else:
                body = encode_request(prompt_tokens, n, seed, sampling, written, self._served_model)
                data, headers = await self._ask(body, deadline_s, max_bytes)
        finally:
            self._generating -= 1
        version = self._check_version(headers)
        answer = decode_answer(data, n, self.name, headers.get("Content-Type", ""))
        if images:
            check_expanded(
                answer.prompt_tokens, np.concatenate([prompt_tokens, written]), self.name
            )
        generations = checked_generations(answer, sampling, self._vocab_size, self.name, version)
        if sampling.expert_choices is None:
            return generations
        return await self._with_expert_choices(
            generations, answer, num_given, sampling.expert_choices, deadline_s
        )

    async def _ask(
        self, body: bytes, deadline_s: float, max_bytes: int
    ) -> tuple[bytes, Mapping[str, str]]:
        return await self._request(
            "POST",
            "/v1/completions",
            body,
            deadline_s,
            max_bytes=max_bytes,
            keep_connection=True,
            accept=COMPACT_TYPE,
        )

    async def _ask_with_images(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        written: npt.NDArray[np.int32],
        images: Sequence[ShownImage],
        deadline_s: float,
        max_bytes: int,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Asks by one placeholder an image, whose data goes along unless the engine has it."""
        short, places = short_tokens(prompt_tokens, images)
        end_s = time.monotonic() + deadline_s
        while True:
            # decoding and encoding an image of a megapixel takes some 50 ms
            parts = await asyncio.to_thread(self._sent_images.parts, images, places)
            left_s = max(0.001, end_s - time.monotonic())
            try:
                body = encode_request(short, n, seed, sampling, written, self._served_model, parts)
                data, headers = await self._ask(body, left_s, max_bytes)
                break
            except EngineGone:
                raise
            except EngineError as error:
                was_sent = all(part.data for part in parts)
                if was_sent or not is_unknown_image(str(error)):
                    raise
                self._sent_images.forget(images)
        self._sent_images.have_arrived(images)
        return data, headers

    async def _with_expert_choices(
        self,
        generations: list[Generation],
        answer: DecodedAnswer,
        num_given: int,
        expert_choices: ExpertChoices,
        deadline_s: float,
    ) -> list[Generation]:
        """Returns the generations with the expert choices of all their tokens.

        Args:
            generations: the n responses of one request.
            answer: that they are of.
            num_given: tokens of the prompt and of the beginning of the response.
            expert_choices: the column.
            deadline_s: of a further request to the workers, if the answer has no expert choices.
        """
        try:
            recorded = recorded_expert_choices(answer, expert_choices.layers)
            if recorded is None:
                arguments = [answer.request, len(generations), num_given]
                num_tokens = sum(num_given + len(response.tokens) for response in generations)
                results, _ = await self._on_workers(
                    "pa_expert_choices",
                    arguments,
                    deadline_s,
                    max_bytes=_FRAME_BYTES + num_tokens * expert_choices.max_bytes,
                )
                recorded = recorded_by_workers(results[0])
            if len(recorded) != len(generations):
                raise ValueError(f"{len(recorded)} of {len(generations)} responses")
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise EngineError(
                f"engine {self.name}: its answer has no expert choices "
                f"({type(error).__name__}: {error}); "
                "does it record them?"
            ) from None
        size = int(np.prod(expert_choices.column.shape))
        completed = []
        for response, ids in zip(generations, recorded, strict=True):
            # The engine may have computed more than it answers, behind a text that ends a response.
            end = (num_given + len(response.tokens)) * size
            completed.append(
                with_expert_choices(
                    response, ids.reshape(-1)[:end], num_given, expert_choices, self.name
                )
            )
        return completed

    async def score(
        self, tokens: npt.NDArray[np.int32], scoring: Scoring, *, deadline_s: float
    ) -> Scores:
        data, headers = await self._score(tokens, scoring, deadline_s)
        version = self._check_version(headers)
        # most of the work with an answer, for which no request should wait
        return await asyncio.to_thread(
            decode_scores, data, tokens, scoring, self._vocab_size, self.name, version
        )

    async def token_texts(
        self, tokens: npt.NDArray[np.int32], *, deadline_s: float
    ) -> list[Mapping[int, str]]:
        """Returns for each place of a sequence the text of its token, by id, as the server has it."""
        data, _ = await self._score(tokens, Scoring(), deadline_s)
        return texts(decode_places(data, len(tokens), self.name))

    async def _score(
        self, tokens: npt.NDArray[np.int32], scoring: Scoring, deadline_s: float
    ) -> tuple[bytes, Mapping[str, str]]:
        self._generating += 1
        try:
            return await self._request(
                "POST",
                "/v1/completions",
                encode_score_request(tokens, scoring, self._served_model),
                deadline_s,
                action="a request for scores",
                max_bytes=ANSWER_BYTES + score_bytes(len(tokens), scoring.num_choices),
                keep_connection=True,
            )
        finally:
            self._generating -= 1

    async def cut_responses(self, *, deadline_s: float) -> None:
        # New requests wait between the two. Releases differ in the names of modes; `abort` is the
        # default of all.
        await self._request("POST", "/pause?mode=abort&clear_cache=false", None, deadline_s)
        await self._request("POST", "/resume", None, deadline_s)

    async def sleep(self, *, deadline_s: float) -> None:
        # Level 2 keeps no weights: the next load brings all of them anyway.
        await self._request("POST", "/sleep?level=2", None, deadline_s)

    async def wake(self, *, deadline_s: float) -> None:
        await self._request("POST", "/wake_up", None, deadline_s)

    async def join_weight_groups(self, connection: WeightGroups, *, deadline_s: float) -> None:
        await self._on_workers("pa_connect", [vars(connection)], deadline_s)

    async def load_weights(
        self, version: int, *, deadline_s: float, begins_within_s: float | None = None
    ) -> LoadedWeights:
        arguments: list[Any] = [version]
        if begins_within_s is not None:
            arguments.append(begins_within_s)
        return await self._load("pa_receive", arguments, deadline_s)

    async def prepare_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        end_s = time.monotonic() + deadline_s
        await self._on_workers("pa_prepare", [version], deadline_s)
        pause_s = _SHORTEST_PAUSE_S
        while (left_s := end_s - time.monotonic()) > 0:
            # Workers answer between two steps, so that a request costs little.
            results, _ = await self._on_workers("pa_prepared", [version], left_s)
            loaded = loaded_weights(results, self.name)
            if None not in loaded.versions:
                return loaded
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise DeadlineExceeded(
            f"engine {self.name}: it did not receive weight version {version} within "
            f"{deadline_s:g} s"
        )

    async def swap_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        return await self._load("pa_swap", [version], deadline_s)

    async def _load(self, method: str, args: Sequence[Any], deadline_s: float) -> LoadedWeights:
        """Returns the answer to a load, if the server states the same version.

        From here on responses must be by that version.
        """
        self._asked_to_load = True
        self._version = None
        results, headers = await self._on_workers(method, args, deadline_s)
        loaded = loaded_weights(results, self.name)
        stated = stated_version(headers)
        if set(loaded.versions) != {stated}:
            raise EngineError(
                f"engine {self.name}: its workers hold weight versions {list(loaded.versions)}, "
                f"but its server says {headers.get(VERSION_HEADER, 'nothing')}; was it started "
                "with the command of this package?"
            )
        self._version = stated
        return loaded

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        results, _ = await self._on_workers("pa_version", [], deadline_s)
        return loaded_weights(results, self.name)

    async def _on_workers(
        self, method: str, args: Sequence[Any], deadline_s: float, max_bytes: int = ANSWER_BYTES
    ) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
        """Calls a method of the workers.

        Returns the results in rank order, and the answer's headers.

        The deadline stays in this client: a `timeout` given to vLLM shifts every later reply by one
        when it fires. After DeadlineExceeded the engine is in an unknown state and must be killed.
        """
        data, headers = await self._request(
            "POST",
            "/collective_rpc",
            json.dumps({"method": method, "args": list(args)}).encode(),
            deadline_s,
            action=f"{method} on its workers",
            max_bytes=max_bytes,
        )
        results = decode_object(data, self.name).get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise EngineError(f"engine {self.name}: {method} on its workers returned no results")
        return results, headers

    async def probe(self, *, deadline_s: float) -> None:
        try:
            await self.generate(_PROBE_PROMPT, 1, 0, _PROBE_SAMPLING, deadline_s=deadline_s)
        except DeadlineExceeded:
            if not self._generating:
                raise
            # If the batch is full, the token waits for its turn; workers answer between two steps.
            await self.loaded_weights(deadline_s=min(deadline_s, _WORKERS_ANSWER_S))

    async def check_health(self, *, deadline_s: float) -> int | None:
        _, headers = await self._request("GET", OPEN_PATH, None, deadline_s)
        return stated_version(headers)

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        start = time.monotonic()
        reason = "no answer"
        while (left_s := deadline_s - (time.monotonic() - start)) > 0:
            try:
                await self.check_health(deadline_s=min(left_s, 10.0))
            except (EngineError, DeadlineExceeded) as error:
                reason = str(error)
                await asyncio.sleep(min(_READY_PAUSE_S, left_s))
            else:
                # A server may have lost its workers a moment ago, and then never answers.
                return await self._capabilities(min(left_s, _CAPABILITIES_WITHIN_S))
        raise DeadlineExceeded(
            f"engine {self.name}: not ready after {deadline_s:g} s ({reason}); see the engine's log"
        )

    async def _capabilities(self, deadline_s: float) -> EngineCapabilities:
        """Asks a ready engine for its abilities."""
        data, _ = await self._request("GET", "/version", None, deadline_s)
        version = decode_object(data, self.name).get("version")
        workers, _ = await self._on_workers("pa_version", [], deadline_s)

        def all_can(ability: str) -> bool:
            return all(worker.get(ability) is True for worker in workers)

        return EngineCapabilities(
            kind=self._kind,
            version=str(version),
            num_workers=len(workers),
            continues=all_can("continues"),
            sleeps=all_can("sleeps"),
            records_expert_choices=all_can("expert_choices"),
            scores_at_temperature=all_can("scores_at_temperature"),
            reads_images=all_can("images"),
        )

    def _check_version(self, headers: Mapping[str, str]) -> int | None:
        """Returns the version that the engine states for its responses.

        Raises InvariantViolation if this client let it load another one.
        """
        stated = stated_version(headers)
        if self._asked_to_load and (stated is None or stated != self._version):
            published = "none completely" if self._version is None else str(self._version)
            raise InvariantViolation(
                f"I1 version: engine {self.name} says that it generated by weight version "
                f"{headers.get(VERSION_HEADER)}, but this run gave it {published}; does another "
                "run use it?"
            )
        return stated


def served_model(url: str, key: str) -> str:
    """Returns the model directory that an engine was started with.

    Raises OSError or ValueError if the engine does not name it.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, body = bounded_get(f"{url}/v1/models", headers, _GET_TIMEOUT_S)
    if status == _UNAUTHORISED:
        raise OSError(f"HTTP {status}: it refuses this API key")
    if status != 200:
        raise OSError(f"HTTP {status}")
    try:
        directory = json.loads(body)["data"][0]["root"]
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"its answer cannot be read: {type(error).__name__}") from None
    if not isinstance(directory, str) or path_problem(directory):
        raise ValueError("its answer names no directory")
    return directory
