"""A model directory with code of its own (auto_map): model, configuration and tokenizer, in files that import each other."""

from __future__ import annotations

import json
from pathlib import Path

from tools.try_models import make_usable

_CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
    own_scale: float = 2.0
"""
_MODELING = """
from transformers import LlamaForCausalLM, LlamaModel

from .configuration_own import OwnConfig

class OwnModel(LlamaModel):
    config_class = OwnConfig

    def forward(self, *inputs, **options):
        found = super().forward(*inputs, **options)
        found.last_hidden_state = found.last_hidden_state * self.config.own_scale
        return found

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
"""
_TOKENIZATION = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def make_remote(directory: Path, tiny: Path) -> Path:
    """Write a random model with the tokenizer of tiny/model and code that doubles the last hidden
    state; returns its directory.
    """
    make_usable(directory, "llama", tiny)
    for name, text in (
        ("configuration", _CONFIGURATION),
        ("modeling", _MODELING),
        ("tokenization", _TOKENIZATION),
    ):
        (directory / f"{name}_own.py").write_text(text)
    own = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    _change(
        directory / "config.json",
        model_type="own",
        architectures=["OwnForCausalLM"],
        own_scale=2.0,
        auto_map=own,
    )
    tokenizer = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    _change(directory / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer)
    return directory


def _change(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
