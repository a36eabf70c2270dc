"""Messages as bytes: what goes in comes out, and nothing else comes out at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etha.bus import codec, schema
from etha.bus.codec import Bounds, Cancel, Failure, Malformed, Push, Reply, Request, decode, encode, message
from etha.errors import (
    EthaError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    RendezvousTimeoutError,
    Violation,
)
from tests.examples import examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    key: str | None
    sizes: Annotated[tuple[int, ...], Bounds(max=4)]


@message("test_all")
@dataclass(frozen=True, slots=True, kw_only=True)
class All:
    number: int
    ratio: float
    text: Annotated[str, Bounds(max=10)]
    raw: bytes
    flag: bool
    nothing: None
    verb: Literal["send", "recv", 3]
    label: int | str | None
    parts: tuple[Part, ...]
    pairs: tuple[tuple[str, int], ...]
    table: dict[str, Part]
    free: dict[str, Any]


@message("test_checked")
@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    even: int

    def __post_init__(self) -> None:
        if self.even % 2:
            raise ValueError(f"{self.even} is odd")


SAMPLE: dict[str, Any] = {
    "number": -(2**63),
    "ratio": 0.5,
    "text": "héllo",
    "raw": b"\x00\xff",
    "flag": True,
    "nothing": None,
    "verb": "send",
    "label": 7,
    "parts": [{"key": None, "sizes": [1, 2]}],
    "pairs": [["a", 1], ["b", 2]],
    "table": {"x": {"key": "k", "sizes": []}},
    "free": {"deep": [1, {"er": None}], "f": 1.5},
}

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
parts = st.builds(
    Part, key=st.none() | st.text(max_size=20), sizes=st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
)
messages = st.builds(
    All,
    number=st.integers(-(2**63), 2**63 - 1),
    ratio=st.floats(allow_nan=False),
    text=st.text(max_size=10),
    raw=st.binary(),
    flag=st.booleans(),
    nothing=st.none(),
    verb=st.sampled_from(["send", "recv", 3]),
    label=st.none() | st.text(max_size=20) | st.integers(0, 2**32),
    parts=st.lists(parts, max_size=4).map(tuple),
    pairs=st.lists(st.tuples(st.text(max_size=5), st.integers(0, 9)), max_size=3).map(tuple),
    table=st.dictionaries(st.text(max_size=5), parts, max_size=3),
    free=st.dictionaries(st.text(), plain, max_size=4),
)
ids = st.integers(1, 2**63 - 1)
errors = st.sampled_from(
    [
        EthaError("plain"),
        PeerLostError("gone", reason="closed", torn=True),
        RendezvousTimeoutError("late", missing={"trainer": (0, 3)}),
        RegistrationError("no", violations=[Violation(code="dtype", name="w", side="a", rank=None, text="t")]),
    ]
)


def request(args: Any, **changes: Any) -> bytes:
    wire = {"v": 1, "id": 5, "op": "test_all", "left": 2.0, "args": args} | changes
    return bytes(msgpack.packb({key: value for key, value in wire.items() if value is not ...}))


@settings(max_examples=examples(50), deadline=None)
@given(ids, st.none() | st.floats(0, 1e6), messages)
def test_a_request_comes_out_as_it_went_in(id: int, left: float | None, sent: All) -> None:
    got = decode(encode(Request(id, left, sent)), now=100.0)
    assert isinstance(got, Request)
    assert (got.id, got.left, got.message) == (id, left, sent)
    assert got.deadline == (math.inf if left is None else 100.0 + left)


@settings(max_examples=examples(50), deadline=None)
@given(ids, messages, st.integers(0, 2**63 - 1))
def test_replies_pushes_and_cancels_come_out_as_they_went_in(id: int, sent: All, any_id: int) -> None:
    for envelope in (Reply(id, sent), Push(any_id, sent), Cancel(id)):
        assert decode(encode(envelope)) == envelope


@settings(max_examples=examples(50), deadline=None)
@given(ids, errors, st.none() | st.text())
def test_an_error_crosses_with_its_type_its_data_and_the_remote_traceback(
    id: int, error: EthaError, text: str | None
) -> None:
    got = decode(encode(Failure(id, error, text)))
    assert isinstance(got, Failure)
    assert type(got.error) is type(error)
    assert got.error.to_wire() == error.to_wire()
    assert got.error.remote_traceback == got.traceback == text


def test_a_past_deadline_is_now_and_not_before() -> None:
    got = decode(request(dict(SAMPLE), left=-3), now=10.0)
    assert isinstance(got, Request)
    assert got.deadline == 10.0


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("number", True, "test_all.number: expected int, got True"),
        ("number", 1.0, "test_all.number: expected int, got 1.0"),
        ("number", None, "test_all.number: expected int, got None"),
        ("ratio", "1", "test_all.ratio: expected float, got '1'"),
        ("ratio", True, "test_all.ratio: expected float, got True"),
        ("text", b"bytes", "test_all.text: expected text, got b'bytes'"),
        ("text", "x" * 11, "test_all.text: 11 long, at most 10 allowed"),
        ("raw", "text", "test_all.raw: expected bytes"),
        ("flag", 1, "test_all.flag: expected bool, got 1"),
        ("nothing", 0, "test_all.nothing: expected null"),
        ("verb", "both", "test_all.verb: expected one of 'send', 'recv', 3, got 'both'"),
        ("verb", [], "test_all.verb: expected one of"),
        ("label", 1.5, "test_all.label: expected one of NoneType, int, str, got 1.5"),
        ("label", True, "test_all.label: expected one of"),
        ("parts", {}, "test_all.parts: expected an array, got a dict"),
        ("parts", [{"key": None, "sizes": [1]}, {"key": 1, "sizes": []}], "test_all.parts[1].key: expected one of"),
        ("parts", [{"key": None, "sizes": [1, 2, "3"]}], "test_all.parts[0].sizes[2]: expected int, got '3'"),
        ("parts", [{"key": None, "sizes": [0] * 5}], "test_all.parts[0].sizes: 5 items, at most 4 allowed"),
        ("parts", [{"key": None}], "test_all.parts[0]: fields missing: ['sizes'], unknown: none"),
        ("pairs", [["a"]], "test_all.pairs[0]: expected an array of 2, got 1 items"),
        ("pairs", [["a", "b"]], "test_all.pairs[0][1]: expected int"),
        ("table", {"x": 3}, "test_all.table['x']: expected a map, got 3"),
        ("table", [], "test_all.table: expected a map"),
        ("free", [], "test_all.free: expected a map"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(field: str, value: Any, told: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(request({**SAMPLE, field: value}))
    assert told in str(caught.value)
    assert isinstance(caught.value, Malformed)
    assert caught.value.id == 5


def test_missing_and_unknown_fields_are_both_named() -> None:
    args = {**SAMPLE, "extra": 1}
    del args["flag"]
    with pytest.raises(ProtocolError, match=r"fields missing: \['flag'\], unknown: \[\"'extra'\"\]"):
        decode(request(args))


def test_what_a_message_itself_refuses_is_a_protocol_error() -> None:
    assert isinstance(decode(encode(Request(1, None, Checked(even=4)))), Request)
    with pytest.raises(ProtocolError, match=r"test_checked: 3 is odd"):
        decode(request({"even": 3}, op="test_checked"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"v": 2}, "speaks protocol 2, this one 1"),
        ({"v": True}, "speaks protocol True"),
        ({"v": ...}, "speaks protocol None"),
        ({"id": ...}, "no id"),
        ({"id": True}, "no id"),
        ({"id": -1}, "no id"),
        ({"id": 2**63}, "no id"),
        ({"id": 0}, "above 0"),
        ({"op": "no_such"}, "unknown operation 'no_such'"),
        ({"op": ["list"]}, "unknown operation"),
        ({"left": math.nan}, "left"),
        ({"left": math.inf}, "left"),
        ({"left": "1"}, "left"),
        ({"left": True}, "left"),
        ({"left": ...}, "no envelope has the fields"),
        ({"more": 1}, "no envelope has the fields"),
    ],
)
def test_a_wrong_envelope_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(request(dict(SAMPLE), **changes))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"ok": {"op": "test_all"}},
        {"ok": []},
        {"push": 3},
        {"cancel": False},
        {"cancel": 1},
        {"error": {"code": "etha", "text": "t", "data": {}}},
        {"error": {"code": "etha", "text": "t", "data": [], "traceback": None}},
        {"error": {"code": 3, "text": "t", "data": {}, "traceback": None}},
        {"error": {"code": "etha", "text": "t", "data": {}, "traceback": 3}},
        {"error": {"code": "etha", "text": "t", "data": {"unknown": 1}, "traceback": None}},
        {"error": {"code": "registration", "text": "t", "data": {"violations": [{"no": 1}]}, "traceback": None}},
        {"error": {"code": "rendezvous_timeout", "text": "t", "data": {"missing": 3}, "traceback": None}},
        {"ok": {}, "error": {}},
        {},
    ],
)
def test_a_wrong_answer_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        decode(msgpack.packb({"v": 1, "id": 1, **body}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\x01",
        b"\xa1\xff",
        b"\x81\x01\x02",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(msgpack.packb([1, 2])),
        bytes(msgpack.packb({"v": 1, "id": 1, "cancel": msgpack.Timestamp(1)})),
        bytes(msgpack.packb({"v": 1, "id": 1, "cancel": msgpack.ExtType(5, b"x")})),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        return


@settings(max_examples=examples(200), deadline=None)
@given(messages, st.data())
def test_a_valid_message_with_bytes_changed_decodes_or_is_refused(sent: All, data: st.DataObject) -> None:
    wire = bytearray(encode(Request(1, 1.0, sent)))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(wire))
    except ProtocolError:
        return


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(st.sampled_from(["v", "id", "op", "left", "args", "ok", "push", "error", "cancel"]), plain))
def test_any_map_decodes_or_is_refused(wire: dict[str, Any]) -> None:
    try:
        decode(msgpack.packb({"v": 1, "id": 1, **wire}))
    except ProtocolError:
        return


@pytest.mark.parametrize("value", [object(), {1, 2}, 2**70, "\ud800", 1j])
def test_what_cannot_travel_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(ProtocolError, match="request 'test_checked' cannot be encoded"):
        encode(Request(1, None, _checked(value)))


def _checked(value: Any) -> Checked:
    built = object.__new__(Checked)
    object.__setattr__(built, "even", value)
    return built


def test_a_class_without_an_operation_is_refused_where_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="Part is not a registered message"):
        encode(Push(0, Part(key=None, sizes=())))


def test_a_message_above_the_bound_is_refused_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Request(1, None, Checked(even=2)))
    monkeypatch.setattr(codec, "MAX_MESSAGE", len(data) - 1)
    with pytest.raises(ProtocolError, match=r"request 'test_checked' has .* bytes, at most"):
        encode(Request(1, None, Checked(even=2)))
    with pytest.raises(Malformed, match=r"at most .* are taken"):
        decode(data)


def test_free_data_is_bounded_in_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = 1
    for _ in range(schema.MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(Malformed, match="deeper than"):
        decode(request({**SAMPLE, "free": {"d": deep}}))


def test_an_overlong_error_text_is_cut() -> None:
    got = decode(encode(Failure(1, EthaError("x" * (codec.MAX_TEXT + 5)), "y" * (codec.MAX_TEXT + 5))))
    assert isinstance(got, Failure)
    assert len(got.error.message) == len(got.traceback or "") == codec.MAX_TEXT


def test_an_error_code_of_a_newer_version_is_told_as_such() -> None:
    wire = {"code": "brand_new", "text": "hm", "data": {}, "traceback": None}
    got = decode(msgpack.packb({"v": 1, "id": 1, "error": wire}))
    assert isinstance(got, Failure)
    assert type(got.error) is ProtocolError
    assert "brand_new" in got.error.message


@pytest.mark.parametrize("hint", [set[int], list[int], dict[int, str], object, complex, "int | float", tuple])
def test_hints_that_cannot_be_checked_are_refused_at_registration(hint: Any) -> None:
    cls = type("Bad", (), {"__annotations__": {"field": hint}, "__module__": __name__})
    with pytest.raises(TypeError, match=r"Bad\.field"):
        message("test_bad")(dataclass(cls))


def test_an_operation_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="belongs to Checked already"):
        message("test_checked")(Part)
