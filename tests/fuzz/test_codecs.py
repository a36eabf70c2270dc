"""Mutated messages at the two codecs: a message, or a Malformed of bounded text; nothing else, and little memory."""

from __future__ import annotations

import random

import pytest

from etha.bus import codec
from etha.bus.codec import Malformed
from etha.peer import wire

from .mutation import PROMISES, mutated
from .samples import bus_messages, peer_messages
from .trial import MIB, bounded, judge, rng_of, seeds

#: Valid messages to begin from.
ROUNDS = 20


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "valid", "module"),
    [("bus codec", bus_messages, codec), ("peer codec", peer_messages, wire)],
)
def test_a_mutated_message_is_decoded_or_malformed(name: str, valid: object, module: object) -> None:
    first = random.Random(0)
    corpus = [message for _ in range(ROUNDS) for message in valid(first)]  # type: ignore[operator]
    for message in corpus:
        module.decode(message)  # type: ignore[attr-defined]
    taken = 0
    with bounded():
        for seed in seeds(name):
            rng = rng_of(seed)
            data = mutated(rng.choice(corpus), rng, rng.choice(corpus))
            taken += judge(name, seed, data, lambda d=data: module.decode(d), (Malformed,))  # type: ignore[misc,attr-defined]
    assert taken, "mutations should leave some messages valid"
    for message in corpus:
        module.decode(message)  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [codec, wire], ids=["bus", "peer"])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda p: p.hex())
def test_what_is_promised_and_does_not_follow_costs_nothing(module: object, promise: bytes) -> None:
    with bounded(more=16 * MIB):
        for depth in (1, 10, 500, 5000):
            with pytest.raises(Malformed):
                module.decode(promise * depth)  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [codec, wire], ids=["bus", "peer"])
def test_what_is_refused_is_told_in_few_words(module: object) -> None:
    import msgpack

    much = "y" * (1 << 20)
    for plain in (
        {"v": much, "id": 1, "op": much, "scope": None, "args": {}},
        {"v": 1, "id": 1, much: 1, "x": 2},
        {"v": 1, "id": 1, "op": "goodbye", "left": much, "args": {}},
        {"v": 1, "id": 1, "op": "goodbye", "left": None, "args": {f"{much}{i}": 1 for i in range(3)}},
        {"v": 1, "op": "beat", "scope": None, "args": {f"x{i}": 1 for i in range(60_000)}},
        {"v": [much], "op": much, "scope": much, "args": much},
    ):
        with pytest.raises(Malformed) as caught:
            module.decode(msgpack.packb(plain))  # type: ignore[attr-defined]
        assert len(str(caught.value)) < 2000
