"""An agent of smolagents that trains.

    agent.command="python examples/smolagents_agent.py" agent.programs=1

smolagents requires a tool in every answer, the last of them `final_answer`. It needs
agent.serve_as_sampled=[tool_choice], which leaves it to the policy whether it calls one.
"""

from __future__ import annotations

from agent_client import Session, serve
from calculator import SESSIONS_AT_ONCE, TURNS, calculator, reward
from smolagents import OpenAIModel, ToolCallingAgent, tool

TOOL = tool(calculator)


def work(session: Session) -> float:
    model = OpenAIModel("policy", api_base=session.openai_url, api_key=session.api_key)
    agent = ToolCallingAgent(tools=[TOOL], model=model, max_steps=TURNS, verbosity_level=0)
    try:
        answer = agent.run(session.task["row"]["question"])
    except Exception as error:  # a limit of the run
        print(error)
        return 0.0
    return reward(answer, session.task)


if __name__ == "__main__":
    serve(work, SESSIONS_AT_ONCE)
