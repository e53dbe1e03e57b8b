"""Which address of this machine a node's processes listen on, and which interface has it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError

_SIOCGIFADDR = 0x8915


def resolve_address(config: Config) -> Config:
    """The configuration with placement.host set, where the run has several nodes.

    The head listens on master_addr, which must be an address of this machine that others reach; another node on the address
    from which it reaches the head. Raises ConfigError where there is none.
    """
    placement = config.placement
    if placement.nnodes == 1 or placement.host is not None:
        return config
    if placement.master_addr is None:
        raise ConfigError(
            "placement.master_addr: needed where there are several nodes; set it to the head's address, on all of them"
        )
    head = _resolve(placement.master_addr)
    host = head if placement.node_rank == 0 else _address_towards(head, placement.rendezvous_port)
    if is_loopback(host) and not is_loopback(placement.master_addr):
        raise ConfigError(
            f"placement.master_addr: {placement.master_addr} is {host} here, which other nodes cannot reach; give the head's "
            f"address as a number, or this node's in placement.host"
        )
    return config.model_copy(update={"placement": placement.model_copy(update={"host": host})})


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
        wanted = ipaddress.ip_address(_resolve(address))
    except (ValueError, ConfigError):
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


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"placement.master_addr: {host} cannot be resolved ({error.strerror}); give the head's address as a number"
        ) from None


def _address_towards(host: str, port: int) -> str:
    """The local address of a connection to `host`; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as handle:
        try:
            handle.connect((host, port))
        except OSError as error:
            raise ConfigError(
                f"placement.master_addr: no way to {host} from here ({error.strerror}); correct it, or the routes of this node"
            ) from None
        return str(handle.getsockname()[0])
