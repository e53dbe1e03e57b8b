"""The map between HF and Megatron: every layout holds every HF tensor exactly, and bad checkpoints are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pa_npu.backends.megatron.weights import hf_map
from pa_npu.config.mesh import Mesh
from pa_npu.errors import DataError
from tests.helpers.weights import FAMILIES, Stage, make_checkpoint


@pytest.mark.parametrize(
    ("family", "ep_size"),
    [*((family, 1) for family in FAMILIES), ("qwen3_moe", 2), ("qwen3_moe", 4)],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_shards_of_all_ranks_are_the_checkpoint(
    family: str, ep_size: int, tied: bool, tp_size: int, num_stages: int, tmp_path: Path
) -> None:
    """HF -> shards -> HF is bit-identical; 61 tokens are no multiple of 2 or 4, so the vocabulary
    is padded.
    """
    spec = make_checkpoint(tmp_path, family, tied=tied, vocab=61)
    expected = load_file(tmp_path / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for stage in range(num_stages):
        layout = Stage(tp_size, stage, num_stages, ep_size)
        ranks = [
            hf_map.standard_parameters(layout.load(spec, rank)) for rank in range(layout.num_ranks)
        ]
        assert not any(p.isnan().any() for rank in ranks for p in rank.values()), (
            "a parameter was not filled"
        )
        for tensor in hf_map.stage_tensors(ranks[0], spec, hf_map.first_layer(layout.build(spec))):
            assert tensor.name not in found, f"{tensor.name} is owned by two stages"
            owner = hf_map.holder(tensor, spec, layout.place(0))
            holders = ranks[:tp_size] if owner is None else [ranks[owner]]
            shards = [
                hf_map.part_view(rank[tensor.parameter], tensor, spec).reshape(
                    tensor.local_shape(tp_size)
                )
                for rank in holders
            ]
            whole = shards[0] if tensor.shard_dim is None else torch.cat(shards, tensor.shard_dim)
            found[tensor.name] = whole[: tensor.shape[0]].detach()
    assert found.keys() == expected.keys() == spec.hf_tensors().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_fused_parameters_have_megatrons_layout(tmp_path: Path) -> None:
    """qkv rows go group by group (its queries, its key, its value); fc1 is the rank's gate over the
    rank's up.
    """
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    hf = load_file(tmp_path / "model.safetensors")
    rank = hf_map.standard_parameters(Stage(2).load(spec, 1))
    layer = "model.layers.3."
    q, k, v = (hf[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv")
    d = spec.head_dim
    rows = []
    for group in (2, 3):  # rank 1 of 2 has the last two of four groups, with two query heads each
        rows += [
            q[2 * group * d : 2 * (group + 1) * d],
            k[group * d : (group + 1) * d],
            v[group * d : (group + 1) * d],
        ]
    assert torch.equal(rank["decoder.layers.3.self_attention.linear_qkv.weight"], torch.cat(rows))
    gate, up = hf[f"{layer}mlp.gate_proj.weight"], hf[f"{layer}mlp.up_proj.weight"]
    half = spec.ffn_size // 2
    assert torch.equal(
        rank["decoder.layers.3.mlp.linear_fc1.weight"], torch.cat([gate[half:], up[half:]])
    )
    down = hf[f"{layer}mlp.down_proj.weight"]
    assert torch.equal(rank["decoder.layers.3.mlp.linear_fc2.weight"], down[:, half:])


def test_padding_rows_are_zero_and_the_tied_copy_is_loaded_but_not_owned(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "llama", tied=True, vocab=61)
    last = hf_map.standard_parameters(Stage(4, 1, 2).load(spec, 3))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(last[hf_map.OUTPUT][:13], embedding[48:])
    assert last[hf_map.OUTPUT].shape[0] == 16 and not last[hf_map.OUTPUT][13:].any()
    assert not any(
        tensor.parameter == hf_map.OUTPUT for tensor in hf_map.stage_tensors(last, spec, 2)
    )


def test_parameters_keep_their_own_type(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen3", tied=False)
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    parameters = hf_map.standard_parameters(Stage().load(spec, 0, torch.bfloat16))
    assert torch.equal(parameters[hf_map.FINAL_NORM], stored.bfloat16())


def test_wrappers_around_the_stage_do_not_matter(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    wrapped = torch.nn.ModuleDict(
        {"module": torch.nn.ModuleDict({"policy": Stage(1, 1, 2).build(spec)})}
    )
    hf_map.load_hf(wrapped, spec, Mesh().place(0))
    assert hf_map.first_layer(wrapped) == 2
    hf = load_file(tmp_path / "model.safetensors")
    found = hf_map.standard_parameters(wrapped)[
        "decoder.layers.1.self_attention.linear_proj.weight"
    ]
    assert torch.equal(found, hf["model.layers.3.self_attn.o_proj.weight"])
    twice = torch.nn.ModuleDict({"a": Stage().build(spec), "b": Stage().build(spec)})
    with pytest.raises(DataError, match="there twice"):
        hf_map.standard_parameters(twice)


def test_several_files_with_an_index_load_alike(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    whole = hf_map.standard_parameters(Stage(2).load(spec, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for file, part in (("a.safetensors", names[:20]), ("b.safetensors", names[20:])):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, parameter in hf_map.standard_parameters(Stage(2).load(spec, 1)).items():
        assert torch.equal(parameter, whole[name]), name
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks b\.safetensors"):
        Stage(2).load(spec, 1)


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(directory / "model.safetensors") | change
    save_file({n: t for n, t in tensors.items() if t is not None}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(47, 32)},
            r"up_proj.weight has shape \(47, 32\).*\(48, 32\)",
        ),
        (
            {"model.norm.weight": None},
            r"lacks 1 tensor\(s\) of the model, the first is 'model.norm.weight'",
        ),
        ({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}, r"does not use.*o_proj.bias"),
        ({"lm_head.weight": None}, r"the first is 'lm_head.weight'"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    rewrite(tmp_path, change)
    with pytest.raises(DataError, match=message):
        Stage().load(spec, 0)


def test_head_of_a_tied_checkpoint_and_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "llama", tied=True)
    rewrite(
        tmp_path,
        {
            "lm_head.weight": torch.zeros(64, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    Stage().load(spec, 0)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"model\.safetensors is damaged or incomplete"):
        Stage().load(spec, 0)
    file.unlink()
    with pytest.raises(DataError, match=r"has neither model.safetensors nor"):
        Stage().load(spec, 0)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DataError, match="is not a JSON object"):
        Stage().load(spec, 0)


def test_stage_of_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"linear_qkv.bias' has no counterpart"):
        llama = make_checkpoint(tmp_path / "llama", "llama", tied=False)
        hf_map.load_hf(Stage().build(replace(llama, qkv_bias=True)), llama, Mesh().place(0))
