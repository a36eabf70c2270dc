"""What a call lends is taken back if its thread leaves first, whichever thread comes first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from etha.client.memory.base import LentMemory, Mark
from etha.client.sync import TensorBusClient
from etha.memory.revocation import LentPage, RevocationPage


@pytest.fixture
def page() -> Iterator[RevocationPage]:
    made = RevocationPage()
    yield made
    made.close()


def lends(page: RevocationPage, word: int) -> bool:
    return LentPage(os.dup(page.fd)).lends(word)


@pytest.mark.parametrize("first", ["lends", "leaves"])
def test_a_thread_that_leaves_takes_its_memory_back(page: RevocationPage, first: str) -> None:
    lent, word = LentMemory(), page.open()
    steps = [lambda: lent.lend(page, word), lent.leave]
    for step in steps if first == "lends" else steps[::-1]:
        step()
    assert not lends(page, word)


def test_a_call_that_has_ended_takes_nothing_from_the_next_one(page: RevocationPage) -> None:
    lent, word = LentMemory(), page.open()
    lent.lend(page, word)
    page.revoke(word)
    following = page.open()
    lent.leave()
    assert lends(page, following) and not lends(page, word)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupted_call_of_a_blocking_client_lends_nothing_any_more(
    page: RevocationPage, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C does not wait for the event loop, where the call still lends its memory."""
    word, mark = page.open(), Mark()

    class Inner:
        def mark(self) -> Mark:
            return mark

        def direct_transfer(self, *given: Any) -> None:
            """It needs the loop."""

        def transfer_after(self, *given: Any, **options: Any) -> str:
            return "work"

    def run(work: str) -> None:
        mark.lent.lend(page, word)
        assert lends(page, word)
        raise error

    client = TensorBusClient(device="cpu", timeout=5)
    try:
        monkeypatch.setattr(client, "_run", run)
        monkeypatch.setattr(client, "_enter", lambda: type("Entered", (), {"call": None}))
        with pytest.raises(error):
            client._move(Inner(), "send", True, {}, False)  # type: ignore[arg-type]
        assert not lends(page, word)
    finally:
        monkeypatch.undo()
        client.close()
