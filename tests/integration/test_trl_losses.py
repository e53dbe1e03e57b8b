"""Losses beside those of TRL's own code, which runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.algorithm.choices import Choices
from pa_npu.algorithm.divergences import divergence
from tests.unit.algorithm.test_distillation import TEMPERATURE, config_of

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / ".venv-trl"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (TRL / "trl").is_dir(), reason="TRL is not installed in .venv-trl"),
]

# What TRL calls the divergence with beta, and what it is called here. Its beta weights the same
# side of the mixture as distill_beta does.
KINDS: dict[str, dict[str, Any]] = {
    "0": {"distill_divergence": "forward"},
    "1": {"distill_divergence": "reverse"},
    "0.5": {"distill_divergence": "js"},
    "0.2": {"distill_divergence": "js", "distill_beta": 0.2},
}


def test_divergences_of_whole_distributions_are_those_of_trls_gkd_trainer(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    student, teacher = 3 * torch.randn(2, 40, 97, generator=generator)
    file = tmp_path / "logits.pt"
    torch.save({"student": student, "teacher": teacher, "temperature": TEMPERATURE}, file)
    paths = os.pathsep.join([str(ROOT), str(TRL)])
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.trl_divergence", str(file), *KINDS],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "TRL_EXPERIMENTAL_SILENCE": "1"},
        timeout=300,
    )
    found = torch.load(file)
    for beta, kind in KINDS.items():
        keys = config_of(Path("p"), Path("t"), **kind).algorithm
        logits = student.clone().requires_grad_()
        ours, theirs = ((of / TEMPERATURE).log_softmax(-1) for of in (logits, teacher))
        loss = divergence(Choices(ours, theirs), keys).mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(loss.detach(), found[beta]["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient, found[beta]["gradient"], rtol=1e-4, atol=1e-8)
    losses = {beta: float(values["loss"]) for beta, values in found.items()}
    assert len(set(losses.values())) == len(KINDS), "four divergences that differ"
