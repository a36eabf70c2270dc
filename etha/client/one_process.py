"""What all objects of a client have in common: they belong to the process that made the client."""

from __future__ import annotations

from typing import NoReturn


class OfOneProcess:
    """An object that no other process can use, because the client's connection, threads and event loop stay behind."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: make a client in the process that uses it")
