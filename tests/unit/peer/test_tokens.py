"""Tokens of data connections: good once, in time, for whom and what they were given for."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import pytest

from etha.errors import ProtocolError
from etha.peer import tokens
from etha.peer.tokens import TOKEN_BYTES, Purpose, Tokens


def test_a_token_says_whom_it_was_given_to_and_is_good_once() -> None:
    given = Tokens()
    token = given.issue("b", "weights/1/0", 0.0)
    assert len(token) == TOKEN_BYTES
    assert given.redeem(token, 1.0) == Purpose(agent="b", use="weights/1/0")
    assert given.redeem(token, 1.0) is None and len(given) == 0


def test_several_streams_of_one_use_have_tokens_of_their_own() -> None:
    given = Tokens()
    issued = {given.issue("b", "weights", 0.0) for _ in range(4)}
    assert len(issued) == 4
    assert all(given.redeem(token, 0.0) == Purpose(agent="b", use="weights") for token in issued)


def test_a_token_expires() -> None:
    given = Tokens(life=10.0)
    early, late = given.issue("b", "x", 0.0), given.issue("b", "y", 5.0)
    assert given.redeem(early, 10.0) is None
    assert given.redeem(late, 14.9) == Purpose(agent="b", use="y")
    given.issue("b", "z", 20.0)
    given.expire(30.0)
    assert len(given) == 0


@pytest.mark.parametrize("at", [0, 7, 8, TOKEN_BYTES - 1])
def test_one_wrong_bit_opens_nothing_and_costs_the_right_one_nothing(at: int) -> None:
    given = Tokens()
    token = given.issue("b", "x", 0.0)
    wrong = bytearray(token)
    wrong[at] ^= 1
    assert given.redeem(bytes(wrong), 0.0) is None
    assert given.redeem(token, 0.0) is not None


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + b"x", lambda t: b""])
def test_a_token_of_another_size_is_none(change: Callable[[bytes], bytes]) -> None:
    given = Tokens()
    assert given.redeem(change(given.issue("b", "x", 0.0)), 0.0) is None


def test_secrets_are_compared_in_constant_time_known_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    given = Tokens()
    token = given.issue("b", "x", 0.0)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    given.redeem(bytes(TOKEN_BYTES), 0.0)
    given.redeem(token, 0.0)
    assert compared == [(32, 32), (32, 32)]


def test_what_was_given_can_be_taken_back() -> None:
    given = Tokens()
    one, two, other = given.issue("b", "x", 0.0), given.issue("b", "y", 0.0), given.issue("c", "x", 0.0)
    given.revoke("b", "x")
    assert given.redeem(one, 0.0) is None
    given.revoke("b")
    assert given.redeem(two, 0.0) is None
    assert given.redeem(other, 0.0) == Purpose(agent="c", use="x")


def test_tokens_that_nobody_uses_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 2)
    given = Tokens(life=10.0)
    for _ in range(2):
        given.issue("b", "x", 0.0)
    with pytest.raises(ProtocolError, match="not opened"):
        given.issue("b", "x", 9.0)
    given.issue("b", "x", 10.0)
    assert len(given) == 1
