"""Waits of tests for other processes, with a deadline."""

from __future__ import annotations

import socket
import subprocess
import time


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Waits until the process accepts connections. Raises AssertionError if it ends or is late."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with socket.socket() as client:
            client.settimeout(1.0)
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing accepts connections at port {port} after {timeout_s:g} s")
