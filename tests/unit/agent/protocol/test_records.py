"""What a rank registered, through Redis and back; what others wrote there is checked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.distributed.tensor import Replicate, Shard

from etha.agent.protocol.records import Manifest, Record, digest_of
from etha.bus.messages import Entry, Refusal, Register
from etha.errors import LayoutError, ProtocolError
from etha.memory.handles import TensorHandle
from etha.plan import Layout

LAYOUTS = [Layout((2,), [Shard(0)]), Layout((2,), [Replicate()]), Layout.region([[(0, 2), (4, 5)]], [0])]


def handle(*shape: int, dtype: str = "float32") -> TensorHandle:
    return TensorHandle(segment=None, offset=64, shape=shape, strides=(1,) * len(shape), dtype=dtype)


def register(*entries: Entry, refusals: tuple[Refusal, ...] = ()) -> Register:
    return Register(
        batch="b",
        epoch=1,
        form="map",
        pairs=("p", "q"),
        layouts=tuple(layout.to_plain() for layout in LAYOUTS),
        entries=entries,
        refusals=refusals,
        direction="send",
        bucket_size=None,
        atomic=False,
        verify="full",
        seq=3,
    )


def entry(name: str, layout: int = 0, shape: tuple[int, ...] | None = (5,), local: tuple[int, ...] = (3,)) -> Entry:
    return Entry(name=name, pair=0, layout=layout, shape=shape, handle=handle(*local))


def through_redis(manifest: Manifest) -> Manifest:
    layouts = {digest: Layout.from_plain(json.loads(text)) for digest, text in manifest.layouts().items()}
    assert Manifest.layout_digests(manifest.fields()) == set(layouts)
    return Manifest.from_fields(manifest.fields(), layouts)


def test_a_manifest_survives_redis() -> None:
    refusal = Refusal(code="alias", name="w:1", text="it overlaps", target_only=True)
    message = register(entry("w:1"), entry("v", 1, None, (2, 2)), entry("ü", 0, (5,), (4,)), refusals=(refusal,))
    manifest = Manifest.of(message, 0)
    assert through_redis(manifest) == manifest
    assert manifest.tensors["w:1"].local is None, "the layout tells it"
    assert manifest.tensors["ü"].local == (4,), "it is not what the layout tells"
    assert manifest.tensors["v"].local == (2, 2)


def test_ties_survive_redis_and_are_part_of_the_digest() -> None:
    plain, tied = (Manifest.of(register(entry("v"), replace(entry("w"), tied=t)), 0) for t in (None, "v"))
    assert through_redis(tied) == tied and tied.ties == {"w": "v"}
    assert digest_of(plain.fields()) != digest_of(tied.fields())


@pytest.mark.parametrize("first", ["nobody", "w"])
def test_ties_to_what_is_no_first_name(first: str) -> None:
    with pytest.raises(ProtocolError, match="which is not its first name"):
        Manifest.of(register(entry("v"), replace(entry("w"), tied=first)), 0)


def test_ranks_of_equal_shards_share_one_manifest() -> None:
    even = [Manifest.of(register(entry("w", 0, (6,), (3,))), rank) for rank in (0, 1)]
    assert digest_of(even[0].fields()) == digest_of(even[1].fields())
    uneven = [Manifest.of(register(entry("w", 0, (5,), (3 - rank,))), rank) for rank in (0, 1)]
    assert digest_of(uneven[0].fields()) == digest_of(uneven[1].fields())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (entry("w", 7), "refers to a layout or pair that was not sent"),
        (entry("w", -1), "refers to a layout or pair that was not sent"),
        (replace(entry("w"), pair=2), "refers to a layout or pair"),
    ],
)
def test_entries_that_refer_to_nothing(wrong: Entry, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Manifest.of(register(wrong), 0)


def test_a_name_twice_and_a_layout_of_nonsense() -> None:
    with pytest.raises(ProtocolError, match="'w' is registered twice"):
        Manifest.of(register(entry("w"), entry("w")), 0)
    with pytest.raises(LayoutError):
        Manifest.of(replace(register(entry("w")), layouts=({"mesh": "all"},)), 0)


def test_a_record_survives_redis() -> None:
    record = Record.of(register(), "ab12")
    assert Record.from_json("key", record.to_json()) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '["d","tree",["p"],null,null,false,null,0]',
        '["d","map",[1],null,null,false,null,0]',
        '["d","map",["p"],null,null,false,"some",0]',
    ],
)
def test_a_record_that_nobody_wrote(text: str) -> None:
    with pytest.raises(ProtocolError, match="field 'key' of a registration is not what an agent writes"):
        Record.from_json("key", text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def test_a_region_is_short_json_in_redis() -> None:
    manifest = Manifest.of(register(entry("w", 2, (5,), (3,)), entry("v", 2, (4,), (3,))), 0)
    assert through_redis(manifest) == manifest
    (text,) = manifest.layouts().values()
    assert text == '{"mesh":{"shape":[1],"ranks":null},"region":[[[0,2],[4,5]]]}'
    assert manifest.tensors["w"].local is None, "the region tells it"
    assert manifest.tensors["v"].local == (3,), "the region does not lie in this shape"


def test_a_part_says_whose_it_is() -> None:
    part = replace(entry("w [product 1]", 2, (5,), (3,)), of="w")
    manifest = Manifest.of(register(entry("w", 2, (5,), (3,)), part), 0)
    assert through_redis(manifest) == manifest
    assert manifest.tensors["w [product 1]"].of == "w" and manifest.tensors["w"].of is None
    fields = manifest.fields()
    for wrong in ("[1]", '["w","x"]', "[null]"):
        listed = json.loads(fields["t:w"]) + json.loads(wrong)
        with pytest.raises(ProtocolError, match="'t:w'"):
            Manifest.from_fields(
                {"t:w": json.dumps(listed)}, {d.layout.digest(): d.layout for d in manifest.tensors.values()}
            )


def test_a_part_of_nothing_is_refused() -> None:
    for of in ("v", "w"):
        message = register(replace(entry("w", 2), of=of))
        with pytest.raises(ProtocolError, match=f"'w' is told to be a part of '{of}', which is no tensor"):
            Manifest.of(message, 0)
    digest = LAYOUTS[0].digest()
    with pytest.raises(ProtocolError, match="no tensor of its rank"):
        Manifest.from_fields({"t:w": json.dumps(["p", "float32", digest, [5], None, "v"])}, {digest: LAYOUTS[0]})


@given(key=st.sampled_from(["t:w", "r:0", "r:x", "z", "t:"]), value=json_values, cut=st.booleans())
def test_fields_are_read_whole_or_refused(key: str, value: object, cut: bool) -> None:
    text = json.dumps(value)[: -1 if cut else None]
    try:
        manifest = Manifest.from_fields({key: text}, {LAYOUTS[0].digest(): LAYOUTS[0]})
    except ProtocolError as error:
        assert repr(key) in error.message
    else:
        assert manifest.refusals or manifest.tensors
