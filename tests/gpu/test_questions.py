"""What only a card can answer: each test prints what it saw, and asserts no more than Etha relies on (docs/gpu.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import ON_A_CARD, probes
from .world import World

pytestmark = ON_A_CARD
#: Two ranks on one card: NCCL compares hosts by this name, and talks over loopback.
ONE_CARD = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


def shown(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in found.items():
        print(f"    {name:40} {value:.1f}" if isinstance(value, float) else f"    {name:40} {value}")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while copies read it"])
def test_what_an_open_mapping_does_when_its_exporter_is_killed(directory: Path, busy: bool) -> None:
    with World(directory, played=False) as world:
        found = world.start(probes.exporter_killed, 1 << 30, busy).result(300)
    shown(f"the exporter of an open mapping is killed, {'while copies read it' if busy else 'idle'}", found)
    if busy:
        assert found["copies at the time of the kill"] == "running", "the copies were too short to show anything"
    assert found["copy, the exporter alive"] == "ok"


def test_one_handle_opened_twice(directory: Path) -> None:
    with World(directory, played=False) as world:
        found = world.start(probes.opened_twice, 64 << 20).result(300)
        found |= world.start(probes.opened_at_home).result(300)
    shown("one handle, opened twice", found)
    assert found["the addresses are"] == "equal" and found["a copy then"] == "ok"
    assert found["closing it again"] == "ok"


@pytest.mark.parametrize("setting", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_what_memory_says_of_itself(directory: Path, setting: str) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
    with World(directory, played=False) as world:
        found = world.start(probes.exportable, env=env).result(300)
    shown(f"PYTORCH_CUDA_ALLOC_CONF={setting!r}", found)
    assert found["cudaMalloc: IS_LEGACY_CUDA_IPC_CAPABLE"] in ("1", "True")
    reported = found["torch: IS_LEGACY_CUDA_IPC_CAPABLE"] in ("1", "True")
    given = found["torch: cudaIpcGetMemHandle"] == "cudaSuccess"
    print(f"    the attribute {'tells' if reported == given else 'DOES NOT TELL'} whether there is a handle")
    assert found["cudaMalloc: cudaIpcGetMemHandle"] == "cudaSuccess" and (given or setting)


@pytest.mark.parametrize("mib", [64, 1024])
def test_throughput_by_ipc_beside_the_cards_own(directory: Path, mib: int) -> None:
    with World(directory, played=False) as world:
        found = world.start(probes.throughput, mib << 20).result(300)
    ratio = found["by IPC"] / found["its own memory"]
    shown(f"device-to-device copy of {mib} MiB, GB/s of payload, median of 20", {**found, "ratio": f"{ratio:.3f}"})
    assert all(value > 0 for value in found.values())


def test_nccl_sends_to_itself_in_a_world_of_one(directory: Path) -> None:
    with World(directory, played=False) as world:
        found = world.start(probes.nccl_alone, 1 << 20, env=ONE_CARD).result(300)
    print(f"\na send to oneself inside a group, a world of one: {found}")
    assert found


def test_two_ranks_of_nccl_share_a_card(directory: Path) -> None:
    with World(directory, played=False) as world:
        first = world.start(probes.nccl_pair, 0, None, 64 << 20, env={**ONE_CARD, "NCCL_HOSTID": "one"})
        unique_id = first.expect("id")
        second = world.start(probes.nccl_pair, 1, unique_id, 64 << 20, env={**ONE_CARD, "NCCL_HOSTID": "two"})
        found = [first.result(300), second.result(300)]
    print(f"\ntwo ranks of NCCL on one card, each with its own NCCL_HOSTID: {found}")
    assert found == ["ok", "ok"]
