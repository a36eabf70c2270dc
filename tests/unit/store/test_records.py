"""What Redis holds is checked like a stranger's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etha.errors import ProtocolError
from etha.store.batches import batch_text
from etha.store.records import AgentRecord, PairState, PairView, RankHolder
from etha.store.rosters import BatchView, Roster, version_from_text, version_to_text

AGENT = AgentRecord(
    id="a1", host="h", device="cpu", pid=7, address="127.0.0.1:5000", public_key="ab", started_at=12.5, version="0.1"
)
PAIR = {
    "state": "formed",
    "epoch": "3",
    "sides": '["b", "a"]',
    "world_sizes": '{"a": 2, "b": 1}',
    "launches": '{"a": "auto-1", "b": "run"}',
}
MEMBER = {"agent": "a1", "host": "h", "pid": 7, "start": 9, "launch": "auto-1", "epoch": 3}


def test_an_agent_comes_back_as_it_was() -> None:
    assert AgentRecord.from_redis("k", "a1", AGENT.to_redis()) == AGENT


@pytest.mark.parametrize(
    ("field", "value"),
    [("pid", "0"), ("pid", "seven"), ("pid", "7.0"), ("started_at", "nan"), ("started_at", "-1"), ("host", "x" * 501)],
)
def test_a_wrong_field_of_an_agent_is_named(field: str, value: str) -> None:
    with pytest.raises(ProtocolError, match=f"'etha:{{n}}:agent:a1': field '{field}' is .*expected"):
        AgentRecord.from_redis("etha:{n}:agent:a1", "a1", {**AGENT.to_redis(), field: value})


def test_a_missing_field_is_named() -> None:
    values = AGENT.to_redis()
    del values["device"]
    with pytest.raises(ProtocolError, match="field 'device' is None"):
        AgentRecord.from_redis("k", "a1", values)


def test_a_pair_is_read_with_its_members() -> None:
    members = {"a": {"1": json.dumps(MEMBER), "0": json.dumps({**MEMBER, "pid": 8})}, "b": {}}
    view = PairView.read("k", "w", PAIR, members)
    assert (view.state, view.epoch, view.reason, list(view.sides)) == ("formed", 3, None, ["a", "b"])
    assert view.sides["b"].launch == "run" and view.sides["a"].world_size == 2
    assert list(view.sides["a"].members) == [0, 1]
    assert view.member("a", 0) == RankHolder(agent="a1", host="h", pid=8, start=9, launch="auto-1", epoch=3)
    assert view.member("a", 5) is None and view.member("c", 0) is None


def test_missing_ranks_are_those_that_do_not_wait_for_the_next_epoch() -> None:
    waiting = json.dumps({**MEMBER, "epoch": 4})
    view = PairView.read(
        "k", "w", {**PAIR, "state": "lost", "reason": "died"}, {"a": {"0": json.dumps(MEMBER), "1": waiting}}
    )
    assert view.reason == "died" and view.missing() == {"a": (0,), "b": (0,)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "broken"),
        ("epoch", "-1"),
        ("sides", '["a"]'),
        ("sides", '["a", "b:c"]'),
        ("sides", "{"),
        ("world_sizes", "[]"),
        ("world_sizes", '{"a": 0}'),
        ("world_sizes", '{"a": true}'),
        ("launches", '{"a": 1, "b": "x"}'),
        ("reason", "bored"),
    ],
)
def test_a_wrong_field_of_a_pair_is_named(field: str, value: str) -> None:
    with pytest.raises(ProtocolError, match="Redis key 'k"):
        PairView.read("k", "w", {**PAIR, field: value}, {})


@pytest.mark.parametrize("change", [{"pid": -1}, {"pid": "x"}, {"agent": "a b"}, {"epoch": None}, {"launch": 3}])
def test_a_wrong_member_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="Redis key 'k:a 0': field"):
        PairView.read("k", "w", PAIR, {"a": {"0": json.dumps({**MEMBER, **change})}})
    with pytest.raises(ProtocolError, match="Redis key 'k:a': field 'x'"):
        PairView.read("k", "w", PAIR, {"a": {"x": json.dumps(MEMBER)}})


def test_a_roster_tells_entries_verdicts_and_who_closed() -> None:
    values = {"agent/0": "{}", "t/1": "{}", "token:t/1": "x", "agent:id": "d", "entries": "2", "closed:t/1": "1"}
    roster = Roster.from_redis("k", 4, {**values, "closed": "1"})
    assert roster.entries == {("agent", 0): "{}", ("t", 1): "{}"}, "a side may be called agent"
    assert roster.verdicts == {"id": "d"} and roster.closed == {("t", 1)} and roster.generation == 4


@given(st.one_of(st.none(), st.integers(), st.text(max_size=30)))
def test_any_version_comes_back(version: int | str | None) -> None:
    found = version_from_text(version_to_text(version))
    assert found == version and type(found) is type(version)


def test_plain_labels_are_plain_text() -> None:
    assert version_to_text("step-7") == "step-7" and version_to_text(7) == "7" and version_to_text("7") == '"7"'
    assert batch_text({"version": 3, "last_error": None, "last_seconds": 0.5}) == {
        "version": "3",
        "last_error": "",
        "last_seconds": "0.5",
    }


_ANY = st.dictionaries(
    st.sampled_from([*PAIR, *BatchView.__dataclass_fields__, *AGENT.to_redis(), "t/0", "agent:x", "0"]),
    st.one_of(st.text(max_size=20), st.sampled_from(["0", "1", "formed", "registered", '["a", "b"]', '{"a": 1}'])),
)


@given(_ANY)
def test_whatever_stands_there_is_read_or_refused(values: dict[str, str]) -> None:
    for read in (
        lambda: AgentRecord.from_redis("k", "a", values),
        lambda: PairState.from_redis("k", "w", values),
        lambda: PairView.read("k", "w", {**PAIR, **values}, {"a": values}),
        lambda: BatchView.from_redis("k", "w", "b", values),
        lambda: Roster.from_redis("k", 1, values),
    ):
        try:
            read()
        except ProtocolError as error:
            assert "Redis key 'k" in str(error)
