"""TensorBusClient: the blocking facade over AsyncTensorBusClient, for training loops.

Every call runs the coroutine of the same name on the process's loop thread. ``progress`` runs there, too; a plain
``on_commit`` runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from etha.bus.process import check_not_forked
from etha.client.active_calls import in_callback
from etha.client.aio import AsyncBatchHandle, AsyncTensorBusClient
from etha.client.arguments.checks import check_flag
from etha.client.future import TransferFuture
from etha.client.loop_thread import LoopMembership, LoopThread, in_own_thread, quick_switches
from etha.client.manifest import Runs
from etha.client.memory.base import Mark
from etha.client.publishing import Publication, Run, Subscription
from etha.client.results import (
    AsyncLossEvent,
    AsyncPair,
    Offer,
    OfOneProcess,
    OnCommit,
    OnError,
    OnProgress,
    TransferOptions,
    TransferResult,
    Version,
)
from etha.errors import AgentLostError, ConfigError, EthaError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

T = TypeVar("T")


class TensorBusClient(OfOneProcess):
    """A worker's client for blocking code. Its constructor and methods are those of AsyncTensorBusClient.

    ``agent``: address of a running agent (default: $ETHA_AGENT, else the device's). ``device``: the device whose agent
    is used (default: the current CUDA device, else the CPU). ``redis_url``, ``namespace``: default from the
    environment. ``autostart``: start an agent if none listens. ``timeout``: default deadline of every call, in seconds.
    ``on_error``: "report" returns failed transfers as results.

    Calls raise ConfigError inside a running event loop; use AsyncTensorBusClient there.
    """

    #: The class behind the facade.
    _inner: type[AsyncTensorBusClient] = AsyncTensorBusClient

    def __init__(
        self,
        agent: str | None = None,
        *,
        device: torch.device | str | None = None,
        redis_url: str | None = None,
        namespace: str | None = None,
        autostart: bool = True,
        timeout: float = 30.0,
        on_error: OnError = "raise",
    ) -> None:
        """See the class. Nothing is started or asked yet; ConfigError for arguments that cannot be."""
        self._aio = self._inner(
            agent,
            device=device,
            redis_url=redis_url,
            namespace=namespace,
            autostart=autostart,
            timeout=timeout,
            on_error=on_error,
        )
        self._pid = os.getpid()
        self._membership: LoopMembership | None = None
        #: A pair that somebody holds keeps this client alive through its ``lost``, but not the other way round.
        self._pairs: WeakValueDictionary[str, Pair] = WeakValueDictionary()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def init_pair(
        self,
        pair_name: str,
        local_name: str,
        remote_name: str,
        expected_world_size: int | None = None,
        device_mesh: DeviceMesh | torch.Tensor | tuple[int, ...] | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        rank: int | None = None,
        ranks: Mapping[int, int] | None = None,
        takeover: bool | None = None,
        give_up: bool = False,
        timeout: float | None = None,
    ) -> Pair:
        """Meet the other side; see ``AsyncTensorBusClient.init_pair``."""
        inner: AsyncPair = self._run(
            self._aio.init_pair(
                pair_name,
                local_name,
                remote_name,
                expected_world_size,
                device_mesh,
                placements,
                rank=rank,
                ranks=ranks,
                takeover=takeover,
                give_up=give_up,
                timeout=timeout,
            )
        )
        known = self._pairs.get(pair_name)
        if known is None or known._inner is not inner:
            known = self._pairs[pair_name] = Pair(
                name=inner.name,
                local_name=inner.local_name,
                remote_name=inner.remote_name,
                local_world_size=inner.local_world_size,
                remote_world_size=inner.remote_world_size,
                epoch=inner.epoch,
                lost=LossEvent(inner.lost, self._run),
                _inner=inner,
            )
        return known

    def register_tensors(
        self,
        batch_id: str,
        tensors: Sequence[tuple[torch.Tensor, str]] | Mapping[str, torch.Tensor],
        *,
        pair_name: str | None = None,
        placements: Mapping[str, Sequence[Placement]] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        regions: Mapping[str, Runs] | None = None,
        direction: Literal["send", "recv", "both"] | None = None,
        bucket_size: int | None = None,
        atomic: bool | Literal["swap"] = False,
        verify: Literal["sample", "full"] | None = None,
        timeout: float | None = None,
    ) -> BatchHandle:
        """Name the tensors that move together; see ``AsyncTensorBusClient.register_tensors``."""
        inner = self._run(
            self._aio.register_tensors(
                batch_id,
                tensors,
                pair_name=pair_name,
                placements=placements,
                shapes=shapes,
                regions=regions,
                direction=direction,
                bucket_size=bucket_size,
                atomic=atomic,
                verify=verify,
                timeout=timeout,
            )
        )
        return BatchHandle(self, inner)

    @overload
    def transfer(
        self,
        batch_id: str,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: Literal[True] = True,
        snapshot: Literal[False] = False,
        **options: Unpack[TransferOptions],
    ) -> TransferResult: ...

    @overload
    def transfer(
        self,
        batch_id: str,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: Literal[False],
        snapshot: bool = False,
        **options: Unpack[TransferOptions],
    ) -> TransferFuture: ...

    @overload
    def transfer(
        self,
        batch_id: str,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: bool = True,
        snapshot: Literal[True],
        **options: Unpack[TransferOptions],
    ) -> TransferFuture: ...

    def transfer(
        self,
        batch_id: str,
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
        """Move the batch once; see ``AsyncTensorBusClient.transfer``.

        While it blocks, the interpreter's switch interval is at most 0.5 ms, so that busy threads hold it up less.

        Returns a TransferFuture if ``blocking=False``. With ``snapshot=True`` it returns one once the tensors are
        copied.
        """
        inner = self._aio.handle_of(batch_id)
        return self._move(
            inner,
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

    def wait_offer(self, batch_id: str, *, timeout: float | None = None) -> Offer:
        """Wait until the other side waits to send; returns at once if it does already."""
        return self._run(self._aio.wait_offer(batch_id, timeout=timeout))

    def publish(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        publisher: str = "trainer",
        expected_world_size: int | None = None,
        device_mesh: DeviceMesh | torch.Tensor | tuple[int, ...] | None = None,
        placements: Mapping[str, Sequence[Placement]] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        regions: Mapping[str, Runs] | None = None,
        slots: int = 2,
        fan_out: int | None = None,
        max_rate: float | None = None,
        rank: int | None = None,
        ranks: Mapping[int, int] | None = None,
        timeout: float | None = None,
    ) -> Publication:
        """Publish versions of ``tensors`` to any number of subscribers; see ``AsyncTensorBusClient.publish``."""
        inner = self._run(
            self._aio.publish(
                name,
                tensors,
                publisher=publisher,
                expected_world_size=expected_world_size,
                device_mesh=device_mesh,
                placements=placements,
                shapes=shapes,
                regions=regions,
                slots=slots,
                fan_out=fan_out,
                max_rate=max_rate,
                rank=rank,
                ranks=ranks,
                timeout=timeout,
            )
        )
        return Publication(inner, self._run, self._run_closing)

    def describe_publication(self, name: str, *, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a publication by name, on "meta"; see ``AsyncTensorBusClient.describe_publication``."""
        return self._run(self._aio.describe_publication(name, timeout=timeout))

    def subscribe(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        subscriber: str,
        expected_world_size: int | None = None,
        device_mesh: DeviceMesh | torch.Tensor | tuple[int, ...] | None = None,
        placements: Mapping[str, Sequence[Placement]] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        regions: Mapping[str, Runs] | None = None,
        atomic: bool = False,
        serve: bool = True,
        rank: int | None = None,
        ranks: Mapping[int, int] | None = None,
        timeout: float | None = None,
    ) -> Subscription:
        """Follow a publication; see ``AsyncTensorBusClient.subscribe``."""
        inner = self._run(
            self._aio.subscribe(
                name,
                tensors,
                subscriber=subscriber,
                expected_world_size=expected_world_size,
                device_mesh=device_mesh,
                placements=placements,
                shapes=shapes,
                regions=regions,
                atomic=atomic,
                serve=serve,
                rank=rank,
                ranks=ranks,
                timeout=timeout,
            )
        )
        return Subscription(inner, self._run, self._run_closing)

    def facade(self) -> tuple[AsyncTensorBusClient, Run, Run]:
        """Not for users. What another blocking facade needs: the async client, and how to run coroutines on its loop,
        the second one for those that are not needed if the client is closed already."""
        return self._aio, self._run, self._run_closing

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """This agent's pairs, batches and transfers, as ``etha status --json`` prints them."""
        return self._run(self._aio.status(timeout=timeout))

    def close(self) -> None:
        """Leave all pairs, batches and the agent; see ``AsyncTensorBusClient.close``. Idempotent.

        If ``progress`` or a done callback calls it, on the loop's thread, it only begins to close.
        """
        self._closed = True
        membership = self._membership
        if membership is None or os.getpid() != self._pid:
            return
        if membership.loop_thread.is_mine:
            membership.loop_thread.spawn(self._close_behind(membership))
            return
        inside = in_callback()
        try:
            with suppress(AgentLostError):  # the thread has ended
                membership.loop_thread.call(self._aio.close())
        finally:
            self._membership = None
            membership.leave(wait=not inside)

    # ---- inside -------------------------------------------------------------------------------

    async def _close_behind(self, membership: LoopMembership) -> None:
        try:
            await self._aio.close()
        finally:
            self._membership = None
            membership.leave(wait=False)

    def _enter(self) -> LoopThread:
        check_not_forked(self._pid)
        if self._closed:
            raise ConfigError("this client is closed: create another")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigError(
                "TensorBusClient blocks and this is a running event loop: use AsyncTensorBusClient and await its calls"
            )
        if self._membership is None:
            self._membership = LoopMembership(self)
        return self._membership.loop_thread

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            entered = self._enter()
        except BaseException:
            work.close()
            raise
        return entered.call(work)

    def _run_closing(self, work: Coroutine[Any, Any, None]) -> None:
        """``_run`` for work that is not needed if the client is closed already."""
        if self._closed or os.getpid() != self._pid:
            work.close()
        else:
            self._run(work)

    def _move(
        self,
        inner: AsyncBatchHandle,
        verb: Literal["send", "recv"],
        blocking: bool,
        options: TransferOptions,
        snapshot: bool,
    ) -> TransferResult | TransferFuture:
        check_flag("blocking", blocking)
        if callable(on_commit := options.get("on_commit")):  # anything else is refused below
            options["on_commit"] = in_own_thread(on_commit)
        # On this thread, because the transfer comes after the work of the caller's current stream.
        mark = Mark() if self._closed else inner.mark()
        if blocking and not snapshot and not self._closed:
            entered = self._enter()
            with quick_switches():
                found = inner.direct_transfer(mark, verb, entered.call, options)
            if found is not None:
                return found
        work = inner.transfer_after(mark, verb, snapshot=snapshot, blocks=blocking and not snapshot, **options)
        if snapshot or blocking:
            try:
                with quick_switches():
                    result: TransferResult | TransferFuture = self._run(work)
                return result
            except BaseException:
                mark.lent.leave()
                raise
        try:
            entered = self._enter()
        except BaseException:
            work.close()
            raise
        return entered.submit(work)


class BatchHandle(OfOneProcess):
    """A registered batch; ``with`` closes it. Returned by ``register_tensors``."""

    def __init__(self, client: TensorBusClient, inner: AsyncBatchHandle) -> None:
        self._client, self._inner = client, inner

    @property
    def batch_id(self) -> str:
        """The batch's name."""
        return self._inner.batch_id

    @property
    def plan(self) -> dict[str, Any]:
        """A summary of the plan: tensors, and the bytes and digest of each possible direction."""
        return self._inner.plan

    @property
    def version(self) -> Version:
        """The label of the last transfer that this worker sent or received, which is the version that the tensors
        hold."""
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
        **options: Unpack[TransferOptions],
    ) -> TransferResult: ...

    @overload
    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: Literal[False],
        snapshot: bool = False,
        **options: Unpack[TransferOptions],
    ) -> TransferFuture: ...

    @overload
    def transfer(
        self,
        transfer_type: Literal["send", "recv"],
        *,
        blocking: bool = True,
        snapshot: Literal[True],
        **options: Unpack[TransferOptions],
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
        """Leave the batch; local and idempotent. Its id is free once all ranks have closed."""
        self._client._run_closing(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LossEvent(OfOneProcess):
    """Set once a pair's epoch is over. Like ``threading.Event``, with a ``reason``."""

    def __init__(self, inner: AsyncLossEvent, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._inner, self._run = inner, run

    @property
    def reason(self) -> str | None:
        """ "relaunched", "closed" or "died"; None while the epoch lasts."""
        return self._inner.reason if self._inner.is_set() else None

    def is_set(self) -> bool:
        """Whether the epoch is over."""
        return self._inner.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the epoch is over, at most ``timeout`` seconds; returns whether it is.

        ``close`` of the client ends the epoch for this worker, so after it this is True at once.
        """
        return self._inner.is_set() or bool(self._run(self._inner.heard(timeout)))


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Pair(OfOneProcess):
    """A formed pair. ``epoch`` counts how often it was formed, from 1. Form it again once ``lost`` is set."""

    name: str
    local_name: str
    remote_name: str
    local_world_size: int
    remote_world_size: int
    epoch: int
    lost: LossEvent
    _inner: AsyncPair = field(compare=False, repr=False)

    @property
    def errored(self) -> EthaError | None:
        """The first error since ``init_pair`` has returned, of a transfer or the loss of the pair; None if there is
        none.

        With ``on_error="report"`` transfers are skipped while there is one. A forked child receives no errors, so it
        gets ConfigError.
        """
        return self._inner.errored


def _tell_all() -> None:
    """Let ``help`` of a blocking call show what the call says to which it refers."""
    for name, call in vars(TensorBusClient).items():
        if f"``AsyncTensorBusClient.{name}``" in (getattr(call, "__doc__", None) or ""):
            call.__doc__ = f"{inspect.getdoc(call)}\n\n{inspect.getdoc(getattr(AsyncTensorBusClient, name))}"


_tell_all()
