"""Adapters (LoRA) in the fsdp backend: what is trained, what stays, and what is sent, saved and exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from pa_npu.backends.fsdp.lora import add_adapters, check_adapters
from pa_npu.backends.fsdp.optimizer import local
from pa_npu.backends.registry import backend_module, export_checkpoint
from pa_npu.checkpoints.directories import directory_name
from pa_npu.checkpoints.saving import Checkpointing
from pa_npu.errors import DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.findings import Findings
from pa_npu.launcher.run_checks import settle_places
from pa_npu.planning.memory import adapter_parameters, trainer_memory, without_adapters
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner
from tests.helpers.adapters import make_adapter, merged_by_hand, peft_model, plain, received
from tests.helpers.backend import Source
from tests.helpers.backend_updates import RESPONSES, by_hand, config_of, shares
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model, make_other

from pa_npu.samples.microbatch import Microbatch, build_microbatches  # isort: skip


FSDP = {"trainer": {"backend": "fsdp"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    with single_process(model_config(path)):
        yield path


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"))


def learner_of(model: Path, /, **sections: dict[str, Any]) -> Learner:
    given = {"trainer": {"backend": "fsdp"}, **sections}
    config = config_of(model, **given)
    spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
    backend = backend_module("fsdp").create(
        config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline
    )
    return Learner(config, backend, PLATFORM, timeline)


def train(learner: Learner, shared: bool = True) -> None:
    learner.publish(0)
    for share in shares():
        learner.accumulate(
            Source(
                one for group in share for one in build_microbatches(group, RESPONSES, shared, 1)
            )
        )
        learner.step()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def sent(learner: Learner, bucket_bytes: int = 2**14) -> dict[str, torch.Tensor]:
    """Returns the weights that engines would get."""
    source = learner.backend.published_weights(bucket_bytes)
    assert source is not None
    return received(source)


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "separate sequences"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}],
    ids=["all", "some"],
)
def test_updates_are_those_of_peft_on_the_plain_model(
    shared: bool, options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """fp32: two updates with an old policy and a reference; A and B agree within 1e-5 of their size
    or 1e-6.
    """
    adapter = make_adapter(model, tmp_path / "adapter", **options)
    learner = learner_of(model, model={"adapter": str(adapter)})
    train(learner, shared)
    learner.backend.export(tmp_path / "trained")
    trained, first = weights(tmp_path / "trained"), weights(adapter)
    expected = {
        name.replace(".default.", "."): tensor
        for name, tensor in by_hand(peft_model(model, adapter))[-1].items()
        if ".lora_" in name
    }
    assert trained.keys() == expected.keys() == first.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
        assert (tensor - first[name]).abs().max() > 1e-4, f"{name} has not moved"


def test_the_base_stays_to_the_bit_and_the_reference_is_the_plain_model_to_the_bit(
    model: Path,
) -> None:
    learner, untrained = learner_of(model, lora={"rank": 4}), learner_of(model)
    digest, backend = learner.backend.digest(), cast(Any, learner.backend)
    train(learner)
    assert learner.backend.digest() != digest
    base = {
        name.replace(".base_layer.", "."): local(weight)
        for name, weight in backend._policy.model.causal.named_parameters()
        if ".lora_" not in name
    }
    stored = weights(model)
    assert base.keys() == stored.keys() and all(
        torch.equal(base[name], tensor) for name, tensor in stored.items()
    )
    batch = build_microbatches(shares()[0][0], RESPONSES, True, 1)
    found: list[Any] = []
    for one in (learner, untrained):
        one.backend.evaluate(list(batch), lambda _, outputs: found.append(outputs))
    assert torch.equal(found[0].frozen["reference"].values, found[1].policy.values)
    assert not torch.equal(found[0].policy.values, found[1].policy.values)


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_what_is_sent_is_merged_in_fp32_and_rounded_once(
    rank_stabilized: bool, model: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", use_rslora=rank_stabilized)
    learner = learner_of(model, model={"adapter": str(adapter), "dtype": "bf16"})
    factor = 8 / 4**0.5 if rank_stabilized else 8 / 4
    whole = peft_model(model, adapter).state_dict()
    rounded = {
        name: tensor if ".lora_" in name else tensor.to(torch.bfloat16)
        for name, tensor in whole.items()
    }
    expected = merged_by_hand(rounded, factor, torch.bfloat16)
    for bucket_bytes in (2**12, 2**20):  # cut within weights, and not
        found = sent(learner, bucket_bytes)
        assert found.keys() == weights(model).keys()
        unlike = sum(int((found[name] != expected[name]).sum()) for name in found)
        # fp32 and fp64 sums round to two neighbours where they lie at the middle between these
        assert unlike <= 1e-4 * sum(tensor.numel() for tensor in found.values())
    unmerged = merged_by_hand(rounded, 0.0, torch.bfloat16)
    product = merged_by_hand(
        {n: t if ".lora_" in n else torch.zeros_like(t) for n, t in rounded.items()}, factor
    )
    twice = {name: tensor + product[name].bfloat16() for name, tensor in unmerged.items()}
    changed = sum(int((twice[name] != expected[name]).sum()) for name in found)
    assert changed > 1e-2 * sum(tensor.numel() for tensor in found.values()), (
        "rounding twice would be seen"
    )


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]], ids=["all", "some"])
def test_exports_load_in_peft_and_transformers_and_give_the_trainers_logprobs(
    targets: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"lora": {"rank": 4, "targets": targets}, "checkpoint": {"every": 1}}
    learner = learner_of(model, **sections)
    train(learner)
    microbatch, own = build_microbatches(shares()[0][0], 1, False, 1)[0], []
    learner.backend.evaluate([microbatch], lambda _, outputs: own.append(outputs.policy.values))
    learner.backend.export(tmp_path / "adapter")
    merged = sent(learner)
    checkpoint = saved(learner, tmp_path / "run")
    export_checkpoint(checkpoint, tmp_path / "adapter later")
    export_checkpoint(checkpoint, tmp_path / "merged", merged=True)

    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "adapter later" / name).read_bytes() == (
            tmp_path / "adapter" / name
        ).read_bytes()
    stored = weights(tmp_path / "merged")
    assert stored.keys() == merged.keys() and all(
        torch.equal(stored[name], merged[name]) for name in stored
    )
    # peft 0.19's loading wants no process group to be there
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    loaded = {
        "peft": PeftModel.from_pretrained(plain(model), tmp_path / "adapter"),
        "transformers": AutoModelForCausalLM.from_pretrained(
            tmp_path / "adapter", dtype=torch.float32
        ),
        "merged": plain(tmp_path / "merged"),
    }
    for name, policy in loaded.items():
        torch.testing.assert_close(
            logprobs(policy, microbatch),
            own[0],
            rtol=0,
            atol=1e-4,
            msg=lambda t, n=name: f"{n}: {t}",
        )
    assert (logprobs(plain(model), microbatch) - own[0]).abs().max() > 1e-3, (
        "the untrained model would be seen"
    )


@torch.no_grad()
def logprobs(model: Any, microbatch: Microbatch) -> torch.Tensor:
    """Returns the log-probs of one sequence's targets."""
    table = model(microbatch.tokens[None]).logits[0].log_softmax(-1)[microbatch.rows]
    return table.gather(-1, microbatch.targets[:, None])[:, 0]


def saved(learner: Learner, run: Path) -> Path:
    """A checkpoint of the learner as it is."""
    config = learner._config.model_copy(
        update={"run": learner._config.run.model_copy(update={"dir": str(run)})}, deep=True
    )
    Checkpointing(config, learner, lambda version: {}, Timeline(None, "")).finish(1)
    return run / "checkpoints" / directory_name(1)


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "up_proj"], r".*layers\.1\..*(k|v)_proj"]
)
def test_the_plan_counts_the_adapters_that_are_made(
    targets: Any, model: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=targets, r=3)
    config = model_config(
        model, model={"adapter": str(adapter)}, algorithm={"kl_coef": 0.1}, **FSDP
    )
    spec, made = (
        ModelSpec.from_config(config),
        sum(tensor.numel() for tensor in weights(adapter).values()),
    )
    held = dict(trainer_memory(config, spec).parts)
    assert (held["gradients"], held["optimizer"], held["frozen models"]) == (
        4 * made,
        8 * made,
        4 * made,
    )
    assert held["weights"] == 4 * (made + sum(tensor.numel() for tensor in weights(model).values()))
    begun = model_config(model, lora={"rank": 3}, algorithm={"kl_coef": 0.1}, **FSDP)
    assert dict(trainer_memory(begun, spec).parts)["frozen models"] == 0, (
        "the reference is the adapters' being off"
    )


@pytest.mark.parametrize("kind", ["gptj", "mistral", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_the_plan_counts_the_adapters_of_other_models_and_says_that_experts_get_none(
    kind: str, tmp_path: Path
) -> None:
    """Layers may be named .h., routers may be no layers; experts are in one tensor.

    Only Qwen3-MoE has a family file.
    """
    path = make_other(tmp_path, kind, **({"rotary_dim": 16} if kind == "gptj" else {}))
    config = model_config(path, lora={"rank": 3}, **FSDP)
    spec, causal = ModelSpec.from_config(config), AutoModelForCausalLM.from_pretrained(path)
    add_adapters(causal, config)
    made = sum(weight.numel() for weight in causal.parameters() if weight.requires_grad)
    assert adapter_parameters(config, spec) == made > 0
    findings = Findings(spec=spec, own_memory=False)
    settle_places(config, findings)
    said = [
        line
        for line in findings.counts
        if line.startswith("lora.targets: the experts of this mixture get no")
    ]
    assert len(said) == (kind in ("qwen3_moe", "qwen3_next", "deepseek_v3"))
    assert not without_adapters(model_config(path, **FSDP), spec), "without adapters all is trained"


@pytest.mark.usefixtures("model")
def test_a_mixtures_experts_and_routers_stay_while_its_attention_is_trained(tmp_path: Path) -> None:
    mixture = make_model(tmp_path / "mixture", "qwen3_moe")
    learner = learner_of(mixture, lora={"rank": 2})
    train(learner)
    found, first = sent(learner), weights(mixture)
    assert found.keys() == first.keys()
    trained = {name for name, tensor in found.items() if not torch.equal(tensor, first[name])}
    assert trained == {
        name for name in first if name.endswith("_proj.weight") and ".self_attn." in name
    }


def test_a_checkpoint_holds_adapters_and_goes_on_as_if_nothing_had_been(
    model: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "lora": {"rank": 2},
        "algorithm": {"kl_coef": 0.1, "reference_refresh_every": 1},
    }
    learner = learner_of(model, **sections)
    train(learner)
    checkpoint = saved(learner, tmp_path / "adapters")
    names = {name for name in FileSystemReader(checkpoint).read_metadata().state_dict_metadata} - {
        "updates.0"
    }
    assert all(".lora_" in name for name in names) and len(names) == 3 * 2 * 2 * 7
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    full = saved(learner_of(model), tmp_path / "full")
    assert size < 0.4 * sum(file.stat().st_size for file in full.rglob("*") if file.is_file())

    resumed = learner_of(model, **sections)
    resumed.load(checkpoint)
    assert resumed.backend.digest() == learner.backend.digest()
    for one in (learner, resumed):
        train(one)
    assert resumed.backend.digest() == learner.backend.digest()


def test_adapters_of_another_base_are_refused_whatever_byte_differs(
    model: Path, tmp_path: Path
) -> None:
    learner = learner_of(model, lora={"rank": 2})
    checkpoint = saved(learner, tmp_path / "run")
    other = shutil.copytree(model, tmp_path / "other")
    stored = weights(other)
    middle = stored["model.layers.1.mlp.up_proj.weight"]
    # the last bit
    middle[60, 30] = middle[60, 30].view(torch.int32).bitwise_xor(1).view(torch.float32)
    save_file(stored, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        DataError, match=r"checkpoint.load: .* has adapters of other weights than model.path's"
    ):
        learner_of(other, lora={"rank": 2}).backend.load(checkpoint)
    learner_of(model, lora={"rank": 2}).backend.load(checkpoint)


Change = Callable[[Path], object]


def config_with(**keys: Any) -> Change:
    def change(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def tensors_with(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def changed(directory: Path) -> None:
        stored = weights(directory)
        change(stored)
        save_file(stored, directory / "adapter_model.safetensors")

    return changed


def cut_short(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda directory: (directory / "adapter_config.json").unlink(),
            "has no adapter_config.json",
        ),
        (lambda directory: (directory / "adapter_config.json").write_text("{"), "is not JSON"),
        (
            lambda directory: (directory / "adapter_model.safetensors").unlink(),
            "has no adapter_model.safetensors",
        ),
        (
            lambda directory: (directory / "adapter_model.safetensors").write_text("?"),
            "cannot be read",
        ),
        (config_with(peft_type="IA3"), "only LORA is supported"),
        (config_with(use_dora=True), "use_dora = True is not supported"),
        (config_with(modules_to_save=["lm_head"]), "modules_to_save"),
        (config_with(bias="all"), "trains biases too"),
        (config_with(r=0), "is no rank"),
        (config_with(lora_alpha=-1), "is no positive number"),
        (config_with(target_modules=[]), "names no layers"),
        (config_with(target_modules=["nothing"]), "model.adapter: .*nothing"),
        (config_with(target_modules=["embed_tokens"]), "no linear layer"),
        (config_with(target_modules=["lm_head"]), "the LM head"),
        (config_with(target_modules="("), "is no regular expression"),
        (config_with(r=3), r"and \[3, 64\] in the model"),
        (
            lambda directory: (directory / "adapter_model.safetensors").write_bytes(b""),
            "cannot be read",
        ),
        (cut_short, "cannot be read"),
        (
            tensors_with(lambda stored: stored.update({NAME: stored[NAME] * float("nan")})),
            f"{NAME} holds values that are not",
        ),
        (
            tensors_with(lambda stored: stored.update({NAME: stored[NAME].long()})),
            f"{NAME} holds torch.int64",
        ),
        (tensors_with(lambda stored: stored.clear()), "misses base_model"),
        (
            tensors_with(lambda stored: stored.update({f"{NAME}.x": stored[NAME].clone()})),
            f"has {NAME}.x",
        ),
        (tensors_with(lambda stored: stored.pop(NAME)), f"misses {NAME}"),
        (
            tensors_with(lambda stored: stored.update({NAME: torch.zeros(4, 8)})),
            r"is \[4, 8\], and \[4, 64\]",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused_in_a_line(
    change: Change, message: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(adapter, tmp_path / "adapter")
    change(directory)
    config = model_config(model, model={"adapter": str(directory)}, trainer={"backend": "fsdp"})
    spec = ModelSpec.read(str(model))
    for refused in (
        lambda: add_adapters(plain(model), config),
        # before anything starts, and without the weights
        lambda: settle_places(config, Findings(spec)),
    ):
        with pytest.raises(DataError, match=message) as raised:
            refused()
        assert "\n" not in str(raised.value) and "model.adapter" in str(raised.value)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["nothing_of_the_model"], "no layer that is called 'nothing_of_the_model'; name"),
        (["q_proj", "wq", "w1"], "no layer that is called 'wq', 'w1'; name .*q_proj, k_proj"),
        (["lm_head"], "the LM head"),
        (["embed_tokens"], "no linear layer"),
        ([".*"], r"no layer that is called '\.\*'"),
        (["self_attn"], "name linear layers of the model"),
        (["input_layernorm"], "name linear layers of the model"),
    ],
)
def test_targets_that_choose_no_layer_to_train_are_refused_before_anything_starts(
    targets: list[str], message: str, model: Path
) -> None:
    config = model_config(model, lora={"rank": 4, "targets": targets}, **FSDP)
    with pytest.raises(DataError, match=message) as raised:
        settle_places(config, Findings(ModelSpec.read(str(model))))
    assert str(raised.value).startswith("lora.targets: ") and "\n" not in str(raised.value)


def test_adapters_that_fit_are_accepted_without_the_models_weights_and_their_size_is_said(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    for sections in ({"lora": {"rank": 4}}, {"model": {"adapter": str(adapter)}}):
        check_adapters(model_config(bare, **sections, **FSDP), ModelSpec.read(str(bare)))
    findings = Findings(ModelSpec.read(str(model)))
    config = model_config(model, lora={"rank": 4, "targets": ["q_proj", "v_proj"]}, **FSDP)
    settle_places(config, findings)
    trained = sum(parameter.numel() for parameter in trained_of(model, config))
    assert f"adapters (LoRA): rank 4, {trained:,} trained parameters beside" in findings.counts[0]


def trained_of(model: Path, config: Any) -> list[torch.Tensor]:
    causal = plain(model)
    add_adapters(causal, config)
    return [parameter for parameter in causal.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"lora": {"rank": 8}},
            "lora.rank: 8 with trainer.backend=megatron, which trains no adapters",
        ),
        ({"model": {"adapter": "x"}}, "model.adapter: x with trainer.backend=megatron"),
        (
            {"lora": {"rank": 8}, "model": {"adapter": "x"}, **FSDP},
            "lora.rank: 8 beside model.adapter",
        ),
        ({"lora": {"alpha": 8.0}}, "lora.alpha: 8.0 would be read by nothing"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=message):
        model_config(tmp_path, **sections)
