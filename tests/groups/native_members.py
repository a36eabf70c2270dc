"""Members of a group for tests of etha.native: processes that map each other's memfds and run what a test says."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from etha.native import (
    MESSAGE,
    GroupMemory,
    MessageKind,
    NativeLibrary,
    RingLinks,
    RunResult,
    run_arguments,
)
from tests import processes
from tests.processes import send_signal
from tests.unit.native import libraries
from tests.unit.native.pages import STRIDE, copy, post, sources, spaces, steps, wait

processes.preload(__name__)

LENGTH, RINGS, RING = 1 << 20, 1 << 17, 8192
#: Where each member shows its number of the round, one place for even rounds and one for odd.
SLOTS = 8192
#: Bytes that a member copies between rounds, at most.
WORK = 400 << 10
#: What nobody comes near unless something is lost.
PATIENCE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a member's process is given."""

    rank: int
    parent: int
    descriptors: tuple[int, ...]
    library: str
    spin_us: int = 0


class Mapped:
    """A member's mappings of all memfds."""

    def __init__(self, seat: Seat) -> None:
        self.maps = []
        for fd in seat.descriptors:
            with Path(f"/proc/{seat.parent}/fd/{fd}").open("r+b") as file:
                self.maps.append(mmap.mmap(file.fileno(), LENGTH))
        self.at = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]
        found = libraries.get(seat.library)
        assert found is not None
        self.library: NativeLibrary = found
        self.memory = GroupMemory(
            rank=seat.rank,
            pages=self.at,
            descriptor_stride=STRIDE,
            ring_offset=RINGS,
            ring_bytes=RING,
            spin_us=seat.spin_us,
        )


Work = Callable[..., Any]


def _main(seat: Seat, connection: Connection, work: Work, args: tuple[Any, ...]) -> None:
    connection.send(("began", None))
    connection.send(("done", work(Mapped(seat), *args)))
    connection.close()


class Members:
    """Processes of one group. Leaving the context kills what still runs."""

    def __init__(self, size: int, names: tuple[str, ...], spin_us: int = 0) -> None:
        self.size, self.names, self.spin_us = size, names, spin_us
        self.descriptors = tuple(os.memfd_create(f"member {r}") for r in range(size))
        for fd in self.descriptors:
            os.ftruncate(fd, LENGTH)
        self.processes: dict[int, tuple[BaseProcess, Connection]] = {}
        self.own = Mapped(self.seat(0))

    def seat(self, rank: int) -> Seat:
        return Seat(
            rank=rank,
            parent=os.getpid(),
            descriptors=self.descriptors,
            library=self.names[rank % len(self.names)],
            spin_us=self.spin_us,
        )

    def start(self, rank: int, work: Work, *args: Any) -> None:
        """Run ``work(mapped, *args)`` as that member; returns when its process has begun."""
        here, there = processes.CONTEXT.Pipe()
        process = processes.CONTEXT.Process(target=_main, args=(self.seat(rank), there, work, args))
        process.start()
        there.close()
        self.processes[rank] = (process, here)
        assert here.poll(PATIENCE) and here.recv()[0] == "began"

    def result(self, rank: int) -> Any:
        process, here = self.processes[rank]
        assert here.poll(2 * PATIENCE), f"member {rank} says nothing"
        kind, value = here.recv()
        process.join(PATIENCE)
        assert kind == "done" and process.exitcode == 0
        return value

    def signal(self, rank: int, number: signal.Signals) -> None:
        process, _ = self.processes[rank]
        assert process.pid is not None
        send_signal(process.pid, number)
        if number == signal.SIGKILL:
            process.join(PATIENCE)

    def await_sleep(self, rank: int) -> None:
        """Until that member has said that it is about to sleep on its bell."""
        end = time.monotonic() + PATIENCE
        while not self.own.maps[rank][132]:
            assert time.monotonic() < end
            os.sched_yield()

    def close(self) -> None:
        for process, here in self.processes.values():
            process.kill()
            process.join()
            here.close()
        for fd in self.descriptors:
            os.close(fd)


@contextmanager
def group(size: int, *names: str, spin_us: int = 0) -> Iterator[Members]:
    members = Members(size, names, spin_us)
    try:
        yield members
    finally:
        members.close()


def soon() -> int:
    return time.monotonic_ns() + int(PATIENCE * 1e9)


def play_rounds(mapped: Mapped, rounds: int, seed: int, batch: int = 500) -> int:
    """Show the number of each round to all others and read theirs; the number of readings that were wrong.

    Members wait for each other in orders of their own, sometimes in slices.
    """
    memory, library = mapped.memory, mapped.library
    chance, size, wrong, numbers = random.Random(seed), memory.size, 0, np.zeros(batch + 1, np.int64)
    out, scratch = np.zeros((batch + 1, size), np.int64), np.zeros(2 * WORK, np.uint8)
    others = [r for r in range(size) if r != memory.rank]
    for base in range(0, rounds, batch):
        numbers[:], rows = base + np.arange(batch + 1), []
        for phase in range(1, batch + 1):
            slot = SLOTS + phase % 2 * 64
            if chance.random() < 0.5:  # work that takes up to as long as a wake-up, so that posts meet every moment
                rows += [copy(2 + size, 2 + size, chance.randrange(WORK), dst=WORK)]
            rows += [copy(2 + memory.rank, 0, 8, dst=slot, src=8 * phase), post(phase)]
            order = chance.sample(others, len(others))
            rows += [wait(phase)] if chance.random() < 0.5 else [wait(phase, r) for r in order]
            rows += [copy(1, 2 + r, 8, dst=8 * (phase * size + r), src=slot) for r in order]
        args = run_arguments(
            memory,
            steps(*rows),
            sources(),
            spaces(numbers, out, *mapped.at, scratch),
            phase_base=base,
            call_number=base // batch,
            deadline_ns=soon(),
            slice_ms=chance.choice([0, 0, 0, 1]),
            brief_us=chance.choice([0, 20]),
        )
        while (result := library.run(args)) is RunResult.AGAIN:
            pass
        assert result is RunResult.DONE, (result, args.failed_ranks, base, args.next)
        wrong += int((out[1:, others] != numbers[1:, None]).sum())
    return wrong


def wait_for_phase(mapped: Mapped, phase: int, call: int, seconds: float = PATIENCE) -> tuple[str, list[int], float]:
    """Post the phase and wait for everybody: the result, whom it blames, and the seconds that it took."""
    begin = time.monotonic()
    args = run_arguments(
        mapped.memory,
        steps(post(phase), wait(phase)),
        sources(),
        spaces(),
        phase_base=0,
        call_number=call,
        deadline_ns=time.monotonic_ns() + int(seconds * 1e9),
    )
    while (result := mapped.library.run(args)) is RunResult.AGAIN:
        pass
    return result.name, [r for r, failed in enumerate(args.failed_ranks) if failed], time.monotonic() - begin


def give_up(mapped: Mapped, call: int) -> None:
    mapped.library.give_up(mapped.memory, call)


def claim(mapped: Mapped) -> int:
    """Who has the cause, after a race with all others."""
    assert wait_for_phase(mapped, 1, 0)[0] == "DONE"
    found = None
    while found is None:
        found = mapped.library.claim_cause(mapped.at[0], mapped.memory.rank)
    return found


def exchange_messages(mapped: Mapped, count: int, seed: int) -> int:
    """Send ``count`` messages to each other and receive as many, in an order of the own; the number that were wrong."""
    memory = mapped.memory
    links, chance, rank = RingLinks(memory), random.Random(seed + 1000 * memory.rank), memory.rank
    rows, held, expected = [], [], []
    for other in (r for r in range(memory.size) if r != rank):
        for kind, source, target in ((MessageKind.SEND, rank, other), (MessageKind.RECEIVE, other, rank)):
            for number in range(count):
                data = message_bytes(source, target, number, seed)
                held.append(data if kind is MessageKind.SEND else np.zeros_like(data))
                expected.append(data)
                rows.append((kind, other, number % 5, held[-1], len(rows)))
    # Messages of one peer and tag keep their order; everything else is asked for in any order.
    places: dict[tuple[int, int, int], list[int]] = {}
    for kind, other, tag, _, at in rows:
        places.setdefault((kind, other, tag), []).append(at)
    keys = [key for key, those in places.items() for _ in those]
    chance.shuffle(keys)
    order = [places[key].pop(0) for key in keys]
    messages = np.zeros(len(rows), dtype=MESSAGE)
    for place, at in enumerate(order):
        kind, other, tag, data, _ = rows[at]
        m = messages[place]
        m["kind"], m["peer"], m["tag"], m["dtype"] = kind, other, tag, 5
        m["data"], m["nbytes"], m["status"], m["deadline_ns"] = data.ctypes.data, data.nbytes, RunResult.AGAIN, soon()
    while (messages["status"] == RunResult.AGAIN).any():
        assert mapped.library.progress(links, messages, slice_ms=chance.choice([0, 1])) in (0, 1)
    assert (messages["status"] == RunResult.DONE).all(), messages["status"].tolist()
    return sum(not np.array_equal(one, two) for one, two in zip(held, expected, strict=True))


def message_bytes(source: int, target: int, number: int, seed: int) -> np.ndarray:
    random_bytes = np.random.default_rng((seed, source, target, number))
    return random_bytes.integers(0, 256, int(random_bytes.integers(0, 3 * RING)), dtype=np.uint8)


def receive_from(mapped: Mapped, peer: int, call: int) -> tuple[str, int]:
    """Wait for a message of that peer (``ALL``: anybody): how it ended, and whose fault it is."""
    messages, out = np.zeros(1, dtype=MESSAGE), np.zeros(8, np.uint8)
    messages["kind"], messages["peer"], messages["data"], messages["nbytes"] = 2, peer, out.ctypes.data, 8
    messages["status"], messages["deadline_ns"], messages["call_number"] = RunResult.AGAIN, soon(), call
    links = RingLinks(mapped.memory)
    while (result := mapped.library.progress(links, messages)) is RunResult.AGAIN:
        pass
    status = RunResult(int(messages["status"][0])) if result is RunResult.DONE else result
    return status.name, int(messages["source"][0])
