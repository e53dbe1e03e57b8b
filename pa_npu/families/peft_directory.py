"""Reads and checks a directory of peft with a LoRA adapter that a run continues. Without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import read_plain
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_LARGEST_CONFIG_BYTES = 16 << 20
# Each of these would add something to the weights that is not the product of two matrices and a
# factor.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "megatron_config",
    "trainable_token_indices",
    "layer_replication",
    "rank_pattern",
    "alpha_pattern",
    "alora_invocation_tokens",
    "arrow_config",
    "use_bdlora",
    "layers_to_transform",
    "exclude_modules",
    "ensure_weight_tying",
)


@dataclass(frozen=True)
class AdapterShape:
    """The shape of a model's adapters.

    targets: last parts of layers' names, a pattern of whole names (text), or all-linear.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    targets: str | tuple[str, ...]

    @property
    def factor(self) -> float:
        """The factor of the product."""
        divisor = math.sqrt(self.rank) if self.rank_stabilized else self.rank
        return self.alpha / divisor

    def chooses(self, layer: str) -> bool:
        """Returns whether targets name a layer; all-linear names all that are linear."""
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, layer) is not None
        return any(layer == target or layer.endswith(f".{target}") for target in self.targets)

    @classmethod
    def from_config(cls, config: Config) -> AdapterShape:
        """Returns the adapters that a run trains.

        Raises DataError if model.adapter cannot be continued.
        """
        if config.model.adapter:
            return cls.read(Path(config.model.adapter))
        keys = config.lora
        return cls(rank=keys.rank, alpha=keys.alpha, rank_stabilized=False, targets=keys.targets)

    @classmethod
    def read(cls, directory: Path) -> AdapterShape:
        """Returns the adapter in a directory. Raises DataError."""
        where = f"model.adapter: {directory}"
        try:
            raw = json.loads(read_plain(directory / CONFIG_FILE, _LARGEST_CONFIG_BYTES))
        except OSError as error:
            raise DataError(
                f"{where} has no {CONFIG_FILE} ({error.strerror}); name a directory that peft wrote"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: {CONFIG_FILE} is not JSON ({error}); name a directory that peft wrote"
            ) from None
        for reason in _refused(raw):
            raise DataError(f"{where}: {reason}")
        if not (directory / WEIGHTS_FILE).is_file():
            raise DataError(
                f"{where} has no {WEIGHTS_FILE}; save the adapter by peft with "
                "safe_serialization=True"
            )
        targets = raw["target_modules"]
        if not isinstance(targets, str):
            targets = tuple(sorted(targets))
        return cls(
            rank=raw["r"],
            alpha=float(raw["lora_alpha"]),
            rank_stabilized=bool(raw.get("use_rslora")),
            targets=targets,
        )


def check_adapters(config: Config) -> None:
    """Raises UserError if the run's adapters cannot be made or continued."""
    if find_spec("peft") is None:
        raise ConfigError(
            "lora.rank: adapters need peft, which is not installed; pip install 'pa_npu[lora]'"
        )
    AdapterShape.from_config(config)


def _refused(raw: Any) -> Iterator[str]:
    """Yields reasons why a file's adapter cannot be trained, with the remedy."""
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        yield (
            f"its peft_type is {kind!r:.40}, and only LORA is supported; name another, or set "
            "lora.rank to begin one"
        )
        return
    for key in _UNSUPPORTED:
        if raw.get(key):
            yield (
                f"{key} = {raw[key]!r:.60} is not supported, only plain LoRA is; name another, "
                "or set lora.rank to begin one"
            )
    if raw.get("bias", "none") != "none":
        yield (
            f"bias = {raw['bias']!r:.40} trains biases too, which is not supported; name "
            "another, or set lora.rank"
        )
    rank = raw.get("r")
    alpha = raw.get("lora_alpha")
    targets = raw.get("target_modules")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield f"r = {rank!r:.40} is no rank; name a directory that peft wrote"
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        yield f"lora_alpha = {alpha!r:.40} is no positive number; name a directory that peft wrote"
    is_list = (
        isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets)
    )
    if not is_list and not (isinstance(targets, str) and targets):
        yield f"target_modules = {targets!r:.60} names no layers; name a directory that peft wrote"
    elif isinstance(targets, str):
        try:
            re.compile(targets)
        except (re.error, OverflowError, RecursionError) as error:
            yield (
                f"target_modules = {targets!r:.60} is no regular expression ({error}); name a "
                "directory that peft wrote"
            )
