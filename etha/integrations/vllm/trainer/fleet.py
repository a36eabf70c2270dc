"""Sends a version to several engines in one call. Each has its own outcome, and one that is out is left out.

    call         begin --- every replica that is in: a version ------------------------ end
                 a replica that is out: waited for as long, then left out  - - - - - -|
    attend       ... asks the engine again and again ... it answers: in with the next call

A replica is out if its engine is lost or has not answered. On rank 0 ``attend`` looks for it in the background, so that
no call waits for it. The other ranks learn it in the call (team.py; each replica has its own messages).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient

from etha import AsyncTensorBusClient, TransferFuture, TransferResult
from etha.client.loop_thread import LoopThread
from etha.errors import ConfigError, EthaError, PeerLostError, RendezvousTimeoutError, TransferError, from_wire
from etha.integrations.vllm.trainer.init_info import EthaTrainerInitInfo
from etha.integrations.vllm.trainer.replica import AGAIN, Replica, absent, plain
from etha.integrations.vllm.trainer.source import EthaSource, Iterated

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """The outcome of a call for each engine, in the order of the clients: its ``TransferResult`` or its error."""

    results: tuple[TransferResult | EthaError, ...]

    @property
    def ok(self) -> bool:
        """Whether all of them succeeded."""
        return not self.failed

    @property
    def failed(self) -> dict[int, EthaError]:
        """The errors, by the engine's place among the clients."""
        return {number: result for number, result in enumerate(self.results) if isinstance(result, EthaError)}


class Turn:
    """One call on rank 0, which decides how long to wait for replicas that are out.

    It waits while others are under way; if none is, until one has come and is done. ``every``: wait for every one,
    unless one refuses.
    """

    def __init__(self, under_way: Iterable[FleetMember], *, every: bool = False) -> None:
        self._under_way, self._every = set(under_way), every
        #: Set when replicas that are out are not waited for any more.
        self.enough = asyncio.Event()

    def begin(self, member: FleetMember) -> None:
        """A replica that was out takes part."""
        self._under_way.add(member)

    def leave(self, member: FleetMember) -> None:
        """A replica that took part has stopped, or is not under way yet."""
        if member in self._under_way:
            self._under_way.remove(member)
            if not self._under_way and not self._every:
                self.enough.set()

    def end(self, member: FleetMember, error: EthaError | None) -> None:
        """A replica is done."""
        self.leave(member)
        if self._every and error is not None and not absent(error):
            self.enough.set()


class FleetMember:
    """One of several replicas, on one rank."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._background: TransferFuture | None = None
        # Rank 0 only. Set if the engine was met or waits to be met, or if it refuses. Calls begin only then.
        self._answers = asyncio.Event()
        self._refused: Exception | None = None
        self._out, self._told, self._met = True, False, False
        self._calling = False
        self._called = asyncio.Event()

    @property
    def batch(self) -> tuple[str, str]:
        """The names of its pair and batch."""
        return self._replica.info.pair, self._replica.info.batch

    @property
    def is_in(self) -> bool:
        """Whether the engine was met and no error has come since."""
        return self._answers.is_set() and not self._told and self._replica.stands

    def announce(self, metas: Sequence[ParamMeta], *, spread: bool) -> None:
        """See ``Replica.announce``."""
        self._replica.announce(metas, spread=spread)

    async def begin(self, turn: Turn) -> None:
        """Meet the engine."""
        await self._replica.together(partial(self._begin, turn))

    async def send(self, turn: Turn, version: int | str | None, label: str | None) -> TransferResult:
        """Send a version to the engine."""
        return await self._replica.transfer(partial(self._send, turn, version, label), version)

    async def verify(self) -> TransferResult:
        """Prove that the engine computes with the weights."""
        return await self._replica.transfer(self._verify)

    # ---- rank 0's part of a call ---------------------------------------------------------------

    async def _begin(self, turn: Turn) -> None:
        await self._come(turn)
        with self._call():
            await self._meet()

    async def _send(self, turn: Turn, version: int | str | None, label: str | None) -> TransferResult:
        if not self.is_in:
            await self._come(turn)
        with self._call():
            if self._told or not self._replica.stands:
                await self._meet()
            return await self._replica.round(version, label)

    async def _verify(self) -> TransferResult:
        if not self.is_in:
            raise self._missing()
        with self._call():
            return await self._replica.verified()

    async def _come(self, turn: Turn) -> None:
        """Wait until the engine answers, as long as the call waits for it."""
        turn.leave(self)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._replica.info.timeout):
                await _first(self._answers.wait(), turn.enough.wait())
        if self._refused is not None:
            refused, self._refused = self._refused, None
            self._end_of_call(out=True)
            raise refused
        if not self._answers.is_set():
            raise self._missing()
        turn.begin(self)

    def _missing(self) -> EthaError:
        info = self._replica.info
        text = f"pair {info.pair!r}: the engine is lost, or does not answer; it takes the next version once it does"
        if not self._met:
            text = f"pair {info.pair!r}: no engine has answered yet; it takes the next version once it does"
            return RendezvousTimeoutError(text, missing={info.remote_name: (0,)})
        return PeerLostError(text, reason="died", outcome="withdrawn")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Enter for calls to an engine that answers, in the time for one version. If one fails, the engine is out."""
        self._calling, done = True, False
        try:
            with self._replica.within(self._replica.info.timeout):
                yield
            done = True
        finally:
            self._end_of_call(out=not done)

    def _end_of_call(self, *, out: bool) -> None:
        self._calling = self._told = False
        if out:
            self._out = True
            self._answers.clear()
        self._called.set()

    async def _meet(self) -> None:
        error: Exception | None
        try:
            error = await self._replica.ask_to_join()  # again, because it was asked some time ago
        except Exception as failed:
            if not absent(failed):
                raise
            error = failed
        if error is not None:
            text = f"pair {self._replica.info.pair!r}: the engine has left again: {error}"
            raise PeerLostError(text, reason="died", outcome="withdrawn") from error
        await self._replica.meet()
        self._met = True

    # ---- rank 0, in the background -------------------------------------------------------------

    def begin_to_attend(self, loop_thread: LoopThread) -> None:
        """Look for the engine whenever it is out, until ``close``."""
        work: Coroutine[Any, Any, Any] = self._attend()
        self._background = loop_thread.submit(work)

    def close(self) -> None:
        """Stop looking; idempotent."""
        if self._background is not None:
            self._background.cancel()

    async def _attend(self) -> None:
        while True:
            if self._out:
                await self._search()
                self._out = False
                self._answers.set()
            pair = self._replica.pair
            if self._told or self._refused is not None or pair is None:
                await self._called.wait()
            else:
                await _first(pair.lost.wait(), self._called.wait())
            self._called.clear()
            while self._calling:
                await self._called.wait()
                self._called.clear()
            if pair is not None and pair is self._replica.pair and pair.lost.is_set() and not self._out:
                self._out = True
                self._answers.clear()
                log.warning("%s is lost, and looked for: %s", self, pair.lost.text)

    async def _search(self) -> None:
        """Ask until the engine answers: to meet this trainer, or, if the pair is formed, to end an update that was
        begun."""
        last: Exception | None = None
        while True:
            try:
                if self._replica.stands:
                    await self._replica.settle()
                    return
                self._replica.pair = None
                last = await self._replica.ask_to_join(last)
                if last is None:
                    self._told = True
                    log.info("%s answers: it takes the next version", self)
                    return
            except Exception as error:
                if not absent(error):
                    self._refused = error
                    return
                last = error
            await asyncio.sleep(AGAIN)

    def __str__(self) -> str:
        address = getattr(self._replica.client, "base_url", type(self._replica.client).__name__)
        return f"the engine of pair {self._replica.info.pair!r} ({address})"


class Replicas:
    """All replicas of a trainer, on one rank. One that is out does not delay the others, and is reported."""

    def __init__(
        self,
        info: EthaTrainerInitInfo,
        clients: Sequence[VLLMWeightSyncClient],
        bus: AsyncTensorBusClient,
        weights: EthaSource | Iterated,
        loop_thread: LoopThread,
    ) -> None:
        _check(clients)
        self._info, self._bus, self._loop_thread = info, bus, loop_thread
        self._members = [
            FleetMember(Replica(_named(info, number), client, bus, weights)) for number, client in enumerate(clients)
        ]
        # Number of the last version. Each replica counts its own transfers, but all serve one version.
        self._number = 0

    def announce(self, metas: Sequence[ParamMeta], *, spread: bool) -> None:
        """See ``Replica.announce``."""
        for member in self._members:
            member.announce(metas, spread=spread)

    def close(self) -> None:
        """Stop looking; idempotent."""
        for member in self._members:
            member.close()

    async def begin(self) -> None:
        """Meet all engines. An engine that does not come in time is left out, unless none comes.

        An engine that refuses is an error.
        """
        if self._info.is_sender:
            for member in self._members:
                member.begin_to_attend(self._loop_thread)
        turn = Turn((), every=True)
        outcomes = await self._each(turn, lambda member: member.begin(turn))
        failed = _failed(outcomes)
        for error in failed.values():
            if not absent(error) or self._ranks_missing(error):
                raise error
        self._tell(failed, "was not met")
        if len(failed) == len(self._members):
            raise _summary("no engine was met", failed)
        if self._info.is_sender:
            self._number = await self._last()

    async def send(self, version: int | str | None) -> FleetResult:
        """Send a version to all of them; an error only if none has taken it."""
        self._number += 1
        label = str(self._number if version is None else version)
        turn = Turn(member for member in self._members if member.is_in)
        outcomes = await self._each(turn, lambda member: member.send(turn, version, label))
        failed = _failed(outcomes)
        self._tell(failed, f"has not taken version {label}")
        if len(failed) == len(self._members):
            raise _summary(f"no engine has taken version {label}", failed)
        return FleetResult(results=tuple(outcome for outcome in outcomes if outcome is not None))

    async def verify(self) -> FleetResult:
        """Verify all that are in; an error if one computes with other weights, or none is in."""
        turn = Turn(member for member in self._members if member.is_in)
        outcomes = await self._each(turn, lambda member: member.verify())
        failed = _failed(outcomes)
        self._tell(failed, "was not verified")
        if len(failed) == len(self._members) or not all(absent(error) for error in failed.values()):
            raise _summary("not all engines are verified", failed)
        return FleetResult(results=tuple(outcome for outcome in outcomes if outcome is not None))

    async def _each(
        self, turn: Turn, work: Callable[[FleetMember], Coroutine[Any, Any, TransferResult | None]]
    ) -> list[TransferResult | EthaError | None]:
        """Run ``work`` for all of them at the same time; returns each outcome."""

        async def outcome(member: FleetMember) -> TransferResult | EthaError | None:
            try:
                result: TransferResult | EthaError | None = await work(member)
            except Exception as error:
                if not isinstance(error, EthaError):
                    log.exception("%s", member)
                result = plain(error)
            turn.end(member, result if isinstance(result, EthaError) else None)
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(outcome(member)) for member in self._members]
        return [task.result() for task in tasks]

    def _ranks_missing(self, error: EthaError) -> bool:
        """Whether ranks of the trainer were missing, and not the engine. They may have lists of other lengths."""
        return isinstance(error, RendezvousTimeoutError) and self._info.local_name in error.missing

    def _tell(self, failed: dict[int, EthaError], what: str) -> None:
        if self._info.is_sender:
            for number, error in failed.items():
                log.warning("%s %s: %s", self._members[number], what, error)

    async def _last(self) -> int:
        """The number of the last version that any of them has taken, from any trainer."""
        batches = (await self._bus.status())["batches"]
        mine = {member.batch for member in self._members}
        return max((int(batch["seq"]) for batch in batches if (batch["pair"], batch["batch"]) in mine), default=0)


def _check(clients: Sequence[VLLMWeightSyncClient]) -> None:
    """ConfigError unless each engine is listed once."""
    if not clients:
        raise ConfigError("client=[]: give a client for each engine, or one client that is not in a list")
    addresses = [getattr(client, "base_url", id(client)) for client in clients]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"client= has an engine twice ({address}): give each engine one client")


def _named(info: EthaTrainerInitInfo, number: int) -> EthaTrainerInitInfo:
    """``info`` for one replica, with a pair and a batch of its own."""
    if number == 0:
        return info
    return replace(info, pair=f"{info.pair}.{number}", batch=f"{info.batch}.{number}")


def _failed(outcomes: Sequence[TransferResult | EthaError | None]) -> dict[int, EthaError]:
    return {number: outcome for number, outcome in enumerate(outcomes) if isinstance(outcome, EthaError)}


def _summary(what: str, failed: dict[int, EthaError]) -> EthaError:
    """One error for several: of their common class, if there is one, with all texts."""
    text = f"{what}: " + "; ".join(f"engine {number}: {error}" for number, error in failed.items())
    errors = list(failed.values())
    if len({error.code for error in errors}) == 1:
        return from_wire({**errors[0].to_wire(), "text": text})
    outcomes = {getattr(error, "outcome", "withdrawn") for error in errors}
    outcome = outcomes.pop() if len(outcomes) == 1 else "unknown"
    return TransferError(text, outcome=outcome, torn=any(getattr(error, "torn", False) for error in errors))


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when the first of ``waits`` is over."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
