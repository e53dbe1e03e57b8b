"""Writes accepted requests to the log: in one order for each model, each number once, within what a client may have waiting.

A request that repeats another one, number and content, gets that one's id. The same number with
another content is refused.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from pa_npu.service.log import Accepted
from pa_npu.service.registry import Model, Registry
from pa_npu.service.wire import Refused


class Intake:
    """max_pending: requests of a client that may wait for their answers. write: appends to the log and
    to the registry.
    """

    def __init__(self, registry: Registry, max_pending: int, write: Callable[..., None]) -> None:
        self._registry = registry
        self._max_pending = max_pending
        self._write = write

    def in_order(
        self, route: str, model: Model, seq: int, body: bytes, decided: dict[str, int | str]
    ) -> str:
        """Accepts a request of a model, and returns its id. Raises Refused for a number that has been
        answered, or is too far ahead.
        """
        id = f"{model.id}/{seq}"
        if (known := self.repeated(route, id, body)) is not None:
            return known
        if seq < model.next:
            raise Refused(f"seq_id: {seq} was answered long ago; the next one is {model.next}")
        if seq - model.next >= self._max_pending:
            raise Refused(
                f"seq_id: {seq} is more than {self._max_pending} ahead of {model.next}, the next "
                "one (service.pending)",
                429,
            )
        self.check_pending(model.owner)
        return self.accept(route, id, model.owner, body, model.id, seq, decided)

    def check_pending(self, owner: str) -> None:
        pending = [
            future
            for future in self._registry.futures.values()
            if future.answer is None and future.request.owner == owner
        ]
        if len(pending) >= self._max_pending:
            raise Refused(
                f"{len(pending)} requests of this session are not answered (service.pending); wait "
                "for some of them",
                429,
            )

    def repeated(self, route: str, id: str, body: bytes) -> str | None:
        """Returns the id if the request was accepted before. Raises Refused for another content."""
        known = self._registry.futures.get(id)
        if known is None:
            return None
        if known.request.digest != _digest(route, body):
            raise Refused(
                f"seq_id: {known.request.seq} was given before with another content "
                f"({known.request.route}); numbers are used once"
            )
        return id

    def accept(
        self,
        route: str,
        id: str,
        owner: str,
        body: bytes,
        model: str = "",
        seq: int = 0,
        decided: dict[str, int | str] | None = None,
    ) -> str:
        """Accepts a request unless it was accepted before, and returns its id."""
        if (known := self.repeated(route, id, body)) is not None:
            return known
        self._write(
            Accepted(
                route=route,
                id=id,
                owner=owner,
                model=model,
                seq=seq,
                digest=_digest(route, body),
                body=body,
                decided=decided or {},
                time_s=time.time(),
            )
        )
        return id


def _digest(route: str, body: bytes) -> bytes:
    return hashlib.blake2b(route.encode() + b"\0" + body, digest_size=16).digest()
