"""Responses that one engine begins and another goes on with: their parts, and the response that they are together.

An engine that is asked to hand on ends every response in flight as it stands (finish_reason `cut`). The next engine gets the tokens
so far, computes them once, and samples from the same place of the same random stream, so that the response is the one that it would
have been. Where that cannot be, the response is generated again from its seed, which gives the same one too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.samples.columns import continued

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens left out."""

NOTHING: npt.NDArray[np.int32] = np.zeros(0, np.int32)


def written_of(part: Generation, sampling: Sampling, continues: bool) -> npt.NDArray[np.int32]:
    """The tokens of a part that the next engine goes on from; none where it has to begin again.

    A text that ends a response may lie across the cut, where no engine would find it.
    """
    return part.tokens if continues and not sampling.stop else NOTHING


def left_of(sampling: Sampling, num_written: int) -> Sampling:
    """The sampling of what is left of a response."""
    return replace(sampling, max_tokens=sampling.max_tokens - num_written)


def joined(first: Generation, rest: Generation, decode: Decode | None) -> Generation:
    """One response of two parts; rest begins where `first` was cut. decode: None leaves their texts side by side."""
    tokens = np.concatenate([first.tokens, rest.tokens])
    text = first.text + rest.text
    if decode is not None:
        text = decode((tokens[:-1] if rest.finished else tokens).tolist())
    return replace(
        rest,
        tokens=tokens,
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        text=text,
        columns=continued(first.columns, rest.columns),
    )
