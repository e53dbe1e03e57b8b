"""An agent of mini-swe-agent that trains: it has bash, and its submission is the answer.

    agent.command="python examples/mini_swe_agent.py" agent.programs=1

Its commands run as this program does: use agent.container for a policy that you do not trust.
"""

from __future__ import annotations

import os
import tempfile

from agent_client import Session, serve
from calculator import SESSIONS_AT_ONCE, TURNS, reward

os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")  # nobody pays for the policy
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def work(session: Session) -> float:
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": session.openai_url, "api_key": session.api_key, "max_retries": 0},
    )
    with tempfile.TemporaryDirectory() as directory:
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=directory),
            system_template="Answer with: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ANSWER",
            instance_template="{{ task }}",
            step_limit=TURNS,
        )
        try:
            result = agent.run(session.task["row"]["question"])
        except Exception as error:  # a limit of the run
            print(error)
            return 0.0
    return reward(result.get("submission", ""), session.task)


if __name__ == "__main__":
    serve(work, SESSIONS_AT_ONCE)
