"""The recipes' sizes, which are the planner's, and the arithmetic in their comments: what each says `--dry-run` prints.

    python -m tests.helpers.recipes     writes both into configs/ after a recipe or an estimate has changed, some minutes

A recipe's comment has the line of MARK, then arguments, each followed by the lines that --dry-run prints with them.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.launcher.cli import main as launcher
from pa_npu.planning import automatic
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.platform.typical import typical_speed

ROOT = Path(__file__).resolve().parents[2]
WITH_IMAGES = sorted((ROOT / "configs").glob("grpo_*_vl_*.yaml"))
"""Of models that read images, which overlays for Megatron do not fit."""
RECIPES = sorted(
    path
    for path in (ROOT / "configs").glob("grpo_*.yaml")
    if "tiny" not in path.name and path not in WITH_IMAGES
)
STAGES = [ROOT / "configs" / f"{name}.yaml" for name in ("sft_qwen2.5_7b", "distill_qwen3_8b")]
"""Of other stages than reinforcement, which have no overlays."""
MARK = "# What --dry-run prints:"
# Recipes and overlays, the last of which has the sizes, with nodes and devices of each.
SIZED: dict[tuple[str, ...], tuple[int, int]] = {
    ("grpo_qwen2.5_7b.yaml",): (1, 8),
    ("grpo_qwen2.5_7b.yaml", "clusters/7b_16_devices.yaml"): (1, 16),
    ("grpo_qwen2.5_7b.yaml", "clusters/7b_2_nodes.yaml"): (2, 8),
    ("grpo_qwen2.5_7b.yaml", "clusters/7b_4_nodes.yaml"): (4, 8),
    ("grpo_qwen2.5_32b.yaml",): (4, 8),
    ("grpo_qwen2.5_32b.yaml", "clusters/32b_2_nodes_of_16.yaml"): (2, 16),
    ("grpo_qwen2.5_32b.yaml", "clusters/32b_8_nodes.yaml"): (8, 8),
    ("grpo_qwen3_8b.yaml",): (1, 8),
    ("grpo_qwen3_8b.yaml", "lengths/8b_32k_16_devices.yaml"): (1, 16),
    ("grpo_qwen3_8b.yaml", "lengths/8b_128k_4_nodes.yaml"): (4, 8),
    ("grpo_deepseek_r1_distill_qwen_7b.yaml",): (1, 8),
    ("grpo_deepseek_r1_distill_qwen_7b.yaml", "lengths/deepscaler_16k.yaml"): (1, 8),
    ("grpo_qwen3_30b_a3b.yaml",): (1, 16),
    ("distill_qwen3_8b.yaml",): (1, 16),
    ("grpo_qwen2.5_vl_7b.yaml",): (1, 8),
    ("grpo_qwen3_vl_8b.yaml",): (1, 8),
}
QUOTED = (
    "devices ",
    "trainer memory ",
    "engine memory ",
    "KV cache ",
    "teacher ",
    "predicted ",
    "gain over turns ",
)


def dry_run(*arguments: str) -> list[str]:
    """The lines that follow from the configuration."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert launcher(["run", *arguments, "--dry-run"]) == 0, arguments
    return printed.getvalue().splitlines()


def claims(recipe: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yields arguments and lines of each block of the comment."""
    lines = recipe.read_text().splitlines()
    arguments: list[str] = []
    claimed: list[str] = []
    for line in lines[lines.index(MARK) + 1 :]:
        if line.startswith("#   --"):
            if arguments:
                yield arguments, claimed
            arguments, claimed = line.removeprefix("#").split(), []
        elif line.startswith("#     "):
            claimed.append(line.removeprefix("#     "))
        else:
            break
    yield arguments, claimed


def quoted(recipe: Path, arguments: list[str]) -> list[str]:
    """Returns the lines that a block with these arguments must have."""
    printed = dry_run("--config", str(recipe.relative_to(ROOT)), *arguments)
    return [line for line in printed if line.startswith(QUOTED)]


def write(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    start = lines.index(MARK) + 1
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith(("#   --", "#     ")))
    block = []
    for arguments, _ in claims(recipe):
        block.append("#   " + " ".join(arguments))
        block += [f"#     {line}" for line in quoted(recipe, arguments)]
    recipe.write_text("\n".join([*lines[:start], *block, *lines[end:]]) + "\n")


def shipped(files: tuple[str, ...], kind: str = "npu") -> Config:
    return load_config([ROOT / "configs" / file for file in files], [f"run.device={kind}"])


def planned(
    files: tuple[str, ...], kind: str = "npu", places: tuple[int, int] | None = None
) -> Config:
    """Returns the same with the sizes that the planner finds for its devices. places: nodes and
    devices of each, if others.
    """
    nodes, devices = places or SIZED[files]
    arguments = [f"placement.nnodes={nodes}", f"placement.devices_per_node={devices}"]
    arguments += ["placement.cluster=ray"] if nodes > 1 else []
    asked = [f"{key}=auto" for key in automatic.KEYS]
    return automatic.load(
        [str(ROOT / "configs" / file) for file in files],
        [f"run.device={kind}", *arguments, *asked],
        lambda line: None,
    )


def predicted_s(config: Config) -> float:
    spec = known_spec(config.model.path)
    assert spec is not None
    return assumed_basis(config, spec, typical_speed(config.run.device)).predict(config).iteration_s


def sizes(config: Config) -> dict[str, str]:
    """Returns what the planner decides, as it stands in a file."""
    keys = [*automatic.KEYS, "rollout.max_num_seqs"]
    values = {
        key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in keys
    }
    return {key: str(value).lower() for key, value in values.items()}


def write_sizes(file: Path, values: Mapping[str, str]) -> None:
    """Set keys of a YAML file; comments stay."""
    text = file.read_text()
    for key, value in values.items():
        section, _, name = key.partition(".")
        text, actual = re.subn(
            rf"(?m)(^{section}:\n(?: [^\n]*\n)*?  {name}: )\S+", rf"\g<1>{value}", text, count=1
        )
        if not actual:
            text, actual = re.subn(
                rf"(?m)^{section}:\n", f"{section}:\n  {name}: {value}\n", text, count=1
            )
        if not actual:
            text += f"{section}:\n  {name}: {value}\n"
    file.write_text(text)


if __name__ == "__main__":
    for files in SIZED:
        before, after = shipped(files), planned(files)
        if predicted_s(before) > 1.02 * predicted_s(after):
            now = sizes(before)
            changes = {key: value for key, value in sizes(after).items() if value != now[key]}
            write_sizes(ROOT / "configs" / files[-1], changes)
            print(
                f"{' '.join(files)}: {predicted_s(before):.3g} s, now "
                f"{predicted_s(shipped(files)):.3g} s",
                flush=True,
            )
    for path in (*RECIPES, *STAGES, *WITH_IMAGES):
        write(path)
