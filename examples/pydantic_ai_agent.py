"""An agent of pydantic-ai that trains; `structured` asks for an object as its answer.

    agent.command="python examples/pydantic_ai_agent.py [structured]" agent.programs=1

A structured answer is a call of a tool that pydantic-ai requires. It needs
agent.serve_as_sampled=[tool_choice], which leaves it to the policy whether it calls one.
"""

from __future__ import annotations

import sys

from agent_client import Session, serve
from calculator import SESSIONS_AT_ONCE, TURNS, calculator, reward
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

STRUCTURED = sys.argv[1:] == ["structured"]


class Answer(BaseModel):
    number: int


async def work(session: Session) -> float:
    provider = OpenAIProvider(base_url=session.openai_url, api_key=session.api_key)
    agent: Agent[None, object] = Agent(
        OpenAIChatModel("policy", provider=provider),
        tools=[calculator],
        output_type=Answer if STRUCTURED else str,
    )
    question = session.task["row"]["question"]
    try:
        async with agent:  # which closes its client
            result = await agent.run(question, usage_limits=UsageLimits(request_limit=TURNS))
    except Exception as error:  # a limit of the run, or a call that is none
        print(error)
        return 0.0
    output = result.output
    return reward(output.number if isinstance(output, Answer) else output, session.task)


if __name__ == "__main__":
    serve(work, SESSIONS_AT_ONCE)
