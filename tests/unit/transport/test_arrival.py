"""What of a version has come and may be sent on, beside a bitmap."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from etha.memory.views import View, view_of
from etha.transport.arrival import ArrivingVersion, may_arrive
from etha.transport.geometry.boxes import BoxAxis
from etha.transport.geometry.tiles import Ends, Path, Tile
from etha.transport.wire.flows import Cut, End, Flow, FlowPiece, Span, WireProgram

SIZE = 4096


def tensor(place: int = 0, space: str = "segment", elements: int = SIZE) -> View:
    return replace(view_of(torch.zeros(elements, dtype=torch.uint8)), space=space, place=place)


def straight(view: View, offset: int, nbytes: int) -> Span:
    cut = Cut(view, offset, nbytes, torch.uint8)
    return Span(nbytes=nbytes, wire=nbytes, owners=(), memory=memoryview(b""), cuts=(cut,))


def rows(view: View, offset: int, count: int, length: int, stride: int) -> End:
    """``count`` runs of ``length`` bytes each, ``stride`` apart."""
    axes = (BoxAxis(count, stride, stride), BoxAxis(length, 1, 1))
    tile = Tile(
        path=Path.MAPPED,
        axes=axes,
        ends=Ends(source=torch.uint8, target=torch.uint8, source_private=False, target_private=False),
    )
    return End(view, ((tile, offset, 0),))


def packed(*ends: End) -> Span:
    nbytes = ends[0].steps[0][0].numel
    piece = FlowPiece(stage=0, tensor=0, nbytes=nbytes, dtype=torch.uint8, owners=(), ends=ends)
    return Span(nbytes=nbytes, wire=nbytes, owners=(), pieces=((0, piece),))


def program(*spans: Span) -> WireProgram:
    flow = Flow(peer="a", digest=b"", nbytes=sum(span.nbytes for span in spans), lanes=(spans,))
    return WireProgram(sends={}, receives={"a": flow})


@pytest.mark.parametrize("seed", range(20))
def test_bytes_may_be_sent_on_once_all_before_them_have_come(seed: int) -> None:
    chance = random.Random(seed)
    view = tensor(place=chance.randrange(100))
    ends = sorted(chance.sample(range(1, SIZE), 30))
    spans = [straight(view, start, end - start) for start, end in zip([0, *ends], [*ends, SIZE], strict=True)]
    version = ArrivingVersion(1, 5)
    version.begin(program(*spans))
    come = [False] * SIZE
    for span in chance.sample(spans, len(spans)):
        offset, nbytes = span.cuts[0].offset, span.nbytes
        at = 0
        while at < nbytes:
            some = chance.randint(1, nbytes - at)
            version.come(view, offset + at, some)
            come[offset + at : offset + at + some] = [True] * some
            at += some
            place = chance.randrange(SIZE)
            most = chance.randint(1, SIZE - place)
            expected = next((i for i, there in enumerate(come[place : place + most]) if not there), most)
            assert version.ready(view, place, most) == expected
        version.finish(span)
    assert version.ready(view, 0, SIZE) == SIZE
    assert not version.over


def test_what_is_unpacked_counts_once_all_of_its_tensor_has_come() -> None:
    view, other = tensor(), tensor(place=SIZE)
    left, right = (packed(rows(view, offset, 64, 32, 64)) for offset in (0, 32))
    beside = straight(other, 0, SIZE)
    version = ArrivingVersion(1, 5)
    version.begin(program(left, beside, right))
    version.finish(left)
    assert version.ready(view, 0, 32) == 0 and not version.has(rows(view, 0, 1, 32, 64))
    version.finish(beside)
    assert version.ready(view, 0, 32) == 0 and version.ready(other, 7, 32) == 32
    version.finish(right)
    assert version.ready(view, 0, SIZE) == SIZE and version.has(rows(view, 3, 60, 20, 64))


def test_a_packed_piece_waits_for_all_that_it_reads() -> None:
    view = tensor()
    version = ArrivingVersion(1, 5)
    version.begin(program(straight(view, 0, SIZE)))
    version.come(view, 0, 1000)
    assert version.has(rows(view, 0, 10, 100, 100)) and not version.has(rows(view, 1, 10, 100, 100))
    assert version.has(rows(view, 40, 2, 10, 900)) and not version.has(rows(view, 91, 2, 10, 900))


def test_other_memory_at_the_same_place_has_not_come() -> None:
    view = tensor()
    version = ArrivingVersion(1, 5)
    version.begin(program(straight(view, 0, SIZE)))
    version.come(view, 0, SIZE)
    assert version.ready(tensor(space="another"), 0, 10) == 0


def test_the_first_word_on_how_it_has_ended_counts_and_all_hear_it() -> None:
    heard: list[str] = []
    version = ArrivingVersion(1, 5, lambda: heard.append("side"))
    view = tensor()

    def listener() -> None:
        heard.append("run")

    version.listen(listener)
    version.begin(program(straight(view, 0, SIZE)))
    version.end(whole=False)
    version.end(whole=True)
    assert (version.whole, version.lost, heard) == (False, True, ["side", "run", "side"])
    version.begin(program(straight(view, 0, SIZE)))
    version.ignore(listener)
    version.come(view, 0, 1)
    assert heard == ["side", "run", "side"]


def test_a_version_that_is_whole_may_be_sent_on_whatever_was_counted() -> None:
    version = ArrivingVersion(1, 5)
    version.end(whole=True)
    assert version.ready(tensor(), 5, 100) == 100


def test_nothing_is_sent_on_of_what_is_reduced_or_comes_from_nowhere() -> None:
    plain = program(straight(tensor(), 0, SIZE))
    assert may_arrive(plain)
    assert not may_arrive(replace(plain, aliased=True))
    assert not may_arrive(replace(plain, receives={}))


def unpacked(view: View, offset: int, count: int, length: int, stride: int) -> Span:
    """A packed span that is written as ``rows`` and comes without gaps."""
    tile = rows(view, 0, count, length, stride).steps[0][0]
    axes = (BoxAxis(count, length, stride), BoxAxis(length, 1, 1))
    return packed(End(view, ((replace(tile, axes=axes), offset, 0),)))


@pytest.mark.parametrize("seed", range(50))
def test_a_span_is_kept_if_and_only_if_all_of_it_has_come_before(seed: int) -> None:
    chance = random.Random(seed)
    there, strange = tensor(place=SIZE), tensor(place=3 * SIZE)
    whole = tensor(place=5 * SIZE)
    version, come = ArrivingVersion(1, 5), [False] * SIZE
    for claim in range(2, 5):
        version.begin(program(straight(there, 0, SIZE), straight(whole, 0, SIZE), straight(strange, 0, SIZE)))
        for _ in range(chance.randint(0, 4)):
            start = chance.randrange(SIZE)
            nbytes = chance.randint(1, SIZE - start)
            version.come(there, start, nbytes)
            come[start : start + nbytes] = [True] * nbytes
        if claim == 2:
            version.finish(packed(rows(whole, 0, 64, 64, 64)))
        version.settle(whole=False)
        version = ArrivingVersion(claim, 5, earlier=version)
    assert version.resumed
    for _ in range(300):
        count, length = chance.randint(1, 5), chance.randint(1, 100)
        stride = length + chance.choice([0, 1, 100, 500])
        offset = chance.randrange(SIZE - (count - 1) * stride - length)
        last = offset + (count - 1) * stride + length
        assert version.kept(unpacked(there, offset, count, length, stride)) == [all(come[offset:last])]
        span = straight(there, offset, length)
        assert version.kept(span) == [all(come[offset : offset + length])]
        for other in (replace(span, arrivals=(1,)), replace(span, index=0), straight(strange, offset, length)):
            assert version.kept(other) == [False]
        for one in (unpacked(whole, offset, count, length, stride), straight(whole, 3, 9)):
            assert version.kept(one) == [True]


def test_nothing_is_kept_of_a_hop_that_brought_nothing() -> None:
    first = ArrivingVersion(1, 5)
    first.begin(program(straight(tensor(), 0, SIZE)))
    first.settle(whole=False)
    second = ArrivingVersion(2, 5, earlier=first)
    assert not second.resumed
    assert second.kept(straight(tensor(), 0, 1)) == ArrivingVersion(2, 5).kept(straight(tensor(), 0, 1)) == [False]


def test_when_a_hop_may_go_on_where_another_has_ended() -> None:
    version = ArrivingVersion(1, 5, label="five")
    assert not version.goes_on(5, "five"), "it has not ended"
    version.begin(program(straight(tensor(), 0, SIZE)))
    version.end(whole=False)
    assert not version.goes_on(5, "five"), "its run may still write"
    version.settle(whole=False)
    assert version.goes_on(5, "five")
    assert not version.goes_on(6, "five") and not version.goes_on(5, "other")
    unbegun = ArrivingVersion(1, 5)
    unbegun.end(whole=False)
    assert unbegun.goes_on(5, None), "nothing has written"
    whole = ArrivingVersion(1, 5)
    whole.settle(whole=True)
    assert not whole.goes_on(5, None)
