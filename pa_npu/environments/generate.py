"""GroupGenerate: what an environment writes with, bound to one group: its engine, its seeds, its weight version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pa_npu.control.tasks import gather
from pa_npu.engines.pool import GroupSession
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.samples.seeds import turn_seed


class GroupGenerate:
    """The Generate of one group. Seeds follow from the group, the sample and the turn, never from time or engine (I4).

    seed: the group's. version: of the weights that the engines serve, for engines that do not say.
    """

    def __init__(self, session: GroupSession, seed: int, sampling: Sampling, version: int) -> None:
        self._session = session
        self._seed = seed
        self._sampling = sampling
        self._version = version

    async def __call__(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        n: int = 1,
        sample: int = 0,
        turn: int = 0,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        most = self._sampling.max_tokens if max_tokens is None else min(max_tokens, self._sampling.max_tokens)
        if most < 1 or n < 1:
            raise ValueError(f"generate: n = {n} and max_tokens = {most} must be at least 1")
        sampling = replace(self._sampling, max_tokens=most, stop=tuple(stop))
        if turn == 0:  # seeds of the first turn follow one another, so that one request gives all samples
            found = await self._session.generate(tokens, n, turn_seed(self._seed, sample, 0), sampling)
        else:
            seeds = [turn_seed(self._seed, number, turn) for number in range(sample, sample + n)]
            several = await gather([self._session.generate(tokens, 1, seed, sampling) for seed in seeds])
            found = [generation for generations in several for generation in generations]
        return [g if g.version is not None else replace(g, version=self._version) for g in found]
