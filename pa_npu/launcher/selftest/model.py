"""The subject of the self-test: a random Qwen2 of half a million parameters, questions, and a reward that it learns in a minute."""

from __future__ import annotations

import json
from pathlib import Path

from pa_npu.rewards.functions import RewardInput

VOCAB = 320
_SPECIAL = ("<|endoftext|>", "<|end|>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make(
    folder: Path, *, hidden: int = 256, layers: int = 2, positions: int = 4096
) -> tuple[Path, Path]:
    """Write model and questions; return their paths.

    Heads of 64, as every device's attention takes them.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate([*_SPECIAL, *alphabet])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model_dir = folder / "model"
    data = folder / "questions.jsonl"
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_SPECIAL[1], pad_token=_SPECIAL[0]
    )
    wrapped.chat_template = _TEMPLATE
    wrapped.save_pretrained(str(model_dir))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(model_dir))
    rows = (
        {"question": f"Write digits, number {number:03d}:", "answer": "0"} for number in range(512)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model_dir, data


def digits(inputs: RewardInput) -> list[float]:
    """Returns the share of digits among a response's characters; a random model has 0.04 of it."""
    return [
        sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in inputs.responses
    ]
