"""The revocation page: a returned call's memory is not entered, and who is inside is seen."""

from __future__ import annotations

import os
import threading

import pytest

from etha.errors import ConfigError, RegistrationError
from etha.memory.pages import sealed_memfd
from etha.memory.revocation import NBYTES, SLOTS, LentPage, RevocationPage


def both() -> tuple[RevocationPage, LentPage]:
    page = RevocationPage()
    return page, LentPage(os.dup(page.fd))


def test_a_lent_word_lets_in_and_a_revoked_one_does_not() -> None:
    page, lent = both()
    word = page.open()
    guard = lent.guard(word)
    assert guard.enter(0)
    guard.leave(0)
    assert page.revoke(word)
    assert not guard.enter(0)
    assert not page.busy(word)
    assert page.revoke(word)  # again is fine


def test_a_thread_inside_is_seen_until_it_leaves() -> None:
    page, lent = both()
    word = page.open()
    guard = lent.guard(word)
    assert guard.enter(3) and guard.enter(5)
    assert not page.revoke(word)
    guard.leave(3)
    assert page.busy(word) and not page.revoke(word)
    guard.leave(5)
    assert not page.busy(word) and page.revoke(word)


def test_a_slot_is_lent_again_with_another_ticket_only_once_it_is_empty() -> None:
    page, lent = both()
    word = page.open()
    stale = lent.guard(word)
    assert stale.enter(0)
    page.revoke(word)
    assert {w % SLOTS for w in (page.open() for _ in range(SLOTS - 2))}.isdisjoint({word % SLOTS})
    with pytest.raises(ConfigError, match="in flight"):
        page.open()
    stale.leave(0)
    again = page.open()
    assert again % SLOTS == word % SLOTS and again != word
    assert not stale.enter(0)  # thawed, with yesterday's ticket
    assert lent.guard(again).enter(0)


def test_a_client_may_have_a_thousand_calls_in_flight() -> None:
    page, lent = both()
    words = [page.open() for _ in range(1024)]
    assert len({word % SLOTS for word in words}) == 1024 and all(lent.lends(word) for word in words)
    page.close()
    assert not any(lent.lends(word) for word in words)


def test_closing_the_page_revokes_everything() -> None:
    page, lent = both()
    guards = [lent.guard(page.open()) for _ in range(3)]
    page.close()
    page.close()
    assert not any(g.enter(0) for g in guards)


@pytest.mark.parametrize("word", [0, -1, 1, SLOTS, SLOTS * 3, (1 << 32) * SLOTS + 1])
def test_words_that_no_page_holds_are_refused(word: int) -> None:
    _, lent = both()
    with pytest.raises(RegistrationError):
        lent.guard(word)


def test_a_page_of_another_size_is_refused() -> None:
    with pytest.raises(RegistrationError):
        LentPage(sealed_memfd("x", 2 * NBYTES))


def test_whoever_revokes_while_threads_work_never_misses_one() -> None:
    """After revoke() has said that nobody is inside, no thread gets in."""
    page, lent = both()
    word, wrong, returned = page.open(), [], threading.Event()
    ready = threading.Barrier(3)

    def work(thread: int) -> None:
        guard = lent.guard(word)
        ready.wait()
        while guard.enter(thread):
            late = returned.is_set()
            guard.leave(thread)
            if late:
                wrong.append(thread)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    ready.wait()
    page.revoke(word)
    while page.busy(word):
        pass
    returned.set()
    for t in threads:
        t.join()
    assert not wrong
