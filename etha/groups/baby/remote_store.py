"""A torch store that is asked over a socket, and the thread of the trainer that answers by the real one."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

from etha.groups.baby.messages import AskStore, StoreReply, only, receive, send
from etha.groups.store_client import SimpleStore, as_bytes


class RemoteStore(SimpleStore):
    """The trainer's store, in the child."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        super().__init__(seconds)
        self._connection, self._lock = connection, threading.Lock()

    def _ask(self, operation: str, *keys: str, **more: Any) -> StoreReply:
        with self._lock:
            send(self._connection, AskStore(operation=operation, keys=keys, **more))
            reply: StoreReply = only(receive(self._connection), StoreReply)
        if reply.error is not None:
            raise RuntimeError(reply.error)
        return reply

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, values=(as_bytes(value),))

    def get(self, key: str) -> bytes:
        return self._ask("get", key, seconds=self._seconds).values[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", *keys, seconds=self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount=amount).number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask("compare_set", key, values=(as_bytes(expected), as_bytes(desired))).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key).number)


def serve_store(connection: socket.socket, store: Any) -> None:
    """Answer a child's store until the child is gone. Runs on a thread of its own, because a store may block."""
    with connection:
        while True:
            try:
                got = receive(connection)
                if got is None:
                    return
                send(connection, _answer(store, only(got, AskStore)))
            except OSError:
                return


def _answer(store: Any, asked: AskStore) -> StoreReply:
    try:
        return _perform(store, asked)
    except Exception as error:
        return StoreReply(error=str(error)[:1000])


def _perform(store: Any, asked: AskStore) -> StoreReply:
    keys = list(asked.keys)
    match asked.operation:
        case "set":
            store.set(keys[0], asked.values[0])
        case "get" | "wait":
            store.wait(keys, timedelta(seconds=asked.seconds or 1.0))
            return StoreReply(values=() if asked.operation == "wait" else (as_bytes(store.get(keys[0])),))
        case "check":
            return StoreReply(number=int(store.check(keys)))
        case "add":
            return StoreReply(number=int(store.add(keys[0], asked.amount)))
        case "compare_set":
            expected, desired = (value.decode() for value in asked.values)
            return StoreReply(values=(as_bytes(store.compare_set(keys[0], expected, desired)),))
        case "delete_key":
            return StoreReply(number=int(store.delete_key(keys[0])))
        case _:
            return StoreReply(error=f"a store has no {asked.operation}")
    return StoreReply()
