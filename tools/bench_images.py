#!/usr/bin/env python
"""Bytes of prompts with images on each way, the coordinator's memory for many of them, and the time of their steps.

    rows ──read──> prompts ──pixels──> PNG ──────────> engines
     parquet          │        └─────> groups ───────> trainers ──> patches

    python tools/bench_images.py                          # 1,000 prompts with an image of a megapixel each
    python tools/bench_images.py --prompts 50 --side 224  # small and quick

Images are drawn and written as JPEG into a parquet file. A process of its own reads it as a run
does, and then makes of each prompt what engines and trainers get: a request that sends the image,
one that only names it, and groups of 1, 8 and 16 responses. Memory is what the system counts for
that process. Times are the processor's, for one image.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RESPONSES = (1, 8, 16)
RESPONSE_TOKENS = 64
ROW_GROUP_ROWS = 100
_MIB = 2**20
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "min_pixels": 3136,
    "max_pixels": 12845056,  # as Qwen2.5-VL has it
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure)))
        return 0
    with tempfile.TemporaryDirectory(prefix="pa_npu-bench-images-") as made:
        directory = Path(made)
        make_model(directory / "model")
        write_rows(directory / "first.parquet", 1, 56)
        file_bytes = write_rows(directory / "train.parquet", arguments.prompts, arguments.side)
        # the parent's memory is not that of who reads
        command = [sys.executable, __file__, "--measure", str(directory)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured = json.loads(output.splitlines()[-1])
    measured["file_bytes"] = file_bytes
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
    print("\n".join(table(measured)))
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def make_model(path: Path) -> None:
    """Writes what reading needs of a model: no weights."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tools import make_tiny_model, tiny_vision

    disable_progress_bar()
    asked = make_tiny_model.parse_arguments(
        ["--task", "vision", "--out", str(path.parent), "--random"]
    )
    tokenizer = make_tiny_model.make_tokenizer()
    torch.manual_seed(1)
    tiny_vision.make_vision_model(asked, tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(str(path))
    (path / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))


def write_rows(file: Path, number: int, side: int) -> int:
    """Writes rows that hold a JPEG each, as verl's have it; returns the bytes of the images."""
    import pyarrow
    import pyarrow.parquet

    random = np.random.default_rng(1)
    # shapes of some pixels beside fine grain, of which a photograph's bytes are
    coarse = random.integers(40, 216, (-(-side // 16), -(-side // 16), 3))
    scene = np.repeat(np.repeat(coarse, 16, 0), 16, 1)[:side, :side]
    scene = np.clip(scene + random.normal(0, 12, (side, side, 3)), 0, 255).astype(np.uint8)
    total = 0
    writer = None
    for start in range(0, number, ROW_GROUP_ROWS):
        rows = []
        for index in range(start, min(start + ROW_GROUP_ROWS, number)):
            data = to_jpeg(np.roll(scene, index + 1, axis=index % 2))
            total += len(data)
            rows.append(
                {
                    "prompt": [{"role": "user", "content": "<image>How many?"}],
                    "images": [{"bytes": data, "path": f"{index}.jpg"}],
                    "reward_model": {"style": "rule", "ground_truth": "1"},
                }
            )
        table = pyarrow.Table.from_pylist(rows)
        writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    assert writer is not None, "there is at least one prompt"
    writer.close()
    return total


def to_jpeg(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure(directory: Path) -> dict[str, Any]:
    """Reads the rows as a run does, and makes of each what engines and trainers get."""
    import torch

    from pa_npu.config.schema import Config
    from pa_npu.data.image_rows import ImageInput
    from pa_npu.data.prompts import load_training
    from pa_npu.engines.codec import encode_request
    from pa_npu.engines.images import SentImages, short_tokens
    from pa_npu.engines.protocol import Sampling
    from pa_npu.families.model_directory import load_tokenizer
    from pa_npu.samples.wire import to_bytes

    config = Config.model_validate(
        {
            "model": {"path": str(directory / "model"), "dtype": "fp32"},
            "data": {
                "train": str(directory / "train.parquet"),
                "answer_column": "reward_model.ground_truth",
                "max_prompt_tokens": 16384,
            },
            "rollout": {"backend": "transformers"},
            "trainer": {"backend": "fsdp"},
        }
    )
    tokenizer = load_tokenizer(config.model.path)
    images = ImageInput.from_config(config)
    assert isinstance(images, ImageInput)
    torch.set_num_threads(1)
    # libraries are not what images take
    first = config.data.model_copy(update={"train": str(directory / "first.parquet")})
    load_training(first, tokenizer, True, images=ImageInput.from_config(config))
    before = resident_bytes()
    began_s = time.process_time()
    (prompts,) = load_training(config.data, tokenizer, True, images=images)
    measured: dict[str, Any] = {
        "prompts": len(prompts.prompts),
        "read_s": time.process_time() - began_s,
        "read_bytes": resident_bytes() - before,
        "read_peak_bytes": peak_bytes() - before,
    }
    sent = SentImages()
    sampling = Sampling(RESPONSE_TOKENS, 1.0)
    largest: dict[str, int] = {}
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start_s = time.process_time()
        result = call()
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - start_s
        return result

    def note(name: str, size: int) -> None:
        largest[name] = max(largest.get(name, 0), size)

    for prompt in prompts.prompts:
        (image,) = prompt.images
        pixels = timed("pixels", partial(images.reader.pixels, image.file))
        timed("png", image.png)
        short, places = short_tokens(prompt.tokens, prompt.images)
        for name in ("first request", "later request"):
            parts = sent.parts(prompt.images, places)
            note(name, len(encode_request(short, 8, 1, sampling, images=parts)))
            sent.have_arrived(prompt.images)
        for number in RESPONSES:
            note(f"group of {number}", len(to_bytes(group_of(prompt, number))))
        on_device = torch.from_numpy(np.array(pixels))
        processor = images.reader.processor
        patches = timed("patches", partial(processor.patches, on_device))
        note("patches", patches.numel() * patches.element_size())
        note("tokens of an image", image.length)
    measured["largest"] = largest
    measured["seconds"] = {name: total / len(prompts.prompts) for name, total in seconds.items()}
    measured["end_bytes"] = resident_bytes() - before
    measured["peak_bytes"] = peak_bytes() - before
    return measured


def group_of(prompt: Any, number: int) -> Any:
    """Returns a prompt's group with so many responses."""
    from pa_npu.samples.group import Group
    from pa_npu.samples.shown_images import attached
    from pa_npu.samples.types import SampleBuilder

    runs = attached(prompt.images)
    samples = []
    for index in range(number):
        builder = SampleBuilder(prompt.tokens, placeholders=runs)
        tokens = np.full(RESPONSE_TOKENS, 5 + index, np.int32)
        builder.write(tokens, np.full(RESPONSE_TOKENS, -0.5, np.float32), 0)
        samples.append(builder.finish(True, ""))
    values = np.zeros(number, np.float32)
    return Group.from_samples(
        samples, values, values, run_seed=1, iteration=0, index=0, prompt_id=prompt.prompt_id
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(measured: dict[str, Any]) -> list[str]:
    """Returns what was measured as rows of Markdown."""
    largest = measured["largest"]
    seconds = measured["seconds"]
    groups = [f"{largest[f'group of {number}'] / 1000:,.0f}" for number in RESPONSES]
    rows = [
        (
            f"{measured['prompts']:,} images, as files",
            f"{measured['file_bytes'] / _MIB:,.0f} MiB, {largest['tokens of an image']:,} tokens each",
        ),
        (
            "memory of the coordinator after reading them",
            f"{measured['read_bytes'] / _MIB:,.0f} MiB, {measured['read_peak_bytes'] / _MIB:,.0f} "
            "MiB at most",
        ),
        (
            "memory once each has been sent",
            f"{measured['end_bytes'] / _MIB:,.0f} MiB, {measured['peak_bytes'] / _MIB:,.0f} MiB at "
            "most",
        ),
        (
            f"a group on the way to trainers, with {', '.join(map(str, RESPONSES))} responses of "
            f"{RESPONSE_TOKENS} tokens",
            f"{', '.join(groups)} KB",
        ),
        (
            "a request to an engine, the first and later ones",
            f"{largest['first request'] / 1000:,.0f}, {largest['later request'] / 1000:,.1f} KB",
        ),
        ("patches in a trainer", f"{largest['patches'] / 1000:,.0f} KB"),
        (
            "processor time: decoding and resizing, PNG, patches",
            ", ".join(f"{seconds[name]:.3f}" for name in ("pixels", "png", "patches")) + " s",
        ),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


if __name__ == "__main__":
    raise SystemExit(main())
