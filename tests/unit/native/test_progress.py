"""Point-to-point messages of two or three members in one process: matched, set aside, refused, ended."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from etha.native import ALL, MESSAGE, MessageKind, NativeLibrary, RingLinks, RunResult, ring_length
from etha.native.structs import HEADER
from tests.unit.native.pages import Pages

RING = 4096


class Member:
    """One member's messages, in the order in which they were asked for."""

    def __init__(self, library: NativeLibrary, pages: Pages, rank: int, **more: int) -> None:
        self.library, self.pages = library, pages
        self.memory = pages.member(rank, ring_offset=8192, ring_bytes=RING)
        self.links = RingLinks(self.memory, **more)
        self.messages = np.zeros(0, dtype=MESSAGE)
        self.held: list[NDArray] = []

    def ask(self, kind: MessageKind, peer: int, data: NDArray, tag: int = 0, dtype: int = 5, **more: int) -> int:
        self.held.append(data)
        row = np.zeros(1, dtype=MESSAGE)
        row["kind"], row["peer"], row["tag"], row["dtype"] = kind, peer, tag, dtype
        row["data"], row["nbytes"], row["status"] = data.ctypes.data, data.nbytes, RunResult.AGAIN
        for name, value in more.items():
            row[name] = value
        self.messages = np.concatenate([self.messages, row])
        return len(self.messages) - 1

    def send(self, peer: int, data: NDArray, **more: int) -> int:
        return self.ask(MessageKind.SEND, peer, data, **more)

    def receive(self, peer: int, data: NDArray, **more: int) -> int:
        return self.ask(MessageKind.RECEIVE, peer, data, **more)

    def go(self) -> RunResult:
        return self.library.progress(self.links, self.messages, slice_ms=1)

    def status(self, message: int) -> RunResult:
        return RunResult(int(self.messages[message]["status"]))


def members(library: NativeLibrary, size: int, **more: int) -> list[Member]:
    pages = Pages(size, 8192 + size * ring_length(RING))
    return [Member(library, pages, rank, **more) for rank in range(size)]


def turns(*who: Member, most: int = 1000) -> None:
    """Let them go on in turn until nothing is pending."""
    for _ in range(most):
        for member in who:
            if (member.messages["status"] == RunResult.AGAIN).any():
                member.go()
        if not any((member.messages["status"] == RunResult.AGAIN).any() for member in who):
            return
    raise AssertionError([m.messages["status"].tolist() for m in who])


def numbers(count: int, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("count", [0, 1, 31, RING - 32, RING - 31, RING, 3 * RING + 17, 100_000])
def test_a_message_of_any_size_arrives(library: NativeLibrary, count: int) -> None:
    a, b = members(library, 2)
    data, out = numbers(count), np.zeros(count, np.uint8)
    sent, got = a.send(1, data), b.receive(0, out)
    turns(a, b)
    assert (a.status(sent), b.status(got)) == (RunResult.DONE, RunResult.DONE)
    assert (out == data).all() and b.messages[got]["source"] == 0


def test_both_send_before_they_receive(library: NativeLibrary) -> None:
    """What torch's batch_isend_irecv does: each side's send is larger than the ring."""
    a, b = members(library, 2)
    data, out = [numbers(50_000, i) for i in range(2)], [np.zeros(50_000, np.uint8) for _ in range(2)]
    for rank, member in enumerate((a, b)):
        member.send(1 - rank, data[rank])
        member.receive(1 - rank, out[rank])
    turns(a, b)
    assert (out[0] == data[1]).all() and (out[1] == data[0]).all()


def test_messages_of_one_tag_keep_their_order(library: NativeLibrary) -> None:
    a, b = members(library, 2)
    outs = [np.zeros(700, np.uint8) for _ in range(20)]
    for i in range(20):
        a.send(1, numbers(700, i))
        b.receive(0, outs[i])
    turns(b, a)
    assert all((out == numbers(700, i)).all() for i, out in enumerate(outs))


def test_tags_are_matched_and_early_ones_set_aside(library: NativeLibrary) -> None:
    a, b = members(library, 2)
    for tag in (1, 2, 1, 3):
        a.send(1, np.full(2000, 10 * tag + len(a.messages), np.uint8), tag=tag)
    outs = {i: np.zeros(2000, np.uint8) for i in range(4)}
    last = b.receive(0, outs[0], tag=3)
    turns(a, b)
    assert b.status(last) is RunResult.DONE and outs[0][0] == 33
    for i, tag in enumerate((1, 2, 1), start=1):
        b.receive(0, outs[i], tag=tag)
    turns(b)
    assert [int(outs[i][0]) for i in (1, 2, 3)] == [10, 21, 12]


def test_a_message_that_is_being_set_aside_comes_before_later_ones(library: NativeLibrary) -> None:
    a, b = members(library, 2)
    a.send(1, np.full(3 * RING, 1, np.uint8), tag=1)
    a.go()
    first = np.zeros(10, np.uint8)
    other = b.receive(0, first, tag=2)
    b.go()  # half of tag 1 is set aside by now
    big, small = np.zeros(3 * RING, np.uint8), np.zeros(3 * RING, np.uint8)
    b.receive(0, big, tag=1)
    b.receive(0, small, tag=1)
    a.send(1, np.full(3 * RING, 2, np.uint8), tag=1)
    a.send(1, np.full(10, 3, np.uint8), tag=2)
    turns(a, b)
    assert b.status(other) is RunResult.DONE
    assert (big == 1).all() and (small == 2).all() and (first == 3).all()


def test_what_does_not_fit_aside_stays_in_the_ring(library: NativeLibrary) -> None:
    a, b = members(library, 2, aside_bytes=1000)
    a.send(1, numbers(2000), tag=1)
    a.send(1, numbers(10), tag=2)
    a.go()
    late = b.receive(0, np.zeros(10, np.uint8), tag=2, deadline_ns=time.monotonic_ns())
    assert b.go() is RunResult.DONE and b.status(late) is RunResult.TIMEOUT
    out = np.zeros(2000, np.uint8)
    b.receive(0, out, tag=1)
    again = b.receive(0, np.zeros(10, np.uint8), tag=2)
    turns(a, b)
    assert (out == numbers(2000)).all() and b.status(again) is RunResult.DONE


def test_a_receive_from_anybody_takes_what_comes(library: NativeLibrary) -> None:
    a, b, c = members(library, 3)
    outs = [np.zeros(3000, np.uint8) for _ in range(2)]
    got = [c.receive(ALL, out) for out in outs]
    b.send(2, numbers(3000, 1))
    turns(b)
    while c.status(got[0]) is RunResult.AGAIN:
        c.go()
    assert (c.status(got[0]), int(c.messages[got[0]]["source"])) == (RunResult.DONE, 1)
    assert c.status(got[1]) is RunResult.AGAIN
    a.send(2, numbers(3000, 0))
    turns(a, c)
    assert int(c.messages[got[1]]["source"]) == 0
    assert (outs[0] == numbers(3000, 1)).all() and (outs[1] == numbers(3000, 0)).all()


def test_a_message_depends_on_its_own_peer_only(library: NativeLibrary) -> None:
    a, b, c = members(library, 3)
    stuck = a.send(1, numbers(100_000))
    waiting = a.receive(1, np.zeros(4, np.uint8))
    free, out = a.send(2, numbers(90_000, 2)), np.zeros(90_000, np.uint8)
    c.receive(0, out)
    for _ in range(200):
        a.go()
        if (c.messages["status"] == RunResult.AGAIN).any():
            c.go()
    assert a.status(free) is RunResult.DONE and (out == numbers(90_000, 2)).all()
    assert (a.status(stuck), a.status(waiting)) == (RunResult.AGAIN, RunResult.AGAIN)
    assert b.status is not None


@pytest.mark.parametrize("count", [100, 20_000])
def test_another_size_or_dtype_is_reported_for_that_message(library: NativeLibrary, count: int) -> None:
    a, b = members(library, 2)
    a.send(1, numbers(count), tag=1)
    a.send(1, numbers(64), tag=2, dtype=6)
    a.send(1, numbers(64), tag=3)
    out = np.full(count - 1, 7, np.uint8)
    size, dtype = b.receive(0, out, tag=1), b.receive(0, np.full(64, 7, np.uint8), tag=2)
    good = np.zeros(64, np.uint8)
    right = b.receive(0, good, tag=3)
    turns(a, b)
    assert [b.status(m).name for m in (size, dtype, right)] == ["MISMATCH", "MISMATCH", "DONE"]
    assert (b.messages[size]["got_bytes"], b.messages[dtype]["got_dtype"]) == (count, 6)
    assert (out == 7).all() and (good == numbers(64)).all()


def test_a_size_that_was_set_aside_is_compared_too(library: NativeLibrary) -> None:
    a, b = members(library, 2)
    a.send(1, numbers(100), tag=1)
    a.send(1, numbers(5), tag=2)
    b.receive(0, np.zeros(5, np.uint8), tag=2)
    turns(a, b)
    wrong = b.receive(0, np.zeros(99, np.uint8), tag=1)
    turns(b)
    assert b.status(wrong) is RunResult.MISMATCH and b.messages[wrong]["got_bytes"] == 100


def test_each_message_has_its_own_deadline(library: NativeLibrary) -> None:
    a, b = members(library, 2)
    late = a.receive(1, np.zeros(4, np.uint8), deadline_ns=time.monotonic_ns())
    in_time = a.receive(1, np.zeros(4, np.uint8), tag=9, deadline_ns=time.monotonic_ns() + 10**12)
    assert a.go() is RunResult.DONE
    assert (a.status(late), a.status(in_time)) == (RunResult.TIMEOUT, RunResult.AGAIN)
    b.send(0, numbers(4), tag=9)
    turns(b, a)
    assert a.status(in_time) is RunResult.DONE


def test_a_peer_that_gave_up_ends_its_messages_but_not_what_it_had_sent(library: NativeLibrary) -> None:
    a, b, c = members(library, 3)
    out = np.zeros(40, np.uint8)
    b.send(0, numbers(40))
    b.go()
    library.give_up(b.memory, 5)
    had = a.receive(1, out, call_number=6)
    lost, earlier = (
        a.receive(1, np.zeros(4, np.uint8), call_number=6),
        a.receive(1, np.zeros(4, np.uint8), call_number=4),
    )
    anybody, other = a.receive(ALL, np.zeros(4, np.uint8), tag=8, call_number=5), a.receive(2, np.zeros(4, np.uint8))
    unsent = a.send(1, numbers(50_000), call_number=5)
    for _ in range(5):
        a.go()
    assert a.status(had) is RunResult.DONE and (out == numbers(40)).all()
    assert {a.status(m).name for m in (lost, anybody, unsent)} == {"GAVE_UP"}
    assert {a.status(m).name for m in (earlier, other)} == {"AGAIN"}
    assert c.memory.rank == 2


def test_what_was_abandoned_half_way_does_not_disturb_the_next_receive(library: NativeLibrary) -> None:
    a, b = members(library, 2)
    a.send(1, numbers(3 * RING), tag=1)
    a.go()
    b.receive(0, np.zeros(3 * RING, np.uint8), tag=1)
    b.go()
    assert b.messages[0]["started"]
    b.messages = b.messages[:0]  # its caller has left
    a.send(1, numbers(50), tag=1)
    out = np.zeros(50, np.uint8)
    b.receive(0, out, tag=1)
    turns(a, b)
    assert (out == numbers(50)).all()


def test_a_send_behind_one_that_was_abandoned_half_way_is_refused(library: NativeLibrary) -> None:
    a, _ = members(library, 2)
    a.send(1, numbers(3 * RING))
    a.go()
    a.messages = a.messages[:0]
    behind = a.send(1, numbers(5))
    assert a.go() is RunResult.DONE and a.status(behind) is RunResult.INVALID


def test_impossible_messages_are_refused(library: NativeLibrary) -> None:
    a, _ = members(library, 2)
    wrong = [a.send(0, numbers(4)), a.receive(0, numbers(4)), a.send(2, numbers(4)), a.send(ALL, numbers(4))]
    assert a.go() is RunResult.DONE
    assert {a.status(m) for m in wrong} == {RunResult.INVALID}


def test_words_that_make_no_sense_end_messages_of_that_peer(library: NativeLibrary) -> None:
    pages = Pages(2, 8192 + 2 * ring_length(RING))
    a = Member(library, pages, 0)
    pages.maps[1][8192 : 8192 + 8] = (1 << 40).to_bytes(8, "little")
    got = a.receive(1, np.zeros(4, np.uint8))
    assert a.go() is RunResult.DONE and a.status(got) is RunResult.INVALID


def test_a_kick_a_slice_and_a_stop_end_a_progress(library: NativeLibrary) -> None:
    a, _ = members(library, 2)
    a.receive(1, np.zeros(4, np.uint8))
    library.kick(a.links)
    assert library.progress(a.links, a.messages) is RunResult.AGAIN
    assert a.go() is RunResult.AGAIN
    library.stop(a.memory, 3)
    assert library.progress(a.links, a.messages) is RunResult.STOPPED


def test_rings_without_room_for_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold messages"):
        RingLinks(Pages(1).member(0))


@pytest.mark.parametrize("seed", range(30))
def test_garbage_in_a_peers_rings_stays_within_the_buffers(library: NativeLibrary, seed: int) -> None:
    chance = random.Random(seed)
    pages = Pages(3, 8192 + 3 * ring_length(RING))
    a = Member(library, pages, 0, aside_bytes=chance.choice([100, 1000, 5000]))
    sizes = [chance.choice([0, 4, 100, RING - 32, RING, 20_000]) for _ in range(6)]
    outs = [np.full(size + 64, 0xA5, np.uint8) for size in sizes]
    for out in outs:
        a.receive(chance.choice([1, 2, ALL]), out[32:-32], tag=chance.choice([0, 1]))
    for peer in (1, 2):
        a.send(peer, numbers(2 * RING))
    for _ in range(6):
        for peer in (1, 2):
            if chance.random() < 0.3:  # what the peer says that it has taken of the own ring
                tail = 8192 + peer * ring_length(RING) + 64
                pages.maps[0][tail : tail + 8] = chance.choice([0, RING, chance.getrandbits(64)]).to_bytes(8, "little")
            head = chance.choice([0, 32, 100, RING, RING + 1, chance.getrandbits(64)])
            nbytes = chance.choice([0, 4, 100, RING, 20_000, 1 << 40, (1 << 64) - 1, (1 << 64) - 48])
            header = HEADER.pack(chance.choice([0, 1, 5]), nbytes, chance.choice([0, 0, 1]), chance.choice([5, 6]), 0)
            pages.maps[peer][8192 : 8192 + 8] = head.to_bytes(8, "little")
            pages.maps[peer][8192 + 128 : 8192 + 160] = chance.choice([header, chance.randbytes(32)])
        if (a.messages["status"] == RunResult.AGAIN).any():
            a.go()
    for out in outs:
        assert (out[:32] == 0xA5).all() and (out[-32:] == 0xA5).all()
