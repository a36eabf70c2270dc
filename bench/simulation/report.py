"""Tables of what simulated agents have used: one for each phase, with a row for each number of agents. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from simulation.accounts import Account
from simulation.fleet import PHASES, Options, Phase

_HEAD = (
    "agents", "ranks", "with", "messages", "KiB sent", "links", "streams", "CPU ms", "of it assumed", "beats",
    "Redis commands", "all", "KiB read", "Redis CPU ms", "seconds",
)  # fmt: skip


def tables(rows: Sequence[tuple[Options, list[Phase]]]) -> str:
    """All tables. Numbers are means over agents, with the largest of one agent in brackets."""
    parts = []
    for number, name in enumerate(PHASES):
        lines = [f"| {' | '.join(_HEAD)} |", f"|{'--:|' * len(_HEAD)}"]
        lines += [_row(options, phases[number]) for options, phases in rows]
        parts.append(f"{name}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def details(phase: Phase) -> str:
    """What all agents have said to each other, what Redis did for them, and what they have warned of."""
    said = [f"{n:,} {kind} of {size / n:,.0f} bytes" for kind, (n, size) in phase.messages.items()]
    asked = [
        f"{n:,} {kind} of {took / n * 1e6:,.0f} us and {size / n:,.0f} bytes"
        for kind, (n, took, size) in list(phase.requests.items())[:_MOST]
    ]
    lines = [f"  messages: {', '.join(said) or 'none'}", f"  Redis: {', '.join(asked) or 'nothing'}"]
    lines += [f"  {n:,} warnings: {text}" for text, n in phase.warnings.items()]
    return "\n".join(lines)


#: Kinds of requests to Redis that are shown.
_MOST = 6


def _row(options: Options, phase: Phase) -> str:
    def both(what: Callable[[Account], float], digits: int = 0) -> str:
        values = [what(account) for account in phase.used]
        return f"{statistics.mean(values):,.{digits}f} ({max(values):,.{digits}f})"

    cells = [
        str(options.agents),
        str(2 * options.world_size),
        options.pattern,
        both(lambda used: used.messages, 1),
        both(lambda used: used.sent / 1024, 1),
        both(lambda used: used.links),
        both(lambda used: used.streams),
        both(lambda used: (used.cpu + used.assumed) * 1e3, 1),
        f"{statistics.mean(used.assumed for used in phase.used) * 1e3:,.1f}",
        f"{statistics.mean(used.beats for used in phase.used):,.0f}",
        both(lambda used: used.commands, 1),
        f"{sum(used.commands for used in phase.used):,}",
        both(lambda used: used.read / 1024, 1),
        f"{phase.server * 1e3:,.1f}",
        f"{phase.seconds:.4f}",
    ]
    return f"| {' | '.join(cells)} |"
