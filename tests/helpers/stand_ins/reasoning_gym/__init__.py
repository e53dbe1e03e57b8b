"""What pa_npu uses of reasoning-gym, with two tasks: sums, and words whose order is open."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any


class _Task:
    def __init__(self, name: str, size: int, seed: int) -> None:
        self._name, self._size, self._seed = name, size, seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        generator = random.Random(self._seed + index)
        return self._entry(generator)

    def _entry(self, generator: random.Random) -> dict[str, Any]:
        raise NotImplementedError


class _Sums(_Task):
    def __init__(self, size: int, seed: int, max_term: int = 99) -> None:
        super().__init__("sums", size, seed)
        self._max_term = max_term

    def _entry(self, generator: random.Random) -> dict[str, Any]:
        terms = (generator.randint(1, self._max_term), generator.randint(1, self._max_term))
        return {
            "question": f"{terms[0]} + {terms[1]} =",
            "answer": str(sum(terms)),
            "metadata": {"terms": terms},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.0 if answer is None else 0.01


class _Letters(_Task):
    """No answer is stored: any order of the letters is right."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__("letters", size, seed)

    def _entry(self, generator: random.Random) -> dict[str, Any]:
        letters = generator.sample("abcdef", 3)
        return {
            "question": f"Any order of {letters}:",
            "answer": None,
            "metadata": {"letters": letters},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(sorted(answer or "") == sorted(entry["metadata"]["letters"]))


factory = SimpleNamespace(DATASETS={"sums": _Sums, "letters": _Letters})


def create_dataset(name: str, **options: Any) -> Any:
    return factory.DATASETS[name](**options)
