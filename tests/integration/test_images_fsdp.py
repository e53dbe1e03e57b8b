"""Groups with images beside groups without, over two ranks: the update is one rank's, tower frozen, trained, or with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from pa_npu.backends.fsdp.model import load_model
from pa_npu.backends.registry import export_checkpoint
from pa_npu.checkpoints import directories as store
from pa_npu.vision.family import is_of_tower
from tests.helpers.megatron import model_config
from tests.helpers.trainer_rank import Job, run_job
from tests.helpers.vision import make_vision

pytestmark = pytest.mark.integration


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def trained(
    model: Path, directory: Path, ranks: int, vision: str, rank: int, **more: Any
) -> list[dict]:
    """Two iterations of two updates, or the second after a checkpoint. The first rank of two gets
    the groups with images, the second those without.
    """
    load = more.pop("load", None)
    config = model_config(
        model,
        model={"dtype": "fp32", "vision": vision},
        run={"dir": str(directory), "deterministic": True},
        trainer={"backend": "fsdp", "devices": ranks},
        rollout={"responses_per_prompt": 4, "max_response_tokens": 16},
        schedule={
            "prompts_per_iteration": 4,
            "updates_per_iteration": 2,
            "order": "prompt",
            "iterations": 2,
        },
        algorithm={"kl_coef": 0.01},
        optimizer={"learning_rate": 1e-3, "weight_decay": 0.1},
        lora={"rank": rank},
        checkpoint={
            "every": 1,
            "export_hf": "merged" if rank else True,
            **({"load": str(load)} if load else {}),
        },
    )
    job = Job(config, directory, last=2, export=str(directory / "hf"), **more)
    job.options["images"] = True
    return run_job(job)


@pytest.mark.parametrize(
    ("vision", "rank"),
    [
        ("trained", 0),
        pytest.param("frozen", 0, marks=pytest.mark.nightly),
        pytest.param("frozen", 3, marks=pytest.mark.nightly),
        pytest.param("trained", 3, marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_train_as_one_and_one_goes_on_from_their_checkpoint(
    vision: str, rank: int, tmp_path: Path
) -> None:
    model = make_vision(tmp_path / "made")
    reports = {
        ranks: trained(model, tmp_path / f"of {ranks}", ranks, vision, rank) for ranks in (1, 2)
    }
    assert [r["grad_norm"] for r in reports[2]] == pytest.approx(
        [r["grad_norm"] for r in reports[1]], rel=1e-5
    )
    before = weights(model)
    first, two = (weights(tmp_path / f"of {ranks}" / "hf") for ranks in (1, 2))
    assert first.keys() == two.keys() == before.keys()
    changed = {"tower": 0, "decoder": 0}
    for name, tensor in first.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)
        part = "tower" if is_of_tower(name) else "decoder"
        changed[part] += not torch.equal(tensor, before[name])
    assert changed["decoder"] > 0
    assert (changed["tower"] > 0) == (vision == "trained")

    middle = tmp_path / "of 2" / "checkpoints" / store.directory_name(1)
    resumed = trained(model, tmp_path / "resumed", 1, vision, rank, first=1, load=middle)
    assert resumed[-1]["grad_norm"] == pytest.approx(reports[2][-1]["grad_norm"], rel=1e-5)
    # what transformers and engines need beside weights is in an export
    exported = {file.name for file in (tmp_path / "of 1" / "hf").iterdir()}
    assert {"preprocessor_config.json", "chat_template.jinja", "tokenizer.json"} <= exported
    if not rank:
        return
    last = middle.with_name(store.directory_name(2))
    export_checkpoint(last, tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(load_model(str(model), torch.float32), tmp_path / "adapters")
    layers = [name for name, _ in loaded.named_modules() if name.endswith("lora_A.default")]
    assert any(".visual." in name for name in layers) == (vision == "trained")
    merged = loaded.merge_and_unload().state_dict()
    in_files = load_model(str(tmp_path / "of 2" / "hf"), torch.float32).state_dict()
    for name, tensor in in_files.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
