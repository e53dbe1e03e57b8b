"""Invariant I7 over ranks: copies of a weight hold the same bits after every step.

    replicas             each holds all weights, or all shards
    tensor ranks         each holds norms, and what else is not cut
    first, last stage    each holds a tied embedding

A step whose result did not reach a replica, or a gradient that was summed on some of the ranks that
need it, leaves copies that drift apart. Engines get one of them, and what each rank computes with
its own is right by itself, so that no other check looks at it. Some elements of every tensor are
compared, other ones in every update.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.backends.protocol import CopiedWeights
from pa_npu.errors import InvariantViolation
from pa_npu.trainer.step_elements import ChosenElements, memory_of, read_elements, views_of


def check_copies(
    where: str, copies: list[CopiedWeights], seed: int, update: int, device: torch.device
) -> None:
    """Raises InvariantViolation if ranks hold different values of a weight that they should share.

    where: which update, for messages. copies: this rank's, of each group of ranks that it is in.
    seed, update: choose the elements, the same ones on all ranks. Collective over these groups.
    """
    for part in copies:
        name = int.from_bytes(hashlib.blake2b(part.among.encode(), digest_size=4).digest(), "big")
        chosen = ChosenElements.choose(part.tensors, seed, update, name)
        (values,) = read_elements([(chosen, views_of(memory_of(part.tensors, "weights"), chosen))])
        local_values = torch.from_numpy(values).float()
        extremes = torch.cat([local_values, -local_values]).to(device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=part.group)
        largest, smallest = extremes.cpu().double().numpy().reshape(2, -1) * [[1.0], [-1.0]]
        differs = largest != smallest
        if not differs.any():
            continue
        place = int((largest - smallest).argmax())
        wrong = np.unique(chosen.owner[differs])
        raise InvariantViolation(
            f"I7 step: {where}: an element of {part.tensors[chosen.owner[place]].name} is between "
            f"{smallest[place]:.9g} and {largest[place]:.9g} on the {part.group.size()} "
            f"{part.among} that hold copies of it, {values[place]:.9g} here; {len(wrong)} of "
            f"{len(part.tensors)} tensors differ. Either a step did not reach all of them, or their "
            "gradient was not summed"
        )
