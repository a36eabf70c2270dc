"""Clients of the store over which the members of one forming find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from etha.errors import GroupError


def create_store_client(store_addr: str, timeout: timedelta) -> Any:
    """A client of a TCPStore by its address ``host:port/prefix``; the host may be an IPv6 address, in brackets or not.

    ``timeout`` holds for the connection and for each wait. Raises `GroupError` if the address is malformed.
    """
    place, _, prefix = store_addr.partition("/")
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        raise GroupError(f"{store_addr!r} is no address of a store: it must be host:port/prefix")
    store = TCPStore(
        host_name=host,
        port=int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timeout,
    )
    return PrefixStore(prefix, store)
