"""Which GPU each rank of the demo takes, and which backend its job talks by."""

from __future__ import annotations

import os

import pytest
import torch

from etha.demo import seats
from etha.demo.options import RANKS, Options
from etha.demo.seats import seat
from etha.errors import ConfigError


def placed(count: int) -> dict[str, list[tuple[str, str]]]:
    """Device and host of each rank."""
    options = Options(device="cuda", cards=count)
    found = {job: [seat(job, rank, options) for rank in range(ranks)] for job, ranks in RANKS.items()}
    assert {one.backend for ones in found.values() for one in ones} == {"cpu:gloo,cuda:nccl"}
    return {job: [(one.device, one.host) for one in ones] for job, ones in found.items()}


def test_on_the_cpu_all_is_as_ever() -> None:
    for job, ranks in RANKS.items():
        for rank in range(ranks):
            one = seat(job, rank, Options())
            assert (one.device, one.kind, one.backend) == ("cpu", "cpu", "gloo")
            one.take()  # nothing is taken


def test_on_one_card_ranks_share_it_as_hosts_of_their_own() -> None:
    assert placed(1) == {
        "trainer": [("cuda:0", f"trainer-{rank}") for rank in range(4)],
        "inference": [("cuda:0", f"inference-{rank}") for rank in range(2)],
    }


def test_ranks_are_hosts_of_their_own_only_where_a_card_is_shared() -> None:
    """For NCCL refuses two ranks of one host on one card."""
    assert placed(2) == {
        "trainer": [(f"cuda:{rank % 2}", f"trainer-{rank}") for rank in range(4)],
        "inference": [("cuda:0", ""), ("cuda:1", "")],
    }
    assert placed(3)["inference"] == [("cuda:1", ""), ("cuda:2", "")]
    assert placed(4)["trainer"] == [(f"cuda:{i}", "") for i in range(4)]
    for count in range(1, 9):
        for ranks in placed(count).values():
            assert (len({device for device, _ in ranks}) == len(ranks)) == (ranks[0][1] == "")
            assert len(set(ranks)) == len(ranks)


def test_what_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(torch, "empty", lambda *_, device: seen.append(device))
    monkeypatch.setattr(os, "environ", {})
    seat("inference", 1, Options(device="cuda", cards=2)).take()
    assert os.environ == {} and seen == ["cuda:1"] * 2
    seat("trainer", 3, Options(device="cuda", cards=2)).take()
    assert os.environ["NCCL_HOSTID"] == "trainer-3" and os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_six_cards_are_one_for_each_rank_of_both_jobs() -> None:
    found = placed(6)
    assert [device for job in found.values() for device, _ in job] == [f"cuda:{i}" for i in range(6)]


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert seats.cards("cpu") == 0
    with pytest.raises(ConfigError, match=r"sees no GPU here.*--device cpu"):
        seats.cards("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert (seats.cards("cpu"), seats.cards("cuda")) == (0, 3)


def test_options_and_cards_fit() -> None:
    assert Options.from_json(Options(device="cuda", cards=2).to_json()) == Options(device="cuda", cards=2)
    for wrong in ({"device": "tpu"}, {"device": "cuda"}, {"cards": 1}):
        with pytest.raises(ValueError, match="device"):
            Options(**wrong)  # type: ignore[arg-type]
