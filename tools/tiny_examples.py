"""Worked sums before each question of tools/make_tiny_model.py --examples: a prompt of thousands of tokens.

They are earlier turns of the conversation, the same ones before every question, so that an engine
computes them once for a whole iteration. A model that adds has to learn to read past them: its
attention to the digits of one question must hold beside those of hundreds. It learns so from
conversations that grow, in which every answer is a lesson.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Worked = tuple[str, str]
"""A question, and its answer step by step."""
Descend = Callable[[torch.Tensor, torch.Tensor, float], float]
"""One optimizer step on tokens and labels, both [rows, width], with a learning rate; returns the loss."""

# Shares of the final number of examples, conversations in a step, and steps. What a step costs
# grows with the square of the length, and most is learned from the shorter ones.
STAGES = ((1 / 16, 8, 60), (1 / 4, 2, 40), (1, 1, 40))
LENGTHENING_RATE = 1e-3
SLIP_STEPS = 30
SLIP_BATCH = 32
SLIP_RATE = 5e-4
IGNORED = -100  # label of tokens without loss


def messages(examples: Sequence[Worked], question: str) -> list[dict[str, str]]:
    """Returns the conversation that ends with the question."""
    turns = []
    for asked, answered in examples:
        turns.append({"role": "user", "content": asked})
        turns.append({"role": "assistant", "content": answered})
    turns.append({"role": "user", "content": question})
    return turns


def row(examples: Sequence[Worked], question: str, answer: str) -> dict[str, Any]:
    """Returns a row of train.jsonl."""
    return {"prompt": messages(examples, question), "answer": answer}


def question_tokens(tokenizer: Any, question: str) -> list[int]:
    """Returns the tokens of a question's turn, up to where its answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    tokens: list[int] = tokenizer(text).input_ids
    return tokens


def answer_tokens(tokenizer: Any, answer: str) -> list[int]:
    tokens: list[int] = tokenizer(answer + tokenizer.eos_token).input_ids
    return tokens


def conversation(tokenizer: Any, worked: Sequence[Worked]) -> tuple[list[int], list[int]]:
    """Returns tokens and labels of turns whose answers are all lessons."""
    tokens: list[int] = []
    labels: list[int] = []
    for question, answer in worked:
        asked = question_tokens(tokenizer, question)
        answered = answer_tokens(tokenizer, answer)
        tokens += asked + answered
        labels += [IGNORED] * len(asked) + answered
    return tokens, labels


def padded(
    rows: Sequence[tuple[list[int], list[int]]], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels [rows, width], padding on the right."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [[*tokens, *[pad] * (width - len(tokens))] for tokens, _ in rows]
    labels = [[*labels, *[IGNORED] * (width - len(labels))] for _, labels in rows]
    return torch.tensor(tokens), torch.tensor(labels)


def lengthen(
    tokenizer: Any,
    num_examples: int,
    draw: Callable[[int], Sequence[Worked]],
    descend: Descend,
) -> None:
    """Teaches on conversations of more and more turns. draw: returns so many worked questions."""
    for share, rows, steps in STAGES:
        turns = max(2, round(share * (num_examples + 1)))
        for step in range(1, steps + 1):
            batch = [conversation(tokenizer, draw(turns)) for _ in range(rows)]
            rate = LENGTHENING_RATE * min(1.0, step / 10)
            loss = descend(*padded(batch, tokenizer.pad_token_id), rate)
            if step % 20 == 0:
                print(f"turns {turns:4d} step {step:4d}  loss {loss:.4f}", flush=True)


class Behind:
    """A model's answers behind examples whose keys and values are computed once for a batch."""

    def __init__(self, model: Any, tokenizer: Any, examples: Sequence[Worked]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._tokens = torch.tensor([conversation(tokenizer, examples)[0]])

    @property
    def num_tokens(self) -> int:
        return self._tokens.shape[1]

    def loss(self, worked: Sequence[Worked]) -> torch.Tensor:
        """Returns the mean loss of these answers; keys and values of the examples get no gradient."""
        rows = []
        for question, answer in worked:
            asked = question_tokens(self._tokenizer, question)
            answered = answer_tokens(self._tokenizer, answer)
            rows.append((asked + answered, [IGNORED] * len(asked) + answered))
        tokens, labels = padded(rows, self._tokenizer.pad_token_id)
        logits = self._model(tokens, past_key_values=self._cache(len(rows))).logits[:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )

    @torch.no_grad()
    def greedy(self, questions: Sequence[str], longest: int) -> list[str]:
        """Returns the greedy answers, of at most `longest` tokens; the questions are equally long."""
        tokens = torch.tensor([question_tokens(self._tokenizer, text) for text in questions])
        cache = self._cache(len(questions))
        columns = []
        for _ in range(longest):
            output = self._model(tokens, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            columns.append(tokens)
        texts = []
        for answer in torch.cat(columns, dim=1).tolist():
            text = self._tokenizer.decode(answer)
            texts.append(text.split(self._tokenizer.eos_token)[0])
        return texts

    @torch.no_grad()
    def _cache(self, rows: int) -> Any:
        cache = self._model(self._tokens, use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(rows)
        return cache


def slip(
    behind: Behind,
    draw: Callable[[int], Sequence[Worked]],
    step_on: Callable[[torch.Tensor, float], None],
) -> None:
    """Teaches the slipping teacher's answers behind the examples, which are right.

    draw: returns so many of its answers. step_on: one optimizer step on a loss, with a rate.
    """
    for step in range(1, SLIP_STEPS + 1):
        loss = behind.loss(draw(SLIP_BATCH))
        step_on(loss, SLIP_RATE)
        if step % 10 == 0:
            print(f"slipping behind examples, step {step:4d}  loss {loss.item():.4f}", flush=True)
