"""The reward `reasoning_gym`: a row that reasoning-gym made is scored by its own task, any other as `math` does."""

from __future__ import annotations

from pa_npu.config.sections.reward import RESPONSE_CPU_S
from pa_npu.data.limits import TimeLimitReached, time_limit
from pa_npu.data.made_rows import COLUMN, score_of
from pa_npu.data.records import ANSWER_MARK
from pa_npu.rewards.answers import final_text
from pa_npu.rewards.boxes import last_boxed
from pa_npu.rewards.functions import RewardInput, math_reward


def gym_reward(group: RewardInput) -> list[float]:
    """Returns each response's score by the task that made the row, from 0 to 1.

    A response without an answer gets what its task gives for none. A response that is not scored
    within RESPONSE_CPU_S of processor time gets 0.
    """
    recipe = group.row.get(COLUMN)
    if not isinstance(recipe, dict):
        return math_reward(group)
    question = group.row.get("question")
    rewards = []
    for response in group.responses:
        try:
            with time_limit(RESPONSE_CPU_S):
                reward = score_of(recipe, question, plain_answer(response, group.prompt))
        except TimeLimitReached:
            reward = 0.0
        rewards.append(reward)
    return rewards


def plain_answer(response: str, prompt: str) -> str | None:
    """Returns the text that a response gives as its answer, as written; None if there is none.

    It stands in <answer>, behind ####, in the last \\boxed{}, or else is all that follows the
    thought.
    """
    text = final_text(response, prompt)
    _, mark, behind = text.rpartition(f"{ANSWER_MARK} ")
    if mark:
        text = behind
    elif (boxed := last_boxed(text)) is not None:
        text = boxed
    return text.strip() or None
