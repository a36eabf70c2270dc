"""A formed pair as blocking code sees it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from etha.client.results import Lost as AsyncLost
from etha.client.results import Pair as AsyncPair
from etha.errors import EthaError


class Lost:
    """Set once a pair's epoch is over; as ``threading.Event``, with a ``reason``."""

    def __init__(self, inner: AsyncLost, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._inner, self._run = inner, run

    @property
    def reason(self) -> str | None:
        """ "relaunched", "closed" or "died"; None while the epoch stands."""
        return self._inner.reason if self._inner.is_set() else None

    def is_set(self) -> bool:
        """Whether the epoch is over."""
        return self._inner.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is, at most ``timeout`` seconds; tells whether it is."""
        self._inner.check_process()
        return bool(self._run(self._inner.heard(timeout)))


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Pair:
    """A formed pair. ``epoch`` counts its formings from 1; ``lost`` tells when to form it again."""

    name: str
    local_name: str
    remote_name: str
    local_world_size: int
    remote_world_size: int
    epoch: int
    lost: Lost
    _inner: AsyncPair = field(compare=False, repr=False)

    @property
    def errored(self) -> EthaError | None:
        """The first error since ``init_pair`` has returned, of a transfer or the loss of the pair; None: there is none.

        With ``on_error="report"`` transfers are skipped while there is one.
        """
        return self._inner.errored
