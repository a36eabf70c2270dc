"""Stores over which the members of one forming find each other: a client of torch's, and the base of Etha's own."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from etha.errors import GroupError, GroupTimeoutError


def create_store_client(store_addr: str, timeout: timedelta) -> Any:
    """A client of a TCPStore by its address ``host:port/prefix``; the host may be an IPv6 address, in brackets or not.

    ``timeout`` holds for the connection and for each wait. Raises `GroupError` if the address is malformed, and
    `GroupTimeoutError` if nobody serves a store there.
    """
    place, _, prefix = store_addr.partition("/")
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        raise GroupError(f"{store_addr!r} is no address of a store: it must be host:port/prefix")
    try:
        store = TCPStore(
            host_name=host,
            port=int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
    except RuntimeError as error:
        text = str(error).partition("\nException raised from")[0]
        raise GroupTimeoutError(
            f"the store at {place} does not answer ({text}): is the process that serves it alive?"
        ) from error
    return PrefixStore(prefix, store)


class MeetingPlace:
    """A TCPStore that this process serves so that members can be named by handles, as torch 2.15's reconfigure does.

    ``handle``: TOKEN@HOST:PORT, unlike any other process's.
    """

    def __init__(self) -> None:
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        try:
            host = socket.gethostbyname(os.uname().nodename)
        except OSError:  # a container whose name nobody resolves is reached by nobody else
            host = "127.0.0.1"
        self.handle = f"{secrets.token_hex(8)}@{host}:{self._store.port}"

    @staticmethod
    def address(handle: str) -> str:
        """HOST:PORT of a handle. GroupError if it is none."""
        token, _, place = handle.partition("@")
        if not token or not place.rpartition(":")[2].isdecimal():
            raise GroupError(f"{handle!r} is no handle of get_reconfigure_handle()")
        return place


class SimpleStore(Store):
    """Base of a torch Store in Python: a timeout of ``_seconds``, and none of torch's extensions."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> Any:
        return self

    def present(self, keys: list[str]) -> dict[str, bytes]:
        """The values of those keys that have one."""
        if self.check(keys):
            return {key: bytes(self.get(key)) for key in keys}
        return {key: bytes(self.get(key)) for key in keys if self.check([key])}

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()


class PolledStore(SimpleStore):
    """A store of torch whose waits are looks, so that they can be ended and keep nobody else waiting.

    A wait inside a TCPStore lasts until its timeout, blocks all who use the same client meanwhile, and aborts the
    process if the interpreter ends before. ``check_end`` raises once nobody needs the answer any more.
    """

    def __init__(self, store: Any, seconds: float, check_end: Callable[[], None]) -> None:
        super().__init__(seconds)
        self._store, self._check_end = store, check_end

    @property
    def underlying_store(self) -> Any:
        """The store that is asked."""
        return self._store

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        begun = time.monotonic()
        while not self._store.check(keys):
            self._check_end()
            waited = time.monotonic() - begun
            if waited >= seconds:
                raise TimeoutError(f"wait timeout after {seconds:g} s for the keys {', '.join(keys)} of the store")
            # A twentieth of the wait at most is lost by that, and a thousand ranks do not keep the store busy.
            time.sleep(min(0.1, max(0.0002, waited / 20)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))


def ended_by(store: Any, seconds: float, check_end: Callable[[], None]) -> SimpleStore:
    """The store as one whose waits end once ``check_end`` raises: Etha's own do so by themselves."""
    return store if isinstance(store, SimpleStore) else PolledStore(store, seconds, check_end)


def as_bytes(value: Any) -> bytes:
    """A value as stores keep it: text, bytes, or a list of numbers, as torch's C++ gives it."""
    return value.encode() if isinstance(value, str) else bytes(value)
