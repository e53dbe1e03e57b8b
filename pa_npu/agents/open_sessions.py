"""The sessions of a run that are open: their keys, and the queue of tasks that wait for an agent.

environment ──add, offer──> queue ──wait_task──> a program, through the gateway ──> session ──remove──> environment
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import deque

from pa_npu.agents.session import Session


class Sessions:
    """The open sessions, their keys, and the queue of tasks that wait for an agent.

    key: the run's; the keys of sessions and programs are derived from it.
    url: the gateway's, once it listens.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.url = ""
        self._open: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()
        self._program_of: dict[str, str] = {}  # by the session's id
        self._useful: set[str] = set()  # programs that have done a session
        self._offered = asyncio.Event()
        self._taken = asyncio.Event()

    @staticmethod
    def new_id() -> str:
        return secrets.token_hex(8)

    def add(self, session: Session) -> None:
        self._open[session.id] = session

    async def offer(self, session: Session, patience_s: float) -> None:
        """Queues the session's task, and returns once an agent has taken it.

        Raises asyncio.TimeoutError if no agent takes any task for patience_s.
        """
        self._waiting.append(session)
        self._offered.set()
        while session in self._waiting:
            await asyncio.wait_for(self._taken.wait(), patience_s)

    async def remove(self, session: Session) -> None:
        """Closes the session and forgets it."""
        self._open.pop(session.id, None)
        program = self._program_of.pop(session.id, None)
        if program is not None and session.is_done:
            self._useful.add(program)
        if session in self._waiting:
            self._waiting.remove(session)
        await session.close()

    def find(self, session_id: str) -> Session | None:
        return self._open.get(session_id)

    async def wait_task(self, program: str, wait_s: float) -> Session | None:
        """Removes the session that has waited longest from the queue, for this program.

        Returns None if there is none within wait_s.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        while not self._waiting:
            self._offered.clear()
            try:
                await asyncio.wait_for(self._offered.wait(), end_s - loop.time())
            except asyncio.TimeoutError:
                return None
        session = self._waiting.popleft()
        self._program_of[session.id] = program
        self._taken.set()
        self._taken = asyncio.Event()
        return session

    def give_back(self, session: Session) -> None:
        """Puts a session at the head of the queue whose task did not reach the agent that asked."""
        self._program_of.pop(session.id, None)
        if session.outcome is None:
            self._waiting.appendleft(session)
            self._offered.set()

    def program_ended(self, program: str) -> bool:
        """Marks the sessions as lost that the program has taken and not ended.

        Returns whether it has done a session since it last ended.
        """
        was_useful = program in self._useful
        self._useful.discard(program)
        for session_id, taker in self._program_of.items():
            session = self._open.get(session_id)
            if taker != program or session is None:
                continue
            was_useful |= session.is_done
            if session.outcome is None:
                session.lose()
            else:
                session.finish()
        return was_useful

    def derive_key(self, subject: str) -> str:
        """Returns the key of a session (`session:ID`) or of a program (`program:NUMBER`)."""
        message = subject.encode("utf-8", "surrogateescape")  # a header may have any bytes
        return hmac.new(self.key.encode(), message, hashlib.sha256).hexdigest()

    def base_url(self, session: Session) -> str:
        return f"{self.url}/sessions/{session.id}/v1"
