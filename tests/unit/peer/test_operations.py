"""The names of operations, as they travel: a class may be renamed, its operation keeps its name.

Whoever changes a name here changes the protocol: agents and workers of the version before do not know it.
"""

from __future__ import annotations

import typing

import msgpack
import pytest

from etha.bus import codec
from etha.bus import handshake as handshake
from etha.bus import messages as messages
from etha.bus.schema import StrictStruct
from etha.peer import messages as peer_messages
from etha.peer.wire import Control, Said, Scope, encode

#: Between a worker and its agent.
BUS = {
    "attach", "attach_shadows", "attach_snapshot", "batch_lost", "close_batch", "confirm", "descriptors", "done",
    "events", "get_events", "get_picture", "get_records", "get_status", "goodbye", "hello", "init_pair", "join",
    "let_go", "moved", "offered", "ok", "pair_formed", "pair_lost", "picture", "probe", "probed", "progress", "records",
    "register", "registered", "released", "status",
    "supersede", "transfer", "wait_offer", "welcome",
    "add_value", "ask_group_progress", "depart_group", "enter_group", "get_values", "group_changing", "group_formed",
    "group_noted", "group_progress",
    "put_values", "swap_value", "values",
    "move_stream", "pull", "pulled", "streamed",
    "announced", "begin_put", "claim_lost", "claim_version", "close_publication", "close_subscription",
    "describe_publication", "end_hop",
    "exchange_segments",
    "finish_put", "get_subscribers", "holders", "leave_pair", "publication_described",
    "publish", "published", "slot_given", "subscribe", "subscribed", "wait_holders",
    "subscribers", "version_claimed", "wait_held",
}  # fmt: skip
#: Between agents: about a pair or a batch, and about the link itself.
LINK = {
    "abort", "answer", "ask_missing", "ask_records", "ask_tokens", "book", "booked", "commit", "committed", "copied",
    "declined",
    "done", "exhibits", "failed", "forsaken", "give_tokens", "go", "lost_peer", "meet", "met", "noted", "offer",
    "question", "ready", "recall", "refused", "relay", "stood", "sums", "tell_missing", "tell_records", "held_base",
    "held_part", "unbook",
    "unique_id", "unready",
}  # fmt: skip
LINK_ITSELF = {"hello", "welcome", "beat", "bye"}


def test_the_operations_of_the_bus_are_these() -> None:
    assert {op for op, cls in codec.MESSAGES.items() if cls.__module__.startswith("etha.")} == BUS


def test_the_operations_of_a_link_are_these() -> None:
    assert {peer_messages.OPS[cls] for cls in typing.get_args(Said)} == LINK
    assert {peer_messages.OPS[cls] for cls in typing.get_args(Control)} == LINK_ITSELF
    assert len(peer_messages.OPS) == len(LINK | LINK_ITSELF) == len(LINK) + len(LINK_ITSELF)


def test_an_operation_of_a_link_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="'beat' belongs to"):

        @peer_messages.message("beat")
        class Other(StrictStruct, frozen=True, kw_only=True):
            number: int


def test_a_message_of_a_link_is_a_strict_struct() -> None:
    with pytest.raises(TypeError, match="int is no StrictStruct"):
        peer_messages.message("test_bad")(int)


def test_a_message_on_a_link_carries_the_name_of_its_definition() -> None:
    scope = Scope(pair="weights", epoch=1, batch="step_0", generation=1)
    sent = encode(scope, peer_messages.Commit(seq=1))
    assert msgpack.unpackb(sent)["op"] == "commit"
