"""BatchHandle: an open batch of the async client."""

from __future__ import annotations

from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from etha.client.future import TransferFuture
from etha.client.memory.base import Mark
from etha.client.options import OnCommit, OnProgress, Options
from etha.client.report import OnError
from etha.client.results import Offer, TransferResult, Version

if TYPE_CHECKING:
    from etha.client.aio import AsyncTensorBusClient
    from etha.client.batch import Registration


class BatchHandle:
    """A registered batch; ``async with`` closes it. Returned by ``register_tensors``."""

    def __init__(self, client: AsyncTensorBusClient, registration: Registration) -> None:
        self._client, self._registration = client, registration

    @property
    def batch_id(self) -> str:
        """The batch's name."""
        return self._registration.batch

    @property
    def plan(self) -> dict[str, Any]:
        """The plan in short: tensors, and per possible direction its bytes and digest."""
        return self._registration.plan

    @property
    def version(self) -> Version:
        """The label of the last transfer that this worker sent or received: what the tensors hold."""
        return self._registration.version

    @property
    def atomic(self) -> bool:
        """Whether receivers keep the old version until commit."""
        return self._registration.atomic

    @overload
    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        snapshot: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Coroutine[Any, Any, TransferResult]: ...

    @overload
    def transfer(
        self, transfer_type: Literal["send", "recv"], *, snapshot: Literal[True], **options: Unpack[Options]
    ) -> Coroutine[Any, Any, TransferFuture]: ...

    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        version: Version = None,
        on_commit: OnCommit | None = None,
        timeout: float | None = None,
        progress: OnProgress | None = None,
        on_error: OnError | None = None,
        snapshot: bool = False,
    ) -> Coroutine[Any, Any, Any]:
        """Move this batch once; see ``AsyncTensorBusClient.transfer``."""
        return self._client.transfer_of(
            self._registration,
            transfer_type,
            version=version,
            on_commit=on_commit,
            timeout=timeout,
            progress=progress,
            on_error=on_error,
            snapshot=snapshot,
        )

    def mark(self) -> Mark:
        """What the calling thread has queued on this batch's device by now."""
        return self._client.mark_of(self._registration)

    def transfer_after(
        self, mark: Mark, transfer_type: Literal["send", "recv"], *, snapshot: bool = False, **options: Unpack[Options]
    ) -> Coroutine[Any, Any, Any]:
        """As ``transfer``, of another thread, whose device work by ``mark`` comes first."""
        return self._client.transfer_of(self._registration, transfer_type, snapshot=snapshot, mark=mark, **options)

    async def wait_offer(self, *, timeout: float | None = None) -> Offer:
        """Wait until the other side waits to send this batch."""
        return await self._client.wait_offer_of(self._registration, timeout=timeout)

    async def close(self) -> None:
        """Be done with the batch; local and idempotent. Its id is free once all ranks have closed."""
        await self._client.close_batch(self._registration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
