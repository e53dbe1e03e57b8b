"""Which system a file is of, told by what only its files contain; for the line that refuses the others."""

from __future__ import annotations

import re

# Text that only the files of a system contain: keys of its configuration, its programs and its
# packages.
_MARKS: dict[str, str] = {
    "NeMo-RL": r"\bnum_prompts_per_step\b|\bnum_generations_per_prompt\b|\bnemo_rl\b|\bpolicy\.generation\.|"
    r"examples/run_(?:grpo|dpo|sft)\w*\.py|^loss_fn:",
    "prime-rl": r"\bprime[_-]rl\b|^\s*\[(?:orchestrator|inference)\b|\bmax_async_level\b|\brollouts_per_example\b|"
    r"\buv run (?:rl|trainer|orchestrator|inference)\b|--(?:orchestrator|inference)\.",
    "OpenRLHF": r"\bopenrlhf\b|--actor_num_gpus_per_node\b|--vllm_num_engines\b|--micro_train_batch_size\b",
    "slime": r"\bslime\b|--rollout-num-gpus\b|--rollout-num-gpus-per-engine\b|--actor-num-gpus-per-node\b",
    "ms-swift": r"\b(?:swift|megatron) rlhf\b|\brlhf_type\b|\bswift\.llm\b",
    "AReaL": r"\bareal\b|^allocation_mode:|\ballocation_mode=|^gconfig:",
    "SkyRL": r"\bskyrl\w*\b",
    "LLaMA-Factory": r"\bllamafactory\b|^finetuning_type:",
    "accelerate": r"^compute_environment:",
    "Axolotl": r"\baxolotl\b|^base_model:",
    "verl": r"\bactor_rollout_ref\b|^\s*partial_pretrain:|\bverl\.(?:trainer|recipe|experimental)\b",
    "TRL": r"\b(?:GRPO|SFT|DPO|GKD)Config\b|\btrl (?:grpo|rloo|dpo|sft|kto|reward)\b|^\s*from trl\b|"
    r"^(?:num_generations|per_device_train_batch_size|max_completion_length):",
}
_NAMES = {"trl": "TRL", "verl": "verl"}
_MARKS_OF = {name: re.compile(marks, re.MULTILINE) for name, marks in _MARKS.items()}
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")


def other_system(text: str, origin: str) -> str | None:
    """Returns the name of the system that the file is of, where it is not the one that was named."""
    text = _COMMENT.sub("", text)
    if origin == "verl" and _MARKS_OF["verl"].search(text):
        return None  # paths and names of verl's recipes may contain anything
    return next(
        (
            name
            for name, marks in _MARKS_OF.items()
            if name != _NAMES[origin] and marks.search(text)
        ),
        None,
    )


def refusal(system: str) -> str:
    """Says what can be done with a file of another system."""
    origin = next((key for key, name in _NAMES.items() if name == system), None)
    if origin is not None:
        return f"it is a file of {system}; give --from {origin}"
    return (
        f"it is a file of {system}, which is not translated (TRL's and verl's are); write the keys "
        "of docs/configuration.md by hand"
    )
