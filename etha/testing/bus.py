"""What a dummy's agent and other side would know and answer: pairs, batches, and faults to come."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from etha.bus.messages import (
    Announced,
    BeginPut,
    ClaimVersion,
    FinishPut,
    Holders,
    InitPair,
    Moved,
    Offered,
    PairFormed,
    PairLost,
    PublicationDescribed,
    Publish,
    Published,
    Register,
    Registered,
    SlotGiven,
    Subscribe,
    Subscribed,
    Subscribers,
    Transfer,
    VersionClaimed,
    WaitOffer,
)
from etha.errors import (
    EthaError,
    PeerLostError,
    RegistrationError,
    TransferTimeoutError,
    Violation,
    with_again,
)
from etha.memory.handles import TensorHandle
from etha.version import __version__


@dataclass(slots=True, kw_only=True)
class _Pair:
    """A pair as the other side and the agent would know it. ``lost`` is why its epoch is over."""

    init: InitPair
    epoch: int
    lost: PeerLostError | None = None


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A registered batch. ``seq`` and ``version`` continue over epochs."""

    register: Register
    nbytes: int
    seq: int
    generation: int
    version: int | str | None = None


@dataclass(slots=True)
class _Publication:
    """The newest version, what the subscriber holds, and who waits for a newer one."""

    publisher: str = "trainer"
    seq: int = 0
    version: int | str | None = None
    held: int = 0
    tensors: tuple[dict[str, Any], ...] = ()
    subscriber: str = ""
    turn: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Bus:
    """What outlives a connection: pairs, batches, publications, and faults to come."""

    def __init__(self) -> None:
        self.pairs: dict[str, _Pair] = {}
        self.batches: dict[str, _Batch] = {}
        self.publications: dict[str, _Publication] = {}
        #: Of hops: batch -> label of the version that is received next.
        self._hops: dict[str, int] = {}
        self.faults: deque[EthaError] = deque()

    def lose(self, name: str, reason: str) -> PairLost:
        """End the pair's epoch. Returns what its workers are told."""
        pair = self.pairs[name]
        text = with_again(f"pair {name!r}: {pair.init.remote} rank 0 has {reason}")
        pair.lost = pair.lost or PeerLostError(
            text, reason=reason, outcome="withdrawn", culprits=[(pair.init.remote, 0)]
        )
        return PairLost(
            pair=name,
            epoch=pair.epoch,
            reason=pair.lost.reason,
            text=pair.lost.message,
            culprits=pair.lost.culprits,
        )

    def check(self, names: tuple[str, ...], epoch: int) -> None:
        """Raise PeerLostError if one of the pairs is lost, or is at another epoch by now."""
        for name in names:
            if (lost := self.pairs[name].lost) is not None:
                raise PeerLostError(lost.message, **lost.data())
        if (now := self.pairs[names[0]].epoch) != epoch:
            text = f"pair {names[0]!r} is at epoch {now} now, not {epoch}: call register_tensors again"
            raise PeerLostError(text, reason="relaunched", outcome="withdrawn")

    # ---- what an agent answers -----------------------------------------------------------------

    def init_pair(self, init: InitPair) -> PairFormed:
        """Form the pair. Repeating the call changes nothing; after a loss, or as another rank, it forms the next
        epoch."""
        pair = self.pairs.get(init.pair)
        if pair is None or pair.lost is not None or pair.init != init:
            pair = self.pairs[init.pair] = _Pair(init=init, epoch=1 if pair is None else pair.epoch + 1)
        return PairFormed(epoch=pair.epoch, local_world_size=init.world_size, remote_world_size=1)

    def register(self, register: Register) -> Registered:
        """Register at once. RegistrationError for tensors that no other side could fit."""
        self.check(register.pairs, register.epoch)
        init = self.pairs[register.pairs[0]].init
        receives = register.direction in ("recv", "both")
        if reasons := [
            Violation(code=refusal.code, name=refusal.name, side=init.side, rank=init.rank, text=refusal.text)
            for refusal in register.refusals
            if receives or not refusal.target_only
        ]:
            listed = "\n  ".join(str(reason) for reason in reasons[:20])
            raise RegistrationError(
                f"batch {register.batch} cannot be registered, {len(reasons)} reasons:\n  {listed}",
                violations=tuple(reasons),
            )
        nbytes = sum(_nbytes(entry.handle) for entry in register.entries)
        known = self.batches.get(register.batch)
        seq = max(register.seq, 0 if known is None else known.seq)
        generation = 1 if known is None else known.generation + 1
        self.batches[register.batch] = _Batch(register=register, nbytes=nbytes, seq=seq, generation=generation)
        names = (f"{init.side}->{init.remote}", f"{init.remote}->{init.side}")
        summary = {
            "tensors": len(register.entries),
            "bucket_size": register.bucket_size,
            "verify": register.verify,
            "directions": {name: {"bytes": nbytes, "digest": ""} for name in names},
        }
        # Without shadows, because nothing could be received into them.
        return Registered(
            generation=generation,
            seq=seq,
            atomic=register.atomic,
            shadows=False,
            send=True,
            recv=True,
            receives=receives,
            summary=summary,
        )

    def transfer(self, call: Transfer) -> Moved:
        """GO and COMMIT in one. A receiver without a label gets that of the last send."""
        batch = self.batches[call.batch]
        self.check(batch.register.pairs, call.epoch)
        batch.seq += 1
        if call.verb == "send" or call.version is not None:
            batch.version = call.version
        elif call.batch in self._hops:
            batch.version = self._hops.pop(call.batch)
        return Moved(seq=batch.seq, version=batch.version, nbytes=batch.nbytes, seconds=0.0, peers=(), peak_staging=0)

    def offer(self, call: WaitOffer) -> Offered:
        batch = self.batches[call.batch]
        self.check(batch.register.pairs, call.epoch)
        return Offered(version=batch.version, nbytes=batch.nbytes)

    # ---- publications --------------------------------------------------------------------------

    def announce(self, name: str, version: int | str | None) -> Announced:
        """The next version of a publication is there. Returns what its subscriber is told."""
        found = self.publications.setdefault(name, _Publication())
        found.seq, found.version = found.seq + 1, version
        found.news.set()
        return Announced(publication=name, seq=found.seq)

    def publish(self, message: Publish) -> Published:
        """The publisher enters; what it publishes is known from now on."""
        found = self.publications.setdefault(message.publication, _Publication())
        found.publisher = message.publisher
        found.tensors = tuple(
            {"name": one.name, "dtype": one.handle.dtype, "shape": list(one.shape or one.handle.shape)}
            for one in sorted(message.entries, key=lambda entry: entry.name)
        )
        return Published(seq=found.seq)

    def begin_put(self, message: BeginPut) -> SlotGiven:
        return SlotGiven(slot=0, seq=self.publications[message.publication].seq + 1)

    def finish_put(self, message: FinishPut) -> Announced:
        return self.announce(message.publication, message.version)

    def describe(self, name: str) -> PublicationDescribed:
        """What this client publishes."""
        found = self.publications.get(name)
        if found is None or not found.tensors:
            text = f"nobody has published {name!r}, and a dummy waits for nobody: publish it first"
            raise TransferTimeoutError(text, outcome="withdrawn")
        return PublicationDescribed(tensors=found.tensors)

    def subscribe(self, message: Subscribe) -> Subscribed:
        found = self.publications.setdefault(message.publication, _Publication())
        found.subscriber, found.held = message.subscriber, 0
        return Subscribed(seq=found.seq, turn=found.turn)

    async def claim(self, message: ClaimVersion, timeout: float) -> VersionClaimed:
        """Wait for a version that is newer than the one that is held, or has the pinned label."""
        found = self.publications[message.publication]
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                while not self._fits(found, message):
                    found.news.clear()
                    await found.news.wait()
        except TimeoutError:
            text = f"{message.subscriber} got no version of publication {message.publication!r} by its deadline"
            raise TransferTimeoutError(f"{text}: put one, or call announce", outcome="withdrawn") from None
        found.turn = max(found.turn + 1, message.turn)
        pair = f"hop.{message.publication}.{found.publisher}.{message.subscriber}"[:90]
        self._hops[f"{pair}.slot0"] = found.seq
        return VersionClaimed(
            claim=found.turn,
            turn=found.turn,
            source=found.publisher,
            pair=pair,
            batch=f"{pair}.slot0",
            seq=found.seq,
            version=found.version,
        )

    @staticmethod
    def _fits(found: _Publication, message: ClaimVersion) -> bool:
        pinned = message.version is None or message.version == found.version
        return found.seq > 0 and pinned and (message.version is not None or found.seq > message.newer_than)

    def subscribers(self, name: str) -> Subscribers:
        """The one of this client, if it has one."""
        found = self.publications[name]
        if not found.subscriber:
            return Subscribers(subscribers=())
        lag = found.seq - found.held
        one = {
            "name": found.subscriber,
            "ranks": 1,
            "seq": found.held,
            "version": None if lag else found.version,
            "lag": lag,
            "lag_seconds": 0.0,
            "source": found.publisher,
            "state": "behind" if lag else "current",
            "error": "",
        }
        return Subscribers(subscribers=(one,))

    def holders(self, name: str, seq: int) -> Holders:
        """The one of this client, if it has one that holds the version."""
        found = self.publications[name]
        return Holders(subscribers=(found.subscriber,) if found.subscriber and found.held >= seq else ())

    def hold(self, name: str) -> None:
        """The subscriber has received the newest version."""
        self.publications[name].held = self.publications[name].seq

    def status(self) -> dict[str, Any]:
        """A report like an agent's."""
        return {
            "agent": {"id": "dummy", "pid": 0, "host": "", "device": "", "version": __version__, "workers": []},
            "pairs": [
                {
                    "pair": name,
                    "state": "formed" if pair.lost is None else "lost",
                    "epoch": pair.epoch,
                    "sides": {
                        pair.init.side: {"world_size": pair.init.world_size, "ranks": [pair.init.rank]},
                        pair.init.remote: {"world_size": 1, "ranks": [0]},
                    },
                    "waiting_for": {},
                    "error": "" if pair.lost is None else pair.lost.message,
                }
                for name, pair in sorted(self.pairs.items())
            ],
            "batches": [
                {
                    "pair": batch.register.pairs[0],
                    "batch": name,
                    "state": "registered",
                    "seq": batch.seq,
                    "version": batch.version,
                    "bytes": batch.nbytes,
                    "transport": "dummy",
                    "waiting_for": [],
                    "last_error": "",
                }
                for name, batch in sorted(self.batches.items())
            ],
        }


def _nbytes(handle: TensorHandle) -> int:
    itemsize: int = getattr(torch, handle.dtype).itemsize
    return torch.Size(handle.shape).numel() * itemsize
