"""Arguments and results of a client's calls. All of them belong to the process that made the client.

With ``on_error="report"`` a failed transfer is a result with an error, and the transfers after it are skipped. So a
training loop needs no error handling around each transfer: it continues, and forms the pair again at a convenient point
(``docs/recovery.md``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Self, TypedDict, cast

from etha.bus.process import check_not_forked
from etha.client.arguments.checks import shown
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError, PeerLostError, TransferError
from etha.phases import NO_PHASES, Phases

Version = int | str | None


class OfOneProcess:
    """An object that no other process can use, because the client's connection, threads and event loop stay behind."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: make a client in the process that uses it")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """One transfer as this worker saw it: committed, or failed if ``on_error="report"`` was asked for.

    ``bytes``: its payload at the wire dtype, including local copies. ``seconds``: from GO to COMMIT. ``peers``: sorted
    (side, rank). ``peak_staging``: most bytes of staging that its agent used. ``swapped``: bytes of its tensors that
    were put in place without a copy (``atomic="swap"``). ``phases``: the seconds of the whole call by phase.

    A failed one has an ``error``. ``skipped``: it was not tried, because of an earlier error of this pair, which is
    ``error``. A failed result counts nothing (``seq`` 0, ``version`` None, ``peers`` empty), but has the ``phases`` it
    reached.
    """

    seq: int
    version: Version
    bytes: int
    seconds: float
    direction: Literal["send", "recv"]
    peers: tuple[tuple[str, int], ...]
    peak_staging: int
    error: EthaError | None = None
    skipped: bool = False
    swapped: int = 0
    phases: Phases = NO_PHASES

    @classmethod
    def failed(cls, direction: Literal["send", "recv"], error: EthaError, *, skipped: bool = False) -> Self:
        """The result of a transfer that failed, or that was not tried because of an earlier ``error``."""
        return cls(
            seq=0,
            version=None,
            bytes=0,
            seconds=0.0,
            direction=direction,
            peers=(),
            peak_staging=0,
            error=error,
            skipped=skipped,
            phases=NO_PHASES if skipped else getattr(error, "phases", None) or NO_PHASES,
        )

    @property
    def ok(self) -> bool:
        """Whether it was committed: the tensors were sent, or hold what was received."""
        return self.error is None

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second of this worker's payload."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The other side waits to send ``bytes`` (whole batch, all targets) under ``version``."""

    version: Version
    bytes: int


class AsyncLossEvent(OfOneProcess):
    """Set once a pair's epoch is over: ``await pair.lost`` returns the reason, ``is_set()`` asks.

    ``reason`` is "relaunched", "closed" or "died" (see PeerLostError), None while the epoch lasts. It is "closed" once
    the own client is closed. A forked child receives no losses, so it gets ConfigError.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._pid = os.getpid()
        self.reason: str | None = None
        self.text = ""
        self.culprits: tuple[tuple[str, int], ...] = ()

    def check_process(self) -> None:
        """Raise ConfigError in a forked child."""
        check_not_forked(self._pid, "pair")

    def is_set(self) -> bool:
        """Whether the epoch is over."""
        self.check_process()
        return self._event.is_set()

    async def wait(self) -> str:
        """Wait until the epoch is over; returns the reason."""
        self.check_process()
        await self._event.wait()
        assert self.reason is not None
        return self.reason

    async def heard(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds until the epoch is over; returns whether it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        return self.is_set()

    def __await__(self) -> Generator[Any, None, str]:
        return self.wait().__await__()

    def set(self, reason: str, text: str, culprits: Sequence[tuple[str, int]] = ()) -> None:
        """Record that the epoch is over; the first reason stays."""
        if self.reason is None:
            self.reason, self.text, self.culprits = reason, text, tuple(culprits)
            self._event.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPair(OfOneProcess):
    """A formed pair. ``epoch`` counts how often it was formed, from 1. Form it again once ``lost`` is set."""

    name: str
    local_name: str
    remote_name: str
    local_world_size: int
    remote_world_size: int
    epoch: int
    lost: AsyncLossEvent = field(default_factory=AsyncLossEvent, compare=False, repr=False)
    _errors: list[EthaError] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def errored(self) -> EthaError | None:
        """The first error since ``init_pair`` has returned, of a transfer or the loss of the pair; None if there is
        none.

        With ``on_error="report"`` transfers are skipped while there is one. A forked child receives no errors, so it
        gets ConfigError.
        """
        self.lost.check_process()
        return self._errors[0] if self._errors else None

    def fail(self, error: EthaError) -> None:
        """Record a transfer's failure."""
        if not self._errors or (isinstance(error, PeerLostError) and len(self._errors) == 1):
            self._errors.append(error)

    @property
    def doomed(self) -> bool:
        """Whether a transfer has found a peer dead, and the news that the epoch is over has not arrived yet."""
        return not self.lost.is_set() and any(isinstance(error, PeerLostError) for error in self._errors)

    def lose(
        self, reason: str, text: str, error: EthaError | None = None, culprits: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Record that the epoch is over, because of ``culprits``. ``error``: its error, if that is not a
        PeerLostError."""
        if not self.lost.is_set():
            self.fail(error or PeerLostError(text, reason=reason, outcome="withdrawn", culprits=culprits))
            self.lost.set(reason, text, culprits)

    def stands(self) -> None:
        """``init_pair`` has found the pair formed: forget earlier errors."""
        self._errors.clear()


OnError = Literal["raise", "report"]

#: Errors that say how a transfer failed. All others are mistakes of the caller, which are always raised.
FAILURES = (TransferError, AgentLostError, AgentUnavailableError)


def check_on_error(value: Any) -> OnError:
    """``value`` itself; ConfigError if it is neither of the two."""
    if not isinstance(value, str) or value not in ("raise", "report"):
        raise ConfigError(f"on_error={shown(value)} must be 'raise' or 'report'")
    return cast(OnError, value)


async def reported(
    on_error: OnError,
    pairs: Sequence[AsyncPair],
    verb: Literal["send", "recv"],
    move: Callable[[], Awaitable[TransferResult]],
) -> TransferResult:
    """The result of ``move()`` or of its failure. Does not call it if one of the pairs has failed already."""
    if on_error == "report":
        for pair in pairs:
            if (earlier := pair.errored) is not None:
                return TransferResult.failed(verb, earlier, skipped=True)
    try:
        return await move()
    except FAILURES as error:
        kept = _bare(error)
        for pair in pairs:
            pair.fail(kept)
        if on_error == "raise":
            raise
    return TransferResult.failed(verb, kept)


def _bare(error: EthaError) -> EthaError:
    """The same error without its traceback, so that keeping it does not keep frames and the tensors in them."""
    bare = type(error)(error.message, **error.data())
    bare.remote_traceback = error.remote_traceback
    return bare


#: Called after COMMIT, before this worker's tensors change.
OnCommit = Callable[[], Awaitable[None] | None]
#: (bytes done, bytes total) of this worker.
OnProgress = Callable[[int, int], None]


class TransferOptions(TypedDict, total=False):
    """See ``AsyncTensorBusClient.transfer``."""

    version: Version
    on_commit: OnCommit | None
    timeout: float | None
    progress: OnProgress | None
    on_error: OnError | None
