"""Messages as bytes: what goes in comes out, and nothing else comes out at all."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from etha.bus import codec, schema
from etha.bus.codec import PROTOCOL, Cancel, Failure, Malformed, Push, Reply, Request, decode, encode, message
from etha.bus.schema import Blob, Items, JsonObject, StrictStruct, Text
from etha.errors import (
    EthaError,
    GroupLostError,
    GroupMismatchError,
    GroupTimeoutError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    RendezvousTimeoutError,
    Violation,
)
from tests.examples import examples


class Part(StrictStruct, frozen=True, kw_only=True):
    key: Text | None
    sizes: Annotated[tuple[int, ...], Meta(max_length=4)]


@message("test_all")
class All(StrictStruct, frozen=True, kw_only=True):
    number: int
    ratio: float
    text: Annotated[str, Meta(max_length=10)]
    raw: Blob
    flag: bool
    nothing: None
    verb: Literal["send", "recv", 3]
    label: int | Text | None
    parts: Items[Part]
    pairs: Items[tuple[Text, int]]
    table: Annotated[dict[Text, Part], Meta(max_length=10)]
    free: JsonObject


class Even(int):
    """An int that is no plain int."""


@message("test_checked")
class Checked(StrictStruct, frozen=True, kw_only=True):
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

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
free = scalars
for _ in range(schema.MAX_DEPTH):
    free = scalars | st.lists(free, max_size=2) | st.dictionaries(st.text(), free, max_size=2)
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
    free=st.dictionaries(st.text(), free, max_size=4),
)
ids = st.integers(1, 2**63 - 1)
errors = st.sampled_from(
    [
        EthaError("plain"),
        PeerLostError("gone", reason="closed", torn=True),
        RendezvousTimeoutError("late", missing={"trainer": (0, 3)}),
        GroupLostError("lost", ranks=(1,), reason="was killed", epoch=7),
        GroupTimeoutError("late", waiting_for=(0, 2)),
        GroupMismatchError("differ", calls={0: "allreduce", 1: "barrier"}),
        RegistrationError("no", violations=[Violation(code="dtype", name="w", side="a", rank=None, text="t")]),
    ]
)


def request(args: Any, **changes: Any) -> bytes:
    wire = {"v": PROTOCOL, "id": 5, "op": "test_all", "left": 2.0, "args": args} | changes
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
    ("field", "value", "reported"),
    [
        ("number", True, "Expected `int`, got `bool` - at `$.number`"),
        ("number", 1.0, "Expected `int`, got `float` - at `$.number`"),
        ("number", None, "Expected `int`, got `None` - at `$.number`"),
        ("ratio", "1", "Expected `float`, got `str` - at `$.ratio`"),
        ("ratio", True, "Expected `float`, got `bool` - at `$.ratio`"),
        ("text", b"bytes", "Expected `str`, got `bytes` - at `$.text`"),
        ("text", "x" * 11, "Expected `str` of length <= 10 - at `$.text`"),
        ("raw", "text", "Expected `bytes`, got `str` - at `$.raw`"),
        ("flag", 1, "Expected `bool`, got `int` - at `$.flag`"),
        ("nothing", 0, "Expected `null`, got `int` - at `$.nothing`"),
        ("verb", "both", "Invalid enum value 'both' - at `$.verb`"),
        ("verb", [], "got `array` - at `$.verb`"),
        ("verb", True, "got `bool` - at `$.verb`"),
        ("label", 1.5, "Expected `int | str | null`, got `float` - at `$.label`"),
        ("label", True, "got `bool` - at `$.label`"),
        ("parts", {}, "Expected `array`, got `object` - at `$.parts`"),
        ("parts", [{"key": None, "sizes": [1]}, {"key": 1, "sizes": []}], "got `int` - at `$.parts[1].key`"),
        ("parts", [{"key": None, "sizes": [1, 2, "3"]}], "Expected `int`, got `str` - at `$.parts[0].sizes[2]`"),
        ("parts", [{"key": None, "sizes": [0] * 5}], "Expected `array` of length <= 4 - at `$.parts[0].sizes`"),
        ("parts", [{"key": None}], "Object missing required field `sizes` - at `$.parts[0]`"),
        ("parts", [{"key": None, "sizes": [], "more": 1}], "unknown field `more` - at `$.parts[0]`"),
        ("pairs", [["a"]], "Expected `array` of length 2, got 1 - at `$.pairs[0]`"),
        ("pairs", [["a", "b"]], "Expected `int`, got `str` - at `$.pairs[0][1]`"),
        ("table", {"x": 3}, "Expected `object`, got `int` - at `$.table[...]`"),
        ("table", [], "Expected `object`, got `array` - at `$.table`"),
        ("table", {1: {"key": None, "sizes": []}}, "Expected `str`, got `int` - at `key` in `$.table`"),
        ("table", {str(i): {"key": None, "sizes": []} for i in range(11)}, "of length <= 10 - at `$.table`"),
        ("free", [], "Expected `object`, got `array` - at `$.free`"),
        ("free", {"a": [{1: 2}]}, "Expected `str`, got `int` - at `key` in `$.free[...][0]`"),
        ("free", {"a": b"bytes"}, "got `bytes` - at `$.free[...]`"),
        ("free", {"a": [msgpack.ExtType(5, b"x")]}, "got `ext` - at `$.free[...][0]`"),
        ("free", {"a": msgpack.Timestamp(1)}, "got `ext` - at `$.free[...]`"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(field: str, value: Any, reported: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(request({**SAMPLE, field: value}))
    assert str(caught.value).startswith("malformed message 5: test_all: ") and reported in str(caught.value)
    assert isinstance(caught.value, Malformed)
    assert caught.value.id == 5


def test_missing_and_unknown_fields_are_named() -> None:
    args = {name: value for name, value in SAMPLE.items() if name != "flag"}
    with pytest.raises(ProtocolError, match=r"test_all: Object missing required field `flag`"):
        decode(request(args))
    with pytest.raises(ProtocolError, match=r"test_all: Object contains unknown field `extra`"):
        decode(request({**SAMPLE, "extra": 1}))


def test_what_a_message_itself_refuses_is_a_protocol_error() -> None:
    assert isinstance(decode(encode(Request(1, None, Checked(even=4)))), Request)
    with pytest.raises(ProtocolError, match=r"test_checked: 3 is odd"):
        decode(request({"even": 3}, op="test_checked"))


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"v": PROTOCOL + 1}, f"speaks protocol {PROTOCOL + 1}, this one {PROTOCOL}"),
        ({"v": PROTOCOL + 1, "more": 1}, f"speaks protocol {PROTOCOL + 1}, this one {PROTOCOL}"),
        ({"v": True}, "Expected `int`, got `bool` - at `$.v`"),
        ({"v": ...}, "missing required field `v`"),
        ({"id": ...}, "missing required field `id`"),
        ({"id": True}, "Expected `int`, got `bool` - at `$.id`"),
        ({"id": -1}, "Expected `int` >= 0 - at `$.id`"),
        ({"id": 2**63}, "- at `$.id`"),
        ({"id": 0}, "above 0"),
        ({"op": "no_such"}, "unknown operation 'no_such'"),
        ({"op": ["list"]}, "got `array` - at `$.op`"),
        ({"op": ...}, "no envelope has the fields"),
        ({"more": None}, "unknown field `more`"),
        ({"cancel": True}, "no envelope has the fields op, left, args, cancel"),
        ({"left": math.nan}, "left"),
        ({"left": math.inf}, "left"),
        ({"left": "1"}, "left"),
        ({"left": True}, "left"),
        ({"left": ...}, "no envelope has the fields"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_wrong_envelope_is_refused(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(request(dict(SAMPLE), **changes))
    assert reported in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"ok": {"op": "test_all"}},
        {"ok": []},
        {"push": 3},
        {"cancel": True, "args": 1},
        {"cancel": True, "left": 1.0},
        {"op": "test_checked", "left": None},
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
        decode(msgpack.packb({"v": PROTOCOL, "id": 1, **body}))


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
        bytes(msgpack.packb({"v": PROTOCOL, "id": 1, "cancel": msgpack.Timestamp(1)})),
        bytes(msgpack.packb({"v": PROTOCOL, "id": 1, "cancel": msgpack.ExtType(5, b"x")})),
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
        decode(msgpack.packb({"v": PROTOCOL, "id": 1, **wire}))
    except ProtocolError:
        return


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [object(), range(2), 2**70, "\ud800", 1j, nested(5000)])
def test_what_cannot_travel_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(ProtocolError, match="request 'test_checked' cannot be encoded"):
        encode(Request(1, None, _checked(value)))


def _checked(value: Any) -> Checked:
    built = Checked(even=0)
    msgspec.structs.force_setattr(built, "even", value)
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


def test_free_data_is_bounded_in_depth() -> None:
    got = decode(request({**SAMPLE, "free": {"d": nested(schema.MAX_DEPTH)}}))
    assert isinstance(got, Request) and got.message.free == {"d": nested(schema.MAX_DEPTH)}
    with pytest.raises(Malformed, match=r"got `array` - at `\$\.free"):
        decode(request({**SAMPLE, "free": {"d": nested(schema.MAX_DEPTH + 1)}}))


def test_numbers_that_inherit_from_plain_ones_travel() -> None:
    got = decode(encode(Request(1, np.float64(2.5), Checked(even=Even(4)))))
    assert isinstance(got, Request) and (got.left, got.message) == (2.5, Checked(even=4))
    assert type(got.left) is float and type(got.message.even) is int


def test_an_overlong_error_text_is_cut() -> None:
    got = decode(encode(Failure(1, EthaError("x" * (codec.MAX_TEXT + 5)), "y" * (codec.MAX_TEXT + 5))))
    assert isinstance(got, Failure)
    assert len(got.error.message) == len(got.traceback or "") == codec.MAX_TEXT


def test_an_error_code_of_a_newer_version_is_told_as_such() -> None:
    wire = {"code": "brand_new", "text": "hm", "data": {}, "traceback": None}
    got = decode(msgpack.packb({"v": PROTOCOL, "id": 1, "error": wire}))
    assert isinstance(got, Failure)
    assert type(got.error) is ProtocolError
    assert "brand_new" in got.error.message


def test_a_message_is_a_strict_struct() -> None:
    with pytest.raises(TypeError, match="int is no StrictStruct"):
        message("test_bad")(int)


def test_an_operation_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="belongs to Checked already"):
        message("test_checked")(Part)
