"""The task `vision` of tools/make_tiny_model.py: drawn images in which squares are counted, and a model that slips at it.

An image is a grid of cells, each of the size that becomes one token of the model, and some cells
hold a square of any colour, size and place. The teacher counts one too much, more often than not.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

MARKS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QUESTION = "How many?"
VOCAB_SIZE = 384
MAX_TOKENS = 64
LARGEST_COUNT = 8
_SIDES = (2, 3, 4)  # cells of an image's side
_BATCH_IMAGES = 64


def cell_pixels(family: str) -> int:
    """Pixels of the side of a cell, which becomes one token."""
    return 28 if family == "qwen2_5_vl" else 32


def draw(order: random.Random, cell: int) -> tuple[Image.Image, int]:
    """Returns an image and the number of its squares."""
    rows = order.choice(_SIDES)
    columns = order.choice(_SIDES)
    count = order.randint(1, min(LARGEST_COUNT, rows * columns))
    pixels = np.full((rows * cell, columns * cell, 3), order.randint(215, 255), np.uint8)
    for place in order.sample(range(rows * columns), count):
        side = order.randint(cell // 2, cell - 6)
        top = place // columns * cell + order.randint(2, cell - side - 2)
        left = place % columns * cell + order.randint(2, cell - side - 2)
        colour = [order.randint(0, 140) for _ in range(3)]
        pixels[top : top + side, left : left + side] = colour
    return Image.fromarray(pixels), count


def write_rows(directory: Path, name: str, number: int, order: random.Random, cell: int) -> None:
    """Writes `name`.jsonl, whose rows name files in `name`_images, and the same as name.parquet,
    whose rows hold them.
    """
    import pyarrow
    import pyarrow.parquet

    folder = directory / f"{name}_images"
    folder.mkdir()
    rows = []
    tables = []
    for index in range(number):
        image, count = draw(order, cell)
        file = folder / f"{index:05d}.png"
        image.save(file)
        question = f"<image>{QUESTION}"
        answer = f"#### {count}"
        path = f"{folder.name}/{file.name}"
        rows.append({"question": question, "images": [path], "answer": answer})
        held = {"bytes": file.read_bytes(), "path": file.name}
        # as the rows that verl reads: geometry3k
        tables.append(
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": question}],
                "images": [held],
                "reward_model": {"style": "rule", "ground_truth": str(count)},
            }
        )
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist(tables)
    pyarrow.parquet.write_table(table, directory / f"{name}.parquet")


def add_marks(tokenizer: Any) -> dict[str, int]:
    """Gives a tokenizer the tokens around images, and returns their ids as config.json names them."""
    known = list(tokenizer.all_special_tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": [*known, *MARKS.values()]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(text) for name, text in MARKS.items()
    }


def make_config(arguments: argparse.Namespace, tokenizer: Any, marks: dict[str, int]) -> Any:
    """Returns the configuration of a small model of the family."""
    from transformers import AutoConfig

    head_dim = arguments.hidden // arguments.heads
    text: dict[str, Any] = {
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.ffn,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "max_position_embeddings": arguments.max_positions,
        "initializer_range": 0.06,
        "tie_word_embeddings": arguments.tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "depth": 2,
        "out_hidden_size": arguments.hidden,
        "initializer_range": 0.1,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    half = head_dim // 2
    if arguments.family == "qwen2_5_vl":
        sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
        text["rope_parameters"] = {**rope, "mrope_section": sections}
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    else:
        sections = [half - 2 * (half // 3), half // 3, half // 3]
        parameters = {**rope, "mrope_section": sections, "mrope_interleaved": True}
        text |= {"head_dim": head_dim, "rope_parameters": parameters}
        vision |= {
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }
    if arguments.family == "qwen3_vl_moe":
        text |= {
            "num_experts": arguments.experts,
            "num_experts_per_tok": arguments.experts_per_token,
            "moe_intermediate_size": arguments.expert_ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return AutoConfig.for_model(
        arguments.family,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=arguments.tied,
        **marks,
    )


def make_vision_model(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Returns a small model with random weights, whose norms and biases are not trivial."""
    from transformers import AutoModelForImageTextToText

    config = make_config(arguments, tokenizer, add_marks(tokenizer))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if not arguments.tied:
            torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
        if arguments.random:
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            # else another image would hardly change a log-prob, and a wrong one go unseen
            linear = torch.nn.Linear
            merger = model.base_model.visual.merger
            [*_, last] = [module for module in merger.modules() if isinstance(module, linear)]
            last.weight.mul_(8)
    return model


def write_processor(directory: Path, family: str) -> None:
    """Writes the image processor's file as public models have it."""
    cell = cell_pixels(family)
    is_older = family == "qwen2_5_vl"
    raw = {
        "image_processor_type": "Qwen2VLImageProcessor"
        if is_older
        else "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen2_5_VLProcessor" if is_older else "Qwen3VLProcessor",
        "patch_size": cell // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * cell**2, "longest_edge": MAX_TOKENS * cell**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(raw, indent=1) + "\n")


def batch_of(
    tokenizer: Any, processor: Any, images: Sequence[Image.Image], answers: Sequence[str]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns a model's inputs for one question with each image, padded on the right, and labels,
    which are -100 for all tokens but the answers'.
    """
    from pa_npu.vision.placeholders import expanded

    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text).input_ids
    image_token = tokenizer.convert_tokens_to_ids(MARKS["image"])
    rows = []
    patches = []
    grids = []
    for image, answer in zip(images, answers, strict=True):
        grid = processor.grid_of(image.height, image.width)
        tokens, _ = expanded(prompt, image_token, [processor.num_tokens(grid)])
        written = tokenizer(answer).input_ids if answer else []
        rows.append((tokens, written))
        patches.append(processor.patches(torch.from_numpy(processor.resized(image))))
        grids.append(grid)
    width = max(len(tokens) + len(written) for tokens, written in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, (tokens, written) in enumerate(rows):
        end = len(tokens) + len(written)
        ids[row, :end] = torch.tensor(tokens + written)
        labels[row, len(tokens) : end] = torch.tensor(written)
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == image_token).int(),
    }
    return inputs, labels


def supervise(
    model: Any, tokenizer: Any, processor: Any, arguments: argparse.Namespace, order: random.Random
) -> dict[str, Any]:
    """Teaches counting until the answers are (nearly) all right, then the slip."""
    started = time.process_time()
    cell = cell_pixels(arguments.family)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    held_out = [draw(order, cell) for _ in range(200)]
    known = 0.0
    step = 0

    def descend(rate: float, slip_rate: float) -> float:
        drawn = [draw(order, cell) for _ in range(_BATCH_IMAGES)]
        answers = []
        for _, count in drawn:
            slip = 1 if order.random() < slip_rate else 0
            answers.append(f"#### {count + slip}<|end|>")
        inputs, labels = batch_of(tokenizer, processor, [image for image, _ in drawn], answers)
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for step in range(1, arguments.steps + 1):
        left = max(0.05, 1 - step / arguments.steps)
        loss = descend(arguments.learning_rate * min(step / 20, 1.0, left), 0.0)
        if step % 50 == 0:
            known, _ = counted_right(model, tokenizer, processor, held_out)
            print(f"counting step {step:4d}  loss {loss:.4f}  right {known:.3f}", flush=True)
            if known >= 0.985:
                break
    for slip_step in range(1, arguments.slip_steps + 1):
        loss = descend(0.25 * arguments.learning_rate, arguments.slip_rate)
        if slip_step % 50 == 0:
            right, slipped = counted_right(model, tokenizer, processor, held_out)
            print(
                f"slipping step {slip_step:4d}  loss {loss:.4f}  right {right:.3f}  slipped "
                f"{slipped:.3f}",
                flush=True,
            )
    seconds = time.process_time() - started
    return {"accuracy_before_slipping": known, "steps": step, "cpu_seconds": round(seconds, 1)}


@torch.no_grad()
def counted_right(
    model: Any, tokenizer: Any, processor: Any, drawn: Sequence[tuple[Image.Image, int]]
) -> tuple[float, float]:
    """Returns the shares of images whose likeliest count is right, and one too much."""
    right = slipped = 0
    for start in range(0, len(drawn), _BATCH_IMAGES):
        part = drawn[start : start + _BATCH_IMAGES]
        inputs, labels = batch_of(
            tokenizer, processor, [image for image, _ in part], ["#### "] * len(part)
        )
        logits = model(**inputs, use_cache=False).logits
        width = labels.shape[1]
        last = width - 1 - (labels.flip(1) != -100).int().argmax(1)
        chosen = logits[torch.arange(len(part)), last].argmax(-1)
        for token, (_, count) in zip(chosen.tolist(), part, strict=True):
            text = tokenizer.decode([token]).strip()
            right += text == str(count)
            slipped += text == str(count + 1)
    return right / len(drawn), slipped / len(drawn)


def make_vision_task(
    arguments: argparse.Namespace, tokenizer: Any, directory: Path, order: random.Random
) -> dict[str, Any]:
    """Writes model, processor and rows into `directory`; returns what tiny_model.json says."""
    from pa_npu.vision.processor import ImageProcessor

    cell = cell_pixels(arguments.family)
    write_rows(directory, "train", arguments.train_questions, order, cell)
    write_rows(directory, "test", arguments.test_questions, order, cell)
    model = make_vision_model(arguments, tokenizer)
    target = directory / "model"
    target.mkdir()
    write_processor(target, arguments.family)
    processor = ImageProcessor.from_directory(str(target))
    report: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if not arguments.random:
        report |= supervise(model, tokenizer, processor, arguments, order)
        drawn = [draw(order, cell) for _ in range(200)]
        report["greedy_accuracy"], _ = counted_right(model, tokenizer, processor, drawn)
        print(f"greedy accuracy on other images: {report['greedy_accuracy']:.3f}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(str(target))
    return report
