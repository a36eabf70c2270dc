"""One cell: three members, of whom one meets the event at its phase; how all their calls end, and when."""

from __future__ import annotations

import itertools
import random
import signal
import time
from dataclasses import replace

from tests.groups.faults.calls import MESSAGES
from tests.groups.faults.crew import PATIENCE, SIZE, CallEnd, CallOrder, Crew, Sailor
from tests.groups.faults.table import CallEnding, FaultCell
from tests.seconds import within

#: Seconds of a call that somebody does not answer: of Etha's, and of Gloo's in a child, which does not always notice
#: that a member has ended. Seconds of a wait that ends early.
SHORT, LONGER, WAIT = 0.5, 2.0, 0.1
_numbers = itertools.count(1)
_STRIKES = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "Ctrl-C": signal.SIGINT}


class FaultPlay:
    """``turn`` chooses who is met, where a call is held, who is its root, and whether DataLoaders live."""

    def __init__(self, crew: Crew, cell: FaultCell, turn: int, *, loads: bool | None = None) -> None:
        self.crew, self.cell = crew, cell
        self.chance = random.Random(f"{cell} {turn}")
        self.victim = self.chance.randrange(SIZE)
        self.helper, self.third = (self.victim + 1) % SIZE, (self.victim + 2) % SIZE
        self.root = self.chance.randrange(SIZE)
        self.loads = turn % 2 == 0 if loads is None else loads
        self.etha = cell.group == "etha"
        self.ends_here = cell.event in ("SIGKILL", "exit")
        self.stops = cell.event in ("SIGSTOP", "child SIGSTOP")
        #: When the others end if nobody tells them of the event: the timeout of their calls.
        self.timeout = PATIENCE
        if cell.event != "mismatch" and (self.stops or not self.etha):
            self.timeout = SHORT if self.etha else LONGER
        self.sailors: list[Sailor] = []
        self.ends: dict[int, CallEnd] = {}
        self.calls: dict[int, int] = {}
        self.struck = 0.0

    # ---- the phases ------------------------------------------------------------------------------

    def run(self) -> None:
        """Play it; AssertionError if something ends otherwise, later, or not at all."""
        self.sailors = self.crew.configure(list(range(SIZE)), self.timeout)
        if self.loads:
            self.crew.load_data(self.sailors)
        getattr(self, f"_{self.cell.phase}")()
        survivors = [self.helper, self.third]
        self._check_others(survivors)
        if self.cell.event == "SIGSTOP":
            self._thaw(survivors)
        if self.ends_here:
            self.crew.bury(self.victim)
        else:
            survivors = list(range(SIZE))
            self._check_victim()
        again = self.crew.configure(survivors, PATIENCE)
        for sailor in again:
            sailor.order("untouched")
        for sailor in again:
            assert sailor.expect("untouched"), "a call wrote into a tensor after it had failed"

    def _before(self) -> None:
        if self.cell.event == "mismatch":
            self.struck = time.monotonic()
            # Of a message only its two ends hear.
            for rank in (self.victim, self.helper) if self.cell.kind in MESSAGES else range(SIZE):
                odd = rank == self.victim
                other = {"send": "recv", "recv": "send", "recv_anysource": "send"}.get(self.cell.kind)
                self._begin(rank, odd=odd, kind=other if odd else None)
        else:
            for rank in (self.helper, self.third):
                self._begin(rank, expects=True)
            self._strike()
            if not self.ends_here and self.cell.event != "SIGSTOP":
                self._begin(self.victim)
        self._end(*(rank for rank in (self.helper, self.third) if rank in self.calls))

    def _waiting(self) -> None:
        ring = {self.victim: self.helper, self.helper: self.third, self.third: self.victim}
        # A small call of Etha's needs nothing of a member that has posted its part.
        self._begin(self.victim, expects=True, peer=ring[self.victim], meets=True, large=self.etha)
        self._begin(self.helper, expects=True, peer=ring[self.helper], large=self.etha)
        self._strike()
        if not self.ends_here and not self.stops:
            self._end(self.victim)
        self._begin(self.third, peer=ring[self.third], large=self.etha)
        self._end(self.helper, self.third)

    def _moving(self) -> None:
        """Bytes of the call are moving, and one member stands still between two of its steps."""
        if not self.etha:
            return self._moving_children()
        itself = self.ends_here or self.cell.event == "SIGSTOP"
        holder = self.victim if itself else self.third
        held = self.chance.random() / 2
        kind = {"recv": "send", "recv_anysource": "send", "send": "recv"}.get(self.cell.kind, self.cell.kind)
        targets = [rank for rank in (self.victim, self.helper, self.third) if rank != holder]
        if self.cell.kind == "send":
            held = -1.0  # the others stop at a ring that is full
        else:
            self._begin(holder, kind=kind, peer=targets[0], large=True, hold=held, meets=itself)
        for rank in targets:
            # A message needs its own peer only.
            peer = holder if rank in (self.victim, targets[0]) else self.victim
            self._begin(rank, large=True, expects=True, peer=peer, meets=rank == self.victim)
        if held >= 0:
            self._expect(holder, "held")
        self._strike()
        self._end(*targets)
        if itself:
            return
        if held < 0:
            self._begin(holder, kind="barrier")
        self.sailors[holder].order("resume")
        self._end(holder)

    def _expect(self, rank: int, word: str) -> None:
        self.sailors[rank].expect(word, self.calls[rank])

    def _moving_children(self) -> None:
        """A child has sent a megabyte of a call of many: the victim's, or that of whom the victim hears."""
        message = self.cell.kind in MESSAGES
        watched = self.helper if self.cell.kind == "send" else self.victim
        if self.cell.kind in ("broadcast", "scatter"):  # only the root sends
            watched = self.root
        elif self.cell.kind == "gather" and self.root == self.victim:  # only the others do
            watched = self.helper
        for rank in range(SIZE):
            kind, peer = self.cell.kind, self.victim
            if message and rank == self.victim:
                kind, peer = ("recv" if self.cell.kind == "send" else "send"), self.helper
            self._begin(rank, kind=kind, peer=peer, large=True, watched=rank == watched, meets=rank == self.victim)
        self._expect(watched, "held")
        self._strike()
        if not self.ends_here and self.cell.event != "SIGSTOP":
            self._end(self.victim)
        self._end(self.helper, self.third)

    def _between(self) -> None:
        self._strike()
        if not self.ends_here and self.cell.event != "SIGSTOP":
            self._begin(self.victim)
        for rank in (self.helper, self.third):
            self._begin(rank)
        self._end(self.helper, self.third)

    # ---- what members do --------------------------------------------------------------------------

    def _begin(
        self,
        rank: int,
        *,
        kind: str | None = None,
        peer: int | None = None,
        expects: bool = False,
        meets: bool = False,
        **how: object,
    ) -> None:
        order = CallOrder(
            kind=kind or self.cell.kind,
            root=self.root,
            peer=self.victim if peer is None else peer,
            large=self.cell.kind == "send" or bool(how.pop("large", False)),
        )
        if order.peer == rank:
            order = replace(order, peer=self.helper)
        if meets and self.cell.event == "wait timeout":
            order = replace(order, wait=WAIT)
        if meets and self.cell.event == "exit":
            order = replace(order, aside=True)
        self.calls[rank] = next(_numbers)
        self.sailors[rank].order("make", replace(order, number=self.calls[rank], **how))
        if expects:
            self._expect(rank, "waiting")

    def _strike(self) -> None:
        sailor = self.sailors[self.victim]
        match self.cell.event:
            case "abort":
                self.struck = time.monotonic()
                sailor.order("abort")
                sailor.expect("aborted")
            case "exit":
                self.struck = time.monotonic()
                sailor.order("exit")
                if self.cell.phase == "waiting":  # else it takes part until it has ended
                    sailor.process.join(PATIENCE)
            case "wait timeout":
                self.struck = time.monotonic() + WAIT
            case "child SIGKILL" | "child SIGSTOP":
                self.struck = sailor.strike(_STRIKES[self.cell.event.removeprefix("child ")], sailor.child)
            case _:
                self.struck = sailor.strike(_STRIKES[self.cell.event])
        if self.timeout < PATIENCE:
            self.struck += self.timeout

    def _end(self, *ranks: int) -> None:
        for rank in ranks:
            if rank not in self.ends and not (rank == self.victim and self.ends_here):
                self.ends[rank] = self.sailors[rank].end()

    def _thaw(self, survivors: list[int]) -> None:
        """The member that was stopped goes on when the others have made their next group."""
        self.crew.configure(survivors, PATIENCE)
        sailor = self.sailors[self.victim]
        self.struck = sailor.strike(signal.SIGCONT)
        if self.cell.phase in ("before", "between") or self.victim not in self.calls:
            self._begin(self.victim)
        elif self.etha and self.cell.phase == "moving":
            sailor.order("resume")
        self._end(self.victim)

    # ---- what is expected -------------------------------------------------------------------------

    def _check_others(self, ranks: list[int]) -> None:
        ranks = [rank for rank in ranks if rank in self.ends]
        for rank in ranks:
            self._check(rank, self.cell.others)
        names = [self.ends[rank].name for rank in ranks]
        if not self.etha and self.cell.phase in ("waiting", "moving"):
            return  # the child may have done its part, or the event have come late
        if self.cell.phase == "waiting" and self.cell.kind == "barrier":
            return  # the member had posted all of it
        assert set(names) & set(self.cell.others.names), f"{self.cell}: nobody hears of it: {names}"

    def _check_victim(self) -> None:
        self._end(self.victim)
        self._check(self.victim, self.cell.victim)

    def _check(self, rank: int, ending: CallEnding) -> None:
        end = self.ends[rank]
        who = f"{self.cell}: rank {rank} (it met rank {self.victim})"
        names = ending.names
        if self.cell.phase in ("waiting", "moving") and end.name == "result" and end.right:
            return  # it had all that it needed
        assert end.name in names, f"{who}: {end.name} instead of {names}: {end.text}"
        assert end.right or end.name != "result", f"{who}: a wrong result"
        assert end.sticks or end.name == "result", f"{who}: the group goes on after {end.name}"
        if self.etha and end.name == "GroupLostError":
            assert end.ranks == (self.victim,), f"{who}: {end.ranks} are named: {end.text}"
        allowed = within(self.cell.within if ending.seconds is None else ending.seconds)
        took = end.at - self.struck
        assert took < allowed, f"{who}: {end.name} after {took:.3f} s, promised are {allowed} s: {end.text}"
