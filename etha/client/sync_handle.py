"""BatchHandle: an open batch of the blocking client."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from etha.client.future import TransferFuture
from etha.client.handle import BatchHandle as AsyncBatchHandle
from etha.client.options import OnCommit, OnProgress, Options
from etha.client.report import OnError
from etha.client.results import Offer, TransferResult, Version

if TYPE_CHECKING:
    from etha.client.sync import TensorBusClient


class BatchHandle:
    """A registered batch; ``with`` closes it. Returned by ``register_tensors``."""

    def __init__(self, client: TensorBusClient, inner: AsyncBatchHandle) -> None:
        self._client, self._inner = client, inner

    @property
    def batch_id(self) -> str:
        """The batch's name."""
        return self._inner.batch_id

    @property
    def plan(self) -> dict[str, Any]:
        """The plan in short: tensors, and per possible direction its bytes and digest."""
        return self._inner.plan

    @property
    def version(self) -> Version:
        """The label of the last transfer that this worker sent or received: what the tensors hold."""
        return self._inner.version

    @property
    def atomic(self) -> bool:
        """Whether receivers keep the old version until commit."""
        return self._inner.atomic

    @overload
    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: Literal[True] = True,
        snapshot: Literal[False] = False,
        **options: Unpack[Options],
    ) -> TransferResult: ...

    @overload
    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: Literal[False],
        snapshot: bool = False,
        **options: Unpack[Options],
    ) -> TransferFuture: ...

    @overload
    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: bool = True,
        snapshot: Literal[True],
        **options: Unpack[Options],
    ) -> TransferFuture: ...

    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: bool = True,
        version: Version = None,
        on_commit: OnCommit | None = None,
        timeout: float | None = None,
        progress: OnProgress | None = None,
        on_error: OnError | None = None,
        snapshot: bool = False,
    ) -> TransferResult | TransferFuture:
        """Move this batch once; see ``TensorBusClient.transfer``."""
        return self._client._move(
            self._inner,
            transfer_type,
            blocking,
            {
                "version": version,
                "on_commit": on_commit,
                "timeout": timeout,
                "progress": progress,
                "on_error": on_error,
            },
            snapshot,
        )

    def wait_offer(self, *, timeout: float | None = None) -> Offer:
        """Wait until the other side waits to send this batch."""
        return self._client._run(self._inner.wait_offer(timeout=timeout))

    def close(self) -> None:
        """Be done with the batch; local and idempotent. Its id is free once all ranks have closed."""
        self._client._run_closing(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
