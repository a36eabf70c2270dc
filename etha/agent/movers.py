"""The shell around transfers: worker calls in, programs on the lane, results and errors out."""

from __future__ import annotations

import asyncio
import logging
import time

from etha.agent.calls import Calls
from etha.agent.chronicle import Chronicle
from etha.agent.effects import CallKey, Fail, Member, OfferChanged, Settled, StartMove, StopMove, Tell
from etha.agent.lane import Lane
from etha.agent.live import Ask, Current, Live
from etha.agent.pairs import Spawn
from etha.agent.pipeline import Execution
from etha.agent.session import Session
from etha.agent.transfer import TransferEffect
from etha.agent.waiting import Call
from etha.bus.codec import Request
from etha.bus.messages import Moved, Offered, Progress, Transfer
from etha.errors import (
    EthaError,
    PeerLostError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
)
from etha.memory.reach import ReachError, RevokedError, WorkerGoneError
from etha.memory.views import View
from etha.store.registry import Store
from etha.transport.local import compile_local
from etha.transport.program import Program

log = logging.getLogger(__name__)

#: Bytes up to which a program is run on the loop itself, some ten microseconds.
_SHORT = 64 << 10


class Movers:
    """All transfers of this agent, on one lane."""

    def __init__(self, *, store: Store, calls: Calls, lane: Lane, spawn: Spawn) -> None:
        self._calls, self._lane, self._spawn = calls, lane, spawn
        self.chronicle = Chronicle(store, spawn)
        self.running = 0
        #: Set while no transfer moves on this agent.
        self.idle = asyncio.Event()
        self.idle.set()

    # ---- what workers ask ---------------------------------------------------------------------

    def transfer(self, session: Session, request: Request, message: Transfer, live: Live) -> None:
        """A worker calls ``transfer``; the batch stands."""
        member = session.seats[live.pairs[0]].member
        assert live.evaluation is not None and live.transfers is not None
        source = member[0] if message.verb == "send" else live.other(member[0])
        if violations := live.evaluation.violations[source]:
            listed = "\n  ".join(map(str, violations[:20]))
            raise RegistrationError(
                f"batch {live.name!r} cannot move from {source} to {live.other(source)}:\n  {listed}",
                violations=violations,
            )
        if message.version is not None and message.verb == "recv":
            raise TransferError("version= is a label that the sender sets; recv learns it", outcome="withdrawn")
        if session.revocation is not None and not session.revocation.lends(message.slot):
            # This agent was frozen: the worker waits no more, and nobody is to be bound to its call.
            raise TransferError(f"batch {live.name!r}: the call had ended before it was heard", outcome="withdrawn")
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(live, key, expired))
        live.asks[key] = Ask(session=session, slot=message.slot, progress=message.progress)
        call = Call(key=key, member=member, verb=message.verb, version=message.version)
        self._perform(live, live.transfers.wait(call))

    def wait_offer(self, session: Session, request: Request, live: Live) -> None:
        """A worker calls ``wait_offer``."""
        assert live.transfers is not None
        side = session.seats[live.pairs[0]].side
        key = self._calls.open(session.peer, request, lambda key, expired: self._no_offer(live, key, expired))
        live.offers[key] = live.other(side)
        self._tell_offers(live)

    # ---- what happens around ------------------------------------------------------------------

    def withdraw(self, live: Live, member: Member, error: PeerLostError) -> None:
        """A worker leaves the batch: its waiting calls end, and a transfer that it is part of."""
        for key in [key for key, side in live.offers.items() if side == live.other(member[0])]:
            if live.tensors[member].session.key == key[0]:
                del live.offers[key]
                self._calls.fail(key, error)
        if live.transfers is not None:
            for key in [k for k, a in live.asks.items() if a.session is live.tensors[member].session]:
                self._perform(live, live.transfers.end(key, expired=False))

    def break_up(self, live: Live, error: PeerLostError) -> None:
        """The batch is over for everybody."""
        for key in list(live.offers):
            del live.offers[key]
            self._calls.fail(key, error)
        if live.transfers is not None:
            self._perform(live, live.transfers.break_up(error))

    # ---- inside -------------------------------------------------------------------------------

    def _ended(self, live: Live, key: CallKey, expired: bool) -> None:
        assert live.transfers is not None
        self._perform(live, live.transfers.end(key, expired=expired))

    def _no_offer(self, live: Live, key: CallKey, expired: bool) -> None:
        if (side := live.offers.pop(key, None)) is not None:
            how = "ended at its deadline" if expired else "was cancelled"
            text = f"wait_offer on batch {live.name!r} {how}: {side} is not waiting to send"
            self._calls.fail(key, TransferTimeoutError(text, outcome="withdrawn"))

    def _tell_offers(self, live: Live, going: str | None = None) -> None:
        """Answer who waits for an offer that stands, or for one that GO has just taken up (from ``going``)."""
        assert live.transfers is not None and live.evaluation is not None
        standing = dict(live.transfers.offers)
        if going is not None and live.transfers.current is not None:
            standing[going] = live.transfers.current.version
        for key, side in list(live.offers.items()):
            if side in standing:
                del live.offers[key]
                offered = Offered(version=standing[side], nbytes=live.evaluation.nbytes(side))
                self._calls.answer(key, offered)

    def _perform(self, live: Live, effects: list[TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case StartMove(seq=seq, source=source, calls=calls):
                    self.running += 1
                    self.idle.clear()
                    live.current = Current(seq=seq, source=source, calls=calls, started=time.monotonic())
                    self._tell_offers(live, going=source)
                    self._start(live, live.current)
                case StopMove():
                    assert live.current is not None
                    live.current.stopped = True
                    if live.current.running is not None:
                        live.current.running.abort(asyncio.CancelledError())
                case Fail(call=key, error=error):
                    live.asks.pop(key, None)
                    self._calls.fail(key, error)
                case Settled():
                    self._settled(live, effect)
                case OfferChanged():
                    self._tell_offers(live)
                case Tell(agent=agent):
                    raise AssertionError(f"no link to agent {agent}")

    def _start(self, live: Live, current: Current) -> None:
        program = live.programs.get(current.source)
        if program is not None:
            self._submit(live, current, program)
        else:
            self._spawn(self._compile(live, current))

    async def _compile(self, live: Live, current: Current) -> None:
        """The first transfer in a direction resolves every handle and lays out the pieces, off the loop."""
        assert live.evaluation is not None
        plan = live.evaluation.plans[current.source]
        try:
            sources, targets = self._views(live, current.source, plan.names)
            program = await asyncio.to_thread(compile_local, plan, sources, targets)
        except EthaError as error:
            self._over(live, current, error, touched=False)
            return
        except Exception as error:
            log.exception("batch %s: compiling failed", live.name)
            text = f"batch {live.name!r}: the agent could not lay out the transfer, a bug of Etha: {error!r}"
            self._over(live, current, TransferError(text), touched=False)
            return
        live.programs[current.source] = program
        self._submit(live, current, program)

    def _views(
        self, live: Live, source: str, names: tuple[str, ...]
    ) -> tuple[dict[int, dict[int, View]], dict[int, dict[int, View]]]:
        assert live.evaluation is not None
        sources: dict[int, dict[int, View]] = {}
        targets: dict[int, dict[int, View]] = {}
        for (side, rank), tensors in live.tensors.items():
            receives = side != source
            shadows = tensors.shadows if receives and live.evaluation.atomic else None
            if receives and live.evaluation.atomic and shadows is None:
                raise TransferError(f"{side} rank {rank} has not attached its shadows")
            handles = shadows or tensors.handles
            views = {i: tensors.session.memory.resolve(handles[n]) for i, n in enumerate(names) if n in handles}
            (targets if receives else sources)[rank] = views
        return sources, targets

    def _submit(self, live: Live, current: Current, program: Program) -> None:
        if current.stopped:
            self._over(live, current, None, touched=False)
            return
        guards = {}
        for member, key in current.calls.items():
            ask = live.asks[key]
            if ask.session.revocation is not None:
                role = "source" if member[0] == current.source else "target"
                guards[role, member[1]] = ask.session.revocation.guard(ask.slot)
        job = Execution(program, guards)
        if program.work <= _SHORT and job.pieces <= 2 and self._lane.idle:
            # The way to a lane thread and back takes longer than such a copy.
            asyncio.get_running_loop().call_soon(self._here, live, current, job)
            return
        current.running = self._lane.submit(
            job,
            on_progress=lambda done: self._progress(live, current, program, done),
            on_done=lambda error: self._done(live, current, error),
        )

    def _here(self, live: Live, current: Current, job: Execution) -> None:
        """Run a short program on the loop, in the place of one thread more than the lane has."""
        error: BaseException | None = asyncio.CancelledError() if current.stopped else None
        piece = 0
        while error is None and piece < job.pieces:
            try:
                job.run(piece, self._lane.threads)
            except Exception as raised:  # as from a lane: handed on, and told to the workers
                error = raised
            piece += 1
        self._over(live, current, None if error is None else self._translate(live, error), touched=piece > 0)

    def _progress(self, live: Live, current: Current, program: Program, done: int) -> None:
        if live.current is not current or program.work == 0:
            return
        for (side, rank), key in current.calls.items():
            ask = live.asks.get(key)
            if ask is not None and ask.progress:
                total = program.nbytes["source" if side == current.source else "target", rank]
                self._calls.push(key, Progress(done=total * done // program.work, total=total))

    def _done(self, live: Live, current: Current, error: BaseException | None) -> None:
        touched = current.running is not None and current.running.next > 0
        self._over(live, current, None if error is None else self._translate(live, error), touched=touched)

    def _over(self, live: Live, current: Current, error: EthaError | None, *, touched: bool) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()
        assert live.transfers is not None
        self._perform(live, live.transfers.moved(current.seq, error, touched=touched))

    def _translate(self, live: Live, error: BaseException) -> EthaError:
        """What a lane met, in words that name the worker."""
        if isinstance(error, EthaError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return TransferError("stopped")
        who = "a worker"
        if isinstance(error, ReachError) and error.owner is not None:
            role, rank = error.owner
            current = live.current
            source = current.source if current is not None else ""
            who = f"{source if role == 'source' else live.other(source)} rank {rank}"
        match error:
            case WorkerGoneError():
                return PeerLostError(f"{who} died in the transfer", reason="died")
            case RevokedError():
                return TransferError(f"the call of {who} has ended and taken its memory back")
            case ReachError():
                return TransferError(f"the memory of {who} could not be reached: {error}")
        log.error("batch %s: a lane failed", live.name, exc_info=error)
        return TransferError(f"the agent's lane failed, a bug of Etha: {type(error).__name__}: {error}")

    def _settled(self, live: Live, effect: Settled) -> None:
        current, live.current = live.current, None
        assert current is not None and live.evaluation is not None
        seconds = time.monotonic() - current.started
        fields: dict[str, int | float | str | None] = {"seq": effect.seq}
        if effect.error is None:
            live.version, live.last_seconds, live.last_error = effect.version, seconds, None
            self._answer(live, effect, seconds)
            fields |= {"version": effect.version, "last_seconds": round(seconds, 6), "last_error": ""}
        else:
            live.last_error = effect.error
            fields |= {"last_error": effect.error.message[:1000]}
        for pair in live.pairs:
            self.chronicle.tell(pair, live.name, fields)

    def _answer(self, live: Live, effect: Settled, seconds: float) -> None:
        program = live.programs[effect.source]
        for (side, rank), key in effect.calls.items():
            live.asks.pop(key, None)
            role = "source" if side == effect.source else "target"
            sides = {"source": effect.source, "target": live.other(effect.source)}
            peers = tuple(sorted((sides[where], peer) for where, peer in program.peers[role, rank]))
            moved = Moved(
                seq=effect.seq,
                version=effect.version,
                nbytes=program.nbytes[role, rank],
                seconds=seconds,
                peers=peers,
                peak_staging=program.peak_staging(self._lane.threads),
            )
            self._calls.answer(key, moved)
