"""An agent on the anthropic package that trains, over the Messages API.

agent.command="python examples/anthropic_agent.py" agent.programs=1
"""

from __future__ import annotations

from agent_client import Session, serve
from anthropic import Anthropic, AnthropicError
from calculator import SCHEMA, SESSIONS_AT_ONCE, TURNS, calculator, reward

MAX_TOKENS = 1024  # the run has a limit of its own
TOOLS = [
    {
        "name": "calculator",
        "description": "The value of an arithmetic expression.",
        "input_schema": SCHEMA,
    }
]


def work(session: Session) -> float:
    client = Anthropic(base_url=session.anthropic_url, api_key=session.api_key, max_retries=0)
    messages = [{"role": "user", "content": session.task["row"]["question"]}]
    text = ""
    try:
        for _ in range(TURNS):
            message = client.messages.create(
                model="policy", max_tokens=MAX_TOKENS, messages=messages, tools=TOOLS
            )
            text = "".join(block.text for block in message.content if block.type == "text")
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            results = []
            for call in calls:
                value = calculator(str(call.input.get("x")))
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": value})
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": results})
    except AnthropicError as error:  # a limit of the run: what was written until then is judged
        text = str(error)
    return reward(text, session.task)


if __name__ == "__main__":
    serve(work, SESSIONS_AT_ONCE)
