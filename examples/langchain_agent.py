"""An agent of LangChain that trains; `structured` asks for an object as its answer.

    agent.command="python examples/langchain_agent.py [structured]" agent.programs=1

A structured answer is asked for by response_format. It needs
agent.serve_as_sampled=[response_format], which leaves it to the policy what it writes.
"""

from __future__ import annotations

import sys

from agent_client import Session, serve
from calculator import SESSIONS_AT_ONCE, TURNS, calculator, reward
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

STRUCTURED = sys.argv[1:] == ["structured"]
TOOL = tool(calculator)


class Answer(BaseModel):
    number: int


def work(session: Session) -> float:
    model = ChatOpenAI(
        model="policy", base_url=session.openai_url, api_key=session.api_key, max_retries=0
    )
    question = session.task["row"]["question"]
    try:
        if STRUCTURED:
            answer = model.with_structured_output(Answer).invoke(question)
            return reward(answer.number, session.task)
        with_tool = model.bind_tools([TOOL])
        messages = [HumanMessage(question)]
        for _ in range(TURNS):
            messages.append(with_tool.invoke(messages))
            if not messages[-1].tool_calls:
                break
            messages += [TOOL.invoke(call) for call in messages[-1].tool_calls]
    except Exception as error:  # a limit of the run, or a call that is none
        print(error)
        return 0.0
    return reward(messages[-1].content, session.task)


if __name__ == "__main__":
    serve(work, SESSIONS_AT_ONCE)
