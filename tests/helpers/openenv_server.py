"""A server of OpenEnv whose task is to count, for the interpreter that has openenv: python openenv_server.py PORT."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

EPISODES_AT_ONCE = 8
LAST = 3


class Said(Action):
    message: str


class Shown(Observation):
    text: str


class Counting(Environment[Said, Shown, State]):
    """Three numbers, from the one that the row says. Half a reward for each."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._first = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, first: int = 1, **row: Any
    ) -> Shown:
        self._state = State(episode_id=episode_id, step_count=0)
        self._first = first
        return Shown(text=f"count from {first}, seed {seed}")

    def step(self, action: Said, timeout_s: float | None = None, **more: Any) -> Shown:
        right = action.message == f"#{self._first + self._state.step_count}"
        self._state.step_count += 1
        done = self._state.step_count == LAST
        return Shown(text="next", reward=0.5 * right, done=done)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Counting, Said, Shown, max_concurrent_envs=EPISODES_AT_ONCE)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
