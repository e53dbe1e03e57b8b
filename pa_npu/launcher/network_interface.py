"""Which network interface of this machine has an address."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(address: str) -> str | None:
    """The network interface that has `address`; None where it cannot be found out."""
    if is_loopback(address):
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if sys.platform != "linux":
        return None
    try:
        wanted = ipaddress.ip_address(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except (ValueError, OSError):
        return None
    if wanted.version == 6:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
                fields = line.split()
                if ipaddress.ip_address(bytes.fromhex(fields[0])) == wanted:
                    return fields[5]
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(handle.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == str(wanted):
                    return name
    return None
