"""What a version costs between two hosts if only what has changed is sent, beside all of its bytes.

    python bench/differences.py [--mib 64] [--rate 125] [--versions 7]

A publisher of two ranks and a subscriber of two, on two hosts joined by loopback. ``--rate`` is the publisher's
``max_rate`` in MB/s: 125 is a link of 1 Gbit/s. In each version a share of all elements, at random places, gets other
bits; 100 % of float32 changes only bits that bf16 does not keep. For each share the agents send differences
(ETHA_DIFFERENCES=always), or do not (never). Bytes are those of ``Update.wire_bytes``. Seconds are the median of the
subscriber's, without the first version. CPU seconds are those of both agents for one version. Every version is
compared bit by bit with what was put.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import torch
from torch.distributed.tensor import Shard

import etha

SHARES = (0.0, 0.01, 0.1, 1.0)
#: Name of a case -> dtypes of the publisher and of the subscriber, and the dims that they cut.
CASES = {
    "bf16, equal layouts": (torch.bfloat16, torch.bfloat16, 0, 0),
    "bf16, rows to columns": (torch.bfloat16, torch.bfloat16, 0, 1),
    "float32 to bf16": (torch.float32, torch.bfloat16, 0, 0),
}
ROWS = 2048
BITS = {2: torch.int16, 4: torch.int32}


def version(number: int, columns: int, dtype: torch.dtype, share: float) -> torch.Tensor:
    """Version ``number`` of the whole tensor: random bits, NaNs among them, of which each version changes a share."""
    integer = BITS[dtype.itemsize]
    limits = torch.iinfo(integer)
    made = torch.randint(limits.min, limits.max, (ROWS, columns), generator=seeded(0), dtype=integer)
    for step in range(1, number):
        chance = seeded(step)
        if share == 1.0:
            made = made ^ (step & 3 | 4)
        elif share:
            changed = torch.rand(made.shape, generator=chance) < share
            # Also in the bits that bf16 keeps of float32.
            made = torch.where(changed, made ^ (1 << (8 * dtype.itemsize - 12)), made)
    if share == 1.0 and dtype.itemsize == 4:
        made = made << 8 ^ made
    return made.view(dtype)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal bits. After a cast all NaNs count as the same."""
    nan = one.isnan() & other.isnan()
    integer = BITS[one.dtype.itemsize]
    return bool(((one.view(integer) == other.view(integer)) | nan).all())


async def publisher(environment: Mapping[str, str], barrier: Any, case: str, share: float, columns: int, count: int,
                    rate: float) -> float:  # fmt: skip
    """Both ranks of the publisher; CPU seconds of its agent for each version but the first."""
    dtype, _, dim, _ = CASES[case]
    harness.settle(dict(environment))
    async with etha.AsyncTensorBusClient(timeout=300) as one, etha.AsyncTensorBusClient(timeout=300) as other:
        clients = (one, other)
        held = [torch.empty_like(part) for part in version(1, columns, dtype, share).chunk(2, dim)]
        opened = await asyncio.gather(
            *(
                client.publish(
                    "bench", {"w": part}, rank=rank, expected_world_size=2, device_mesh=(2,), max_rate=rate,
                    placements={"w": [Shard(dim)]}, shapes={"w": (ROWS, columns)},
                )
                for rank, (client, part) in enumerate(zip(clients, held, strict=True))
            )
        )  # fmt: skip
        agent, begun = (await one.status())["agent"]["pid"], 0.0
        for number in range(1, count + 1):
            for part, fresh in zip(held, version(number, columns, dtype, share).chunk(2, dim), strict=True):
                part.copy_(fresh)
            await asyncio.to_thread(barrier.wait)
            if number == 2:
                begun = cpu_seconds(agent)
            await asyncio.gather(*(publication.put(number) for publication in opened))
            await asyncio.to_thread(barrier.wait)
        used = cpu_seconds(agent) - begun
        await asyncio.to_thread(barrier.wait)
        await asyncio.gather(*(publication.close() for publication in opened))
    return used / (count - 1)


async def subscriber(environment: Mapping[str, str], barrier: Any, case: str, share: float, columns: int, count: int,
                     rate: float) -> tuple[float, float, float]:  # fmt: skip
    """Both ranks: bytes on the wire for a version, of its payload; its seconds; CPU seconds of their agent."""
    source, dtype, _, dim = CASES[case]
    harness.settle(dict(environment))
    async with etha.AsyncTensorBusClient(timeout=300) as one, etha.AsyncTensorBusClient(timeout=300) as other:
        held = [part.clone() for part in torch.zeros(ROWS, columns, dtype=dtype).chunk(2, dim)]
        opened = await asyncio.gather(
            *(
                client.subscribe(
                    "bench", {"w": part}, subscriber="replica", atomic=True, rank=rank, expected_world_size=2,
                    device_mesh=(2,), placements={"w": [Shard(dim)]}, shapes={"w": (ROWS, columns)},
                )
                for rank, (client, part) in enumerate(zip((one, other), held, strict=True))
            )
        )  # fmt: skip
        agent, begun, wire, seconds = (await one.status())["agent"]["pid"], 0.0, [], []
        for number in range(1, count + 1):
            await asyncio.to_thread(barrier.wait)
            if number == 2:
                begun = cpu_seconds(agent)
            updates = await asyncio.gather(*(subscription.next() for subscription in opened))
            expected = version(number, columns, source, share).to(dtype)
            assert all(map(same, held, expected.chunk(2, dim))), f"version {number} is not what was put"
            if number > 1:
                wire.append(updates[0].wire_bytes / sum(update.bytes for update in updates))
                seconds.append(max(update.seconds for update in updates))
            await asyncio.to_thread(barrier.wait)
        used = cpu_seconds(agent) - begun
        await asyncio.to_thread(barrier.wait)
        await asyncio.gather(*(subscription.close() for subscription in opened))
    return statistics.median(wire), statistics.median(seconds), used / (count - 1)


def run(role: Any, *args: Any) -> Any:
    return asyncio.run(role(*args))


def measure(directory: Path, redis: str, case: str, share: float, mode: str, options: argparse.Namespace) -> str:
    columns = options.mib * harness.MIB // ROWS // CASES[case][1].itemsize
    barrier = get_context("fork").Barrier(2)
    places = []
    for name in ("trainer", "replica"):
        # Agents of their own, because each has one mode.
        place = harness.place(directory, redis, "tcp", f"{name}-{mode}")
        places.append(
            {
                **place,
                "ETHA_DIFFERENCES": mode,
                "ETHA_NAMESPACE": f"{mode}.{list(CASES).index(case)}.{SHARES.index(share)}",
            }
        )
    args = (barrier, case, share, columns, options.versions, options.rate * 1e6)
    sent, (wire, seconds, received) = harness.run_ranks(
        [(run, (publisher, places[0], *args)), (run, (subscriber, places[1], *args))]
    )
    return f"| {case} | {share:.0%} | {mode} | {wire:.4f} | {seconds:.3f} | {sent:.2f} + {received:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="payload of a version")
    parser.add_argument("--rate", type=float, default=125.0, help="MB/s that the publisher may send")
    parser.add_argument("--versions", type=int, default=7)
    options = parser.parse_args()
    print(harness.machine())
    print(f"\n{options.mib} MiB a version, {options.rate:g} MB/s; medians of {options.versions - 1}\n")
    print(
        "| case | changed | differences | wire bytes / payload | s | CPU s of both agents |\n|---|---|---|---|---|---|"
    )
    with harness.private_host() as directory:
        redis = harness.shared_redis()
        for case in CASES:
            for share in SHARES:
                for mode in ("never", "always"):
                    print(measure(directory, redis, case, share, mode, options), flush=True)


if __name__ == "__main__":
    main()
