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
        self._useful: set[str] = set()  # takers that have ended a session
        self._offered, self._taken = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @staticmethod
    def new_id() -> str:
        return secrets.token_hex(8)

    def add(self, session: Session) -> None:
        self._open[session.id] = session

    async def offer(self, session: Session, patience_s: float) -> None:
        """Returns when an agent has taken it. Raises asyncio.TimeoutError where none has taken any for so long."""
        self._waiting.append(session)
        self._offered.set()
        while session in self._waiting:
            await asyncio.wait_for(self._taken.wait(), patience_s)

    async def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)
        taker = self._takers.pop(session.id, None)
        if taker is not None and session.is_done:
            self._useful.add(taker)
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
        self._taken.set()
        self._taken = asyncio.Event()
        return session

    def taker_ended(self, taker: str) -> bool:
        """Begins the sessions again that the taker has taken and not ended. Whether it has ended one since its last end."""
        was_useful = taker in self._useful
        self._useful.discard(taker)
        for session in [self._open[one] for one, other in self._takers.items() if other == taker and one in self._open]:
            was_useful |= session.is_done
            if session.outcome is None:
                session.lose()
        return was_useful

    def key_of(self, what: str) -> str:
        """The key of a session (`session:ID`) or of a program (`program:NUMBER`)."""
        return hmac.new(self.key.encode(), what.encode(), hashlib.sha256).hexdigest()

    def base_url(self, session: Session) -> str:
        return f"{self.url}/sessions/{session.id}/v1"
