"""Computes TRL's generalised Jensen-Shannon divergence of logits, and its gradient, in a process that has TRL.

    python tests/helpers/trl_divergence.py FILE BETA ...

FILE holds `student` and `teacher`, logits [rows, tokens], and gets, for each beta, the mean over rows
(`loss`) and its gradient at the student's logits (`gradient`).
"""

from __future__ import annotations

import sys

import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer


def main(file: str, *betas: str) -> None:
    logits = torch.load(file)
    found = {}
    for beta in betas:
        student = logits["student"].clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(
            student[None],
            logits["teacher"][None],
            labels=torch.zeros(1, len(student), dtype=torch.long),
            beta=float(beta),
            temperature=logits["temperature"],
        )
        (gradient,) = torch.autograd.grad(loss, student)
        found[beta] = {"loss": loss.detach(), "gradient": gradient}
    torch.save(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
