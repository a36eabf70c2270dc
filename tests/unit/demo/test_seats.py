"""Which GPU each rank of the demo takes, and which backend its job talks by."""

from __future__ import annotations

import pytest
import torch

from etha.demo import seats
from etha.demo.options import RANKS, Options
from etha.demo.seats import seat
from etha.errors import ConfigError


def placed(count: int) -> dict[str, list[tuple[str, str]]]:
    options = Options(device="cuda", cards=count)
    found = {job: [seat(job, rank, options) for rank in range(ranks)] for job, ranks in RANKS.items()}
    return {job: [(one.device, one.backend) for one in ones] for job, ones in found.items()}


def test_on_the_cpu_all_is_as_ever() -> None:
    for job, ranks in RANKS.items():
        for rank in range(ranks):
            one = seat(job, rank, Options())
            assert (one.device, one.kind, one.backend) == ("cpu", "cpu", "gloo")
            one.take()  # nothing is taken


def test_on_one_card_ranks_share_it_and_talk_through_the_host() -> None:
    assert placed(1) == {"trainer": [("cuda:0", "gloo")] * 4, "inference": [("cuda:0", "gloo")] * 2}


def test_nccl_only_where_each_rank_of_a_job_has_a_card_of_its_own() -> None:
    both = "cpu:gloo,cuda:nccl"
    assert placed(2) == {
        "trainer": [("cuda:0", "gloo"), ("cuda:1", "gloo")] * 2,
        "inference": [("cuda:0", both), ("cuda:1", both)],
    }
    assert placed(3)["inference"] == [("cuda:1", both), ("cuda:2", both)]
    assert placed(4)["trainer"] == [(f"cuda:{i}", both) for i in range(4)]
    for count in range(1, 9):
        for ranks in placed(count).values():
            assert (len({device for device, _ in ranks}) == len(ranks)) == (ranks[0][1] == both)


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
