"""Where the members of other hosts reach a member: the address on which it listens while its group is configured."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from etha.addresses import Advertised, parse_address
from etha.config import Settings
from etha.errors import GroupError


def listen(store: Any, backlog: int) -> tuple[socket.socket, str, int]:
    """A socket that listens on a free port, and the host and port by which others reach it.

    The address is that of ``ETHA_LISTEN``; without it that from which this host reaches the store, or Redis.
    ``ETHA_ADVERTISE`` says under which other address that host is known; its ports are those of the agent. GroupError
    if data must be encrypted (``ETHA_ENCRYPT``), which groups cannot do, or if the address is not this host's.
    """
    settings = Settings.from_env()
    if settings.encrypt:
        raise GroupError(
            "ETHA_ENCRYPT=1, but process groups between hosts do not encrypt: give all members one host, or unset it "
            "where the network is trusted"
        )
    if settings.listen is not None:
        bound, asked = parse_address(settings.listen, what="ETHA_LISTEN=")[0], f" (ETHA_LISTEN={settings.listen})"
    else:
        bound, asked = _route_to(*_place(store, settings)), ""
    try:
        family, kind, number, _name, place = socket.getaddrinfo(bound, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.bind(place)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise GroupError(f"cannot listen on {bound}{asked} for members of other hosts: {error}") from None
    host, port = listener.getsockname()[:2]
    if settings.advertise is not None:
        host = parse_address(Advertised.parse(settings.advertise).address)[0]
    elif ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        listener.close()
        raise GroupError(
            f"ETHA_LISTEN={settings.listen} names no one address: give the one of this host, or ETHA_ADVERTISE"
        )
    return listener, host, port


def _place(store: Any, settings: Settings) -> tuple[str, int]:
    """Host and port of what all members reach: the TCPStore, else Redis; the loopback if Redis is on this host."""
    url = settings.redis_url
    while store is not None:
        host, port = getattr(store, "host", None), getattr(store, "port", None)
        if isinstance(host, str) and isinstance(port, int):
            return host, port
        url = getattr(store, "redis_url", None) or url
        store = getattr(store, "underlying_store", None)
    parts = urlsplit((url or "").partition(",")[0])
    return (parts.hostname, parts.port or 6379) if parts.hostname else ("127.0.0.1", 6379)


def _route_to(host: str, port: int) -> str:
    """The address from which this host sends to that one. Nothing is sent."""
    try:
        family, _kind, _number, _name, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(place)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise GroupError(
            f"no way from this host to {host}, where all members meet: {error}; ETHA_LISTEN=HOST:0 names the address "
            f"by which other hosts reach this one"
        ) from None
