"""What survivors of a lost coordinator ask each other; pure.

An agent that voted and is in doubt is *fenced*: it takes no COMMIT any more, whatever it answers or learns. So if every
agent other than the coordinator says "fenced", nobody has committed and nobody will, because the coordinator itself
answers its workers only after one of them has acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from etha.errors import PeerLostError
from etha.peer.messages import Known

Outcome = Literal["committed", "aborted", "unknown"]


class Inquiry:
    """The questions of one agent about one transfer. ``others`` are its agents, except itself and the coordinator."""

    def __init__(self, others: Iterable[str], lost_agents: Iterable[str], cause: PeerLostError) -> None:
        self.others, self.lost_agents = frozenset(others), set(lost_agents)
        self.cause = cause
        self.answers: dict[str, Known] = {}

    def answer(self, agent: str, verdict: Known) -> None:
        """Note an agent's answer. Its last answer counts, because it can only have learned more."""
        if agent in self.others:
            self.answers[agent] = verdict

    def on_agent_lost(self, agent: str) -> None:
        """An agent will answer no more. What it has said remains valid."""
        self.lost_agents.add(agent)

    def outcome(self) -> Outcome | None:
        """The outcome; None while an answer that can still come would change it."""
        said = set(self.answers.values())
        if "committed" in said:
            return "committed"
        if "aborted" in said or self.others == self.answers.keys():
            return "aborted"
        return "unknown" if self.others <= self.answers.keys() | self.lost_agents else None
