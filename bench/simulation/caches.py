"""Gives each agent the caches that it has as a process of its own.

Etha keeps some results of pure functions in caches of its modules (``functools.lru_cache``). In one process the first
agent would fill them for all others, and these would seem to compute nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from simulation.virtual_time import Actor, VirtualLoop

#: Packages whose caches belong to an agent. Others hold what is built or read once for a whole machine.
_PACKAGES = ("etha.agent", "etha.bus", "etha.peer", "etha.plan", "etha.store", "etha.transport")


@contextlib.contextmanager
def own_caches(loop: VirtualLoop) -> Iterator[None]:
    """In this context, each actor has its own caches. Modules that are imported later share theirs."""
    replaced: list[tuple[Any, str, Any]] = []
    made: dict[int, Callable[..., Any]] = {}

    def own(cached: Any) -> Callable[..., Any]:
        if id(cached) not in made:
            made[id(cached)] = _own(loop, cached)
        return made[id(cached)]

    def replace(holder: Any, name: str, found: Any) -> None:
        if isinstance(found, functools._lru_cache_wrapper):
            replaced.append((holder, name, found))
            setattr(holder, name, own(found))
        elif isinstance(found, classmethod | staticmethod) and isinstance(found.__func__, functools._lru_cache_wrapper):
            replaced.append((holder, name, found))
            setattr(holder, name, type(found)(own(found.__func__)))

    for module_name, module in list(sys.modules.items()):
        if not f"{module_name}.".startswith(tuple(f"{package}." for package in _PACKAGES)):
            continue
        for name, found in list(vars(module).items()):
            replace(module, name, found)
            if isinstance(found, type) and found.__module__ == module_name:
                for attribute, value in list(vars(found).items()):
                    replace(found, attribute, value)
    try:
        yield
    finally:
        for holder, name, found in replaced:
            setattr(holder, name, found)


def _own(loop: VirtualLoop, cached: Any) -> Callable[..., Any]:
    """``cached`` with a cache for each actor."""
    caches: dict[Actor, Callable[..., Any]] = {}
    most = cached.cache_parameters()["maxsize"]

    @functools.wraps(cached.__wrapped__)
    def call(*args: Any, **kwargs: Any) -> Any:
        actor = loop.actor
        cache = caches.get(actor)
        if cache is None:
            cache = caches[actor] = functools.lru_cache(maxsize=most)(cached.__wrapped__)
        return cache(*args, **kwargs)

    return call
