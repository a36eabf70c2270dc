"""Real members that wait for each other through etha.native: no wake-up is lost, nobody waits longer than it must."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from etha.native import ALL, run_arguments
from tests.groups.native_members import (
    claim,
    exchange_messages,
    give_up,
    group,
    play_rounds,
    receive_from,
    soon,
    wait_for_phase,
)
from tests.unit.native import libraries
from tests.unit.native.pages import sources, spaces, steps, wait

EACH_LIBRARY = pytest.mark.parametrize("name", libraries.NAMES)


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if libraries.get("compiled") is None:
        pytest.skip("no C compiler (cc) on the path")


@pytest.mark.parametrize(
    ("names", "size", "rounds", "spin_us"),
    [
        pytest.param(("compiled",), 2, 40_000, 0, id="two that sleep"),
        pytest.param(("compiled",), 2, 40_000, 20, id="two that spin first"),
        pytest.param(("compiled",), 4, 10_000, 0, id="four"),
        pytest.param(("python",), 2, 1500, 0, id="two in Python"),
        pytest.param(("compiled", "python"), 3, 1500, 0, id="mixed"),
        pytest.param(("compiled",), 2, 400_000, 0, id="two that sleep, long", marks=pytest.mark.proof),
        pytest.param(("compiled",), 2, 400_000, 3, id="two that spin first, long", marks=pytest.mark.proof),
        pytest.param(("compiled",), 4, 200_000, 3, id="four, long", marks=pytest.mark.proof),
        pytest.param(("compiled", "python"), 3, 40_000, 0, id="mixed, long", marks=pytest.mark.proof),
    ],
)
def test_no_wake_up_is_lost_and_nobody_reads_another_round(
    names: tuple[str, ...], size: int, rounds: int, spin_us: int
) -> None:
    with group(size, *names, spin_us=spin_us) as members:
        for rank in range(size):
            members.start(rank, play_rounds, rounds, rank)
        assert [members.result(rank) for rank in range(size)] == [0] * size


@EACH_LIBRARY
def test_a_deadline_names_whom_it_waits_for(name: str) -> None:
    with group(3, name) as members:
        members.start(0, wait_for_phase, 2, 0, 0.3)
        members.start(1, wait_for_phase, 2, 0)
        result, blamed, seconds = members.result(0)
        assert (result, blamed) == ("TIMEOUT", [2]) and seconds >= 0.3
        members.start(2, wait_for_phase, 2, 0)
        assert members.result(1)[0] == members.result(2)[0] == "DONE"


@EACH_LIBRARY
def test_a_member_that_gives_up_names_the_call_and_ends_waits_of_it(name: str) -> None:
    with group(3, name) as members:
        members.start(0, wait_for_phase, 1, 5)
        members.start(1, wait_for_phase, 1, 4)
        members.await_sleep(0)
        members.await_sleep(1)
        members.start(2, give_up, 5)
        assert members.result(0)[:2] == ("GAVE_UP", [2])
        members.start(0, give_up, 4)
        assert members.result(1)[:2] == ("GAVE_UP", [0])


@EACH_LIBRARY
def test_a_stop_word_set_by_another_thread_ends_the_wait(name: str) -> None:
    with group(2, name) as members:
        mapped, ended = members.own, []
        waiter = threading.Thread(target=lambda: ended.append(wait_for_phase(mapped, 1, 0)))
        waiter.start()
        members.await_sleep(0)
        mapped.library.stop(mapped.memory, 1)
        waiter.join(30)
        assert [result for result, _, _ in ended] == ["STOPPED"]


@EACH_LIBRARY
def test_a_killed_member_leaves_the_others_waiting_and_they_can_be_stopped(name: str) -> None:
    with group(3, name) as members:
        members.start(1, wait_for_phase, 1, 0)
        members.start(2, wait_for_phase, 1, 0)
        members.await_sleep(1)
        members.await_sleep(2)
        members.signal(2, signal.SIGKILL)
        members.start(0, give_up, 0)
        assert members.result(1)[:2] == ("GAVE_UP", [0])
        assert wait_for_phase(members.own, 1, 0)[0] == "DONE"  # both had posted before


@EACH_LIBRARY
def test_a_stopped_member_goes_on_where_it_was(name: str) -> None:
    with group(2, name) as members:
        members.start(0, wait_for_phase, 1, 0)
        members.await_sleep(0)
        members.signal(0, signal.SIGSTOP)
        members.start(1, wait_for_phase, 1, 0)
        assert members.result(1)[0] == "DONE"
        members.signal(0, signal.SIGCONT)
        assert members.result(0)[0] == "DONE"


@EACH_LIBRARY
def test_a_member_stopped_before_it_posted_keeps_the_others_until_it_goes_on(name: str) -> None:
    with group(2, name) as members:
        members.start(0, play_rounds, 2000, 0)
        members.start(1, play_rounds, 2000, 1)
        for _ in range(20):
            members.signal(1, signal.SIGSTOP)
            os.sched_yield()
            members.signal(1, signal.SIGCONT)
        assert [members.result(0), members.result(1)] == [0, 0]


@EACH_LIBRARY
def test_one_member_has_the_first_cause(name: str) -> None:
    with group(4, name) as members:
        for rank in range(4):
            members.start(rank, claim)
        assert len({members.result(rank) for rank in range(4)}) == 1


def test_members_of_both_kinds_agree_on_the_first_cause() -> None:
    with group(4, "compiled", "python") as members:
        for rank in range(4):
            members.start(rank, claim)
        assert len({members.result(rank) for rank in range(4)}) == 1


@pytest.mark.parametrize(
    ("names", "size", "count"),
    [
        pytest.param(("compiled",), 2, 400, id="two"),
        pytest.param(("compiled",), 4, 100, id="four"),
        pytest.param(("python",), 2, 30, id="Python"),
        pytest.param(("python", "compiled"), 3, 20, id="mixed"),
    ],
)
def test_messages_between_all_members_arrive_whole(names: tuple[str, ...], size: int, count: int) -> None:
    with group(size, *names) as members:
        for rank in range(size):
            members.start(rank, exchange_messages, count, 7)
        assert [members.result(rank) for rank in range(size)] == [0] * size


@EACH_LIBRARY
@pytest.mark.parametrize("peer", [1, ALL])
def test_a_receiver_that_sleeps_hears_that_its_peer_gave_up(name: str, peer: int) -> None:
    with group(2, name) as members:
        members.start(0, receive_from, peer, 3)
        members.await_sleep(0)
        members.start(1, give_up, 3)
        assert members.result(0) == ("GAVE_UP", 1)


@EACH_LIBRARY
def test_a_signal_ends_the_wait_so_that_its_handler_runs(name: str) -> None:
    with group(2, name) as members:
        mapped, seen, ended = members.own, [], threading.Event()
        before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:  # again and again, because the first may come before the wait
            while not ended.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
                os.sched_yield()

        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            args = run_arguments(
                mapped.memory, steps(wait(1)), sources(), spaces(), phase_base=0, call_number=0, deadline_ns=soon()
            )
            assert mapped.library.run(args).name == "AGAIN"
        finally:
            ended.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)
        assert seen
