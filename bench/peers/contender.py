"""The runner's end of a contender: the ranks of one variant of one peer, in one row."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .cases import SIDES, Row, Side

#: The folder ``bench``.
BENCH = Path(__file__).resolve().parent.parent
#: Seconds in which a rank must answer.
SILENCE = 300.0
#: Seconds for which ranks that were stopped run before a call: their threads find their cores again.
SETTLE = 0.1
TAIL = 12


class Failed(Exception):
    """A contender that is out of its row; the text says why."""


@dataclass(slots=True, kw_only=True)
class Rank:
    """A process, and the log with what its libraries print."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def tell(self, **order: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self.name} is gone\n{self._tail()}") from None

    def answer(self) -> Any:
        """Wait for what the last order brought."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], SILENCE)[0]:
            raise Failed(f"{self.name} said nothing for {SILENCE:.0f} s\n{self._tail()}")
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.name} ended with {self.process.wait()}\n{self._tail()}")
        answer = json.loads(line)
        if "bad" in answer:
            raise Failed(f"{self.name}: {answer['bad'].strip()}\n{self._tail()}")
        return answer["good"]

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        return "\n".join(f"    {line}" for line in lines)


@dataclass(slots=True, kw_only=True)
class Contender:
    """``python`` runs the ranks; ``places`` are variables of each side's."""

    peer: str
    variant: str
    row: Row
    shrink: int
    python: str
    directory: Path
    environment: Mapping[str, str]
    places: Mapping[Side, Mapping[str, str]]
    #: Stop the ranks whenever they have nothing to do.
    paused: bool = False
    ranks: list[Rank] = field(default_factory=list)
    #: Seconds of the rounds: alone, with a busy thread in each worker, with as many busy processes beside them.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""

    @property
    def name(self) -> str:
        return f"{self.peer} {self.variant}"

    def start(self) -> None:
        """Start the ranks, sources first, and have them meet."""
        self.directory.mkdir(parents=True)
        for side in SIDES:
            for rank in range(self.row.ranks):
                self.ranks.append(self._start(side, rank))
        shares = self.all(do="prepare")
        self.all(do="connect", shares=shares)

    def _start(self, side: Side, rank: int) -> Rank:
        arguments = {
            "peer": self.peer, "row": self.row.key, "shrink": self.shrink, "side": side, "rank": rank,
            "variant": self.variant, "directory": str(self.directory),
        }  # fmt: skip
        log = self.directory / f"{side}-{rank}.log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [self.python, "-m", "peers.rank", json.dumps(arguments)],
                cwd=BENCH, env=os.environ | self.environment | self.places[side], text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip
        return Rank(name=f"{self.name}, {side} rank {rank}", process=process, log=log)

    def all(self, **order: Any) -> list[Any]:
        """Tell all ranks, then hear all."""
        with self.awake():
            for rank in self.ranks:
                rank.tell(**order)
            return [rank.answer() for rank in self.ranks]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Ranks that are paused go on while the block runs."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks if self.paused else ():
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    def go(self, beside: Sequence[int | str | None] = ()) -> float:
        """Seconds from the first rank's call to the last rank's return, each with what runs beside it (peers.rank)."""
        with self.awake():
            time.sleep(SETTLE if self.paused else 0.0)
            for rank, what in zip_longest(self.ranks, beside):
                rank.tell(do="go", beside=what)
            times = [rank.answer() for rank in self.ranks]
        return max(end for _, end in times) - min(start for start, _ in times)

    def prove(self, stamp: int) -> None:
        """Move fresh numbers into cleared memory, and look at every element."""
        self.all(do="fill", stamp=stamp)
        self.go()
        if faults := [fault for fault in self.all(do="check", stamp=stamp) if fault]:
            raise Failed(f"WRONG DATA: {faults[0]}")

    def quit(self) -> None:
        """Say goodbye to the ranks, and end them with all that they started and left in their process groups."""
        for rank in self.ranks:
            if not self.failure and rank.process.poll() is None:
                with suppress(Failed):  # it has ended since
                    rank.tell(do="quit")
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + 10.0
        for rank in self.ranks:
            try:
                rank.process.wait(0.1 if self.failure else max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                rank.process.kill()
            try:
                os.killpg(rank.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # the usual end: nothing is left of the group
            finally:
                rank.process.wait()
        self.ranks.clear()
