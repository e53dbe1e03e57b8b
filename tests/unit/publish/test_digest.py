"""Digests of weights: exact whatever the order of addition, blind to no change that a publish could make."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from pa_npu.weight_transfer import digest
from pa_npu.weight_transfer.digest import Digests, digest_of, first_difference


def digests(*tensors: torch.Tensor) -> str:
    computed = Digests()
    for tensor in tensors:
        computed.add(tensor)
    return computed.read()


def by_integers(tensor: torch.Tensor) -> str:
    """The definition in the module's docstring, in Python's whole numbers."""
    columns, rows = (numbers.long().tolist() for numbers in digest._numbers(torch.device("cpu")))
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    hashed = b""
    for start in range(0, len(data), 2**20):
        block = data[start : start + 2**20]
        sums = [0, 0]
        for r in range(0, len(block), 256):
            row = block[r : r + 256]
            for c in range(8):
                product = sum(columns[j][c] * byte for j, byte in enumerate(row))
                for i in range(2):
                    sums[i] += rows[i][r // 256][c] * product
        assert max(sums) < 2**63
        hashed += struct.pack("<qq", *sums)
    return hashlib.blake2b(hashed, digest_size=8).hexdigest()


@pytest.mark.parametrize("shape", [(1,), (3, 43), (64, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_is_what_whole_numbers_give(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert digests(tensor) == by_integers(tensor)


def test_the_largest_sums_are_still_exact() -> None:
    """All bytes 255, two blocks and a short one: the bounds 2^24 and 2^63 hold for every bucket."""
    tensor = torch.full((2 * 2**20 + 300,), 255, dtype=torch.uint8)
    columns, rows = digest._numbers(torch.device("cpu"))
    assert float((columns.double() * 255).sum(0).max()) < 2**24
    assert 255 * 255 * 256 * (2**24 - 1) * rows[0].numel() < 2**63
    products = (columns.double().sum(0) * 255).long()
    full = (rows * products).sum((1, 2))
    assert torch.equal(digest._block_sums(tensor[: 2**20]), full)
    assert len(digests(tensor)) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_shows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = (torch.randn(700, 512, generator=generator) * 0.02).to(dtype)
    before = digests(weights)
    assert digests(weights.clone()) == before
    changes = {
        "one bit of one weight": lambda w: (
            w.view(torch.uint8)
            .view(-1)
            .__setitem__(77_777, w.view(torch.uint8).view(-1)[77_777] ^ 1)
        ),
        "scaled by 1.01": lambda w: w.mul_(1.01),
        "two rows exchanged": lambda w: w.copy_(w[torch.tensor([1, 0, *range(2, 700)])]),
        "shifted by one": lambda w: w.copy_(w.view(-1).roll(1).view(w.shape)),
        "transposed halves": lambda w: w.copy_(torch.cat([w[350:], w[:350]])),
    }
    for name, change in changes.items():
        changed = weights.clone()
        change(changed)
        assert not torch.equal(changed, weights)
        assert digests(changed) != before, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_at_a_learning_rate_of_a_millionth_shows(dtype: torch.dtype) -> None:
    """In bf16 it changes only the weights that are close to zero: the others round back to what
    they were.
    """
    master = (
        (torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype).float()
    )
    weights = master.to(dtype)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.0).step()
    updated = parameter.detach().to(dtype)
    share = (updated != weights).float().mean().item()
    assert (share > 0.5) if dtype == torch.float32 else (0 < share < 0.1)
    assert digests(updated) != digests(weights)


def test_the_first_tensor_that_differs_is_named() -> None:
    first, two, three = (torch.full((5,), float(value)) for value in range(3))
    assert first_difference(digests(first, two), digests(first, two)) is None
    assert first_difference(digests(first, two, three), digests(first, three, three)) == 1
    assert first_difference(digests(first, two), digests(first)) == 1
    assert first_difference("", digests(first)) == 0
    assert digest_of([first, two]) != digest_of([two, first])


def test_a_bucket_that_is_overwritten_after_it_was_added_keeps_its_digest() -> None:
    buffer = torch.ones(1000)
    actual = Digests()
    actual.add(buffer)
    buffer.zero_()
    assert actual.read() == digests(torch.ones(1000))
