"""Stand-ins for the weight tests: HF directories of random tensors, Megatron-named stages, gloo groups between threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d

from pa_npu.backends.megatron.weights import hf_map
from pa_npu.config.mesh import Mesh, Place
from pa_npu.families.spec import ModelSpec

T = TypeVar("T")
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
EXPERTS, EXPERT_FFN, DENSE_LAYER = 8, 16, 1


def make_checkpoint(
    directory: Path, family: str, *, tied: bool, vocab: int = 64, dtype: torch.dtype = torch.float32
) -> ModelSpec:
    """An HF directory (4 layers, 8 heads, 4 kv heads) whose tensors follow the HF names written out
    here by hand.
    """
    hidden, ffn, heads, kv_heads, head_dim, layers = 32, 48, 8, 4, 8, 4
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    if family == "qwen3_moe":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_FFN,
        }
        config["mlp_only_layers"] = [DENSE_LAYER]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (
            ("q", heads * head_dim),
            ("k", kv_heads * head_dim),
            ("v", kv_heads * head_dim),
        ):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if family == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
            if family in ("qwen3", "qwen3_moe") and name != "v":
                shapes[f"{prefix}self_attn.{name}_norm.weight"] = (head_dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        is_sparse = family == "qwen3_moe" and layer != DENSE_LAYER
        if is_sparse:
            shapes[f"{prefix}mlp.gate.weight"] = (EXPERTS, hidden)
        owners = [f"mlp.experts.{expert}." for expert in range(EXPERTS)] if is_sparse else ["mlp."]
        inner = EXPERT_FFN if is_sparse else ffn
        for owner in owners:
            shapes[f"{prefix}{owner}gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}{owner}up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}{owner}down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(vocab)
    save_file(
        {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()},
        directory / "model.safetensors",
    )
    return ModelSpec.read(str(directory))


@dataclass(frozen=True)
class Stage:
    """Which share of the model a stand-in stage holds. ep_size ranks share its experts, over
    replicas where TP has fewer. copies: of its weights, each on num_ranks ranks.
    """

    tp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    ep_size: int = 1
    copies: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks that together hold all of the stage once."""
        return max(self.tp_size, self.ep_size)

    def place(self, rank: int) -> Place:
        """Returns the place of one of these ranks, or of those of another copy."""
        data = self.copies * self.num_ranks // self.tp_size
        mesh = Mesh(self.tp_size, self.num_stages, data, expert=self.ep_size, experts_tensor=1)
        return mesh.at(tensor=rank % self.tp_size, data=rank // self.tp_size, pipeline=self.stage)

    def parameter_names(self, spec: ModelSpec) -> list[str]:
        per_stage = spec.num_layers // self.num_stages
        rests = [
            "input_layernorm.weight",
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.weight",
        ]
        rests += ["self_attention.linear_qkv.bias"] * spec.qkv_bias
        rests += [
            "self_attention.q_layernorm.weight",
            "self_attention.k_layernorm.weight",
        ] * spec.qk_norm
        rests += ["pre_mlp_layernorm.weight"]
        dense, sparse = (
            ["linear_fc1.weight", "linear_fc2.weight"],
            ["router.weight", "experts.gate_up", "experts.down"],
        )
        names = []
        for layer in range(per_stage):
            kinds = sparse if spec.has_experts(layer + per_stage * self.stage) else dense
            names += [
                f"decoder.layers.{layer}.{rest}"
                for rest in [*rests, *(f"mlp.{kind}" for kind in kinds)]
            ]
        if self.stage == 0:
            names.insert(0, hf_map.EMBEDDING)
        if self.stage == self.num_stages - 1:
            names.append(hf_map.FINAL_NORM)
            # as in Megatron: a tied model has its own copy only where the embedding is on another
            # stage
            if not spec.tied or self.num_stages > 1:
                names.append(hf_map.OUTPUT)
        return names

    def build(self, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """A module tree with Megatron's parameter names and this layout's shapes, filled with NaN."""
        module = torch.nn.Module()
        offset = spec.num_layers // self.num_stages * self.stage
        for name in self.parameter_names(spec):
            tensors = hf_map.sources(name, spec, offset)
            shapes = [t.local_shape(self.tp_size) for t in tensors if t.expert == tensors[0].expert]
            shape = (sum(s[0] for s in shapes), *shapes[0][1:])
            if tensors[0].expert is not None:
                shape = (EXPERTS // self.ep_size, *shape)
            owner = module
            *path, leaf = name.split(".")
            for child in path:
                if not hasattr(owner, child):
                    owner.add_module(child, torch.nn.Module())
                owner = getattr(owner, child)
            owner.register_parameter(
                leaf, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype))
            )
        for layer, transformer_layer in module.decoder.layers.named_children():
            transformer_layer.layer_number = offset + int(layer) + 1
        return module

    def load(
        self, spec: ModelSpec, rank: int, dtype: torch.dtype = torch.float32
    ) -> torch.nn.Module:
        module = self.build(spec, dtype)
        hf_map.load_hf(module, spec, self.place(rank))
        return module


def gloo_group(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float
) -> dist.ProcessGroup:
    """A gloo group of threads of one process, outside torch's registry of groups."""
    prefixed = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefixed, rank, size)
    backend = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=timeout_s))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    if not hasattr(group, "get_group_store"):  # torch 2.7 keeps the store in the registry
        c10d._world.pg_map[group] = ("gloo", prefixed)
    return group


def run_threads(*functions: Callable[[], T]) -> list[T | Exception]:
    """Run all at the same time; each result, or the exception that ended it."""
    results: list[Any] = [None] * len(functions)

    def call(index: int, function: Callable[[], T]) -> None:
        try:
            results[index] = function()
        except Exception as error:  # handed to the test, which asserts on it
            results[index] = error

    threads = [
        threading.Thread(target=call, args=item, name=f"member-{item[0]}")
        for item in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), (
        "a member of the group hangs past every deadline"
    )
    return results
