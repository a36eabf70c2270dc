"""How long a plan takes on given links: a prediction for comparing layouts, not a promise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etha.plan.analysis.bounds import Loads, LowerBounds
from etha.plan.analysis.links import LinkTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidths in GB/s (powers of ten): of a NIC each way, of a rank's copies inside its host, and inside its agent.

    ``latency`` is in seconds, for each peer of the busiest rank.
    """

    nic: float = 50.0
    host: float = 400.0
    local: float = 1500.0
    latency: float = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of each kind of links, of all together, and of the lower bound on the NICs."""

    wire: float
    host: float
    local: float
    latency: float
    bound: float

    @property
    def seconds(self) -> float:
        return max(self.wire, self.host, self.local) + self.latency


def predict(found: LinkTable, load: Loads, limit: LowerBounds, links: Links) -> Prediction:
    """max(wire, host, local) + latency, because the three kinds of links work at the same time.

    wire = bytes of the busiest NIC, out or in / nic. host and local = bytes of the busiest rank that stay in its host,
    or in its agent / that bandwidth. latency = ``links.latency`` x (most peers of a rank outside its agent + hops).
    bound = the largest lower bound of a NIC / nic.
    """
    far = found.distance > 0
    peers = max(_most(found.sender[far]), _most(found.receiver[far])) + found.hops
    return Prediction(
        wire=max(int(load.nic_out.max()), int(load.nic_in.max())) / links.nic / 1e9,
        host=_busiest(found, 1) / links.host / 1e9,
        local=_busiest(found, 0) / links.local / 1e9,
        latency=peers * links.latency,
        bound=float(limit.nic) / links.nic / 1e9,
    )


def _most(ranks: np.typing.NDArray[np.int64]) -> int:
    return int(np.bincount(ranks).max(initial=0)) if len(ranks) else 0


def _busiest(found: LinkTable, distance: int) -> int:
    keep = found.distance == distance
    most = 0
    for ends in (found.sender[keep], found.receiver[keep]):
        if len(ends):
            total = np.zeros(int(ends.max()) + 1, dtype=np.int64)
            np.add.at(total, ends, found.nbytes[keep])
            most = max(most, int(total.max()))
    return most
