"""Nucleus sampling of the transformers engine: which tokens are left, and with what probability."""

from __future__ import annotations

import pytest
import torch

from pa_npu.engines.transformers.decoding import nucleus


@pytest.mark.parametrize(
    ("top_p", "left"),
    [
        (0.05, [2]),
        (0.4, [2]),
        (0.45, [2, 0]),
        (0.69, [2, 0]),
        (0.75, [2, 0, 3]),
        (0.999, [2, 0, 3, 1]),
        (1.0, [2, 0, 3, 1]),
    ],
)
def test_the_smallest_set_with_that_probability_is_left_and_renormalised(
    top_p: float, left: list[int]
) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.2])
    actual = nucleus(probabilities.log(), top_p).exp()
    expected = torch.zeros(4)
    expected[left] = probabilities[left] / probabilities[left].sum()
    assert torch.allclose(actual, expected, atol=1e-6)
