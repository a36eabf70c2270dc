"""Delays calls until the GPU work that their callers queued before them is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from etha.agent.protocol.effects import CallKey
from etha.agent.runtime.device import GpuDevice
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.services.batch_state import RegisteredBatch
from etha.errors import EthaError, TransferError, TransferTimeoutError
from etha.transport.copy.device_memory import CardError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    batch: RegisteredBatch
    session: WorkerSession
    go: Callable[[], None]


class StreamOrder:
    """Holds each such call until its device has reached the call's mark. No other agent knows of it before. Loop thread
    only."""

    def __init__(self, card: GpuDevice | None, calls: OpenCalls) -> None:
        self._card, self._calls = card, calls
        self._held: dict[CallKey, _Held] = {}

    def pass_on(
        self, batch: RegisteredBatch, session: WorkerSession, key: CallKey, mark: bytes, go: Callable[[], None]
    ) -> None:
        """Call ``go`` now, or once the work before ``mark`` is done. RegistrationError for an invalid mark."""
        if not mark or self._card is None:
            return go()
        try:
            reached = self._card.reached(session, mark)
        except EthaError:
            batch.asks.pop(key, None)
            raise
        if reached:
            return go()
        self._held[key] = _Held(batch=batch, session=session, go=go)
        self._card.follow(session, mark, lambda why: self._reached(key, why))

    def end(self, key: CallKey, *, expired: bool) -> bool:
        """A call's deadline or cancellation. Returns whether it was held here; if so, it has its error."""
        held = self._take(key)
        if held is None:
            return False
        name = held.batch.name
        if expired:
            error: EthaError = TransferTimeoutError(
                f"batch {name!r}: the work that this worker had queued on its GPU before the call is not done yet",
                outcome="withdrawn",
            )
        else:
            error = TransferError(f"batch {name!r}: cancelled before the other side was asked", outcome="withdrawn")
        self._calls.fail(key, error)
        return True

    def leave(self, batch: RegisteredBatch, session: WorkerSession, error: TransferError) -> None:
        """A worker leaves a batch: its held calls end with an error."""
        self._drop([key for key, held in self._held.items() if held.batch is batch and held.session is session], error)

    def break_up(self, batch: RegisteredBatch, error: TransferError) -> None:
        """The batch is over."""
        self._drop([key for key, held in self._held.items() if held.batch is batch], error)

    def _drop(self, keys: Sequence[CallKey], error: TransferError) -> None:
        # No other agent knows of these calls.
        withdrawn = copy(error)
        withdrawn.outcome = "withdrawn"
        for key in keys:
            self._take(key)
            self._calls.fail(key, withdrawn)

    def failed(self, error: BaseException | None) -> None:
        """A transfer has failed here. If the GPU's context is lost, report that: nothing will work any more."""
        if self._card is not None and isinstance(error, CardError) and error.sticky:
            self._card.spoil(str(error))

    def _take(self, key: CallKey) -> _Held | None:
        held = self._held.pop(key, None)
        if held is not None:
            held.batch.asks.pop(key, None)
        return held

    def _reached(self, key: CallKey, why: str) -> None:
        held = self._held.get(key)
        if held is None:
            return
        if why:
            self._take(key)
            text = f"batch {held.batch.name!r}: this worker's GPU failed before the call: {why}"
            self._calls.fail(key, TransferError(text, outcome="withdrawn"))
            return
        del self._held[key]
        held.go()
