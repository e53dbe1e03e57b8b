"""A teacher on a server with vLLM's interface: its address and key, and the trial before a run that it scores given tokens.

The trial scores the first rows' own tokens. It finds a server that gives no prompt log-probs, or
too few of the most likely tokens, or only at temperature 1; and, by the texts that the server names
beside the tokens' ids, one with another vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections.learning import TEACHER_KEY_VARIABLE
from pa_npu.control.bounded_http import bounded_get
from pa_npu.engines.client import EngineClient
from pa_npu.engines.protocol import EngineError, Scoring
from pa_npu.errors import DataError, DeadlineExceeded, UserError

_TRIAL_S = 120.0
_GET_S = 10.0


def server_url(url: str) -> str:
    """Returns the URL before /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def server_key() -> str:
    """Returns the key of teachers' servers; empty if there is none.

    Raises DataError for a key that no request can hold.
    """
    key = os.environ.get(TEACHER_KEY_VARIABLE, "")
    if key.isascii() and key.isprintable() and key.strip() == key:
        return key
    raise DataError(
        f"{TEACHER_KEY_VARIABLE}: the environment variable holds a space at an end, a line end or "
        "another character that no header of a request can hold; set it to the key alone"
    )


def served_teacher(url: str, key: str, secret: str) -> str:
    """Returns the name under which the server at a URL (server_url) serves its model.

    key: the teacher's key in the configuration, for messages. secret: server_key. Raises UserError.
    """
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    try:
        status, body = bounded_get(f"{url}/v1/models", headers, _GET_S)
        if status != 200:
            raise ValueError(f"HTTP {status}")
        models = json.loads(body)["data"]
        name = models[0]["id"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{key}.url: {url} does not answer as a server with vLLM's interface ({error}); start "
            f"it, correct the URL, or set {TEACHER_KEY_VARIABLE} to its key"
        ) from None
    if not isinstance(name, str):
        raise UserError(f"{key}.url: {url} does not name its model; is it a server of vLLM's kind?")
    return name


def try_server(
    url: str,
    key: str,
    *,
    rows: Sequence[npt.NDArray[np.int32]],
    scoring: Scoring,
    tokenizer: Any,
) -> None:
    """Lets the server score rows as the run will.

    Args:
        url: teacher.NAME.url.
        key: teacher.NAME, for messages.
        rows: tokens of prompts.
        scoring: the run's.
        tokenizer: the policy's.

    Raises UserError with what it cannot do.
    """
    address = server_url(url)
    secret = server_key()
    model = served_teacher(address, key, secret)
    client = EngineClient(address, len(tokenizer), secret, served_model=model)
    try:
        asyncio.run(_try(client, key, rows, scoring, tokenizer))
    except (EngineError, DeadlineExceeded) as error:
        raise UserError(
            f"{key}.url: {url} does not score given tokens: {error}; a teacher needs a server of "
            "vLLM's kind with prompt_logprobs"
        ) from None


async def _try(
    client: EngineClient,
    key: str,
    rows: Sequence[npt.NDArray[np.int32]],
    scoring: Scoring,
    tokenizer: Any,
) -> None:
    async with client:
        if scoring.temperature != 1.0:
            await _check_temperature(client, key, scoring.temperature)
        for row in rows:
            await client.score(row, scoring, deadline_s=_TRIAL_S)
            named = await client.token_texts(row, deadline_s=_TRIAL_S)
            for place, texts in enumerate(named):
                for token, text in texts.items():
                    _check_text(client.name, key, token, text, tokenizer, place)


async def _check_temperature(client: EngineClient, key: str, temperature: float) -> None:
    try:
        capabilities = await client.wait_ready(deadline_s=_TRIAL_S)
        can_scale = capabilities.scores_at_temperature
    except EngineError:  # a server of somebody else's has no such call
        can_scale = False
    if not can_scale:
        raise UserError(
            f"{key}.url: {client.name} gives log-probs at temperature 1 only, and "
            f"rollout.temperature = {temperature:g}; set it to 1, start the server with pa-npu "
            "engines, or give the run the teacher's directory (model)"
        )


def _check_text(url: str, key: str, token: int, text: str, tokenizer: Any, place: int) -> None:
    """Raises DataError if a token has another text at the server than here."""
    ours = {str(tokenizer.decode([token])), *map(str, tokenizer.convert_ids_to_tokens([token]))}
    # a token of a part of a character, and a token alone, are written in several ways
    if text in ours or "\ufffd" in text or any(text.strip() == own.strip() for own in ours):
        return
    raise DataError(
        f"{key}.url: {url}: token {token} (place {place} of a row) is {text!r:.60} there and "
        f"{min(ours)!r:.60} of the policy; use a teacher with the policy's vocabulary"
    )
