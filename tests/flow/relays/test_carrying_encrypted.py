"""ETHA_ENCRYPT=1 where agents carry for each other: every element is right, and no wire between hosts shows any."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest
import torch

from tests.flow.networks.test_advertise import Gateway, Mapped, gateway, two_ports
from tests.flow.relays.test_carrying import CASES, MESHES, WAY, carried, given, opened, plan_of, traffic, wanted
from tests.flow.sides import Sides
from tests.flow.sites import open_site

pytestmark = pytest.mark.timeout(240)

#: What rank 2 carries and holds nothing of, and whose elements travel as they are.
FOREIGN = ("one rank's", "with gaps")
CARRIER = 2


def version_of(name: str, round_: int) -> int:
    """No two tensors hold the same numbers."""
    return 10 * round_ + list(CASES).index(name)


def probes(name: str) -> list[bytes]:
    """Six neighbouring elements each, from all over what the trainer has sent of a tensor."""
    found = []
    for rank in range(2):
        flat = given(CASES[name], rank, version_of(name, 2)).reshape(-1)
        for start in np.linspace(flat.numel() // 10, flat.numel() - 6, 15).astype(int).tolist():
            found.append(flat[start : start + 6].numpy().tobytes())
    return found


@pytest.mark.parametrize(
    ("encrypted", "options"),
    [
        (True, {"atomic": True, "verify": "full"}),
        (False, {}),
        pytest.param(True, {}, marks=pytest.mark.more),
    ],
)
async def test_what_is_carried_is_right_and_no_wire_between_hosts_shows_it(
    pair: str, encrypted: bool, options: dict[str, object]
) -> None:
    """Without encryption the same wires show it."""
    with open_site(WAY) as plain:  # type: ignore[arg-type]
        site = Mapped(plain.way, plain.directory, plain.redis)
        site.overrides = {}
        async with AsyncExitStack() as stack:
            links: list[Gateway] = []
            data: dict[str, Gateway] = {}
            for place in ("s", "x", "x2", "x3", "y"):
                own = two_ports()
                one, first = await stack.enter_async_context(gateway(own))
                two, second = await stack.enter_async_context(gateway(own + 1))
                links.append(one)
                data[place] = two
                site.overrides[place] = {
                    "ETHA_LISTEN": f"127.0.0.1:{own}",
                    "ETHA_ADVERTISE": f"127.0.0.1:{first},{second}",
                    **({"ETHA_ENCRYPT": "1"} if encrypted else {}),
                }
            async with Sides(site, pair, trainer=2, inference=4, timeout=60) as sides:
                await sides.meet(**MESHES, timeout=60)
                handles, held = await opened(sides, CASES, **options)
                through = carried(await plan_of(sides, CASES))
                assert through[CARRIER] and not {*FOREIGN} & held["inference", CARRIER].keys()
                for round_ in (1, 2):
                    for (side, rank), mine in held.items():
                        for name, tensor in mine.items() if side == "trainer" else ():
                            tensor.copy_(given(CASES[name], rank, version_of(name, round_)))
                    before = await traffic(sides)
                    for member, result in (await sides.move(handles)).items():
                        assert not isinstance(result, Exception), (member, result)
                    after = await traffic(sides)
                    for rank, nbytes in through.items():
                        assert after[rank][0] - before[rank][0] >= nbytes, "a carrier has handed on"
                        assert after[rank][1] - before[rank][1] >= nbytes
                    for rank in range(4):
                        for name, tensor in held["inference", rank].items():
                            right = wanted(CASES[name], rank, version_of(name, round_))
                            assert right is not None and torch.equal(tensor, right), (name, rank)
                            tensor.fill_(77)
                for client in sides.clients.values():
                    assert (await client.status())["agent"]["encrypted"] is encrypted
            assert len(data[WAY.place("inference", CARRIER)].bytes) > 2 * through[CARRIER]
            for name in FOREIGN:
                for place in [WAY.place("inference", CARRIER)] if not encrypted else data:
                    shown = [probe in data[place].bytes for probe in probes(name)]
                    assert any(shown) is not encrypted, (name, place, sum(shown))
            said = b"\0".join(bytes(one.bytes) for one in links)
            assert said and pair.encode() not in said, "links are encrypted in any case"
