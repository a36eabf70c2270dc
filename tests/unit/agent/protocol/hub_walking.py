"""The walk of a batch whose agents are not all linked: hubs pass on what the others say, and tell of losses.

What is different from ``Walk``: an agent that is no hub has no link to another that is none. A message between them
is on the link to a hub first, then on the hub's own link, behind whatever was there, and is lost with either. An agent
that a hub has lost is lost for the others when the hub's word has come, whatever still comes from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from etha.peer.messages import Question, VerdictAnswer
from tests.unit.agent.protocol.walking import Event, Walk


@dataclass(frozen=True)
class Passing:
    """On a link: what ``origin`` says to ``to``, through a hub. ``message`` is its number."""

    origin: str
    to: str
    message: int


@dataclass(frozen=True)
class LossNews:
    """On a link: a hub has lost ``agent``."""

    agent: str


@dataclass
class HubWalk(Walk):
    """``hubs``: who is linked with everybody. ``through_all``: whether survivors ask each other through all of them."""

    hubs: tuple[str, ...] = ()
    through_all: bool = True

    def far(self, a: str, b: str) -> bool:
        """Whether two agents have no link."""
        return a not in self.hubs and b not in self.hubs

    def step(self, state: tuple[int, ...], name: str, event: Event, spent: int | None = None) -> tuple[int, ...]:
        found = self.stepped(state, name, event)
        after = list(state)
        after[self.index[name]] = found[0]
        if spent is not None:
            after[-1] = spent
        known = self.at[name].things[found[0]].lost
        for link, message in found[1]:
            to = self.target[link]
            if not self.far(name, to):
                self.put(after, name, to, message)
                continue
            asks = isinstance(self.messages.things[message], Question | VerdictAnswer)
            hubs = [hub for hub in self.hubs if hub not in known]
            for hub in hubs if asks and self.through_all else hubs[:1]:
                self.put(after, name, hub, Passing(name, to, message))
        if event[0] == "lose" and name in self.hubs:
            for other in self.names:
                if other not in (name, event[1]) and self.far(other, event[1]):
                    self.put(after, name, other, LossNews(event[1]))
        return tuple(after)

    def put(self, state: list[int], a: str, b: str, item: Any) -> None:
        """Send on a link, unless nobody hears it any more."""
        target = self.at[b].things[state[self.index[b]]]
        if target.dead or a in target.lost:
            return
        link = self.link[a, b]
        state[link] = self.queues.number((*self.queues.things[state[link]], item))

    def hears(self, state: tuple[int, ...], a: str, b: str, item: Any) -> tuple[Event, tuple[int, ...]]:
        match item:
            case LossNews(agent=lost):
                known = lost in self.at[b].things[state[self.index[b]]].lost
                return (b, "hears of", lost), state if known else self.step(state, b, ("lose", lost))
            case Passing(origin=origin, to=to, message=message) if to == b:
                return (b, "hear", origin, message), self.step(state, b, ("hear", origin, message))
            case Passing(to=to):
                after = list(state)
                if to not in self.at[b].things[state[self.index[b]]].lost:
                    self.put(after, b, to, item)
                return (b, "passes on", item), tuple(after)
        return super().hears(state, a, b, item)

    def linked(self) -> Iterator[tuple[str, str]]:
        return (pair for pair in self.pairs if not self.far(*pair))
