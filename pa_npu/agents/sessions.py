"""Sessions: those that are open, who may use them, and those that wait for an agent to take them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import deque

from pa_npu.agents.session import Session


class Sessions:
    """key: the run's; a session's and a program's own follow from it. url: of the gateway, once it listens."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.url = ""
        self._open: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()
        self._takers: dict[str, str] = {}  # who has taken which, by the session's id
        self._offered = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @staticmethod
    def new_id() -> str:
        return secrets.token_hex(8)

    def add(self, session: Session) -> None:
        self._open[session.id] = session

    def offer(self, session: Session) -> None:
        """Let an agent take it."""
        self._waiting.append(session)
        self._offered.set()

    async def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)
        self._takers.pop(session.id, None)
        if session in self._waiting:
            self._waiting.remove(session)
        await session.close()

    def find(self, session_id: str) -> Session | None:
        return self._open.get(session_id)

    async def take(self, taker: str, wait_s: float) -> Session | None:
        """The session that waits longest, given to this taker alone; None after wait_s."""
        end_s = asyncio.get_running_loop().time() + wait_s
        while not self._waiting:
            self._offered.clear()
            try:
                await asyncio.wait_for(self._offered.wait(), end_s - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                return None
        session = self._waiting.popleft()
        self._takers[session.id] = taker
        return session

    def taker_ended(self, taker: str) -> None:
        """Begins the sessions again that the taker has taken and not ended."""
        for session_id, other in list(self._takers.items()):
            if other == taker and (session := self._open.get(session_id)) is not None and session.outcome is None:
                session.lose()

    def key_of(self, what: str) -> str:
        """The key of a session (`session:ID`) or of a program (`program:NUMBER`)."""
        return hmac.new(self.key.encode(), what.encode(), hashlib.sha256).hexdigest()

    def base_url(self, session: Session) -> str:
        return f"{self.url}/sessions/{session.id}/v1"
