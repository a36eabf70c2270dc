"""NIXL over UCX: each target rank reads from the sources, one descriptor for each contiguous run of bytes.

Registration, descriptors and handles are made once. A source waits for the notifications that its bytes were read.

read    with the agent's progress thread, which is its default
polled  without: the waiting ranks drive what has to be driven
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

import torch

from .cases import Row
from .seat import TIMEOUT, Seat

if TYPE_CHECKING:
    from nixl._api import nixl_agent

NAME = "nixl"
PROBE = "from importlib.metadata import version; import nixl._api; print('nixl', version('nixl'))"
INSTALL = "pip install torch nixl in a venv of its own, then --python nixl=VENV/bin/python (bench/peers/README.md)"
#: Of the payload, held at a time: at the source, at the target.
COPIES = 2
#: Variants whose ranks keep a core busy while nothing moves: those with a progress thread.
PAUSED = frozenset({"read"})
#: Seconds between two looks for notifications.
PAUSE = 50e-6
DONE = b"read"


def variants(row: Row) -> list[str]:
    """With and without the progress thread."""
    return ["read", "polled"]


def environment(row: Row, variant: str) -> dict[str, str]:
    """Between hosts UCX may use neither shared memory nor another process's memory."""
    return {"UCX_TLS": "tcp,self"} if row.way == "tcp" else {}


class Agent:
    """One rank with an agent."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.held: dict[str, torch.Tensor] = {}
        self._agent: nixl_agent
        self._handles: list[Any] = []
        #: Of the notifications that a source waits for, those that have come.
        self._readers, self._read = 0, 0

    def prepare(self) -> Any:
        """Register memory; addresses for the others."""
        from nixl._api import nixl_agent, nixl_agent_config

        self.held = self.seat.plain()
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=self.seat.variant == "read")
        self._agent = nixl_agent(f"{self.seat.side}-{self.seat.rank}", config)
        regions = [(tensor.data_ptr(), tensor.nbytes, 0, "") for tensor in self.held.values()]
        self._agent.register_memory(regions, "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "addresses": [tensor.data_ptr() for tensor in self.held.values()]}

    def connect(self, shares: list[Any]) -> None:
        """Handles for what comes from each source."""
        row, me = self.seat.row, self.seat.rank
        if self.seat.side == "source":
            targets = range(row.ranks)
            self._readers = sum(any(row.piece(tensor, me, target) for tensor in row.tensors) for target in targets)
            for share in shares[row.ranks :]:
                self._agent.add_remote_agent(base64.b64decode(share["metadata"]))
            return
        for source, share in enumerate(shares[: row.ranks]):
            here, there = [], []
            for tensor, base in zip(row.tensors, share["addresses"], strict=True):
                local = self.held[tensor.name].data_ptr()
                for run in row.runs(tensor, source, me):
                    here.append((local + run.at_target, run.nbytes, 0))
                    there.append((base + run.at_source, run.nbytes, 0))
            if here:
                name = self._agent.add_remote_agent(base64.b64decode(share["metadata"]))
                descriptors = [self._agent.get_xfer_descs(some, "DRAM") for some in (here, there)]
                self._handles.append(self._agent.initialize_xfer("READ", *descriptors, name, DONE))

    def transfer(self) -> None:
        """Read, or wait until one was read."""
        deadline = time.monotonic() + TIMEOUT
        if self.seat.side == "source":
            self._read -= self._readers
            while self._read < 0:
                time.sleep(PAUSE)
                self._read += sum(len(texts) for texts in self._agent.get_new_notifs().values())
                self._expire(deadline)
            return
        states = [self._agent.transfer(handle, DONE) for handle in self._handles]
        while any(state != "DONE" for state in states):
            if "ERR" in states:
                raise RuntimeError(f"NIXL reports {states}")
            states = [
                state if state == "DONE" else self._agent.check_xfer_state(handle)
                for state, handle in zip(states, self._handles, strict=True)
            ]
            self._expire(deadline)

    def _expire(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not read within {TIMEOUT:.0f} s")

    def close(self) -> None:
        """Release the handles."""
        for handle in self._handles:
            self._agent.release_xfer_handle(handle)


def open_adapter(seat: Seat) -> Agent:
    """For ``peers.rank``."""
    return Agent(seat)
