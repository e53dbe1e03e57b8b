#!/usr/bin/env python
"""Make a tiny language model and matching questions for the quick start, tests and benchmarks.

    python tools/make_tiny_model.py --out .cache/tiny --seed 1
    python tools/make_tiny_model.py --out .cache/bench --family llama --hidden 256 --layers 4 --random

writes

    OUT/model/         HF directory: config.json, safetensors, tokenizer with a chat template
    OUT/train.jsonl    questions in GSM8K's layout:
                       {"question": "What is 47+38?", "answer": "7+8=15\\n4+3+1=8\\n#### 85"}
    OUT/test.jsonl     held-out questions, disjoint from the training ones
    OUT/pairs.jsonl, OUT/test_pairs.jsonl
                       the same questions (--task add) with a chosen and a rejected answer, in which the teacher slips
    OUT/demonstrations.jsonl
                       the training questions (--task add) with answers of which --slip-rate are slips: rows for
                       a supervised stage that leaves a reward something to teach
    OUT/tiny_model.json  the arguments and what came out; a second call with the same arguments does nothing

The supervised phase has two parts. First the model learns to add two-digit numbers step by step.
Then its teacher slips: more often than not it adds one too much to the ones. So greedy decoding
gives a wrong answer, sampling often finds the right one, and reinforcement learning has a habit to
find that pays. With --random there is no training (tests and benchmarks).

--task calculator makes questions that it cannot answer by itself, "What is 47*83?". Its teacher
asks a calculator in some of its answers ("<<47*83>>", and reads "=3901") and guesses in the others,
so greedy decoding guesses, sampling sometimes asks, and reinforcement learning with
environment.name=tools has a tool to find that pays. --task agent is the same in the form of chat:
the call is a tool call, and its answer comes in a message of its own (environment.name=agents).
--task both makes sums and products, whose column `task` says which they are, and a model that slips
at the ones and mostly guesses the others: a student of two teachers (configs/distill_two_tiny.yaml).
--task edit makes files to repair by tool calls (tools/tiny_edits.py, examples/edit_files_agent.py):
the teacher can write them, and mostly leaves the mistake in.
--examples N puts N worked sums before each question, as earlier turns, and teaches to read past
them (tools/tiny_examples.py): 268 make prompts of 8,000 tokens (configs/grpo_tiny_8k.yaml).
--task vision makes images in which squares are counted (tools/tiny_vision.py), train.parquet beside
train.jsonl, and a small Qwen2.5-VL (or --family qwen3_vl, qwen3_vl_moe) that slips at counting.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu.vision.family import FAMILIES
from tools import tiny_edits, tiny_examples, tiny_vision

# raise it when the same arguments give another result, so that old caches are made anew
FORMAT_VERSION = 5
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, SYSTEM, USER, ASSISTANT)
# They make "What", " is" and "####" one token each; every digit stays a token of its own.
MERGES = (("W", "h"), ("Wh", "a"), ("Wha", "t"), ("Ġ", "i"), ("Ġi", "s"), ("#", "#"), ("##", "##"))
VOCAB_SIZE = 320  # special tokens, 256 bytes, results of merges, unused rest; a multiple of 64
# Qwen2's own splitting rule: transformers 5 applies it to every tokenizer of a qwen2 model,
# whatever its files say.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Of --task agent and edit: tool calls as Hermes and Qwen write them, and their answers as the
# user's.
AGENT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + ('user' if message['role'] == 'tool' else "
    "message['role']) + '|>' + message['content'] }}{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + {'name': call['function']['name'], 'arguments': "
    "call['function']['arguments']} | tojson + '</tool_call>' }}{% endfor %}{% if message['role'] "
    "== 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|assistant|>' }}{% endif %}"
)
# A model of this size does not learn to copy numbers over as many tokens as a call has letters.
CALL_PARTS = ('<tool_call>{"name": "calculator", "arguments": {"x": "', '"}}</tool_call>')
# two digits each: digits stand at fixed places, which a tiny model learns within a minute
SMALLEST = 10
LARGEST = 99
NUM_VALIDATION = 200
SHOWN_BEHIND = (
    50  # questions that are answered at once behind --examples: each has a copy of their keys
)
IGNORED = -100  # label of tokens without loss

Answered = tuple[tuple[int, int], float]  # (x, y) and the answer


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    key = {
        name: value
        for name, value in sorted(vars(arguments).items())
        if name not in ("out", "threads")
    }
    key["format_version"] = FORMAT_VERSION
    out = Path(arguments.out)
    marker = out / "tiny_model.json"
    if marker.is_file() and json.loads(marker.read_text()).get("arguments") == key:
        print(f"{out} is up to date")
        return 0
    if out.exists() and not marker.is_file() and any(out.iterdir()):
        print(
            f"--out {out} exists and was not made by this tool; name another directory or empty it",
            file=sys.stderr,
        )
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name + ".") as scratch:
        finished = Path(scratch) / "finished"
        finished.mkdir()
        report = make(arguments, finished)
        (finished / marker.name).write_text(
            json.dumps({"arguments": key, **report}, indent=1) + "\n"
        )
        if out.exists():
            shutil.rmtree(out)
        finished.rename(out)
    print(f"wrote {out}/model, {out}/train.jsonl and {out}/test.jsonl")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of weights, questions and training order"
    )
    parser.add_argument(
        "--task",
        choices=("add", "calculator", "both", "agent", "edit", "vision"),
        default="add",
        help="what the questions ask",
    )
    parser.add_argument(
        "--family",
        choices=("qwen2", "qwen3", "qwen3_moe", "llama", *FAMILIES),
        default=None,
        help="architecture; default: qwen2, of vision qwen2_5_vl",
    )
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument(
        "--heads", type=int, default=None, help="attention heads; default: hidden / 32"
    )
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    parser.add_argument(
        "--ffn", type=int, default=None, help="feed-forward size; default: 3 x hidden"
    )
    parser.add_argument("--experts", type=int, default=8, help="experts of a mixture (qwen3_moe)")
    parser.add_argument(
        "--experts-per-token", type=int, default=2, help="experts that a token goes through"
    )
    parser.add_argument(
        "--expert-ffn",
        type=int,
        default=None,
        help="an expert's size; default: ffn / experts per token",
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=None,
        help=f"vocabulary size, a multiple of 64; default: {VOCAB_SIZE}, of edit "
        f"{tiny_edits.VOCAB_SIZE}",
    )
    parser.add_argument("--max-positions", type=int, default=4096, help="longest sequence")
    parser.add_argument("--tied", action="store_true", help="tie input and output embeddings")
    parser.add_argument("--random", action="store_true", help="random weights, no supervised phase")
    parser.add_argument("--train-questions", type=int, default=4096, help="rows of train.jsonl")
    parser.add_argument("--test-questions", type=int, default=200, help="rows of test.jsonl")
    parser.add_argument(
        "--examples", type=int, default=0, help="worked sums before each question (--task add)"
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="most supervised steps that teach adding"
    )
    parser.add_argument(
        "--slip-steps", type=int, default=150, help="supervised steps with the slipping teacher"
    )
    parser.add_argument(
        "--slip-rate", type=float, default=0.65, help="how often the teacher answers one too much"
    )
    parser.add_argument(
        "--call-rate", type=float, default=0.3, help="how often the teacher asks the calculator"
    )
    parser.add_argument("--batch", type=int, default=64, help="questions per supervised step")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=3e-3,
        help="peak learning rate of the supervised phase",
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args(argv)
    if arguments.family is None:
        arguments.family = FAMILIES[0] if arguments.task == "vision" else "qwen2"
    if (arguments.task == "vision") != (arguments.family in FAMILIES):
        parser.error(f"--task {arguments.task} has no --family {arguments.family}")
    if arguments.examples < 0 or (arguments.examples and arguments.task != "add"):
        parser.error(
            f"--examples {arguments.examples} must be at least 0, and 0 with --task "
            f"{arguments.task}"
        )
    if arguments.heads is None:
        arguments.heads = max(arguments.hidden // 32, arguments.kv_heads)
    if arguments.ffn is None:
        arguments.ffn = 3 * arguments.hidden
    if arguments.expert_ffn is None:
        arguments.expert_ffn = arguments.ffn // arguments.experts_per_token
    if arguments.hidden % arguments.heads or arguments.heads % arguments.kv_heads:
        parser.error(
            f"--hidden {arguments.hidden} must be a multiple of --heads {arguments.heads}, "
            f"and that of --kv-heads {arguments.kv_heads}"
        )
    smallest = {"edit": tiny_edits.VOCAB_SIZE, "vision": tiny_vision.VOCAB_SIZE}.get(
        arguments.task, VOCAB_SIZE
    )
    if arguments.vocab is None:
        arguments.vocab = smallest
    if arguments.vocab % 64 or arguments.vocab < smallest:
        parser.error(f"--vocab {arguments.vocab} must be a multiple of 64 and at least {smallest}")
    available = (LARGEST - SMALLEST + 1) ** 2 - NUM_VALIDATION
    if min(arguments.train_questions, arguments.test_questions) < 1 or (
        arguments.train_questions + arguments.test_questions > available
    ):
        parser.error(
            f"--train-questions and --test-questions must be at least 1 and at most {available} "
            "together"
        )
    return arguments


def make(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Writes everything into `directory`; returns what tiny_model.json says about the result."""
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    torch.manual_seed(arguments.seed)
    order = random.Random(arguments.seed)
    if arguments.task == "vision":
        tokenizer = make_tokenizer()
        return tiny_vision.make_vision_task(arguments, tokenizer, directory, order)
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(x, y) for x in numbers for y in numbers]
    order.shuffle(pairs)
    test = pairs[: arguments.test_questions]
    validation = pairs[arguments.test_questions : arguments.test_questions + NUM_VALIDATION]
    rest = pairs[arguments.test_questions + NUM_VALIDATION :]
    examples = make_examples(arguments, rest)
    trained = rest[: arguments.train_questions]
    write_questions(directory / "train.jsonl", trained, arguments.task, examples)
    write_questions(directory / "test.jsonl", test, arguments.task, examples)
    if arguments.task == "add":
        write_pairs(directory / "pairs.jsonl", rest[: arguments.train_questions])
        write_pairs(directory / "test_pairs.jsonl", test)
        write_demonstrations(directory / "demonstrations.jsonl", trained, arguments.slip_rate)

    tokenizer = make_tokenizer(
        arguments.vocab, {"agent": CALL_PARTS, "edit": tiny_edits.PARTS}.get(arguments.task, ())
    )
    if arguments.task in ("agent", "edit"):
        tokenizer.chat_template = AGENT_TEMPLATE
    model = make_model(arguments, tokenizer)
    report: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters())
    }
    if not arguments.random and arguments.task not in ("add", "both"):
        report |= supervise_calls(
            model, tokenizer, arguments, lessons(arguments, rest, validation), order
        )
    elif not arguments.random:
        teach = supervise if arguments.task == "add" else supervise_both
        report |= teach(model, tokenizer, arguments, rest, validation, order)
        answers = greedy(model, tokenizer, test)
        if examples:
            report |= teach_examples(model, tokenizer, arguments, rest, examples, order)
            answers = greedy_behind(model, tokenizer, examples, test)
        report["greedy_accuracy"] = sum(answer == x + y for (x, y), answer in answers) / len(test)
        print(f"greedy accuracy on held-out sums: {report['greedy_accuracy']:.3f}")
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(str(directory / "model"))
    return report


def question(x: int, y: int) -> str:
    return f"What is {x}+{y}?"


def solution(x: int, y: int, slip: int = 0) -> str:
    """Ones, then tens with the carry, then the answer. slip: what is added to the ones by mistake."""
    ones = x % 10 + y % 10 + slip
    tens = x // 10 + y // 10 + ones // 10
    carried = "+1" if ones >= 10 else ""
    return (
        f"{x % 10}+{y % 10}={ones}\n{x // 10}+{y // 10}{carried}={tens}\n#### "
        f"{10 * tens + ones % 10}"
    )


def product_question(x: int, y: int) -> str:
    return f"What is {x}*{y}?"


def call_turns(x: int, y: int, task: str) -> list[tuple[str, bool]]:
    """Returns a text written with a calculator at hand, piece by piece, and whether the model
    writes each piece.
    """
    if task == "agent":
        call = json.dumps({"name": "calculator", "arguments": {"x": f"{x}*{y}"}})
        asked = f"<tool_call>{call}</tool_call>{END_OF_TURN}"
        return [
            (asked, True),
            (f"{USER}{x * y}{ASSISTANT}", False),
            (f"#### {x * y}{END_OF_TURN}", True),
        ]
    return [(f"<<{x}*{y}>>", True), (f"={x * y}\n", False), (f"#### {x * y}{END_OF_TURN}", True)]


def make_examples(
    arguments: argparse.Namespace, pairs: list[tuple[int, int]]
) -> list[tiny_examples.Worked]:
    """Returns the worked sums that stand before every question."""
    drawn = random.Random(arguments.seed).choices(pairs, k=arguments.examples)
    return [(question(x, y), solution(x, y)) for x, y in drawn]


def write_questions(
    path: Path,
    pairs: list[tuple[int, int]],
    task: str,
    examples: Sequence[tiny_examples.Worked] = (),
) -> None:
    if task == "edit":
        rows = tiny_edits.tasks(
            tiny_edits.HELD_OUT_NAMES if path.stem == "test" else tiny_edits.NAMES
        )
    elif examples:
        rows = [tiny_examples.row(examples, question(x, y), solution(x, y)) for x, y in pairs]
    elif task == "add":
        rows = [sum_row(x, y) for x, y in pairs]
    elif task == "both":
        rows = [{"task": "sums", **sum_row(x, y)} for x, y in pairs[::2]]
        rows += [{"task": "products", **product_row(x, y)} for x, y in pairs[1::2]]
    else:
        rows = [product_row(x, y) for x, y in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sum_row(x: int, y: int) -> dict[str, str]:
    return {"question": question(x, y), "answer": solution(x, y)}


def product_row(x: int, y: int) -> dict[str, str]:
    return {"question": product_question(x, y), "answer": f"#### {x * y}"}


def write_pairs(path: Path, pairs: list[tuple[int, int]]) -> None:
    """Writes each question with its right answer, and the one that a slip of the teacher makes."""
    rows = [
        {
            "question": question(x, y),
            "chosen": solution(x, y),
            "rejected": solution(x, y, slip=1),
        }
        for x, y in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_demonstrations(path: Path, pairs: Sequence[tuple[int, int]], mistakes: float) -> None:
    """Writes each question with an answer, of which a share of `mistakes` has one too much at the
    ones.
    """
    drawn = random.Random(0)
    rows = [
        {"question": question(x, y), "answer": solution(x, y, slip=int(drawn.random() < mistakes))}
        for x, y in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(
    vocab_size: int = VOCAB_SIZE, whole: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that covers any text; every digit is a token, and the words of MERGES and
    `whole` are one token each.
    """
    vocab = {
        token: index
        for index, token in enumerate(
            (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
        )
    }
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    for text in whole:
        vocab[text] = len(vocab)
    for index in range(vocab_size - len(vocab)):
        vocab[f"<|unused_{index}|>"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Any:
    config = AutoConfig.for_model(
        arguments.family,
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.hidden // arguments.heads,
        max_position_embeddings=arguments.max_positions,
        tie_word_embeddings=arguments.tied,
        # three times the usual: at this width it halves the steps until the model can add
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(mixture(arguments) if arguments.family == "qwen3_moe" else {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not arguments.tied:
        # Tokens that differ much from the start: 250 instead of 400 steps until the model can add.
        # As an output layer such weights would saturate the softmax.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    return model


def mixture(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.experts_per_token,
        "moe_intermediate_size": arguments.expert_ffn,
        "norm_topk_prob": True,
    }


def supervise(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    arguments: argparse.Namespace,
    pairs: list[tuple[int, int]],
    validation: list[tuple[int, int]],
    order: random.Random,
) -> dict[str, Any]:
    """Teaches adding until the validation questions are (nearly) all right, then the slip; returns
    steps and CPU seconds.
    """
    started = time.process_time()
    optimizer = make_optimizer(model, arguments)
    known = 0.0
    step = 0
    for step in range(1, arguments.steps + 1):
        rate = learning_rate_at(step, arguments)
        loss = supervised_step(
            model, tokenizer, optimizer, rate, order.choices(pairs, k=arguments.batch), order, 0.0
        )
        if step % 25 == 0:
            known = sum(
                answer == x + y for (x, y), answer in greedy(model, tokenizer, validation)
            ) / len(validation)
            print(f"adding   step {step:4d}  loss {loss:.4f}  right {known:.3f}", flush=True)
            if known >= 0.985:
                break
    for slip_step in range(1, arguments.slip_steps + 1):
        rate = 0.25 * arguments.learning_rate
        batch = order.choices(pairs, k=arguments.batch)
        loss = supervised_step(model, tokenizer, optimizer, rate, batch, order, arguments.slip_rate)
        if slip_step % 50 == 0:
            answers = greedy(model, tokenizer, validation)
            right = sum(answer == x + y for (x, y), answer in answers) / len(answers)
            slipped = sum(answer == x + y + 1 for (x, y), answer in answers) / len(answers)
            print(
                f"slipping step {slip_step:4d}  loss {loss:.4f}  right {right:.3f}  slipped "
                f"{slipped:.3f}",
                flush=True,
            )
    seconds = time.process_time() - started
    return {"accuracy_before_slipping": known, "steps": step, "cpu_seconds": round(seconds, 1)}


def teach_examples(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    arguments: argparse.Namespace,
    pairs: list[tuple[int, int]],
    examples: Sequence[tiny_examples.Worked],
    order: random.Random,
) -> dict[str, Any]:
    """Teaches to add behind hundreds of worked sums, and to slip behind these ones."""
    started = time.process_time()
    optimizer = make_optimizer(model, arguments)

    def right(count: int) -> list[tiny_examples.Worked]:
        return [(question(x, y), solution(x, y)) for x, y in order.choices(pairs, k=count)]

    def slipping(count: int) -> list[tiny_examples.Worked]:
        answered = []
        for x, y in order.choices(pairs, k=count):
            slips = order.random() < arguments.slip_rate
            answered.append((question(x, y), solution(x, y, slip=int(slips))))
        return answered

    tiny_examples.lengthen(
        tokenizer,
        len(examples),
        right,
        lambda tokens, labels, rate: descend(model, optimizer, tokens, labels, rate),
    )
    behind = tiny_examples.Behind(model, tokenizer, examples)
    known = greedy_behind(model, tokenizer, examples, pairs[:SHOWN_BEHIND])
    right_behind = sum(answer == x + y for (x, y), answer in known) / len(known)
    print(f"right behind {behind.num_tokens:,} tokens of examples: {right_behind:.3f}", flush=True)
    tiny_examples.slip(behind, slipping, lambda loss, rate: step_on(loss, model, optimizer, rate))
    seconds = time.process_time() - started
    return {
        "example_tokens": behind.num_tokens,
        "accuracy_behind_examples": right_behind,
        "examples_cpu_seconds": round(seconds, 1),
    }


def greedy_behind(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[tiny_examples.Worked],
    pairs: list[tuple[int, int]],
) -> list[Answered]:
    """Returns greedy answers as `greedy` does, behind the examples."""
    longest = len(tokenizer(solution(LARGEST, LARGEST) + END_OF_TURN).input_ids)
    behind = tiny_examples.Behind(model, tokenizer, examples)
    answered: list[Answered] = []
    for start in range(0, len(pairs), SHOWN_BEHIND):
        part = pairs[start : start + SHOWN_BEHIND]
        texts = behind.greedy([question(x, y) for x, y in part], longest)
        for pair, text in zip(part, texts, strict=True):
            answered.append((pair, answer_number(text)))
    return answered


def supervised_step(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    pairs: list[tuple[int, int]],
    order: random.Random,
    slip_rate: float,
) -> float:
    """One AdamW step on the teacher's answers to `pairs`; returns the loss before it."""
    prompts = []
    answers = []
    for x, y in pairs:
        slip = 1 if order.random() < slip_rate else 0
        prompts.append(USER + question(x, y) + ASSISTANT)
        answers.append(solution(x, y, slip) + END_OF_TURN)
    prompt_tokens = tokenizer(prompts).input_ids
    answer_tokens = tokenizer(answers).input_ids
    width = max(
        len(prompt) + len(answer)
        for prompt, answer in zip(prompt_tokens, answer_tokens, strict=True)
    )
    tokens = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompt_tokens, answer_tokens, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return descend(model, optimizer, tokens, labels, learning_rate)


def make_optimizer(model: Any, arguments: argparse.Namespace) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )


def learning_rate_at(step: int, arguments: argparse.Namespace) -> float:
    """Linear warm-up over 20 steps, and a linear decay over the last 70%."""
    remaining = 1 - step / arguments.steps
    rate: float = arguments.learning_rate * min(step / 20, 1.0, max(remaining / 0.7, 0.02))
    return rate


def descend(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    learning_rate: float,
) -> float:
    """One AdamW step; returns the loss before it. tokens, labels: [rows, width]."""
    # Padding stands on the right, so causal attention needs no mask.
    logits = model(tokens, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    step_on(loss, model, optimizer, learning_rate)
    return loss.item()


def step_on(
    loss: torch.Tensor, model: Any, optimizer: torch.optim.Optimizer, learning_rate: float
) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


Lesson = tuple[
    str, list[tuple[str, bool]]
]  # what is asked, and pieces of the answer with whether the model writes each


def lessons(
    arguments: argparse.Namespace, pairs: list[tuple[int, int]], validation: list[tuple[int, int]]
) -> tuple[Callable[[random.Random], list[Lesson]], list[Lesson]]:
    """Draws a batch of what the teacher does; and what greedy decoding should do in the end."""
    if arguments.task == "edit":
        tasks = tiny_edits.tasks((*tiny_edits.NAMES, *tiny_edits.HELD_OUT_NAMES))

        def edited(task: dict[str, Any], sign: str) -> Lesson:
            return tiny_edits.listed(task), tiny_edits.edit_turns(
                task, sign, (USER, ASSISTANT), END_OF_TURN
            )

        def edits(order: random.Random) -> list[Lesson]:
            drawn = order.choices(tasks, k=arguments.batch)
            return [edited(task, tiny_edits.teacher_sign(task, order)) for task in drawn]

        return edits, [edited(task, tiny_edits.wrong_sign(task)) for task in tasks]

    def calls(order: random.Random) -> list[Lesson]:
        """Returns a call in some answers, a guess in the others."""
        return answered_products(arguments, order.choices(pairs, k=arguments.batch), order)

    return calls, called(arguments, validation)


def answered_products(
    arguments: argparse.Namespace, pairs: list[tuple[int, int]], order: random.Random
) -> list[Lesson]:
    """Returns a call in some answers, a guess in the others."""
    answered = []
    for x, y in pairs:
        guess = f"#### {order.randint(SMALLEST**2, LARGEST**2)}{END_OF_TURN}"
        asks = order.random() < arguments.call_rate
        turns = call_turns(x, y, arguments.task) if asks else [(guess, True)]
        answered.append((product_question(x, y), turns))
    return answered


def called(arguments: argparse.Namespace, pairs: list[tuple[int, int]]) -> list[Lesson]:
    """Returns a call in every answer."""
    return [(product_question(x, y), call_turns(x, y, arguments.task)) for x, y in pairs]


def supervise_both(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    arguments: argparse.Namespace,
    pairs: list[tuple[int, int]],
    validation: list[tuple[int, int]],
    order: random.Random,
) -> dict[str, Any]:
    """Teaches sums and calls until (nearly) all are right, then the slip at sums."""
    started = time.process_time()
    optimizer = make_optimizer(model, arguments)

    def learn(slip_rate: float, rate: float) -> float:
        drawn = order.choices(pairs, k=arguments.batch)
        half = arguments.batch // 2
        sums: list[Lesson] = []
        for x, y in drawn[:half]:
            slip = 1 if order.random() < slip_rate else 0
            sums.append((question(x, y), [(solution(x, y, slip) + END_OF_TURN, True)]))
        products = answered_products(arguments, drawn[half:], order)
        return descend(model, optimizer, *call_batch(tokenizer, sums + products), rate)

    known = {}
    step = 0
    for step in range(1, arguments.steps + 1):
        loss = learn(0.0, learning_rate_at(step, arguments))
        if step % 25 == 0:
            answers = greedy(model, tokenizer, validation)
            known = {
                "accuracy_before_slipping": sum(answer == x + y for (x, y), answer in answers)
                / len(answers),
                "right_after_asking": knows_calls(model, tokenizer, called(arguments, validation)),
            }
            print(
                f"both     step {step:4d}  loss {loss:.4f}  sums "
                f"{known['accuracy_before_slipping']:.3f}  calls {known['right_after_asking']:.3f}",
                flush=True,
            )
            if min(known.values()) >= 0.97:
                break
    for _ in range(arguments.slip_steps):
        learn(arguments.slip_rate, 0.25 * arguments.learning_rate)
    seconds = time.process_time() - started
    return {**known, "steps": step, "cpu_seconds": round(seconds, 1)}


def supervise_calls(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    arguments: argparse.Namespace,
    taught: tuple[Callable[[random.Random], list[Lesson]], list[Lesson]],
    order: random.Random,
) -> dict[str, Any]:
    """Teaches to call tools properly. taught: by lessons()."""
    started = time.process_time()
    optimizer = make_optimizer(model, arguments)
    known = 0.0
    step = 0
    for step in range(1, arguments.steps + 1):
        rate = learning_rate_at(step, arguments)
        loss = descend(model, optimizer, *call_batch(tokenizer, taught[0](order)), rate)
        if step % 25 == 0:
            known = knows_calls(model, tokenizer, taught[1])
            print(f"calling  step {step:4d}  loss {loss:.4f}  right {known:.3f}", flush=True)
            if known >= 0.985:
                break
    seconds = time.process_time() - started
    return {"right_after_asking": known, "steps": step, "cpu_seconds": round(seconds, 1)}


def call_batch(
    tokenizer: PreTrainedTokenizerFast, batch: list[Lesson], before: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels [rows, width]; each piece is tokenised by itself, as the
    environments do.

    before: what stands before each question, such as a system message.
    """
    rows = []
    for asked, turns in batch:
        tokens = tokenizer(before + USER + asked + ASSISTANT).input_ids
        labels = [IGNORED] * len(tokens)
        for text, written in turns:
            piece = tokenizer(text).input_ids
            tokens = tokens + piece
            labels += piece if written else [IGNORED] * len(piece)
        rows.append((tokens, labels))
    width = max(len(tokens) for tokens, _ in rows)
    padded = [[*tokens, *[tokenizer.pad_token_id] * (width - len(tokens))] for tokens, _ in rows]
    masked = [[*labels, *[IGNORED] * (width - len(labels))] for _, labels in rows]
    return torch.tensor(padded), torch.tensor(masked)


@torch.no_grad()
def knows_calls(model: Any, tokenizer: PreTrainedTokenizerFast, known: list[Lesson]) -> float:
    """Share of answers that greedy decoding writes once it has begun one."""
    tokens, labels = call_batch(tokenizer, known)
    chosen = model(tokens, use_cache=False).logits[:, :-1].argmax(-1)
    labels = labels[:, 1:].clone()
    first = (labels != IGNORED).int().argmax(dim=1)  # whether to call at all
    labels[torch.arange(len(labels)), first] = IGNORED
    right = (chosen == labels) | (labels == IGNORED)
    return right.all(dim=1).float().mean().item()


@torch.no_grad()
def greedy(
    model: Any, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]
) -> list[Answered]:
    """((x, y), the model's greedy answer); nan stands for an answer without a number."""
    prompts = tokenizer([USER + question(x, y) + ASSISTANT for x, y in pairs]).input_ids
    assert len(set(map(len, prompts))) == 1, "two-digit questions have one length"
    longest = len(tokenizer(solution(LARGEST, LARGEST) + END_OF_TURN).input_ids)
    tokens = torch.tensor(prompts)
    cache = None
    columns = []
    for _ in range(longest):
        output = model(tokens, past_key_values=cache, use_cache=True)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        cache = output.past_key_values
        columns.append(tokens)
    answered: list[Answered] = []
    for pair, row in zip(pairs, torch.cat(columns, dim=1).tolist(), strict=True):
        text = str(tokenizer.decode(row)).split(END_OF_TURN)[0]
        answered.append((pair, answer_number(text)))
    return answered


def answer_number(text: str) -> float:
    """Returns the number that an answer ends with; nan if there is none."""
    number = text.rpartition("#### ")[2]
    return int(number) if number.isdecimal() else math.nan


if __name__ == "__main__":
    sys.exit(main())
