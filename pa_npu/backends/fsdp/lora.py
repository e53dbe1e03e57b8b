"""Adapters (LoRA) by peft in a sharded model: several sets, in fp32, over one set of frozen weights.

    models = adapted(model, config)          "policy", "old", "reference", ...: one sharded model,
                                             with one set of adapters active in each
    models["policy"](tokens, layout, ...)    as a ScoredModel; its weights are those of the set

A frozen model costs a set of adapters and no more. As long as the reference is the model that the
run began with, it needs no set: it is the pass with every adapter off. One set is active at a time,
the policy's last, since recomputation in its backward needs that.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.backends.fsdp.model import ScoredModel, load_model
from pa_npu.backends.fsdp.weights import Weights, rows_of
from pa_npu.backends.logprob import RowScores
from pa_npu.backends.protocol import DTYPES
from pa_npu.config.plain_file import open_plain, reason
from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.families.any_model import bare_model, config_of
from pa_npu.families.peft_directory import WEIGHTS_FILE, AdapterShape
from pa_npu.families.spec import ModelSpec
from pa_npu.families.wire_names import WireWeight, stored_tensors, wire_weights
from pa_npu.vision.family import is_of_tower

POLICY = "policy"
PREFIX = "base_model.model."  # of names in peft's files
_PARTS = ("lora_A", "lora_B")


class ModelWithAdapters(ScoredModel):
    """The model on the host, with its weights in model.dtype and all sets of adapters in fp32.

    Raises DataError if adapters cannot be put into the model.
    """

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        dtype = DTYPES[config.model.dtype]
        causal = load_model(config.model.path, dtype, trust_remote_code=spec.trust_remote_code)
        super().__init__(causal, config.attention.implementation)
        self._wire = wire_weights(causal)
        add_adapters(causal, config)

    def base_weights(self) -> dict[str, torch.Tensor]:
        """Returns weights and buffers without adapters, under the names that they have in a model
        without adapters.
        """
        base = {}
        for name, tensor in stored_tensors(self.causal).items():
            if not any(f".{part}." in name for part in _PARTS):
                base[name.replace(".base_layer.", ".")] = tensor
        return base

    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        tensors = self.base_weights()
        return [(name, weight, tensors[weight.source]) for name, weight in self._wire.items()]


def check_adapters(config: Config, spec: ModelSpec) -> None:
    """Raises DataError if the run's adapters cannot be put into the model. Called before a run;
    takes no memory for weights.
    """
    causal = bare_model(config_of(spec.path, spec.trust_remote_code), spec.trust_remote_code)
    with torch.device("meta"):
        add_adapters(causal, config)


def add_adapters(causal: Any, config: Config) -> None:
    """Puts the run's adapters into a model of transformers on the host, the same on every rank, and
    freezes all other weights.

    Adapters begin as peft's do, A random by run.seed and B zero, or as those of model.adapter.
    Raises DataError.
    """
    from peft import LoraConfig, inject_adapter_in_model

    shape = AdapterShape.from_config(config)
    container = torch.nn.ModuleDict({"causal": causal})
    targets = _chosen(causal, config, shape)
    for name in _sets(config):
        options = LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,  # type: ignore[arg-type]  # peft's own files have fractions too
            use_rslora=shape.rank_stabilized,
            target_modules=targets,
            lora_dropout=0.0,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            try:
                # by the chosen layers' names: by the targets' names peft would make adapters of
                # experts' tensors too, in a mixture that it knows
                inject_adapter_in_model(options, container, name)
            except ValueError as error:  # of targets that are no layers with weights
                cause = str(error).partition("\n")[0].partition(". ")[0]
                raise DataError(
                    f"{_key(config)}: {shape.targets}: {cause}; name linear layers of the model"
                ) from None
            _check_layers(causal, config)
            _start(causal, name)
        del container.peft_config  # peft warns of a model that has one when it gets the next set
    for name, weight in causal.named_parameters():
        weight.requires_grad_(any(f".{part}.{POLICY}." in name for part in _PARTS))
    for layer in _layers(causal).values():
        # shards are gathered in the type that is computed with, A and B too
        layer.cast_input_dtype_enabled = False
    if config.model.adapter:
        _load(causal, Path(config.model.adapter), _sets(config))


def adapted(model: ModelWithAdapters, config: Config) -> dict[str, Adapted]:
    """Returns the run's models by name, all over the one sharded model."""
    sets = _sets(config)
    return {
        name: Adapted(model, name if name in sets else None)
        for name in (POLICY, *trainer_models(config).copies)
    }


class Adapted(Weights):
    """The sharded model with one set of its adapters active, or none; the backend uses it like a
    model of its own. Its weights are those of the set.
    """

    def __init__(self, model: ModelWithAdapters, adapters: str | None) -> None:
        self.model = model
        self.adapters = adapters
        self.layers = _layers(model.causal)

    def __call__(self, *inputs: Any, **options: Any) -> RowScores:
        """See ScoredModel.forward."""
        for layer in self.layers.values():
            # set_adapter would also say what is trained, which the shards know already
            layer._active_adapter = [] if self.adapters is None else [self.adapters]
        scored: RowScores = self.model(*inputs, **options)
        return scored

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's shards of A and B of every layer, under peft's names."""
        if self.adapters is None:
            return {}
        return _weights(self.layers, self.adapters)

    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        """See Weights; returns the adapters alone."""
        named = self.named_weights().items()
        return [(name, WireWeight(name, 0, tuple(weight.shape)), weight) for name, weight in named]

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from self.named_weights().values()

    def base_digest(self, group: dist.ProcessGroup | None) -> str:
        """Returns a digest of the weights that are not trained, which does not depend on how they
        are sharded. Collective over `group`.
        """
        digest = hashlib.blake2b(digest_size=8)
        names = []
        sums = []
        for name, weight in self.model.base_weights().items():
            names.append(f"{name} {weight.dtype} {tuple(weight.shape)}")
            sums.append(_position_sum(weight, group))
        total = torch.stack(sums)
        if group is not None:
            dist.all_reduce(total, group=group)
        for name, value in zip(names, total.tolist(), strict=True):
            digest.update(name.encode() + struct.pack("<q", value))
        return digest.hexdigest()

    def check_base(
        self, saved: str | None, directory: Path, group: dist.ProcessGroup | None
    ) -> None:
        """Raises DataError if the checkpoint `directory` has adapters of other weights than these.
        Collective over `group`.
        """
        if self.base_digest(group) != saved:
            raise DataError(
                f"checkpoint.load: {directory} has adapters of other weights than model.path's, "
                "which it needs; name the model that it began with"
            )


def _sets(config: Config) -> tuple[str, ...]:
    return (POLICY, *trainer_models(config).with_weights)


def _layers(causal: Any) -> dict[str, Any]:
    """Returns peft's layers by the names of the layers that they replace."""
    from peft.tuners.lora import LoraLayer

    return {
        name: module for name, module in causal.named_modules() if isinstance(module, LoraLayer)
    }


def _chosen(causal: Any, config: Config, shape: AdapterShape) -> list[str]:
    """Returns the names of the modules that the targets choose.

    Raises DataError if there are none, or if one target of lora.targets chooses none. An adapter
    that peft wrote may name layers of other models beside those of this one.
    """
    head = causal.get_output_embeddings()
    names = []
    for name, module in causal.named_modules():
        if not shape.chooses(name):
            continue
        if config.model.vision == "frozen" and is_of_tower(name):
            continue
        is_linear = isinstance(module, torch.nn.Linear) and module is not head
        if is_linear or shape.targets != "all-linear":
            names.append(name)
    without_layer = []
    if not isinstance(shape.targets, str):
        for target in shape.targets:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                without_layer.append(target)
    if not names or (without_layer and not config.model.adapter):
        missing = ", ".join(map(repr, without_layer)) or repr(shape.targets)
        where = ""
        if config.model.vision == "frozen" and any(
            is_of_tower(name) for name, _ in causal.named_modules()
        ):
            where = " outside of its tower, which model.vision=frozen leaves out"
        raise DataError(
            f"{_key(config)}: the model has no layer that is called {missing}{where}; name linear "
            f"layers of the model ({_linear_layers(causal, config)})"
        )
    return names


def _linear_layers(causal: Any, config: Config) -> str:
    """Returns the last parts of the names of the linear layers that may have adapters: not the LM
    head's, nor those of a frozen tower.
    """
    head = causal.get_output_embeddings()
    names: dict[str, None] = {}
    for name, module in causal.named_modules():
        if config.model.vision == "frozen" and is_of_tower(name):
            continue
        if isinstance(module, torch.nn.Linear) and module is not head:
            names[name.rpartition(".")[2]] = None
    return ", ".join(names) or "it has none"


def _weights(layers: dict[str, Any], adapters: str) -> dict[str, torch.Tensor]:
    weights = {}
    for name, layer in layers.items():
        for part in _PARTS:
            weights[f"{PREFIX}{name}.{part}.weight"] = getattr(layer, part)[adapters].weight
    return weights


def _check_layers(causal: Any, config: Config) -> None:
    for name, layer in _layers(causal).items():
        if not isinstance(layer.get_base_layer(), torch.nn.Linear):
            kind = type(layer.get_base_layer()).__name__
            raise DataError(
                f"{_key(config)}: {name} is no linear layer but {kind}; name linear layers of the "
                "model"
            )
        if layer is causal.get_output_embeddings():
            raise DataError(
                f"{_key(config)}: {name} is the LM head, whose adapters are not supported; leave "
                "it out"
            )


def _start(causal: Any, adapters: str) -> None:
    """Initialises a set in fp32, with the values that peft gives a set of that type."""
    for layer in _layers(causal).values():
        for part in _PARTS:
            getattr(layer, part)[adapters].float()
        layer.reset_lora_parameters(adapters, True)


@torch.no_grad()
def _load(causal: Any, directory: Path, sets: tuple[str, ...]) -> None:
    where = f"model.adapter: {directory / WEIGHTS_FILE}"
    try:
        open_plain(directory / WEIGHTS_FILE).close()
        stored = load_file(directory / WEIGHTS_FILE, device="cpu")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{where} cannot be read ({reason(error)}); name a directory that peft wrote"
        ) from None
    for name, tensor in stored.items():
        if not tensor.is_floating_point():
            raise DataError(
                f"{where}: {name} holds {tensor.dtype}, which is no weight; name a directory that "
                "peft wrote"
            )
        if not torch.isfinite(tensor).all():
            raise DataError(
                f"{where}: {name} holds values that are not finite; train the adapter again, or "
                "name another"
            )
    for adapters in sets:
        weights = _weights(_layers(causal), adapters)
        differing = sorted(weights.keys() ^ stored.keys())
        if differing:
            has = "misses" if differing[0] in weights else "has"
            raise DataError(
                f"{where} {has} {differing[0]}, unlike the model; name an adapter of model.path"
            )
        for name, weight in weights.items():
            if weight.shape != stored[name].shape:
                raise DataError(
                    f"{where}: {name} is {list(stored[name].shape)}, and {list(weight.shape)} in "
                    "the model; name an adapter of model.path"
                )
            weight.copy_(stored[name])


def _key(config: Config) -> str:
    return "model.adapter" if config.model.adapter else "lora.targets"


def _position_sum(weight: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns int64 []: the sum, modulo 2^64, of the bits of this rank's elements, each times an odd
    number that follows from the element's position.

    The sums of all shards add up to that of the whole weight. Any single changed element changes
    it, since an odd factor has an inverse.
    """
    rows = rows_of(weight, 0, dist.get_rank(group) == 0 if group is not None else True)
    bits = rows.shard.view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.shard.element_size()]
    )
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), 2**22):
        chunk = bits[first : first + 2**22].to(torch.int64)
        position = torch.arange(
            rows.start + first, rows.start + first + len(chunk), device=bits.device
        )
        total += (chunk * (position * 0x5851F42D4C957F2D * 2 + 1)).sum()
    return total
