"""The addresses that processes listen on, as the kernel lists them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket, IPv4 or IPv6, on which one of the processes accepts
    connections.
    """
    actual = set()
    for pid in pids:
        inodes = socket_inodes(pid)
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _LISTEN and fields[9] in inodes:
                        address, port = fields[1].split(":")
                        actual.add((pid, decode_address(address), int(port, 16)))
    return actual


def outside_loopback(sockets: Iterable[tuple[int, str, int]]) -> set[tuple[int, str, int]]:
    return {socket for socket in sockets if not _is_loopback(socket[1])}


def socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                inodes |= {match[1]} if match else set()
    return inodes


def decode_address(text: str) -> str:
    """The kernel prints an address as 32-bit words in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
