"""Messages between agents as bytes: what goes in comes out, and nothing else comes out at all."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etha import errors
from etha.errors import EthaError, PeerLostError, ProtocolError, RegistrationError, RendezvousTimeoutError, Violation
from etha.peer import wire
from etha.peer.messages import Abort, Commit, Failed, Go, Message
from etha.peer.wire import Beat, Control, Malformed, Said, Scope, decode, encode
from tests.examples import examples

SCOPE = Scope(pair="weights", epoch=3, batch="step_0", generation=2)

names = st.from_regex(r"[A-Za-z0-9._-]{1,100}", fullmatch=True)
numbers = st.integers(0, 2**53 - 1)
scopes = st.builds(Scope, pair=names, epoch=numbers, batch=st.just("") | names, generation=numbers)
texts = st.text(st.characters(codec="utf-8"), max_size=50)
failures = st.sampled_from(
    [
        EthaError("plain"),
        PeerLostError("lost", reason="closed", outcome="unknown", torn=True, quiesced=False),
        RendezvousTimeoutError("late", missing={"trainer": (1, 2)}),
        RegistrationError("bad", violations=[Violation(code="dtype", name="w", side="a", rank=None, text="no")]),
        *(cls("told") for cls in errors._BY_CODE.values()),
    ]
)
OF_HINT: dict[Any, st.SearchStrategy[Any]] = {str: texts, int: st.integers(-(2**63), 2**63 - 1), EthaError: failures}
OF_HINT[float] = st.floats(allow_nan=False)  # which is not equal to itself


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    """Values of ``hint`` that can travel: integers of 64 bits, text that is UTF-8."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:  # values of such a size have no bounds to break
        return of_hint(args[0])
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(of_hint(args[0]), max_size=5).map(tuple)
        return st.tuples(*map(of_hint, args))
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(of_hint, args))
    return OF_HINT[hint] if hint in OF_HINT else st.from_type(hint)


def of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: of_hint(hints[f.name]) for f in msgspec.structs.fields(cls)})


messages = st.one_of([of(cls) for cls in typing.get_args(Message)])
controls = st.one_of([of(cls) for cls in typing.get_args(Control)])


def plain(message: object) -> dict[str, Any]:
    """A message with its errors, which compare by identity, as data."""
    values = {f.name: getattr(message, f.name) for f in msgspec.structs.fields(message)}
    return {
        name: (type(value), value.to_wire(), value.remote_traceback) if isinstance(value, EthaError) else value
        for name, value in values.items()
    }


@given(scope=scopes, message=messages)
@settings(deadline=None, max_examples=examples(300))
def test_every_message_arrives_as_it_was_sent(scope: Scope, message: Message) -> None:
    got = decode(encode(scope, message))
    assert got.scope == scope and type(got.message) is type(message)
    assert plain(got.message) == plain(message)


@given(message=controls)
@settings(deadline=None)
def test_the_links_own_messages_arrive_without_a_scope(message: Control) -> None:
    got = decode(encode(None, message))
    assert got.scope is None and got.message == message


def test_the_traceback_of_the_cause_travels() -> None:
    cause = errors.from_wire({"code": "transfer", "text": "no", "data": {}}, "Traceback: there")
    got = decode(encode(SCOPE, Failed(seq=1, cause=cause))).message
    assert isinstance(got, Failed) and got.cause.remote_traceback == "Traceback: there"


@pytest.mark.parametrize(
    "cause",
    [
        RegistrationError(
            "x" * (1 << 16), violations=[Violation(code="c", name="n" * 200, side="s", rank=1, text="t")] * 9999
        ),
        RendezvousTimeoutError("late", missing={"s": (1 << 80,)}),
    ],
)
def test_an_error_too_large_to_travel_loses_its_details_and_still_arrives(cause: EthaError) -> None:
    got = decode(encode(SCOPE, Abort(seq=1, cause=cause))).message
    assert isinstance(got, Abort) and type(got.cause) is type(cause)
    assert cause.message.startswith(got.cause.message) and len(got.cause.message) <= wire.MAX_TEXT


def test_text_that_is_no_utf8_does_not_stop_an_abort() -> None:
    got = decode(encode(SCOPE, Abort(seq=1, cause=EthaError("file \udc80")))).message
    assert isinstance(got, Abort) and got.cause.message == "file ?"


@pytest.mark.parametrize(
    ("scope", "message"),
    [(None, Commit(seq=1)), (SCOPE, Beat(number=1)), (SCOPE, object()), (SCOPE, Commit(seq=1 << 64))],
)
def test_what_cannot_travel_is_refused_by_the_sender(scope: Scope | None, message: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(scope, message)


def test_a_message_that_is_too_large_is_refused_on_both_ends() -> None:
    attempts = tuple(("a" * 300, "s", number) for number in range(30_000))
    with pytest.raises(ProtocolError, match="at most"):
        encode(SCOPE, Go(seq=1, side="s", version=None, attempts=attempts))
    with pytest.raises(Malformed, match="at most"):
        decode(bytes(wire.MAX_MESSAGE + 1))


@pytest.mark.parametrize(
    "scope", [{"pair": ""}, {"pair": "a b"}, {"batch": "x/y"}, {"epoch": -1}, {"generation": True}]
)
def test_a_scope_checks_itself(scope: dict[str, Any]) -> None:
    with pytest.raises(EthaError):
        Scope(**{"pair": "p", "epoch": 1, "batch": "b", "generation": 1, **scope})


GOOD: dict[str, Any] = {"v": wire.PROTOCOL, "op": "commit", "scope": ["p", 1, "b", 2], "args": {"seq": 7}}
ERROR: dict[str, Any] = {"code": "transfer", "text": "no", "data": {}, "traceback": None}


def abort(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "op": "abort", "args": {"seq": 7, "cause": {**ERROR, **changes}}}


def test_the_examples_below_are_wrong_in_one_thing_only() -> None:
    assert decode(msgpack.packb(GOOD)).message == Commit(seq=7)
    assert isinstance(decode(msgpack.packb(abort())).message, Abort)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (b"\x91" * 5000, "array"),
        (b"\xdd\x00\x0f\xff\xff" * 100, "array"),
        (msgpack.packb(GOOD) + b"\x00", "trailing"),
        (msgpack.packb([GOOD]), "not a message"),
        (msgpack.packb({**GOOD, "more": 1}), "not a message"),
        (msgpack.packb({**GOOD, "v": wire.PROTOCOL + 1}), "use one version of etha"),
        (msgpack.packb({**GOOD, "v": True}), r"got `bool` - at `\$\.v`"),
        (msgpack.packb({**GOOD, "op": "explode"}), "unknown message 'explode'"),
        (msgpack.packb({**GOOD, "op": ["commit"]}), r"got `array` - at `\$\.op`"),
        (msgpack.packb({**GOOD, "scope": None}), "its scope is missing"),
        (msgpack.packb({**GOOD, "op": "beat", "args": {"number": 1}}), "a scope where none belongs"),
        (msgpack.packb({**GOOD, "scope": ["p", 1, "b"]}), r"length 4, got 3 - at `\$\.scope`"),
        (msgpack.packb({**GOOD, "scope": ["p", True, "b", 2]}), r"got `bool` - at `\$\.scope\[1\]`"),
        (msgpack.packb({**GOOD, "scope": ["p p", 1, "b", 2]}), "not allowed"),
        (msgpack.packb({**GOOD, "scope": ["p", 1, "b", 2**60]}), "generation"),
        (msgpack.packb({**GOOD, "args": {"seq": "7"}}), r"malformed commit: Expected `int`, got `str` - at `\$\.seq`"),
        (msgpack.packb({**GOOD, "args": {"seq": 7, "more": 1}}), "unknown field `more`"),
        (msgpack.packb({**GOOD, "args": {}}), "missing required field `seq`"),
        (msgpack.packb(abort(code=5)), r"\$\.cause\.code"),
        (msgpack.packb(abort(text="x" * (wire.MAX_TEXT + 1))), r"\$\.cause\.text"),
        (msgpack.packb(abort(data=[])), r"\$\.cause\.data"),
        (msgpack.packb(abort(data={"message": "taken"})), "data of error"),
        (msgpack.packb(abort(code="registration", data={"violations": [{"code": "x"}]})), "data of error"),
        (msgpack.packb(abort(traceback=5)), r"\$\.cause\.traceback"),
    ],
)
def test_anything_else_than_a_message_is_malformed(data: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        decode(data)


def test_an_error_of_an_unknown_kind_arrives_as_one_that_says_so() -> None:
    got = decode(msgpack.packb(abort(code="from_the_future"))).message
    assert isinstance(got, Abort) and "from_the_future" in str(got.cause)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=examples(300))
def test_random_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@given(
    op=st.sampled_from(sorted(wire._BY_OP)), scope=st.just(GOOD["scope"]) | st.none() | plain_data, args=plain_data,
    data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=examples(500))
def test_well_packed_nonsense_is_malformed_or_a_message(op: str, scope: Any, args: Any, data: st.DataObject) -> None:
    cls = wire._BY_OP[op]
    if data.draw(st.booleans()):  # the right fields with anything in them
        args = {f.name: data.draw(plain_data) for f in msgspec.structs.fields(cls)}
    try:
        got = decode(msgpack.packb({"v": 1, "op": op, "scope": scope, "args": args}))
    except Malformed:
        return
    assert type(got.message) is cls


@given(message=messages, at=st.integers(0, 1 << 16), bit=st.integers(0, 7), cut=st.booleans())
@settings(deadline=None, max_examples=examples(300))
def test_a_damaged_message_is_malformed_or_another_message(message: Message, at: int, bit: int, cut: bool) -> None:
    data = bytearray(encode(SCOPE, message))
    at %= len(data)
    data[at] ^= 1 << bit
    try:
        got = decode(bytes(data[:at]) if cut else bytes(data))
    except Malformed:
        return
    assert isinstance(got.message, Said)
