"""AsyncTensorBusClient: the client that a worker uses on its own event loop.

init_pair -> register_tensors -> transfer ... -> close

The blocking client is a facade over this one. The client talks to one agent and never to Redis.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack, overload
from weakref import WeakMethod, finalize

import torch
from torch.distributed.device_mesh import DeviceMesh

from etha.bus.messages import (
    Announced,
    BatchLost,
    ClaimLost,
    CloseBatch,
    Confirm,
    DescribePublication,
    GetStatus,
    InitPair,
    LeavePair,
    Moved,
    Offered,
    PairFormed,
    PairLost,
    PublicationDescribed,
    Status,
    WaitOffer,
)
from etha.bus.process import check_not_forked
from etha.client.active_calls import ActiveCall, ActiveCalls
from etha.client.arguments.checks import (
    check_flag,
    check_optional_text,
    check_timeout,
    shown,
)
from etha.client.arguments.world import RankInfo, check_takeover, device_of
from etha.client.connection import AgentConnection
from etha.client.direct import DirectTransfer
from etha.client.future import TransferFuture
from etha.client.manifest import PairDefaults, Runs, TensorManifest, build_manifest
from etha.client.memory.base import Mark, StagedTensors
from etha.client.memory.select import agent_of
from etha.client.publication import AsyncPublication, check_fan_out, check_max_rate, check_slots
from etha.client.registration import Registration, check_options, register
from etha.client.results import (
    AsyncPair,
    Offer,
    OfOneProcess,
    OnCommit,
    OnError,
    OnProgress,
    TransferOptions,
    TransferResult,
    Version,
    check_on_error,
    reported,
)
from etha.client.snapshot import send_snapshot
from etha.client.subscription import AsyncSubscription
from etha.client.tasks import Deadline, Shield, on_loop, reminded
from etha.client.transfer import check_call, finish_direct, transfer
from etha.config import CUDA_AGENT, LaunchEnv, Settings, check_name
from etha.errors import AgentLostError, ConfigError, EthaError, RegistrationError, with_again, with_note
from etha.memory.room import check_staging
from etha.observe import trace
from etha.observe.calls import spans_of_process, watched
from etha.plan.layouts.dtypes import from_name

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

#: Seconds within which the kernel reports a process's death.
_NEWS = 1.0
#: Seconds after which a call that waits for the other side says so in the log.
_REMIND = 30.0


class AsyncTensorBusClient(OfOneProcess):
    """A worker's client, for the event loop on which it is first used.

    ``agent``: address of a running agent (default: $ETHA_AGENT, else the device's). ``device``: the device whose agent
    is used (default: the current CUDA device, else the CPU). ``redis_url``, ``namespace``: default from the
    environment. ``autostart``: start an agent if none listens. ``timeout``: default deadline of every call, in seconds.
    ``on_error``: "report" returns failed transfers as results, and skips further transfers of the pair until
    ``init_pair`` has returned again.

    Raises ConfigError for bad arguments. It does not connect before the first call.
    """

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
        for what, text in (("agent", agent), ("redis_url", redis_url)):
            check_optional_text(what, text)
        settings = Settings.from_env()
        self._settings = (
            settings if namespace is None else replace(settings, namespace=check_name("namespace", namespace))
        )
        self._agent = agent or self._settings.agent
        settings.check_agent()
        self._redis_url = settings.redis_of(redis_url)
        wanted = device_of(device)
        if wanted.type == "cpu":
            check_staging(settings)
        #: The agent that is found or started, if no address is given.
        self._served = "" if self._agent is not None else agent_of(wanted)
        self._autostart = check_flag("autostart", autostart)
        self._timeout = check_timeout(timeout, "timeout")
        self._on_error = check_on_error(on_error)
        self._env = LaunchEnv.from_env()
        trace.start(settings, "worker", str(wanted))
        #: None if neither ETHA_TRACE is set nor OpenTelemetry used.
        self._spans = spans_of_process()
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Lock | None = None
        self._connection: AgentConnection | None = None
        self._pairs: dict[str, tuple[AsyncPair, PairDefaults]] = {}
        #: pair -> the newest loss of an epoch that ``init_pair`` has not returned yet. The agent's answer and the loss
        #: may be read together, before the task that waits for the answer runs.
        self._early_losses: dict[str, PairLost] = {}
        #: batch -> the newest end of a batch that ``register_tensors`` has not returned yet, for the same reason.
        self._early_ends: dict[str, BatchLost] = {}
        self._batches: dict[str, Registration] = {}
        #: batch -> highest seq seen; and the batches whose target may be half-written here. Both outlive handles.
        self._seqs: dict[str, int] = {}
        self._torn: set[str] = set()
        #: publication -> what this client follows.
        self._subscriptions: dict[str, AsyncSubscription] = {}
        #: Name of the agent of the GPU whose tensors this client publishes through the host; "" otherwise.
        self._gpu = ""
        #: Of a GPU's client: the client that publishes and subscribes for it.
        self._on_host: AsyncTensorBusClient | None = None
        self._calls = ActiveCalls(self._timeout)
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        #: Ends the connection when the client is collected.
        self._dropped: finalize[[], AsyncTensorBusClient] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @watched("pair")
    async def init_pair(
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
    ) -> AsyncPair:
        """Meet the other side: returns once both sides are complete, in any order of arrival.

        Collective over all workers of both sides. ``expected_world_size`` and ``rank`` describe the local side
        (default: torch.distributed's, else the launcher's environment). ``device_mesh`` and ``placements`` are the
        default layout of plain tensors. ``ranks`` maps ranks of the torch world to ranks of the side. ``takeover``
        (default: ETHA_TAKEOVER): replace a launch that lives. Without it, a torchrun job with another run id than a
        living launch is refused. ``give_up``: raise PeerLostError if workers of the other side have come and all left
        again. Without it, the call waits for their next launch until the deadline.

        Raises ConfigError, RendezvousTimeoutError (which names the missing ranks), PeerLostError (a newer launch
        replaced this one), RedisUnavailableError, AgentUnavailableError.
        """
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        for what, name in (("pair", pair_name), ("side", local_name), ("side", remote_name)):
            check_name(what, name)
        if local_name == remote_name:
            raise ConfigError(f"local_name and remote_name are both {local_name!r}: a pair joins two sides")
        place = RankInfo.of(world_size=expected_world_size, rank=rank, ranks=ranks, env=self._env)
        defaults = PairDefaults.of(pair_name, place, device_mesh, placements)
        self._check_usable()
        message = InitPair(
            pair=pair_name,
            side=local_name,
            remote=remote_name,
            world_size=place.world_size,
            rank=place.rank,
            launch=place.launch,
            run=place.run,
            takeover=self._env.takeover if takeover is None else check_takeover(takeover),
            give_up=check_flag("give_up", give_up),
        )
        with self._calls.begin(f"init_pair of {pair_name!r}"):
            known = self._pairs.get(pair_name)
            if known is not None and known[0].doomed:
                # A dead process's memory is gone shortly before the kernel reports its death.
                await known[0].lost.heard(min(_NEWS, deadline.left))
            waits = f"init_pair of {pair_name!r} has waited {_REMIND:g} s and goes on; `etha status` says for whom"
            with reminded(_REMIND, waits):
                formed = await self._ask_for_pair(message, deadline)
        known = self._pairs.get(pair_name)
        if known is not None and known[0].epoch == formed.epoch and not known[0].lost.is_set():
            self._pairs[pair_name] = (known[0], defaults)
            known[0].stands()
            return known[0]
        if known is not None:
            known[0].lose("relaunched", f"pair {pair_name!r} is at epoch {formed.epoch} now")
            self._lost(known[0])
        pair = AsyncPair(
            name=pair_name,
            local_name=local_name,
            remote_name=remote_name,
            local_world_size=formed.local_world_size,
            remote_world_size=formed.remote_world_size,
            epoch=formed.epoch,
        )
        self._pairs[pair_name] = (pair, defaults)
        if self._spans is not None:
            self._spans.joined(pair_name, local_name, place.rank)
        early = self._early_losses.pop(pair_name, None)
        if early is not None and early.epoch == pair.epoch:
            pair.lose(early.reason, early.text, culprits=early.culprits)
        return pair

    @watched("batch")
    async def register_tensors(
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
    ) -> AsyncBatchHandle:
        """Name the tensors that move together. Collective over all workers of both sides; copies nothing.

        ``tensors``: (tensor, pair name) in the same order on all ranks, or name -> tensor with ``pair_name``. A DTensor
        has its own layout. A plain tensor takes ``placements[name]``, else the pair's default. ``shapes``: global
        shapes of plain tensors. ``bucket_size``: in bytes.

        ``regions``: names whose plain tensor on this rank holds an irregular part of the global tensor. For each dim
        the part is a list of ascending (start, stop), and the tensor holds their product, densely. A list of such
        products lies one after the other in a flat tensor. Needs ``shapes[name]``. Regions that send must hold together
        what the other side wants.

        ``direction``: "send", "recv" or "both" must work, else registering fails. ``atomic``: receive into shadow
        memory, so that the tensors change only after commit. "swap": after commit exchange the pages of shadows and of
        this rank's tensors of ``etha.empty`` (1 MiB and more) instead of copying. Addresses stay. Only for tensors
        whose memory nobody else maps by himself (``cudaHostRegister``, RDMA). Tensors that another open batch, a
        process group, or a child that was forked since may see are copied, and a warning says so.

        ``verify``: compare checksums of both ends before any transfer is committed. "full" compares every byte.
        "sample" compares every 16th chunk in turn, at least one of each tensor, for a sixteenth of the cost. The
        strongest choice of any rank holds for all. A difference aborts the transfer.

        Raises LayoutError, RegistrationError (every violation of every rank), RendezvousTimeoutError, PeerLostError.
        """
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        check_name("batch", batch_id)
        check_options(direction, bucket_size, atomic, verify)
        connection = self._require()
        manifest = build_manifest(
            tensors,
            pair_name=pair_name,
            placements=placements,
            shapes=shapes,
            regions=regions,
            pairs={name: defaults for name, (_, defaults) in self._pairs.items()},
            home=connection.home,
        )
        known = self._batches.get(batch_id)
        if known is not None and known.connection is connection and known.lost() is None:
            if not known.manifest.same_tensors(manifest):
                on = ", ".join(repr(pair.name) for pair in known.pairs)
                raise RegistrationError(
                    f"this client has registered batch {batch_id!r} on pair {on} with other tensors or another pair, "
                    f"and an id is one batch of a client: close its handle first, or use another id"
                )
            if await self._confirmed(known, deadline):
                return AsyncBatchHandle(self, known)
        if known is not None:  # release its memory before taking more
            await self._retire(known)
            known.left = True  # one of its calls that still runs must not close the new registration
        with self._calls.begin(f"register_tensors of {batch_id!r}"), connection.advice():
            registration = await register(
                connection,
                batch_id,
                tuple(self._pairs[name][0] for name in manifest.pairs),
                manifest,
                direction=direction,
                bucket_size=bucket_size,
                atomic=atomic,
                verify=verify,
                seq=self._seqs.get(batch_id, 0),
                timeout=lambda: deadline.left,
            )
        registration.torn = batch_id in self._torn
        self._batches[batch_id] = registration
        early = self._early_ends.pop(batch_id, None)
        if early is not None and registration.hear(early):
            self._look_after(registration)
        return AsyncBatchHandle(self, registration)

    @overload
    def transfer(
        self,
        batch_id: str,
        transfer_type: Literal["send", "recv"],
        *,
        snapshot: Literal[False] = False,
        **options: Unpack[TransferOptions],
    ) -> Coroutine[Any, Any, TransferResult]: ...

    @overload
    def transfer(
        self,
        batch_id: str,
        transfer_type: Literal["send", "recv"],
        *,
        snapshot: Literal[True],
        **options: Unpack[TransferOptions],
    ) -> Coroutine[Any, Any, TransferFuture]: ...

    def transfer(
        self,
        batch_id: str,
        transfer_type: Literal["send", "recv"],
        *,
        version: Version = None,
        on_commit: OnCommit | None = None,
        timeout: float | None = None,
        progress: OnProgress | None = None,
        on_error: OnError | None = None,
        snapshot: bool = False,
    ) -> Coroutine[Any, Any, Any]:
        """Move the batch once, all of it or nothing; waits for every rank of both sides.

        On a GPU the transfer comes after the work that the current stream has queued when this method is called, even
        if it is awaited later or by another task. All errors are raised by awaiting it.

        ``version``: label that the sender sets and the receiver sees. ``progress``: called with (bytes done, bytes
        total) of this worker. ``on_commit``, for an atomic recv: runs after commit and before this worker's tensors
        change. If it has not returned by the deadline, the tensors change and TransferTimeoutError ("committed") is
        raised. Its own exceptions are raised after the tensors have changed. A client may have 2,047 transfers in
        flight.

        ``on_error`` (default: the client's): "raise" raises TransferError or a subclass (see ``.outcome`` and
        ``.torn``), AgentLostError or AgentUnavailableError. "report" returns a failed result (``.error``) instead.
        Mistakes (ConfigError, RegistrationError) are always raised.

        ``snapshot=True`` with "send", on every rank of the side: copies the tensors and returns a TransferFuture as
        soon as they may change. The first snapshot allocates as much memory as this rank has registered. There is one
        snapshot at a time: a newer one replaces one that nobody has received yet, whose future then raises
        TransferAbortedError ("withdrawn"), and waits for one that is moving. All ranks must take the same snapshots:
        with equal ``version``, or without one in equal number. Without ``timeout`` a snapshot is offered until it is
        received or replaced. Copying the tensors has the client's deadline.
        """
        try:
            registration = self._registration(batch_id)
        except EthaError as error:
            return _refused(error)
        return self.transfer_of(
            registration,
            transfer_type,
            version=version,
            on_commit=on_commit,
            timeout=timeout,
            progress=progress,
            on_error=on_error,
            snapshot=snapshot,
        )

    def transfer_of(
        self,
        registration: Registration,
        transfer_type: Literal["send", "recv"],
        *,
        snapshot: bool = False,
        mark: Mark | None = None,
        blocks: bool = False,
        **options: Unpack[TransferOptions],
    ) -> Coroutine[Any, Any, Any]:
        """The common part of ``transfer`` and ``AsyncBatchHandle.transfer``. ``mark``: that of the calling thread, if
        it is another. ``blocks``: that thread waits for the result."""
        point = self.mark_of(registration) if mark is None else mark

        async def call() -> TransferResult | TransferFuture:
            try:
                work = self._transfer(registration, transfer_type, point, snapshot, blocks, **options)
                if self._spans is None:
                    return await work
                about = {"verb": transfer_type, **self._about(registration)}
                return await self._spans.watch("snapshot" if snapshot else "transfer", work, about)
            finally:
                point.end()

        return call()

    def mark_of(self, registration: Registration) -> Mark:
        """The work that the calling thread has queued on the batch's device; empty if the call will be refused."""
        if not registration.open or os.getpid() != self._pid:
            return Mark()
        return registration.connection.home.mark()

    async def _transfer(
        self,
        registration: Registration,
        transfer_type: Literal["send", "recv"],
        mark: Mark,
        snapshot: bool,
        blocks: bool,
        *,
        version: Version = None,
        on_commit: OnCommit | None = None,
        timeout: float | None = None,
        progress: OnProgress | None = None,
        on_error: OnError | None = None,
        expects: int | None = None,
        direct: DirectTransfer | None = None,
    ) -> TransferResult | TransferFuture:
        seconds = self._timeout if timeout is None else check_timeout(timeout, "timeout")
        mode = self._on_error if on_error is None else check_on_error(on_error)
        if direct is not None:
            seconds = direct.left
        else:
            self._check_open(registration)
            check_call(registration, transfer_type, version, on_commit, progress, snapshot)
        deadline = Deadline(seconds)

        async def move(call: ActiveCall, edition: str = "") -> TransferResult:
            if direct is None:
                self._check_served(registration)
                registration.check_stands()
            batch_id = registration.batch
            try:
                with self._using(registration):
                    result = await transfer(
                        registration,
                        transfer_type,
                        version=version,
                        on_commit=on_commit,
                        timeout=math.inf if edition and timeout is None else deadline.left,
                        progress=progress,
                        mark=mark,
                        call=call,
                        edition=edition,
                        expects=expects,
                        direct=direct,
                    )
            finally:
                (self._torn.add if registration.torn else self._torn.discard)(batch_id)
            self._seqs[batch_id] = max(self._seqs.get(batch_id, 0), result.seq)
            return result

        async def whole() -> TransferResult:
            with self._calls.begin(transfer_type, registration) as call:
                call.blocks = blocks
                if direct is not None and direct.why is not None:  # once the agent's answer is waited for
                    asyncio.get_running_loop().call_soon(call.interrupt, direct.why, self._calls.patience)
                if self._spans is not None:
                    call.trace_id = self._spans.trace_id()
                result = await move(call)
            if blocks:
                self._open_direct(registration, transfer_type)
            return result

        async def seen(call: ActiveCall, edition: str) -> TransferResult:
            if self._spans is None:
                return await move(call, edition)
            call.trace_id = self._spans.trace_id()
            about = {"verb": transfer_type, "edition": edition, **self._about(registration)}
            return await self._spans.watch("transfer", move(call, edition), about)

        if snapshot:
            with self._using(registration):  # until ``move`` does the same
                return await send_snapshot(
                    registration,
                    version=version,
                    on_error=mode,
                    deadline=deadline,
                    mark=mark,
                    calls=self._calls,
                    send=seen,
                )
        return await reported(mode, registration.pairs, transfer_type, whole)

    def _open_direct(self, registration: Registration, verb: Literal["send", "recv"]) -> None:
        """Let the next such call of a blocked thread ask the agent itself, because this one may be one of many."""
        link = registration.connection.link
        if link.wants_direct and self._spans is None and registration.moves_directly(verb) and not self._closed:
            registration.connection.spawn(link.open_direct())

    def direct_transfer(
        self,
        registration: Registration,
        verb: Literal["send", "recv"],
        mark: Mark,
        run: Callable[[Coroutine[Any, Any, TransferResult]], TransferResult],
        options: TransferOptions,
    ) -> TransferResult | None:
        """``transfer`` for another thread than the loop's, which is blocked until it returns and asks the agent itself.

        None if the call needs the loop, and nothing was asked. ``run`` runs a coroutine on the loop for this thread.
        """
        connection, link = registration.connection.link.direct, registration.connection.link
        version, timeout = options.get("version"), options.get("timeout")
        if connection is None or self._spans is not None or self._on_error != "raise" or mark.handle or mark.failed:
            return None
        if any(value is not None for name, value in options.items() if name not in ("version", "timeout")):
            return None
        try:
            check_call(registration, verb, version, None, None, False)
            seconds = self._timeout if timeout is None else check_timeout(timeout, "timeout")
        except ConfigError:
            return None  # the usual way raises it
        call = DirectTransfer(registration, verb, version, seconds)

        def finish(moved: Moved) -> TransferResult:
            result = finish_direct(call, moved)
            self._torn.discard(registration.batch)
            self._seqs[registration.batch] = max(self._seqs.get(registration.batch, 0), moved.seq)
            return result

        async def go_on() -> TransferResult:
            call.handed = True
            task = asyncio.current_task()
            if call.interrupted and task is not None:
                task.cancel()
            moved = await self._transfer(registration, verb, Mark(), False, True, version=version, direct=call)
            assert isinstance(moved, TransferResult)
            return moved

        def hand_over(error: BaseException | None) -> TransferResult:
            call.interrupted = error is not None
            try:
                result = run(go_on())
            except BaseException:
                if error is None:
                    raise
                raise error from None
            if error is not None:
                raise error
            return result

        self._calls.add_direct(call)
        # Looked at after that, because who closes the client or the batch does so before it looks for calls.
        usable = not (self._closed or registration.torn) and registration.open and registration.lost() is None
        collapser = registration.connection.collapser
        try:
            served = not link.lost.done() and registration.connection is self._connection
            if not (usable and served and registration.moves_directly(verb)):
                return None
            if collapser.working:  # its lock is the event loop's, too, and a signal handler may wait for the loop
                return None
            registration.check_unmoved()
            return call.run(connection, finish, hand_over)
        except RegistrationError:
            if call.word:
                raise
            return None  # the tensors have moved, which the usual way says
        finally:
            call.over = True
            if registration.lost() is not None or not registration.open:
                self._forget_soon(registration)

    def _forget_soon(self, registration: Registration) -> None:
        """``_look_after`` from another thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._look_after, registration)

    @contextmanager
    def _using(self, registration: Registration) -> Iterator[None]:
        """Enter while a call of this worker uses the batch's tensors and their staging."""
        registration.calls += 1
        try:
            yield
        finally:
            registration.calls -= 1
            self._look_after(registration)

    async def wait_offer(self, batch_id: str, *, timeout: float | None = None) -> Offer:
        """Wait until the other side waits to send; returns at once if it does already.

        Raises TransferTimeoutError at the deadline, PeerLostError, AgentLostError.
        """
        return await self.wait_offer_of(self._registration(batch_id), timeout=timeout)

    def _about(self, registration: Registration) -> dict[str, Any]:
        """What spans of the batch's calls say."""
        assert self._spans is not None
        pair = registration.pair
        about = {"pair": pair.name, "epoch": pair.epoch, "batch": registration.batch}
        return {**about, **self._spans.place(pair.name)}

    async def wait_offer_of(self, registration: Registration, *, timeout: float | None = None) -> Offer:
        """The common part of ``wait_offer`` and ``AsyncBatchHandle.wait_offer``."""
        seconds = self._timeout if timeout is None else check_timeout(timeout, "timeout")
        self._check_open(registration)
        self._check_served(registration)
        registration.check_stands()
        message = WaitOffer(batch=registration.batch, epoch=registration.pair.epoch)
        with self._calls.begin("wait_offer", registration), registration.connection.advice():
            offered = await registration.connection.link.request(message, timeout=seconds)
        assert isinstance(offered, Offered)
        return Offer(version=offered.version, bytes=offered.nbytes)

    def seconds(self, timeout: float | None) -> float:
        """Not for users. The deadline of a call that is given ``timeout``, in seconds."""
        return self._timeout if timeout is None else check_timeout(timeout, "timeout")

    async def publish(
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
    ) -> AsyncPublication:
        """Publish versions of ``tensors`` to any number of subscribers. Collective over the ranks of this side only.

        ``publisher`` is the side's name. ``slots``: copies of this rank's tensors that are kept at once; at most
        ``slots - 1`` are read at a time, so that one can always be overwritten. ``fan_out``: subscribers that are
        served from here at once. ``max_rate``: bytes per second that this host's agent sends of it to other hosts,
        over all subscribers together; the least that ranks of a host give counts. ``device_mesh`` is that of plain
        tensors. Slots lie in the host's memory, also those of a GPU's tensors. All other arguments as for ``init_pair``
        and ``register_tensors``.

        Raises ConfigError, LayoutError, RegistrationError (every tensor that cannot be moved, of any rank),
        RendezvousTimeoutError (which names the missing ranks), RedisUnavailableError, AgentUnavailableError.
        """
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        for what, text in (("publication", name), ("publisher", publisher)):
            check_name(what, text)
        check_slots(slots)
        check_fan_out(fan_out)
        rate = check_max_rate(max_rate)
        place = RankInfo.of(world_size=expected_world_size, rank=rank, ranks=ranks, env=self._env)
        defaults = PairDefaults.of_publication(name, place, device_mesh)
        host = await self._for_publications(deadline.left)
        with host._calls.begin(f"publish of {name!r}"):
            connection = await host._connect(deadline.left)
            publication = AsyncPublication(
                connection=connection,
                calls=host._calls,
                name=name,
                publisher=publisher,
                place=place,
                manifest=host._side_manifest(name, tensors, defaults, placements, shapes, regions, connection),
                timeout=host._timeout,
                check_usable=host._check_usable,
            )
            with connection.advice():
                await publication.open(slots, fan_out, rate, deadline)
        return publication

    async def describe_publication(self, name: str, *, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a publication by name, as tensors on "meta": their global shapes and the publisher's dtypes.

        Waits until a publisher has entered. The publisher need not be there any more. Raises TransferTimeoutError at
        the deadline, RedisUnavailableError, AgentUnavailableError.
        """
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        check_name("publication", name)
        host = await self._for_publications(deadline.left)
        with host._calls.begin(f"description of {name!r}"):
            connection = await host._connect(deadline.left)
            found = await connection.link.request(DescribePublication(publication=name), timeout=deadline.left)
        assert isinstance(found, PublicationDescribed)
        return {
            str(one["name"]): torch.empty(tuple(one["shape"]), dtype=from_name(str(one["dtype"])), device="meta")
            for one in found.tensors
        }

    async def subscribe(
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
    ) -> AsyncSubscription:
        """Follow a publication: ``next`` and iteration receive its newest version into ``tensors``, in any layout.

        Collective over the ranks of this subscriber only. ``subscriber`` is its name, which is its own. The publisher
        need not be there. ``atomic``: receive into shadow memory, so that the tensors change only after commit.
        ``serve``: others may receive from this subscriber what it holds, out of its shadow memory (``atomic``) or out
        of tensors of ``etha.empty`` and ``share_module``. One that holds ``regions`` feeds those who want no other
        elements. On a GPU shadow memory of the host is used in any case. All other arguments as for ``init_pair`` and
        ``register_tensors``.

        Raises ConfigError (also for tensors that cannot be served from), LayoutError, RegistrationError (every tensor
        that cannot be moved, of any rank, or does not fit what is published), RendezvousTimeoutError (which names the
        missing ranks), RedisUnavailableError, AgentUnavailableError.
        """
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        for what, text in (("publication", name), ("subscriber", subscriber)):
            check_name(what, text)
        check_flag("atomic", atomic)
        check_flag("serve", serve)
        place = RankInfo.of(world_size=expected_world_size, rank=rank, ranks=ranks, env=self._env)
        defaults = PairDefaults.of_publication(name, place, device_mesh)
        host = await self._for_publications(deadline.left)
        with host._calls.begin(f"subscribe to {name!r}"):
            connection = await host._connect(deadline.left)
            followed = host._subscriptions.get(name)
            if followed is not None and not followed.is_lost:
                raise ConfigError(
                    f"this client follows publication {name!r} already, as {followed.subscriber}: close that "
                    f"subscription first, or use another client"
                )
            subscription = AsyncSubscription(
                host,
                connection=connection,
                calls=host._calls,
                name=name,
                subscriber=subscriber,
                defaults=defaults,
                manifest=host._side_manifest(name, tensors, defaults, placements, shapes, regions, connection),
                atomic=atomic or host is not self,  # a GPU's tensors receive out of shadow memory of the host
                serve=serve,
                timeout=host._timeout,
                check_usable=host._check_usable,
                closed=host._unsubscribed,
            )
            host._subscriptions[name] = subscription
            try:
                with connection.advice():
                    await subscription.open(deadline)
            except BaseException:
                host._unsubscribed(subscription)
                raise
        return subscription

    def _side_manifest(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        defaults: PairDefaults,
        placements: Mapping[str, Sequence[Placement]] | None,
        shapes: Mapping[str, tuple[int, ...]] | None,
        regions: Mapping[str, Runs] | None,
        connection: AgentConnection,
    ) -> TensorManifest:
        """The tensors of a publisher's or a subscriber's rank."""
        if not isinstance(tensors, Mapping):
            raise ConfigError(f"publication {name!r}: tensors={shown(tensors)} must be a mapping name -> tensor")
        return build_manifest(
            tensors,
            pair_name=name,
            placements=placements,
            shapes=shapes,
            regions=regions,
            pairs={name: defaults},
            home=connection.home,
        )

    def _unsubscribed(self, subscription: AsyncSubscription) -> None:
        if self._subscriptions.get(subscription.name) is subscription:
            del self._subscriptions[subscription.name]

    # ---- hops of subscriptions (``client.subscription.HopClient``) ------------------------------

    async def join_hop(self, pair: str, defaults: PairDefaults, side: str, remote: str, *, timeout: float) -> AsyncPair:
        """Not for users. The pair with a holder, formed now if it is not."""
        known = self._pairs.get(pair)
        if known is not None and not known[0].lost.is_set() and not known[0].doomed:
            return known[0]
        place = defaults.place
        formed = await self.init_pair(
            pair, side, remote, place.world_size, rank=place.rank, ranks=place.ranks, timeout=timeout
        )
        self._pairs[pair] = (formed, replace(defaults, name=pair))
        return formed

    async def register_hop(
        self,
        batch: str,
        manifest: TensorManifest,
        *,
        atomic: bool,
        shadows: StagedTensors | None,
        timeout: float,
    ) -> Registration:
        """Not for users. The batch for a holder's slot, registered now if it is not."""
        known = self._batches.get(batch)
        if known is not None and known.lost() is None and known.open:
            return known
        deadline = Deadline(timeout)
        connection = self._require()
        if known is not None:
            await self._retire(known)
            known.left = True
        with connection.advice():
            registration = await register(
                connection,
                batch,
                tuple(self._pairs[name][0] for name in manifest.pairs),
                manifest,
                direction="recv",
                bucket_size=None,
                atomic=atomic,
                verify=None,
                seq=self._seqs.get(batch, 0),
                timeout=lambda: deadline.left,
                shadows=shadows,
            )
        self._batches[batch] = registration
        early = self._early_ends.pop(batch, None)
        if early is not None and registration.hear(early):
            self._look_after(registration)
        return registration

    async def receive_hop(
        self,
        registration: Registration,
        *,
        on_commit: OnCommit | None,
        progress: OnProgress | None,
        timeout: float,
        seq: int,
    ) -> TransferResult:
        """Not for users. Receive version ``seq`` that a holder sends, and nothing else."""
        return await self._transfer(  # type: ignore[return-value]
            registration,
            "recv",
            Mark(),
            snapshot=False,
            blocks=False,
            on_commit=on_commit,
            progress=progress,
            timeout=timeout,
            on_error="raise",
            expects=seq,
        )

    async def leave_hop(self, pair: str, batches: list[str]) -> None:
        """Not for users. Close the batches and leave the pair with a holder."""
        for batch in batches:
            if (registration := self._batches.get(batch)) is not None:
                await self.close_batch(registration)
            self._seqs.pop(batch, None)
            self._torn.discard(batch)
            self._early_ends.pop(batch, None)
        known = self._pairs.pop(pair, None)
        self._early_losses.pop(pair, None)
        if known is not None and self._connection is not None and not self._connection.lost:
            await self._connection.link.request(LeavePair(pair=pair), timeout=self._timeout)
            known[0].lose("closed", "the subscription has left it")

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """This agent's pairs, batches and transfers, as ``etha status --json`` prints them."""
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        self._check_usable()
        with self._calls.begin("status"):
            connection = await self._connect(deadline.left)
            status = await connection.link.request(GetStatus(), timeout=deadline.left)
        assert isinstance(status, Status)
        return status.report

    async def close(self) -> None:
        """Leave all pairs, batches and the agent. Idempotent. When it has returned, nothing writes into tensors any
        more.

        Running calls end first. What is committed is put in place, after its ``on_commit`` or at the deadline of its
        call (if the call has none, after this client's ``timeout`` from now). All other calls raise
        TransferAbortedError or ConfigError. If a callback calls ``close``, it does not wait for the callback's own
        call.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return
        if self._loop not in (None, asyncio.get_running_loop()):
            return await self._close_elsewhere()
        mine = self._calls.calling_back()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(mine))
        elif mine is not None:
            return  # the task that closes waits for this callback
        await asyncio.shield(self._closing)
        if mine is None:
            await self._calls.ended()

    async def _close(self, mine: ActiveCall | None) -> None:
        registrations = self._leave_all()
        connection, self._connection = self._connection, None
        try:
            self._calls.interrupt("this client was closed", but=mine)
            if self._on_host is not None:
                await self._on_host.close()
            await self._calls.ended(but=mine)
            connection = connection or self._connection
            if connection is not None:
                await connection.close(self._timeout)
        finally:
            if connection is not None:
                connection.abort()
            self._forget()
            for registration in registrations:
                registration.let_go()
            if trace.active is not None:  # a process may end without its exit handlers
                await Shield().in_thread(trace.active.flush)

    async def _close_elsewhere(self) -> None:
        """``close`` on another loop than the client's own, which may have ended."""
        assert self._loop is not None
        if self._loop.is_running():
            return await on_loop(self._loop, self.close)
        self._leave_all()
        connection, self._connection = self._connection, None
        if self._on_host is not None:
            await self._on_host.close()
        if connection is not None:
            connection.abort()
        self._forget()

    def _leave_all(self) -> list[Registration]:
        """Close all batches and lose all pairs. Returns the registrations, which drop their tensors once their calls
        have ended."""
        registrations = list(self._batches.values())
        for registration in registrations:
            registration.open = False
        self._batches.clear()  # even if somebody keeps the closed client, it keeps no tensors
        self._subscriptions.clear()
        for pair, _ in self._pairs.values():
            with suppress(RuntimeError):  # the task that waited for it has left with the loop
                pair.lose("closed", "this client was closed")
        return registrations

    def _forget(self) -> None:
        if self._dropped is not None:
            self._dropped.detach()

    def handle_of(self, batch_id: str) -> AsyncBatchHandle:
        """The handle of an open batch; RegistrationError if there is none."""
        return AsyncBatchHandle(self, self._registration(batch_id))

    async def close_batch(self, registration: Registration) -> None:
        """``AsyncBatchHandle.close``; local and idempotent."""
        mine = self._calls.calling_back()
        if registration.open:
            registration.open = False
            if self._batches.get(registration.batch) is registration:
                del self._batches[registration.batch]
            try:
                await self._end_batch(registration)
            finally:
                self._calls.interrupt("its handle was closed", registration)
        await self._calls.ended(registration, but=mine)
        await self._release(registration)

    async def _end_batch(self, registration: Registration) -> None:
        """Ask the agent to end the batch's calls, because it knows their outcomes. A second caller waits for the
        first."""
        async with registration.leaving:
            if not (registration.left or registration.connection.lost or self._closed):
                registration.left = True
                message = CloseBatch(batch=registration.batch, epoch=registration.pair.epoch)
                with self._unless_closed():
                    await registration.connection.link.request(message, timeout=self._timeout)

    async def _release(self, registration: Registration) -> None:
        """Release the memory of a batch that was left, here and in the agent."""
        try:
            if not registration.connection.lost and not self._closed:
                registration.released = True
                with self._unless_closed():
                    await registration.segments.release(self._timeout)
        finally:
            registration.let_go()

    @contextmanager
    def _unless_closed(self) -> Iterator[None]:
        """Suppress AgentLostError if the client has been closed meanwhile."""
        try:
            yield
        except AgentLostError:
            if not self._closed:
                raise

    # ---- inside -------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        check_not_forked(self._pid)
        self._check_not_closed()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._connecting = loop, asyncio.Lock()
        elif self._loop is not loop:
            raise ConfigError("this client belongs to another event loop: create one client per loop")

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigError("this client is closed: create another")

    async def _connect(self, timeout: float) -> AgentConnection:
        """The living connection, or a new one: the next init_pair starts an agent again after one has died."""
        self._check_usable()
        assert self._connecting is not None
        async with self._connecting:
            if self._connection is not None:
                await self._connection.link.hear_of_death(timeout)
                if not self._connection.lost:
                    return self._connection
                self._connection.abort()
                self._connection = None
            connection = await self._open(timeout)
            if self._closed:
                await connection.close(self._timeout)
                raise ConfigError("this client was closed while it connected")
            self._connection = connection
            lost = WeakMethod(self._agent_lost)
            connection.link.lost.add_done_callback(lambda error: _call(lost, error))
            self._forget()
            self._dropped = finalize(self, connection.drop)
            self._dropped.atexit = False  # at exit the end of the process tells the agent
            return connection

    def _hearing(self) -> Callable[[Any], None]:
        """A callback for the agent's pushes that does not hold this client, so that an unused client can be
        collected."""
        pushed = WeakMethod(self._pushed)
        return lambda message: _call(pushed, message)

    async def _open(self, timeout: float) -> AgentConnection:
        return await AgentConnection.open(
            self._settings,
            agent=self._agent,
            device=self._served,
            redis_url=self._redis_url,
            autostart=self._autostart,
            timeout=timeout,
            on_push=self._hearing(),
            again=bool(self._pairs),
            gpu=self._gpu,
        )

    async def _for_publications(self, timeout: float) -> AsyncTensorBusClient:
        """This client, or, if it is a GPU's, one of the host's agent that copies from and to that GPU."""
        self._check_usable()
        if self._gpu:
            return self
        served = self._served
        if not served:  # the agent at an address says what it serves
            served = (await self._connect(timeout)).home.agent
        if not served.startswith(CUDA_AGENT):
            return self
        if self._on_host is None:
            host = AsyncTensorBusClient(
                device="cpu",
                redis_url=self._redis_url,
                autostart=self._autostart,
                timeout=self._timeout,
                on_error=self._on_error,
            )
            host._settings, host._env = self._settings, self._env
            host._agent, host._served, host._gpu = None, agent_of(torch.device("cpu")), served
            self._on_host = host
        return self._on_host

    async def _ask_for_pair(self, message: InitPair, deadline: Deadline) -> PairFormed:
        connection = await self._connect(deadline.left)
        try:
            with connection.advice():
                formed = await connection.link.request(message, timeout=deadline.left)
        except AgentLostError:
            lost = connection.link.lost
            if lost.done():
                raise
            # The agent took no message, so it had died before it was asked, and this client is about to learn it.
            await asyncio.wait({lost}, timeout=min(_NEWS, deadline.left))
            if not lost.done() or deadline.left <= 0:
                raise
            connection = await self._connect(deadline.left)
            with connection.advice():
                formed = await connection.link.request(message, timeout=deadline.left)
        assert isinstance(formed, PairFormed)
        return formed

    def _require(self) -> AgentConnection:
        self._check_usable()
        if self._connection is None:
            raise ConfigError("no pair is formed in this client: call init_pair first")
        if self._connection.lost:
            raise AgentLostError(with_again(self._connection.link.lost.result().message))
        return self._connection

    def _registration(self, batch_id: str) -> Registration:
        self._check_not_closed()
        registration = self._batches.get(batch_id) if isinstance(batch_id, str) else None
        if registration is None:
            raise RegistrationError(
                f"batch {shown(batch_id)} is not registered in this client: call register_tensors first"
            )
        return registration

    def _check_open(self, registration: Registration) -> None:
        self._check_usable()
        if not registration.open:
            raise RegistrationError(f"batch {registration.batch!r} is closed: register it again")

    async def _confirmed(self, registration: Registration, deadline: Deadline) -> bool:
        """Whether an open batch is still registered, after its agent has sent all news about it."""
        with self._calls.begin(f"register_tensors of {registration.batch!r}"), registration.connection.advice():
            await registration.connection.link.request(Confirm(), timeout=deadline.left)
        return registration.lost() is None

    def _check_served(self, registration: Registration) -> None:
        if registration.connection.lost or registration.connection is not self._connection:
            text = f"the agent with which batch {registration.batch!r} was registered is gone"
            text = with_note(text, registration.connection.link.log_note)
            raise AgentLostError(with_again(text), outcome="withdrawn")

    def _pushed(self, message: Any) -> None:
        if isinstance(message, PairLost):
            known = self._pairs.get(message.pair)
            if known is not None and known[0].epoch == message.epoch:
                known[0].lose(message.reason, message.text, culprits=message.culprits)
                self._lost(known[0])
            elif known is None or known[0].epoch < message.epoch:
                self._early_losses[message.pair] = message
        elif isinstance(message, BatchLost):
            registration = self._batches.get(message.batch)
            if registration is not None and registration.hear(message):
                self._look_after(registration)
            else:
                self._early_ends[message.batch] = message
        elif isinstance(message, Announced | ClaimLost):
            subscription = self._subscriptions.get(message.publication)
            if subscription is not None:
                subscription.hear(message)

    def _agent_lost(self, lost: asyncio.Future[AgentLostError]) -> None:
        text = lost.result().message
        if self._connection is not None and self._connection.link.agent_lost:
            text = with_again(text)
        for pair, _ in self._pairs.values():
            pair.lose("died", text, AgentLostError(text))
            self._lost(pair)

    # ---- giving memory back -------------------------------------------------------------------

    def _lost(self, pair: AsyncPair) -> None:
        """A pair's epoch is over, and its batches with it."""
        for registration in list(self._batches.values()):
            if any(one is pair for one in registration.pairs):
                self._look_after(registration)

    def _look_after(self, registration: Registration) -> None:
        """Release what a batch that is over holds, here and in the agent, once no call uses it.

        A GPU's memory stays until the handle or the client is closed. Agents of other GPUs may have it open slightly
        longer than this one, and freeing it meanwhile is undefined.
        """
        if registration.connection.home.lends or self._calls.directly(registration):
            return
        registration.let_go()
        if registration.lost() is not None and not (registration.calls or registration.released or self._closed):
            registration.connection.spawn(self._retire(registration))

    async def _retire(self, registration: Registration) -> None:
        """Leave a batch whose pair is lost. Nobody needs the agent's answer."""
        if not registration.calls and not self._calls.directly(registration):
            with suppress(EthaError):
                await self._end_batch(registration)
                await self._release(registration)


async def _refused(error: EthaError) -> NoReturn:
    raise error


def _call(method: WeakMethod[Any], argument: Any) -> None:
    found = method()
    if found is not None:
        found(argument)


class AsyncBatchHandle(OfOneProcess):
    """A registered batch; ``async with`` closes it. Returned by ``register_tensors``."""

    def __init__(self, client: AsyncTensorBusClient, registration: Registration) -> None:
        self._client, self._registration = client, registration

    @property
    def batch_id(self) -> str:
        """The batch's name."""
        return self._registration.batch

    @property
    def plan(self) -> dict[str, Any]:
        """A summary of the plan: tensors, and the bytes and digest of each possible direction."""
        return self._registration.plan

    @property
    def version(self) -> Version:
        """The label of the last transfer that this worker sent or received, which is the version that the tensors
        hold."""
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
        **options: Unpack[TransferOptions],
    ) -> Coroutine[Any, Any, TransferResult]: ...

    @overload
    def transfer(
        self, transfer_type: Literal["send", "recv"], *, snapshot: Literal[True], **options: Unpack[TransferOptions]
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
        """The work that the calling thread has queued on this batch's device."""
        return self._client.mark_of(self._registration)

    def direct_transfer(
        self,
        mark: Mark,
        transfer_type: Literal["send", "recv"],
        run: Callable[[Coroutine[Any, Any, TransferResult]], TransferResult],
        options: TransferOptions,
    ) -> TransferResult | None:
        """``transfer_after`` without the loop, as far as that is possible; see the client's."""
        return self._client.direct_transfer(self._registration, transfer_type, mark, run, options)

    def transfer_after(
        self,
        mark: Mark,
        transfer_type: Literal["send", "recv"],
        *,
        snapshot: bool = False,
        blocks: bool = False,
        **options: Unpack[TransferOptions],
    ) -> Coroutine[Any, Any, Any]:
        """``transfer`` for another thread: it comes after that thread's device work up to ``mark``. ``blocks``: that
        thread waits for the result."""
        return self._client.transfer_of(
            self._registration, transfer_type, snapshot=snapshot, mark=mark, blocks=blocks, **options
        )

    async def wait_offer(self, *, timeout: float | None = None) -> Offer:
        """Wait until the other side waits to send this batch."""
        return await self._client.wait_offer_of(self._registration, timeout=timeout)

    async def close(self) -> None:
        """Leave the batch; local and idempotent. Its id is free once all ranks have closed."""
        await self._client.close_batch(self._registration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
