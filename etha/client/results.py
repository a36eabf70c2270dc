"""What the calls of a client return."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

Version = int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """One committed transfer as this worker saw it.

    ``bytes``: its payload at the wire dtype, local copies included; ``seconds``: GO to COMMIT; ``peers``:
    sorted (side, rank); ``peak_staging``: bytes of staging that its agent used at most.
    """

    seq: int
    version: Version
    bytes: int
    seconds: float
    direction: Literal["send", "recv"]
    peers: tuple[tuple[str, int], ...]
    peak_staging: int

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second of this worker's payload."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The other side is waiting to send ``bytes`` (whole batch, all targets) under ``version``."""

    version: Version
    bytes: int


class Lost:
    """Set once a pair's epoch is over: ``await pair.lost`` returns the reason, ``is_set()`` asks.

    ``reason`` is "relaunched", "closed" or "died" (see PeerLostError), None while the epoch stands.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason: str | None = None
        self.text = ""

    def is_set(self) -> bool:
        """Whether the epoch is over."""
        return self._event.is_set()

    async def wait(self) -> str:
        """Wait until it is; returns the reason."""
        await self._event.wait()
        assert self.reason is not None
        return self.reason

    def __await__(self) -> Generator[Any, None, str]:
        return self.wait().__await__()

    def set(self, reason: str, text: str) -> None:
        """The epoch is over; the first reason stays."""
        if self.reason is None:
            self.reason, self.text = reason, text
            self._event.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A formed pair. ``epoch`` counts its formings from 1; ``lost`` tells when to form it again."""

    name: str
    local_name: str
    remote_name: str
    local_world_size: int
    remote_world_size: int
    epoch: int
    lost: Lost = field(default_factory=Lost, compare=False, repr=False)
