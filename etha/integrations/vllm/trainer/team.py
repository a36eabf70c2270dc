"""Messages among the trainer's ranks: rank 0, which calls the engine, tells the others what to do next and the outcome.

    rank 0    meet (say "begin")   say "join"   ...   say "send"   ...   say "done", or the error that all ranks raise
    others    meet (hear)          hear         ...   hear         ...   hear

They use a pair of their own, so that it works without torch.distributed and all ranks learn it when rank 0 dies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor.placement_types import Replicate

from etha import AsyncTensorBusClient, TransferResult
from etha.client.aio import AsyncBatchHandle
from etha.client.arguments.world import device_of
from etha.client.results import AsyncPair
from etha.errors import (
    HELD_HERE,
    ConfigError,
    EthaError,
    PeerLostError,
    RendezvousTimeoutError,
    TransferError,
    TransferTimeoutError,
    from_wire,
)

Word = Literal["begin", "join", "register", "send", "done"]
#: Bytes of a message, and most characters of an error's text and of each of its fields, so that an error fits.
_SIZE, _TEXT = 32768, 2000
_LEADER, _OTHERS = "first", "others"


class Team:
    """This rank's place among the ``world`` ranks of the trainer that sends on ``pair``. A single rank has nobody to
    tell.

    ``side``: the trainer's name, for messages. ``timeout``: seconds for meeting the others.
    """

    def __init__(
        self, bus: AsyncTensorBusClient, pair: str, side: str, *, rank: int, world: int, timeout: float
    ) -> None:
        self._bus, self._name, self._side, self._timeout = bus, f"{pair}.ranks", side, timeout
        self._of = pair
        self._rank, self._world, self._alone = rank, world, world == 1
        self._word = torch.zeros(_SIZE, dtype=torch.uint8, device=device_of(None))
        self._pair: AsyncPair | None = None
        self._batch: AsyncBatchHandle | None = None
        #: Calls of all ranks since they met, so that a rank that is one behind does not follow the next call's
        #: messages.
        self._call = 0

    async def meet(self) -> None:
        """Begin a call of all ranks: wait until every rank makes it.

        RendezvousTimeoutError names the missing ranks, the first time and after one was lost; otherwise
        TransferTimeoutError.
        """
        self._call += 1
        if self._alone:
            return
        if self._pair is None or self._pair.lost.is_set():
            await self._form()
        if self._rank == 0:
            await self.say("begin", self._timeout)
        else:
            await self.hear(self._timeout)

    async def _form(self) -> None:
        self._pair = self._batch = None
        leads, others = self._rank == 0, self._world - 1
        sides = (_LEADER, _OTHERS) if leads else (_OTHERS, _LEADER)
        world, rank = (1, 0) if leads else (others, self._rank - 1)
        try:
            with one_engine(self._of):
                self._pair = await self._bus.init_pair(
                    self._name, *sides, world, (world,), [Replicate()], rank=rank, timeout=self._timeout
                )
            self._batch = await self._bus.register_tensors(
                self._name, {"word": self._word}, pair_name=self._name,
                direction="send" if leads else "recv", timeout=self._timeout,
            )  # fmt: skip
        except RendezvousTimeoutError as error:
            raise self._named(error) from None
        self._call = 1

    def _named(self, error: RendezvousTimeoutError) -> RendezvousTimeoutError:
        """``error`` in ranks of the trainer."""
        late = {0} if _LEADER in error.missing else set()
        late |= {rank + 1 for rank in error.missing.get(_OTHERS, ())}
        text = f"trainer_init or send_weights of {self._side} rank {self._rank} ended at its deadline; "
        text += f"missing: {self._side} ranks {sorted(late)}: call it on every rank"
        return RendezvousTimeoutError(text, missing={self._side: tuple(sorted(late))})

    async def say(self, word: Word | EthaError, timeout: float) -> None:
        """Tell all other ranks, which receive it now or within ``timeout``. TransferError and its subclasses."""
        if self._batch is None:
            return
        message: dict[str, object] = {"word": word}
        if isinstance(word, EthaError):
            message = {"error": _short(word)}
        text = json.dumps({"call": self._call, **message}).encode()
        self._word.copy_(torch.frombuffer(bytearray(text.ljust(_SIZE)), dtype=torch.uint8))
        await self._move("send", timeout)

    async def hear(self, timeout: float) -> Word:
        """Rank 0's next message; raises an error that it sends."""
        await self._move("recv", timeout)
        message = json.loads(self._word.cpu().numpy().tobytes())
        if message["call"] != self._call:
            raise TransferError(
                f"{self._side} rank 0 is at call {message['call']} of send_weights since all ranks have met, and rank "
                f"{self._rank} at call {self._call}: call it equally often on every rank",
                outcome="withdrawn",
            )
        if "error" in message:
            raise from_wire(message["error"])
        word: Word = message["word"]
        assert word in get_args(Word)
        return word

    async def _move(self, verb: Literal["send", "recv"], timeout: float) -> TransferResult:
        assert self._batch is not None
        try:
            result: TransferResult = await self._batch.transfer(verb, timeout=timeout)
        except PeerLostError as error:
            who = "rank 0" if verb == "recv" else "another rank"
            text = f"{who} of {self._side} has left while a version was brought in: {error}"
            raise PeerLostError(text, reason=error.reason, outcome="unknown") from error
        except TransferTimeoutError as error:
            text = f"not every rank of {self._side} was there within {timeout:g} s: call trainer_init and send_weights "
            raise TransferTimeoutError(f"{text}on all of them: {error}", outcome="unknown") from error
        return result


@contextmanager
def one_engine(pair: str) -> Iterator[None]:
    """Say what to do if another trainer engine of this process has this rank's place on ``pair``."""
    try:
        yield
    except ConfigError as error:
        if HELD_HERE not in error.message:
            raise
        raise ConfigError(
            f"another trainer engine of pair {pair!r} lives in this process: call shutdown() on it first, or give this "
            f"one another pair="
        ) from error


def _short(error: EthaError) -> dict[str, Any]:
    """``error`` as ``from_wire`` accepts it, without fields that are too long."""
    wire = error.to_wire()
    data = {key: value for key, value in wire["data"].items() if len(json.dumps(value)) <= _TEXT}
    return {**wire, "text": wire["text"][:_TEXT], "data": data}
