"""trainer.backend=fsdp on two ranks, sharded or copied: the update is one rank's, and checkpoints go to other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.backends.registry import export_checkpoint
from pa_npu.checkpoints import directories as store
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tools import try_models

pytestmark = pytest.mark.integration


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def trained(
    model: Path,
    directory: Path,
    dtype: str,
    ranks: int,
    shards: int | None = None,
    first: int = 0,
    load: Path | None = None,
    rank: int = 0,
    prompts: int = 4,
) -> list[dict]:
    """Two iterations of two updates, or the second after a checkpoint."""
    config = model_config(
        model,
        model={"dtype": dtype},
        run={"dir": str(directory), "deterministic": True},
        trainer={"backend": "fsdp", "devices": ranks, **({"shards": shards} if shards else {})},
        rollout={"responses_per_prompt": 4, "max_response_tokens": 16},
        schedule={
            "prompts_per_iteration": prompts,
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
    return run_job(Job(config, directory, first=first, last=2, export=str(directory / "hf")))


@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        ("fp32", 0),
        ("fp32", 3),
        *(pytest.param("bf16", rank, marks=pytest.mark.nightly) for rank in (0, 3)),
    ],
    ids=lambda value: (
        f"adapters of rank {value}" if isinstance(value, int) and value else str(value or "weights")
    ),
)
def test_two_ranks_train_as_one_sharded_or_copied_and_one_goes_on_from_their_checkpoint(
    dtype: str, rank: int, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    reports = {
        ranks: trained(model, tmp_path / f"of {ranks}", dtype, ranks, rank=rank) for ranks in (1, 2)
    }
    copies = trained(model, tmp_path / "copies", dtype, 2, shards=1, rank=rank)
    assert [r["grad_norm"] for r in copies] == pytest.approx(
        [r["grad_norm"] for r in reports[1]], rel=1e-5
    )
    for name, tensor in weights(tmp_path / "copies" / "hf").items():
        torch.testing.assert_close(
            tensor, weights(tmp_path / "of 1" / "hf")[name], rtol=1e-5, atol=1e-6
        )
    assert [r["grad_norm"] for r in reports[2]] == pytest.approx(
        [r["grad_norm"] for r in reports[1]], rel=1e-5
    )
    first, two = (weights(tmp_path / f"of {ranks}" / "hf") for ranks in (1, 2))
    assert first.keys() == two.keys() == weights(model).keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            two[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert any(
        not torch.equal(tensor, weights(model)[name].to(tensor.dtype))
        for name, tensor in first.items()
    )

    middle = tmp_path / "of 2" / "checkpoints" / store.directory_name(1)
    resumed = trained(model, tmp_path / "resumed", dtype, 1, first=1, load=middle, rank=rank)
    assert resumed[-1]["grad_norm"] == pytest.approx(reports[2][-1]["grad_norm"], rel=1e-5)
    for name, tensor in weights(tmp_path / "resumed" / "hf").items():
        torch.testing.assert_close(
            two[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )

    export_checkpoint(middle.with_name(store.directory_name(2)), tmp_path / "exported", merged=True)
    exported = weights(tmp_path / "exported")
    assert exported.keys() == two.keys() and all(
        torch.equal(exported[name], tensor) for name, tensor in two.items()
    )


@pytest.mark.nightly  # the test above has copies, and shards
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [("fp32", 0), ("fp32", 3), ("bf16", 0)],
    ids=lambda value: (
        f"adapters of rank {value}" if isinstance(value, int) and value else str(value or "weights")
    ),
)
def test_copies_of_shards_train_as_one_rank_and_one_goes_on_from_their_checkpoint(
    dtype: str, rank: int, tmp_path: Path
) -> None:
    """Two copies of two shards."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    alone = trained(model, tmp_path / "alone", dtype, 1, rank=rank, prompts=8)
    copies = trained(model, tmp_path / "copies", dtype, 4, shards=2, rank=rank, prompts=8)
    middle = tmp_path / "copies" / "checkpoints" / store.directory_name(1)
    resumed = trained(
        model, tmp_path / "resumed", dtype, 1, first=1, load=middle, rank=rank, prompts=8
    )
    assert [r["grad_norm"] for r in copies] == pytest.approx(
        [r["grad_norm"] for r in alone], rel=1e-5
    )
    assert resumed[-1]["grad_norm"] == pytest.approx(alone[-1]["grad_norm"], rel=1e-5)
    expected = weights(tmp_path / "alone" / "hf")
    for name, tensor in expected.items():
        for another in ("copies", "resumed"):
            actual = weights(tmp_path / another / "hf")[name]
            torch.testing.assert_close(
                actual, tensor, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
            )
    assert any(
        not torch.equal(tensor, weights(model)[name].to(tensor.dtype))
        for name, tensor in expected.items()
    )


# unit/test_any_model.py has its weights, and test_exact_schedules.py trains another such model
@pytest.mark.nightly
def test_a_model_without_a_family_file_trains_and_its_engine_has_what_was_trained(
    tiny: Path, tmp_path: Path
) -> None:
    """From the trial to the export, with scaled logits, embeddings and residuals."""
    actual = try_models.run("granite", "transformers", tiny, tmp_path)
    assert not isinstance(actual, str), actual
    records, way = actual
    assert way == "prompts are shared"
    assert all(record["logprob_diff_max"] < 1e-5 for record in records) and len(records) == 2
    assert records[0]["grad_norm"] > 0.01, "the second publish is of weights that were trained"
    before, after = (weights(tmp_path / "granite" / name) for name in ("model", "transformers/hf"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
