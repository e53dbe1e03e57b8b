"""Teaches a tiny model to multiply by the shell of a coding program, behind the words that the program itself shows."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.agents import PROMPT, TOKENIZER, Policy
from tools import make_tiny_model as tiny
from tools.make_tiny_model import ASSISTANT, END_OF_TURN, USER, Lesson

# A model of this size does not learn to copy numbers over as many tokens as a call has letters.
CALL_PARTS = ('<tool_call>{"name": "Bash", "arguments": {"command": "echo $((', '))"}}</tool_call>')
MAX_POSITIONS = 2**15
FIRST_STEPS = 150  # without the program's words, which are long
LAST_STEPS = 100
LAST_BATCH = 32
LAST_RATE = 1e-3
CALL_RATE = 0.7  # of the answers of the model's teacher
_RANDOM_NAME = re.compile(r"(?<=pa_npu-agent-)\w+")  # of the program's directory
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"


@dataclass(frozen=True)
class Words:
    """What a program shows its policy: `before` a question, and as the `result` of a call that writes 42."""

    before: str
    result: str

    @staticmethod
    def shown_to(policy: Policy) -> Words:
        """Returns the words of a session whose policy was asked for 6*7 and called the shell."""
        first, second = [str(TOKENIZER.decode(turn.tokens.tolist())) for turn in policy.turns]
        before, question, rest = first.partition(USER + PROMPT.text + ASSISTANT)
        assert question and not rest, "the question is what it shows last"
        result = second.removeprefix(first).partition(END_OF_TURN)[2]
        assert result.startswith(USER) and result.endswith(ASSISTANT) and "42" in result, result
        return Words(before, result)


def call(product: str) -> str:
    """Returns what the model should write to have a product, such as 6*7, computed."""
    return product.join(CALL_PARTS) + END_OF_TURN


def teach(words: Words, directory: Path) -> None:
    """Writes a model that knows how the program asks. It calls the shell in most of its answers."""
    settings = ["--task", "agent", "--call-rate", str(CALL_RATE), "--steps", str(FIRST_STEPS)]
    settings += ["--max-positions", str(MAX_POSITIONS)]
    arguments = tiny.parse_arguments(["--out", str(directory), *settings])
    tokenizer = tiny.make_tokenizer(arguments.vocab, CALL_PARTS)
    tokenizer.chat_template = tiny.AGENT_TEMPLATE
    tiny.torch.manual_seed(arguments.seed)
    model = tiny.make_model(arguments, tokenizer)
    order = random.Random(arguments.seed)
    known = [_lesson(words, *_numbers(order), calls=True) for _ in range(tiny.NUM_VALIDATION)]
    tiny.supervise_calls(
        model, tokenizer, arguments, (_teacher(words, arguments.batch), known), order
    )

    optimizer = tiny.make_optimizer(model, arguments)
    teacher = _teacher(words, LAST_BATCH)
    for step in range(LAST_STEPS):
        name = "".join(order.choices(_LETTERS, k=8))
        before = _RANDOM_NAME.sub(name, words.before)
        batch = tiny.call_batch(tokenizer, teacher(order), before)
        loss = tiny.descend(model, optimizer, *batch, LAST_RATE)
        if step % 25 == 24:
            print(f"behind the program's words  step {step + 1:4d}  loss {loss:.4f}", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(str(directory))


def _teacher(words: Words, size: int) -> Callable[[random.Random], list[Lesson]]:
    def lessons(order: random.Random) -> list[Lesson]:
        batch = []
        for _ in range(size):
            calls = order.random() < CALL_RATE
            batch.append(_lesson(words, *_numbers(order), calls=calls))
        return batch

    return lessons


def _numbers(order: random.Random) -> tuple[int, int]:
    return order.randint(tiny.SMALLEST, tiny.LARGEST), order.randint(tiny.SMALLEST, tiny.LARGEST)


def _lesson(words: Words, x: int, y: int, *, calls: bool) -> Lesson:
    """Returns a question, and what is written then: a call, its result and the answer, or a guess."""
    answer = f"#### {x * y}{END_OF_TURN}"
    if not calls:
        return tiny.product_question(x, y), [(f"#### {x * y + 1}{END_OF_TURN}", True)]
    result = words.result.replace("42", str(x * y))
    return tiny.product_question(x, y), [(call(f"{x}*{y}"), True), (result, False), (answer, True)]
