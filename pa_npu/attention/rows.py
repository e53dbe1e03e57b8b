"""Rows: a set of packed rows, taken as a view where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows as ascending spans.

    A single span is taken as a view, several spans by an index that is cached per device.
    """

    spans: tuple[Span, ...]
    _index: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def from_spans(spans: Sequence[Span]) -> Rows:
        """Returns the rows of the non-empty spans, with adjacent spans joined."""
        joined: list[Span] = []
        for start, end in spans:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            elif end > start:
                joined.append((start, end))
        return Rows(tuple(joined))

    @property
    def span(self) -> Span | None:
        """The span, if there is only one."""
        if len(self.spans) != 1:
            return None
        return self.spans[0]

    def index(self, device: torch.device) -> torch.Tensor:
        """Returns the row numbers on the device, int64 [rows]."""
        if device not in self._index:
            host = torch.cat([torch.arange(start, end) for start, end in self.spans])
            self._index[device] = host.to(device)
        return self._index[device]

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns these rows of x along dim, a view if they are one span."""
        if self.span is not None:
            return x.narrow(dim, self.span[0], self.span[1] - self.span[0])
        return x.index_select(dim, self.index(x.device))

    def put_(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrites these rows of x."""
        if self.span is not None:
            x[self.span[0] : self.span[1]].copy_(rows)
        else:
            x.index_copy_(0, self.index(x.device), rows)

    def add_(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to these rows of x. The rows are distinct unless spans overlap."""
        if self.span is not None:
            x[self.span[0] : self.span[1]].add_(rows)
        else:
            x.index_add_(0, self.index(x.device), rows.to(x.dtype))
