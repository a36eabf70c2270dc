"""What travels is bounded: every text, array and map in a message has a most, and nothing may be of any type."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from etha.bus import codec
from etha.bus import handshake as handshake
from etha.bus import messages as messages
from etha.errors import EthaError
from etha.peer import wire
from etha.peer.messages import OPS

STRUCTS = (
    *(cls for cls in codec.MESSAGES.values() if cls.__module__.startswith("etha.")),
    *OPS,
    *(codec._Wire, wire._Wire, wire._Error),
)


def unbounded(hint: inspect.Type, path: str, key: bool = False) -> Iterator[str]:
    """Paths to what has no bound, in ``hint``. Keys have one: msgspec takes text alone, and the message is bounded."""
    match hint:
        case inspect.StrType() | inspect.BytesType():
            if hint.max_length is None and not key:
                yield path
        case inspect.VarTupleType() | inspect.ListType():
            if hint.max_length is None:
                yield path
            yield from unbounded(hint.item_type, f"{path}[]")
        case inspect.DictType():
            if hint.max_length is None or not isinstance(hint.key_type, inspect.StrType):
                yield path
            yield from unbounded(hint.value_type, f"{path}{{}}")
        case inspect.TupleType():
            for number, item in enumerate(hint.item_types):
                yield from unbounded(item, f"{path}[{number}]")
        case inspect.UnionType():
            for item in hint.types:
                yield from unbounded(item, path)
        case inspect.StructType():
            if not hint.forbid_unknown_fields:
                yield f"{path}: takes unknown fields"
            for field in hint.fields:
                yield from unbounded(field.type, f"{path}.{field.name}")
        case inspect.CustomType(cls=cls):
            if cls is not EthaError:  # ``wire`` decodes it as its ``_Error``
                yield f"{path}: {cls}"
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            pass
        case inspect.RawType():
            pass  # decoded as one of the others
        case _:
            yield f"{path}: {hint}"


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_everything_in_a_message_has_a_bound(cls: type) -> None:
    assert list(unbounded(inspect.type_info(cls), cls.__name__)) == []


def test_what_has_no_bound_is_found() -> None:
    class Loose(msgspec.Struct):
        text: str
        items: tuple[bytes, ...]
        table: dict[int, object]

    found = list(unbounded(inspect.type_info(Loose), "Loose"))
    assert found[:4] == ["Loose: takes unknown fields", "Loose.text", "Loose.items", "Loose.items[]"]
    assert found[4] == "Loose.table" and len(found) == 6
