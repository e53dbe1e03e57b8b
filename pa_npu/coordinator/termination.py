"""Ends the coordinator on SIGTERM: measurements are written first, then the process ends by the signal.

The launcher stops all processes of a run as soon as one fails or the run is over, which may be right after an iteration. A first
SIGTERM cancels the event loop's work, so that everything that owns a file closes it; LONGEST_S later, or with a second one, the
process ends whatever it is doing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

# The launcher kills what is left after 5 s (GRACE_S of its process tree).
LONGEST_S = 4.0


def run_until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, in the main thread; with SIGTERM the work is cancelled, and when it has ended the process ends by SIGTERM."""
    terminated = False

    async def watched() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            loop.remove_signal_handler(signal.SIGTERM)  # from here on it has its usual effect
            timer = threading.Timer(LONGEST_S, _end)
            timer.daemon = True
            timer.start()
            assert task is not None
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        await work

    try:
        asyncio.run(watched())
    except BaseException:
        if not terminated:
            raise  # else it is what came of cancelling
    if terminated:
        _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
