"""One worker's part in its engine's subscription: it receives versions beside the engine's steps.

    load          describe the publication, record what the loaders keep of it, receive and load its newest version
    follow        record once more, because vLLM has processed the model since
    begin         receive the next version, on the loop of the clients; then tell EngineCore
    outcome       what has become of that; the follower asks all workers
    bring_in      the version comes into the model, between two steps

The memory that is received into is beside the model, so a version that arrives changes nothing of the model.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from etha import AsyncTensorBusClient, TransferFuture
from etha.client.loop_thread import LoopMembership
from etha.client.subscription import AsyncSubscription, Update
from etha.errors import (
    AgentLostError,
    ConfigError,
    EthaError,
    PeerLostError,
    RegistrationError,
    RendezvousTimeoutError,
)
from etha.integrations.vllm.engine.cores import leave_bound_core
from etha.integrations.vllm.engine.follow_options import FollowOptions
from etha.integrations.vllm.engine.follower import WorkerOutcome
from etha.integrations.vllm.engine.news import report
from etha.integrations.vllm.engine.workers import WorkerAgreement
from etha.integrations.vllm.weights.first_load import FirstLoad
from etha.integrations.vllm.weights.keep import Meta
from etha.integrations.vllm.weights.received import Received, RegionMemory

# Under vLLM's own root, so that vLLM's handlers print it.
log = logging.getLogger("vllm.etha")
#: Seconds that a worker waits for its receive when another worker's has ended. A hop ends on all ranks together.
_SOON = 10.0
#: Seconds after which a worker that receives nothing looks whether it lags, and why.
_LOOK = 10.0
#: Only memory of the CPU can be subscribed to.
_MEMORY = torch.device("cpu")
#: Most parameters that an error names.
_SHOWN = 5


class EngineSubscriber:
    """Rank ``rank`` of the ``world`` workers that are subscriber ``name`` of a publication."""

    def __init__(self, options: FollowOptions, *, name: str, rank: int, world: int) -> None:
        self._options, self.name, self._rank, self._world = options, name, rank, world
        self._bus = AsyncTensorBusClient(
            device="cpu", redis_url=options.redis_url, namespace=options.namespace, timeout=options.timeout
        )
        self._membership = LoopMembership(self)
        leave_bound_core(self._membership.loop_thread)
        self._subscription: AsyncSubscription | None = None
        #: What is registered, and how it gets into the model once that has been processed.
        self._room: RegionMemory | None = None
        self._received: Received | None = None
        self._metas: list[Meta] = []
        self._receiving: TransferFuture | None = None
        self._arrived: Update | None = None
        #: What the model holds.
        self._held = WorkerOutcome()

    @property
    def publication(self) -> str:
        """The publication that the engine follows."""
        return self._options.publication

    @property
    def held(self) -> WorkerOutcome:
        """The version that the model holds."""
        return self._held

    # ---- the first version ----------------------------------------------------------------------

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Load the publication's newest version, the first one if there is none yet, into a model that was just made.

        ConfigError for tensors that do not fit the model; TransferTimeoutError if there is no version by the deadline.
        Call ``follow`` once vLLM has processed the model.
        """
        until = time.monotonic() + self._options.timeout
        with WorkerAgreement() as workers:
            self._metas = self._describe(self._options.timeout)
            first = FirstLoad(model, self._metas, device, agree=workers.agree, memory=_MEMORY)
        self._room = first
        times = [time.monotonic()]
        for step in (first.room, lambda: self._receive_first(until), first.apply):
            step()
            times.append(time.monotonic())
        log.info(
            "publication %s: rank %d has its first version in the model: %.2f s for memory of versions, %.2f s to "
            "receive it, %.2f s to load it",
            self.publication, self._rank, *(after - before for before, after in pairwise(times)),
        )  # fmt: skip

    def follow(self, model: nn.Module, model_config: Any, device: torch.device, *, strict: bool) -> None:
        """Prepare to bring versions into the ``model`` as it is now; the first one, if ``load`` has not done that.

        ConfigError for tensors that do not fit the model, and, if ``strict``, for parameters that the publication has
        nothing of.
        """
        until = time.monotonic() + self._options.timeout
        with WorkerAgreement() as workers:
            self._metas = self._metas or self._describe(self._options.timeout)
            received = self._record(model, model_config, device, workers)
            self._refuse_gaps(received, strict=strict)
            if self._room is not None:
                received.take_room(self._room)
        self._received = self._room = received
        if self._held.seq:
            return
        self._receive_first(until)
        received.apply()

    def adopt(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        """The model has other modules since it was loaded (LoRA puts its own around them): record its loaders again."""
        with WorkerAgreement() as workers:
            received, before = self._record(model, model_config, device, workers), self._received
            assert before is not None
            received.take_room(before)
        self._received = self._room = received

    def _receive_first(self, until: float) -> None:
        receiving = self._submit(self._receive(0, renew=False, timeout=max(0.0, until - time.monotonic())))
        update = cast(Update, receiving.result())
        self._held = _outcome(update)
        log.info(
            "publication %s: %s rank %d of %d loads version %s (number %d) from %s: %d bytes in %.3f s",
            self.publication, self.name, self._rank, self._world, self._held.version, update.seq,
            update.source, update.bytes, update.seconds,
        )  # fmt: skip

    def _describe(self, timeout: float) -> list[Meta]:
        tensors = self._membership.loop_thread.call(self._bus.describe_publication(self.publication, timeout=timeout))
        return [Meta(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]

    def _record(self, model: nn.Module, model_config: Any, device: torch.device, workers: WorkerAgreement) -> Received:
        return Received(
            model, model_config, self._metas, device,
            direct=False, atomic=True, agree=workers.agree, memory=_MEMORY,
        )  # fmt: skip

    def _refuse_gaps(self, received: Received, *, strict: bool) -> None:
        """ConfigError for parameters of which this engine, which loads nothing else, would have undefined values."""
        found = received.report()
        gaps = [*found["unfilled"], *found["partial"]]
        if not gaps:
            return
        shown = ", ".join(map(repr, gaps[:_SHOWN])) + (f" and {len(gaps) - _SHOWN} more" if len(gaps) > _SHOWN else "")
        text = f"publication {self.publication!r} has nothing, or a part, of the model's parameters {shown}"
        if strict:
            raise ConfigError(f"{text}: publish all tensors that a checkpoint of the model has, by their names there")
        log.warning("%s; they keep what vLLM has made of them", text)

    # ---- later versions -------------------------------------------------------------------------

    def begin(self, turn: int, newer_than: int, *, renew: bool, news: str) -> None:
        """Begin to receive a version newer than ``newer_than``; EngineCore is told on ``news`` when that has ended.

        ``renew``: enter the publication again first. Does not wait.
        """
        self._stop()
        self._receiving = self._submit(self._receive_and_report(turn, newer_than, renew=renew, news=news))

    def outcome(self) -> WorkerOutcome:
        """What has become of the receive that was begun. Waits a little for it."""
        receiving = self._receiving
        if receiving is None:
            return WorkerOutcome(error="nothing was being received", lost=True)
        try:
            update = cast(Update, receiving.result(_SOON))
        except RegistrationError as error:
            newest = 0 if self._subscription is None else self._subscription.seq + self._subscription.lag
            return WorkerOutcome(error=str(error), refused=newest)
        except (EthaError, CancelledError) as error:
            again = isinstance(error, AgentLostError | PeerLostError | RendezvousTimeoutError | ConfigError)
            return WorkerOutcome(error=f"{type(error).__name__}: {error}", lost=again or self._subscription is None)
        except TimeoutError:
            self._stop()
            return WorkerOutcome(error=f"has not received what the others have, {_SOON:g} s later", lost=True)
        except Exception as error:
            log.error("a worker of the engine has failed to receive, a bug of Etha", exc_info=error)
            return WorkerOutcome(error=f"{type(error).__name__}: {error}", lost=True)
        self._arrived = update
        return _outcome(update)

    def take(self) -> Update:
        """The version that has arrived. ConfigError if none has."""
        if self._arrived is None:
            raise ConfigError(
                f"no version of publication {self.publication!r} has arrived: the engine brings versions in by itself"
            )
        return self._arrived

    def bring_in(self) -> None:
        """Bring the version that has arrived into the model; between two steps of the engine."""
        update, received = self.take(), self._received
        assert received is not None
        received.apply()
        self._held, self._arrived = _outcome(update), None
        log.info(
            "version %s (number %d) is live: %d bytes received from %s in %.3f s",
            self._held.version, update.seq, update.bytes, update.source, update.seconds,
        )  # fmt: skip

    def close(self) -> None:
        """Follow the publication no more; idempotent."""
        self._stop()
        try:
            with suppress(AgentLostError):  # the process ends, and its loop before this
                self._membership.loop_thread.call(self._bus.close())
        finally:
            self._membership.leave()

    def report(self) -> dict[str, Any]:
        """How this worker receives each tensor, and the bytes; see ``Received.report``."""
        assert self._received is not None
        return dict(self._received.report())

    # ---- inside ---------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, Any]) -> TransferFuture:
        return self._membership.loop_thread.submit(work)

    def _stop(self) -> None:
        """End a receive for which nobody waits."""
        receiving, self._receiving, self._arrived = self._receiving, None, None
        if receiving is not None:
            receiving.cancel()
            with suppress(CancelledError):
                receiving.exception()

    async def _receive_and_report(self, turn: int, newer_than: int, *, renew: bool, news: str) -> Update:
        failed: EthaError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch_lag())
                try:
                    return await self._receive(newer_than, renew=renew, timeout=math.inf)
                except EthaError as error:
                    failed = error
                finally:
                    watch.cancel()
            raise failed
        finally:
            report(news, str(turn))

    async def _watch_lag(self) -> None:
        """Log why a newer version has not come yet, once for each."""
        logged = 0
        while self._rank == 0:
            await asyncio.sleep(_LOOK)
            logged = await self._tell_lag(logged)

    async def _tell_lag(self, logged: int) -> int:
        """Log why a newer version than ``logged`` has not come yet. A holder gives none to a side that it does not fit,
        which is no error of a call that waits. The number of the newest version."""
        subscription = self._subscription
        if subscription is None or not subscription.lag:
            return logged
        newest = subscription.seq + subscription.lag
        if newest > logged:
            with suppress(EthaError):
                misfits = self._misfits(await self._bus.describe_publication(self.publication))
                why = "it is on its way, or all who hold it are busy"
                if misfits:
                    why = f"it does not fit, start the engine again for other tensors: {'; '.join(misfits[:_SHOWN])}"
                log.warning(
                    "publication %s: version number %d has not come yet, and the engine goes on with the one that it "
                    "has: %s",
                    self.publication,
                    newest,
                    why,
                )
        return newest

    def _misfits(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """How what is published differs from what the engine has started with."""
        mine = {meta.name: meta.shape for meta in self._metas}
        theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        found = [f"{name!r} is not published any more" for name in mine.keys() - theirs.keys()]
        found += [f"{name!r} is new" for name in theirs.keys() - mine.keys()]
        found += [
            f"{name!r} has shape {theirs[name]} and had {mine[name]}"
            for name in mine.keys() & theirs.keys()
            if mine[name] != theirs[name]
        ]
        return sorted(found)

    async def _receive(self, newer_than: int, *, renew: bool, timeout: float) -> Update:
        if renew and self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()
        if self._subscription is None:
            self._subscription = await self._subscribe(min(timeout, self._options.timeout))
            if self._subscription.lag < newer_than:
                newer_than = 0  # Redis has lost the publication, whose numbers begin again
        return await self._subscription.next(newer_than=newer_than, timeout=timeout)

    async def _subscribe(self, timeout: float) -> AsyncSubscription:
        room = self._room
        assert room is not None
        return await self._bus.subscribe(
            self.publication,
            room.room(),
            subscriber=self.name,
            regions=room.regions,
            shapes=room.shapes,
            serve=self._options.serve,
            expected_world_size=self._world,
            rank=self._rank,
            timeout=timeout,
        )


def _outcome(update: Update) -> WorkerOutcome:
    version = update.seq if update.version is None else update.version
    return WorkerOutcome(seq=update.seq, version=str(version))
