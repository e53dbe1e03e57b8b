"""Rows of published benchmarks as rows with a question and an answer, by their columns; other rows stay as they are.

    Problem, Answer                                AIME 2024 (Maxwell-Jia/AIME_2024)
    problem | question, answer as 27.0             AMC 2023 (math-ai/amc23, AI-MO/aimo-validation-amc)
    Question, Correct Answer, Incorrect Answer 1-3 GPQA (Idavidrein/gpqa): its CSV
    question, choices: list, answer: index         MMLU (cais/mmlu)
    question, choices: {text, label}, answerKey    ARC (allenai/ai2_arc)

GSM8K, MATH-500 (problem, answer), AIME of HuggingFaceH4 and math-ai (problem | question, answer) need nothing. A multiple choice
becomes a question with lettered options; the order of GPQA's is drawn from the question itself, so that it is the same everywhere
and always. The row keeps its columns, and `choice_letters` tells the math reward to compare letters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = "ABCDEFGHIJ"
CHOICE_COLUMN = "choice_letters"
_GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def published(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with question and answer where its layout is one of the above, else the row."""
    found = dict(row)
    if all(isinstance(row.get(name), str) for name in _GPQA):
        options = [row[name].strip() for name in _GPQA[1:]]
        order = random.Random(row["Question"]).sample(range(4), 4)
        return found | _choice(row["Question"], [options[i] for i in order], order.index(0))
    choices = row.get("choices")
    if isinstance(choices, Mapping) and "answerKey" in row:
        labels, texts = list(choices.get("label", ())), list(choices.get("text", ()))
        if row["answerKey"] in labels and len(labels) == len(texts):
            return found | _choice(str(row.get("question")), texts, labels.index(row["answerKey"]))
    right = row.get("answer")
    if isinstance(choices, (list, tuple)) and type(right) is int and 0 <= right < len(choices) <= len(LETTERS):
        return found | _choice(str(row.get("question")), choices, right)
    if "Problem" in row and "Answer" in row and not {"problem", "question", "prompt", "messages"} & set(row):
        found |= {"problem": row["Problem"], "answer": row["Answer"]}
    answer = found.get("answer")
    if isinstance(answer, float) and answer.is_integer():
        found["answer"] = int(answer)
    return found


def _choice(question: str, options: Sequence[Any], right: int) -> dict[str, Any]:
    letters = LETTERS[: len(options)]
    lines = [f"{letter}) {option}" for letter, option in zip(letters, options, strict=True)]
    text = question.strip() + "\n\n" + "\n".join(lines)
    return {"question": text, "answer": letters[right], CHOICE_COLUMN: letters}
