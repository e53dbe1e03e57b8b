"""Clients of the gateway, a policy whose answers a test writes, and programs that are agents."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.open_sessions import Sessions
from pa_npu.agents.session import Session
from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import Generate
from pa_npu.environments.registry import make_environment, opened
from pa_npu.samples.types import Sample
from pa_npu.vision.images import ShownImage
from tools.make_tiny_model import AGENT_TEMPLATE, END_OF_TURN, make_tokenizer

TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = AGENT_TEMPLATE
PROMPT = Prompt(4, np.zeros(3, np.int32), "42", "What is 6*7?", {"question": "What is 6*7?"})
TOOLS: Any = [
    {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>{"name": "calculator", "arguments": {"x": "6*7"}}</tool_call>'
VERSION = 5


def ids(text: str) -> list[int]:
    """Byte by byte: what a policy writes is not what its text tokenises to."""
    pieces = (
        [text.removesuffix(END_OF_TURN)]
        if text.startswith("<|")
        else list(text.removesuffix(END_OF_TURN))
    )
    actual = [
        token
        for piece in pieces
        for token in TOKENIZER(piece, add_special_tokens=False)["input_ids"]
    ]
    return actual + ([TOKENIZER.eos_token_id] if text.endswith(END_OF_TURN) else [])


@dataclass(frozen=True, eq=False)
class Turn:
    """The arguments of Generate, of one request."""

    tokens: np.ndarray
    sample: int
    turn: int
    max_tokens: int | None
    images: tuple[ShownImage, ...] = ()


class Policy(Generate):
    """Writes what `script` says to what it is shown; log-probs and a seed's part follow from the
    turn that it is asked for.
    """

    def __init__(self, script: Callable[[str], str]) -> None:
        self.script = script
        self.turns: list[Turn] = []
        self.wait: asyncio.Event | None = None

    async def __call__(
        self,
        tokens: np.ndarray,
        *,
        n: int = 1,
        sample: int = 0,
        turn: int = 0,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        images: Sequence[ShownImage] | None = None,
    ) -> list[Generation]:
        return await self.write(Turn(tokens, sample, turn, max_tokens, tuple(images or ())))

    async def write(self, turn: Turn) -> list[Generation]:
        self.turns.append(turn)
        if self.wait is not None:
            await self.wait.wait()
        text = self.script(str(TOKENIZER.decode(turn.tokens.tolist())))
        written = ids(text)[: turn.max_tokens]
        ended = len(written) == len(ids(text)) and text.endswith(END_OF_TURN)
        logprobs = -np.linspace(0.1, 1.0, len(written), dtype=np.float32) - turn.turn % 97
        reason: Any = "stop" if ended else "length"
        return [Generation(np.asarray(written, np.int32), logprobs, "", reason, version=VERSION)]


def asks_then_answers(shown: str) -> str:
    return f"#### 42{END_OF_TURN}" if shown.count("<|user|>") > 1 else f"so {CALL}{END_OF_TURN}"


def config(timeout_s: float | None = None, **agent: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 200},
            "environment": {"name": "agents", "max_turns": 4, "timeout_s": timeout_s},
            "agent": agent,
        }
    )


class Client:
    """One open session, and clients of it."""

    def __init__(self, sessions: Sessions, session: Session) -> None:
        self.sessions, self.session = sessions, session
        self.key = sessions.derive_key(f"session:{session.id}")
        self.openai = openai.AsyncOpenAI(
            base_url=sessions.base_url(session), api_key=self.key, max_retries=0
        )
        self.root = f"{sessions.url}/sessions/{session.id}"

    async def chat(self, messages: list[Any], **more: Any) -> Any:
        return await self.openai.chat.completions.create(model="any", messages=messages, **more)

    async def send(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.root + path, json=body, headers=headers) as reply,
        ):
            return reply.status, await reply.json()

    def samples(self) -> list[Sample]:
        return self.session.tree.samples("", ended=True, reward=None)


async def client_of(agents: AgentEnvironment, policy: Generate, number: int = 0) -> Client:
    assert agents.sessions is not None
    session = Session(
        agents.sessions.new_id(), number, {}, policy, agents._chat, agents._limits, agents._rules
    )
    agents.sessions.add(session)
    return Client(agents.sessions, session)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


PROGRAM = """
import json, os, sys, urllib.request
def ask(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
task = json.loads(os.environ["TASK"])
messages = [{"role": "user", "content": task["row"]["question"]}]
answer = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
"""


def program(directory: Path, *lines: str) -> str:
    file = directory / "agent.py"
    file.write_text(PROGRAM + "\n".join(lines))
    return shlex.join([sys.executable, str(file)])


async def rollout(
    chosen: Config, num_samples: int, script: Callable[[str], str]
) -> tuple[list[Sample], Policy]:
    policy = Policy(script)
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        return await environment.rollout(PROMPT, num_samples, policy), policy
