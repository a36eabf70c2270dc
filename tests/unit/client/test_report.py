"""on_error="report": what is reported, what is raised all the same, and what is skipped."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest

from etha.client.results import AsyncPair, TransferResult, check_on_error, reported
from etha.errors import (
    AgentLostError,
    AgentUnavailableError,
    ConfigError,
    EthaError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)

RESULT = TransferResult(seq=3, version=7, bytes=8, seconds=0.5, direction="send", peers=(), peak_staging=0)


def pair(name: str = "weights") -> AsyncPair:
    return AsyncPair(name=name, local_name="a", remote_name="b", local_world_size=1, remote_world_size=1, epoch=1)


class Calls:
    """What a transfer would do; ``made`` counts how often it was tried."""

    def __init__(self, *outcomes: BaseException | TransferResult) -> None:
        self.outcomes, self.made = list(outcomes), 0

    async def move(self) -> TransferResult:
        self.made += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.mark.parametrize("wrong", [None, "", "ignore", True, 1])
def test_nothing_but_raise_and_report(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="on_error="):
        check_on_error(wrong)


@pytest.mark.parametrize(
    "error",
    [
        TransferError("torn", outcome="aborted", torn=True),
        TransferTimeoutError("late", outcome="withdrawn"),
        TransferAbortedError("another", torn=False),
        PeerLostError("dead", reason="died"),
        AgentLostError("gone", quiesced=False),
        AgentUnavailableError("leaves"),
    ],
)
async def test_a_failure_is_a_result_and_what_follows_is_skipped(error: EthaError) -> None:
    one, calls = pair(), Calls(RESULT, error)
    assert await reported("report", (one,), "send", calls.move) is RESULT
    assert RESULT.ok and not RESULT.skipped and not one.errored

    failed = await reported("report", (one,), "send", calls.move)
    assert not failed.ok and not failed.skipped and failed.direction == "send"
    assert (failed.seq, failed.bytes, failed.version, failed.peers, failed.gb_per_s) == (0, 0, None, (), 0.0)
    assert failed.error is one.errored
    assert type(failed.error) is type(error)
    assert (failed.error.message, failed.error.data()) == (error.message, error.data())

    skipped = await reported("report", (one,), "recv", calls.move)
    assert not skipped.ok and skipped.skipped and skipped.direction == "recv" and skipped.error is one.errored
    assert calls.made == 2, "a skipped one is not tried"

    one.stands()
    calls.outcomes.append(RESULT)
    assert await reported("report", (one,), "send", calls.move) is RESULT


@pytest.mark.parametrize(
    "error",
    [ConfigError("a"), RegistrationError("b"), LayoutError("c"), ProtocolError("d"), asyncio.CancelledError()],
)
async def test_mistakes_and_cancellations_are_raised_whatever_was_asked_for(error: BaseException) -> None:
    one = pair()
    with pytest.raises(type(error)):
        await reported("report", (one,), "send", Calls(error).move)
    assert one.errored is None


async def test_who_asked_to_raise_is_raised_to_and_skips_nothing() -> None:
    one, first = pair(), TransferAbortedError("first")
    calls = Calls(first, TransferAbortedError("second"), RESULT)
    with pytest.raises(TransferAbortedError) as raised:
        await reported("raise", (one,), "send", calls.move)
    assert raised.value is first and one.errored is not None and one.errored.message == "first"
    with pytest.raises(TransferAbortedError, match="second"):
        await reported("raise", (one,), "send", calls.move)
    assert one.errored.message == "first", "the first one stays"
    assert await reported("raise", (one,), "send", calls.move) is RESULT
    assert (await reported("report", (one,), "send", calls.move)).skipped


async def test_a_batch_fails_all_its_pairs_and_each_of_them_skips_it() -> None:
    one, two, other = pair("one"), pair("two"), pair("other")
    await reported("report", (one, two), "send", Calls(TransferAbortedError("x")).move)
    assert one.errored is two.errored is not None and other.errored is None
    one.stands()
    assert (await reported("report", (one, two), "send", Calls().move)).skipped
    assert (await reported("report", (one, other), "send", Calls(RESULT).move)).ok


async def test_a_lost_pair_is_skipped_at_once() -> None:
    one = pair()
    one.lose("relaunched", "the trainer came again")
    one.lose("died", "told twice")
    assert one.lost.reason == "relaunched" and isinstance(one.errored, PeerLostError)
    assert (one.errored.reason, one.errored.outcome) == ("relaunched", "withdrawn")
    result = await reported("report", (one,), "recv", Calls().move)
    assert result.skipped and result.error is one.errored

    lost_pair = pair()
    lost_pair.lose("died", "the agent is gone", AgentLostError("the agent is gone"))
    assert isinstance(lost_pair.errored, AgentLostError) and await lost_pair.lost == "died"


async def test_a_loss_after_a_failure_leaves_the_first_error() -> None:
    one = pair()
    await reported("report", (one,), "send", Calls(TransferAbortedError("first")).move)
    one.lose("died", "then this")
    assert one.lost.is_set() and one.errored is not None and one.errored.message == "first"


async def test_a_peers_death_that_a_transfer_met_announces_the_loss() -> None:
    one = pair()
    await reported("report", (one,), "send", Calls(TransferTimeoutError("late", outcome="withdrawn")).move)
    assert not one.doomed
    with pytest.raises(PeerLostError):
        await reported("raise", (one,), "send", Calls(PeerLostError("dead", reason="died")).move)
    assert isinstance(one.errored, TransferTimeoutError), "the first one"
    before = [one.doomed, await one.lost.heard(0)]
    one.lose("died", "dead")
    after = [one.doomed, await one.lost.heard(0)]
    assert (before, after) == ([True, False], [False, True])


async def test_a_kept_error_holds_no_frames() -> None:
    error = TransferAbortedError("x")
    error.remote_traceback = "what the agent saw"
    result = await reported("report", (pair(),), "send", Calls(error).move)
    assert result.error is not None and traceback.extract_tb(result.error.__traceback__) == []
    assert result.error.__context__ is None and result.error.remote_traceback == "what the agent saw"
