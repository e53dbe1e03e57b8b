"""An agent of openai-agents that trains: its default model speaks the Responses API, `chat` its other one.

agent.command="python examples/openai_agents_agent.py [chat]" agent.programs=1
"""

from __future__ import annotations

import sys

from agent_client import Session, serve
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from calculator import SESSIONS_AT_ONCE, TURNS, calculator, reward
from openai import AsyncOpenAI

CHAT = sys.argv[1:] == ["chat"]


async def work(session: Session) -> float:
    make_model = OpenAIChatCompletionsModel if CHAT else OpenAIResponsesModel
    async with AsyncOpenAI(
        base_url=session.openai_url, api_key=session.api_key, max_retries=0
    ) as client:
        agent = Agent(
            name="calculator",
            tools=[function_tool(calculator)],
            model=make_model("policy", client),
        )
        try:
            result = await Runner.run(agent, session.task["row"]["question"], max_turns=TURNS)
        except Exception as error:  # a limit of the run, or a call that is none
            print(error)
            return 0.0
    return reward(result.final_output, session.task)


if __name__ == "__main__":
    set_tracing_disabled(True)
    serve(work, SESSIONS_AT_ONCE)
