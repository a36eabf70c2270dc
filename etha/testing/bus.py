"""What a dummy's agent and other side would know and answer: pairs, batches, and faults to come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from etha.bus.messages import InitPair, Moved, Offered, PairFormed, PairLost, Register, Registered, Transfer, WaitOffer
from etha.errors import EthaError, PeerLostError, RegistrationError, Violation, with_again
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


class Bus:
    """What outlives a connection: pairs, batches, and faults to come."""

    def __init__(self) -> None:
        self.pairs: dict[str, _Pair] = {}
        self.batches: dict[str, _Batch] = {}
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
        return Moved(seq=batch.seq, version=batch.version, nbytes=batch.nbytes, seconds=0.0, peers=(), peak_staging=0)

    def offer(self, call: WaitOffer) -> Offered:
        batch = self.batches[call.batch]
        self.check(batch.register.pairs, call.epoch)
        return Offered(version=batch.version, nbytes=batch.nbytes)

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
