"""A taskset of verifiers with a tool: products that a model has a calculator for. Imported where verifiers is."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["CalculatorHarness", "CalculatorTaskset"]


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, x: str) -> str:
        """The value of a product."""
        return calculate(x)


class CalculatorTask(vf.Task[CalculatorData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.name == "broken":
            raise ValueError("this task cannot be scored")
        return float(trace.last_reply == f"#### {self.data.answer}")


class CalculatorConfig(vf.TasksetConfig):
    questions: Path
    broken: bool = False


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    def load(self) -> Iterator[CalculatorTask]:
        for line in self.config.questions.read_text().splitlines():
            row = json.loads(line)
            data = CalculatorData(
                prompt=row["question"],
                answer=row["answer"].removeprefix("#### "),
                name="broken" if self.config.broken else None,
            )
            yield CalculatorTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        """One server for all tasks: a server of each task's own takes seconds to start."""
        return [CalculatorToolset(vf.SharedToolsetConfig())]


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """A loop of chat requests in the process of the environment."""

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: Any = [{"role": "user", "content": data.prompt}]
        parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
        function = {"name": "calculator", "parameters": parameters}
        tools: Any = [{"type": "function", "function": function}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model=ctx.model,
                    messages=messages,
                    tools=tools,
                )
                message = answer.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    value = calculate(json.loads(call.function.arguments).get("x", ""))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def calculate(x: str) -> str:
    try:
        first, second = (ast.literal_eval(part) for part in x.split("*"))
        return str(first * second)
    except (ValueError, SyntaxError, TypeError):
        return "error"


if __name__ == "__main__":
    CalculatorToolset.run()
