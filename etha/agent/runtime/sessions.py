"""One connected worker: its process, the memory it showed, the ranks and batches it holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from etha.agent.protocol.effects import Member
from etha.bus.peer import Peer
from etha.errors import ProtocolError
from etha.memory.mapping import WorkerMemory
from etha.memory.reach import ReachError
from etha.memory.revocation import LentPage
from etha.store.records import RankHolder as Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank that this worker holds in a pair; ``epoch`` is the one it was let into."""

    pair: str
    side: str
    rank: int
    remote: str
    holder: Holder
    epoch: int

    @property
    def member(self) -> Member:
        """(side, rank)."""
        return (self.side, self.rank)


@dataclass(slots=True, kw_only=True)
class Session:
    """What the agent knows of one worker's connection; a process may have several."""

    peer: Peer
    holder: Holder
    memory: WorkerMemory
    revocation: LentPage | None = None
    #: Which of the worker's wishes for an agent this one does not meet; or nothing.
    differs: str = ""
    #: Why the worker copies some of its tensors through memory that it can show; or nothing.
    staged: str = ""
    seats: dict[str, Seat] = field(default_factory=dict)
    #: batch name -> (primary pair, generation) of the registration that this worker takes part in.
    batches: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def reach(self) -> str:
        """How its tensors are reached, as ``status`` shows it: "direct", or "staged" and why."""
        if self.staged:
            return f"staged: {self.staged}"
        return "direct" if self.memory.private or self.memory.on_device else "staged"

    @property
    def key(self) -> str:
        """The connection's id."""
        return self.peer.key

    def show(self, header: dict[str, Any], fds: list[int]) -> None:
        """The worker shows memory: a segment, an allocation of a GPU, or its revocation page. Owns ``fds``.

        ProtocolError and RegistrationError for what is none of them.
        """
        match header, fds:
            case {"segment": str(segment), "nbytes": int(nbytes)}, [fd]:
                self.memory.attach(segment, fd, nbytes)
            case {"segment": _, "device": _}, []:
                self.memory.attach_allocation(header)
            case {"revocation": True}, [fd]:
                self.revocation = LentPage(fd)
            case _:
                for fd in fds:
                    os.close(fd)
                raise ProtocolError(f"descriptors of unknown kind {sorted(map(str, header))}")

    def probe(self, address: int, token: bytes) -> str:
        """Find out whether the worker's private memory is within reach; why not, or nothing."""
        try:
            self.memory.process.probe(address, token)
        except ReachError as error:
            self.memory.private = False
            return str(error)
        self.memory.private = True
        return ""
