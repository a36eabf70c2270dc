"""What the shell offers for names: the pairs, batches, publications and devices that there are here.

Completion runs whenever somebody presses TAB. So it asks running agents only, starts none, gives up soon, and is silent
whatever is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from etha.config import Settings
from etha.errors import EthaError

#: Seconds for an agent to answer.
SECONDS = 1.0


def pairs(incomplete: str) -> list[str]:
    """Pairs that this host's agents know."""
    return _beginning(incomplete, (line["pair"] for line in _lines("pairs")))


def batches(context: typer.Context, incomplete: str) -> list[str]:
    """Batches of the pair that the command names already."""
    pair = context.params.get("pair")
    return _beginning(incomplete, (line["batch"] for line in _lines("batches") if line["pair"] == pair))


def publications(incomplete: str) -> list[str]:
    """Publications of the namespace, as this host's agents know them."""
    return _beginning(incomplete, (line["publication"] for line in _lines("publications")))


def devices(incomplete: str) -> list[str]:
    """Devices whose agents run or ran on this host."""
    try:
        settings = Settings.from_env()
        found = (settings.runtime_dir / settings.namespace).glob("*.sock")
        return _beginning(incomplete, (path.stem for path in found))
    except (EthaError, OSError):
        return []


def _lines(what: str) -> list[dict[str, Any]]:
    import asyncio

    from etha.agent_session import look

    try:
        return [line for one in asyncio.run(look(Settings.from_env(), timeout=SECONDS)) for line in one[what]]
    except (EthaError, OSError):
        return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})
