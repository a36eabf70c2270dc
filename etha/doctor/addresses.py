"""Addresses of this host, as the kernel lists them."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from etha.addresses import is_loopback

_SIOCGIFCONF = 0x8912
#: struct ifreq of 64-bit Linux: a name of 16 bytes, then a sockaddr (family, port, IPv4 address) in 24.
_IFREQ = 40
_MOST = 256
_INET6 = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A numeric address of an interface of this host."""

    host: str
    interface: str

    def __str__(self) -> str:
        return f"{self.host} ({self.interface})"


def own_addresses() -> list[Address]:
    """The addresses of this network namespace by which others can reach it: no loopback, no link-local ones."""
    return [
        a for a in (*_ipv4(), *_ipv6()) if not is_loopback(a.host) and not ipaddress.ip_address(a.host).is_link_local
    ]


def _ipv4() -> list[Address]:
    buffer = ctypes.create_string_buffer(_MOST * _IFREQ)
    request = bytearray(struct.pack("iP", len(buffer), ctypes.addressof(buffer)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCGIFCONF, request)
    (size, _) = struct.unpack("iP", request)
    found = []
    for at in range(0, size, _IFREQ):
        entry = buffer.raw[at : at + _IFREQ]
        name = entry[:16].partition(b"\0")[0].decode(errors="replace")
        found.append(Address(host=socket.inet_ntop(socket.AF_INET, entry[20:24]), interface=name))
    return found


def _ipv6() -> list[Address]:
    if not _INET6.exists():
        return []  # a kernel without IPv6
    rows = [line.split() for line in _INET6.read_text().splitlines()]
    return [
        Address(host=socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])), interface=row[5])
        for row in rows
        if row[3] == _GLOBAL_SCOPE
    ]


def split_address(text: str) -> tuple[str, int]:
    """HOST:PORT or [IPv6]:PORT as (host, port). ValueError for anything else."""
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int | str) -> str:
    """The inverse of ``split_address``. ``port`` may be a placeholder."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
