"""A subscription towards an agent that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from etha.bus.messages import ClaimLost, ClaimVersion, EndHop, Ok, VersionClaimed
from etha.client.active_calls import ActiveCalls
from etha.client.manifest import TensorManifest
from etha.client.subscription import AsyncSubscription
from etha.errors import ConfigError


async def test_a_claim_that_ends_before_its_hop_has_begun_is_asked_for_again() -> None:
    """The agent's news may be read together with its answer, before the call that waits for that answer runs."""
    asked: list[tuple[int, ...]] = []

    class Link:
        agent_lost = False

        async def request(self, message: Any, **options: Any) -> Any:
            if isinstance(message, EndHop):
                return Ok()
            assert isinstance(message, ClaimVersion)
            asked.append(message.avoid)
            if len(asked) > 1:
                raise ConfigError("the test is over")
            subscription.hear(ClaimLost(publication="policy", subscriber="r", claim=7, text="trainer has left"))
            return VersionClaimed(claim=7, turn=1, source="trainer", pair="hop", batch="hop.slot0", seq=1, version=None)

    class Client:
        async def join_hop(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("nobody comes to this hop")

    subscription = AsyncSubscription(
        Client(),  # type: ignore[arg-type]
        connection=SimpleNamespace(link=Link(), lost=False),  # type: ignore[arg-type]
        calls=ActiveCalls(patience=1.0),
        name="policy",
        subscriber="r",
        defaults=SimpleNamespace(),  # type: ignore[arg-type]
        manifest=TensorManifest(form="map", pairs=(), items=(), refusals=()),
        atomic=False,
        serve=False,
        timeout=10,
        check_usable=lambda: None,
        closed=lambda _: None,
    )
    with pytest.raises(ConfigError, match="the test is over"):
        await subscription.next()
    assert asked == [(), (7,)]
