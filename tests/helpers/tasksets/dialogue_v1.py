"""An environment of verifiers with several turns: its user asks again until the answer is right."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DialogueEnv", "DialogueTaskset"]


class DialogueTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def early(self, trace: vf.Trace) -> float:
        """The fewer turns, the better; 0 without the right answer."""
        return 1.0 / trace.num_turns if "42" in trace.last_reply else 0.0


class DialogueTaskset(vf.Taskset[DialogueTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[DialogueTask]:
        number = 0
        while True:
            yield DialogueTask(vf.TaskData(prompt=f"Guess, {number}."), self.config.task)
            number += 1


class DialogueConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    turns: int = 3


class DialogueEnv(vf.Env[DialogueConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(self.config.turns - 1):
                if segment.terminated or "42" in segment.last_reply:
                    break
                segment = await talk.turn("Again.")
