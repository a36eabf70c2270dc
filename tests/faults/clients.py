"""The second table of docs/recovery.md, of what a worker does to its own client: each cell is one test.

| client | event | moment | its own call | its target | the other side's call | within |

The first three columns hold one or several values; together the rows have to name every combination once.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass

from tests.flow.jobs import Job, Worker
from tests.flow.puppets import Puppet, perform
from tests.flow.sites import Site, private_directory, stop_all
from tests.flow.ways import Way

from . import client_acts
from .agents import ask, run_agent
from .table import DOCUMENT, tables

HEADER = ("client", "event", "moment", "its own call", "its target", "the other side's call", "within")
CLIENTS = ("blocking", "async")
CLOSING = ("rendezvous", "idle", "READY", "moving", "voted", "on_commit", "copying")
#: In which moments each event can come. A client is dropped, and a program ends, with a call open as a future.
EVENTS: dict[str, tuple[str, ...]] = {
    "close client": CLOSING,
    "close handle": CLOSING[1:],
    "drop": ("idle", "READY", "voted", "on_commit"),
    "loop ends": CLOSING[:-1],
    "exit": ("idle", "READY", "moving", "voted", "on_commit"),
    "on_commit raises Exception": ("on_commit",),
    "on_commit raises SystemExit": ("on_commit",),
    "on_commit raises KeyboardInterrupt": ("on_commit",),
    "progress raises Exception": ("moving",),
    "progress raises SystemExit": ("moving",),
    "progress raises KeyboardInterrupt": ("moving",),
}
#: What the suite plays; `make faults` has the rest, too.
SUITE = {
    ("blocking", "close client"),
    ("blocking", "close handle"),
    ("blocking", "on_commit raises SystemExit"),
    ("blocking", "progress raises KeyboardInterrupt"),
    ("async", "drop"),
    ("async", "loop ends"),
    ("async", "on_commit raises KeyboardInterrupt"),
}


@dataclass(frozen=True, slots=True)
class ClientCell:
    """``own`` and ``other``: how the calls end, alternatives joined by "or"; ``target``: what the tensors hold."""

    client: str
    event: str
    moment: str
    own: str
    target: str
    other: str
    within: float

    def __str__(self) -> str:
        return "-".join((self.client, self.event.replace(" ", "_"), self.moment))

    @property
    def in_suite(self) -> bool:
        return (self.client, self.event) in SUITE


def expected_keys() -> set[tuple[str, str, str]]:
    """Every combination that the table has to name; a blocking client's loop is Etha's own."""
    return {
        (client, event, moment)
        for event, moments in EVENTS.items()
        for client, moment in itertools.product(CLIENTS, moments)
        if (client, event) != ("blocking", "loop ends")
    }


def parse(text: str) -> list[ClientCell]:
    """All cells; ValueError for a row that no test knows, and for a combination that is missing or named twice."""
    cells: dict[tuple[str, str, str], ClientCell] = {}
    for columns in tables(text, HEADER):
        if len(columns) != len(HEADER):
            raise ValueError(f"{DOCUMENT.name}: {len(columns)} columns in {columns}")
        keys = itertools.product(*([v.strip() for v in column.split(",")] for column in columns[:3]))
        for client, event, moment in keys:
            if (client, event, moment) in cells:
                raise ValueError(f"{DOCUMENT.name}: {(client, event, moment)} stands there twice")
            within = float(columns[6].removesuffix(" s"))
            cells[client, event, moment] = ClientCell(client, event, moment, columns[3], columns[4], columns[5], within)
    if unknown := cells.keys() - expected_keys():
        raise ValueError(f"{DOCUMENT.name}: no test knows {sorted(unknown)}")
    if missing := expected_keys() - cells.keys():
        raise ValueError(f"{DOCUMENT.name}: nothing is said of {sorted(missing)}")
    events = tuple(EVENTS)
    return sorted(cells.values(), key=lambda c: (CLIENTS.index(c.client), events.index(c.event), str(c.moment)))


def cells() -> list[ClientCell]:
    """The cells of the document."""
    return parse(DOCUMENT.read_text())


@dataclass(frozen=True, slots=True)
class Ended:
    """How a cell ended."""

    own: str
    target: str
    other: str
    seconds: float


class Company:
    """One agent and a worker a side, who play one cell after the other; ``close`` ends all of it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        directory = self.stack.enter_context(private_directory())
        self.site = Site(Way.LOCAL, directory, None)
        self.stack.callback(stop_all, str(directory))
        self.job = self.stack.enter_context(Job(self.site.env))
        self.agent: Worker = self.job.start(run_agent, at=("trainer", 0))
        self.agent.expect("ready")
        self.puppets: dict[str, Puppet] = {}
        self.numbers = itertools.count(1)

    def close(self) -> None:
        """End everybody."""
        self.stack.close()

    def puppet(self, side: str) -> Puppet:
        """The worker of one side; a new one where the last has ended."""
        if side not in self.puppets:
            self.puppets[side] = Puppet(self.job.start(perform, {"side": side}, at=(side, 0)))
        return self.puppets[side]

    def play(self, client: str, event: str, moment: str) -> Ended:
        """One cell, from a new pair to the ends of both calls."""
        pair = f"client{next(self.numbers)}"
        sender, receiver = self.puppet("trainer"), self.puppet("inference")
        over = event in ("close client", "loop ends", "exit") or (event, moment) == ("drop", "idle")
        if moment == "voted":
            ask(self.agent, "hold")
        receiver.begin(client_acts.receive, client, event, moment, pair)
        if moment != "rendezvous":
            sender.begin(client_acts.send, pair, moment, over)
            sender.worker.expect("registered")
        receiver.worker.expect("open")
        if moment == "rendezvous":
            self.agent.expect(f"InitPair {pair}")
        elif moment == "READY":
            self.agent.expect("Transfer b")
        elif moment == "voted":
            self.agent.expect("voted")
        if moment in ("rendezvous", "idle", "READY", "voted"):
            receiver.worker.go("strike")
        return self._end(event, moment, sender, receiver)

    def _end(self, event: str, moment: str, sender: Puppet, receiver: Puppet) -> Ended:
        if event == "exit":
            receiver.worker.expect("exits")
            receiver.worker._process.join(40)
            assert receiver.worker._process.exitcode is not None, "the program has not ended"
            self.job.workers.remove(receiver.worker)
            self.puppets.pop("inference").worker.end()
            own: tuple[str, str, float] = ("gone", "gone", 0.0)
        elif event == "drop":
            receiver.worker.expect("dropped")
        elif event == "close handle":
            receiver.worker.expect("struck")
        if moment == "voted" and event == "drop":
            ask(self.agent, "release")
        other = "none"
        if moment in ("idle", "READY"):
            sender.worker.go("call")
        # Until then its client lives on, so that the other side hears of the handle and not of the client.
        kept = event == "drop" or (event == "close handle" and moment in ("idle", "READY"))
        if moment != "rendezvous" and kept:
            other = sender.ends()
        if event in ("drop", "close handle"):
            receiver.worker.go("over")
        if event != "exit":
            own = receiver.ends()
        if moment == "voted" and event != "drop":
            ask(self.agent, "release")
        if moment != "rendezvous" and not kept:
            other = sender.ends()
        self.forget()
        return Ended(own[0], own[1], other, own[2])

    def forget(self) -> None:
        """What the agent has told so far is of cells that are over."""
        ask(self.agent, "ping")
        for worker in (self.agent, *(puppet.worker for puppet in self.puppets.values())):
            worker._told.clear()


def matches(said: str, seen: str) -> bool:
    """Whether the table's ending, alternatives joined by "or", allows what was seen."""
    return seen in said.split(" or ")
