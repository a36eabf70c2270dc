"""What the dashboard makes of reports and happenings."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from etha.dashboard.model import EVENTS, LISTED, TRANSFERS, WaitClock, page
from etha.observe.history import Happening, of_event, of_record
from etha.observe.records import Payload, TransferRecord
from etha.phases import PHASES, Phases
from tests.unit.test_status import group, known, link, report


def shown(*reports: dict[str, Any], happenings: tuple[Happening, ...] = (), now: float = 100.0) -> dict[str, Any]:
    found = page(reports, happenings, now=now, clock=WaitClock())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def batch(**more: Any) -> dict[str, Any]:
    line = {"pair": "p", "batch": "b", "state": "registered", "seq": 3, "version": 2, "bytes": 8_000_000}
    return {**line, "transport": "tcp", "waiting_for": [], "last_seconds": 0.5, "last_error": "", **more}


def agent(device: str, *agents: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = report(device, *agents)
    found["agent"] |= {"host": "host-a", "workers": [], "running": 0, "staging": {"limit": 1000, "used": 0}}
    return {**found, "groups": [], **more}


TRANSFER = TransferRecord(
    at=50.0,
    pairs=("p",),
    batch="b",
    outcome="committed",
    seq=7,
    source="trainer",
    target="inference",
    payload=Payload(sent=1000),
    phases=Phases(wait=0.5, move=1.0),
)


def recorded(host: str, record: TransferRecord = TRANSFER, **changes: Any) -> Happening:
    return of_record(msgspec.structs.replace(record, **changes), host, "cpu")


def test_without_any_agent_there_is_still_what_has_happened() -> None:
    found = shown(happenings=(recorded("a"),))
    assert found["pairs"] == found["batches"] == found["groups"] == found["agents"] == [] and found["more"] == {}
    assert [one["seq"] for one in found["transfers"]] == [7]


def test_a_batch_shows_its_rate() -> None:
    (line,) = shown(agent("cpu", batches=[batch()]))["batches"]
    assert (line["seconds"], line["rate"]) == (0.5, 16_000_000)
    (line,) = shown(agent("cpu", batches=[batch(last_seconds=None)]))["batches"]
    assert line["rate"] is None


def test_a_transfer_that_waits_says_for_whom_and_since_when() -> None:
    missing = [f"inference rank {rank}" for rank in range(LISTED + 3)]
    waits = agent("cpu", batches=[batch(state="waiting", waiting_for=missing)])
    clock = WaitClock()
    page([waits], [], now=10.0, clock=clock)
    (line,) = page([waits], [], now=14.0, clock=clock)["waiting"]
    assert (line["where"], line["what"], line["seconds"]) == ("p/b", "a transfer waits for calls of", 4.0)
    assert line["whom"] == [*missing[:LISTED], "and 3 more"]
    # Another transfer of the batch waits anew, and one that waited before does not count.
    later = agent("cpu", batches=[batch(state="waiting", seq=4, waiting_for=missing)])
    assert page([later], [], now=20.0, clock=clock)["waiting"][0]["seconds"] == 0
    page([agent("cpu", batches=[batch(seq=4)])], [], now=21.0, clock=clock)
    assert page([later], [], now=30.0, clock=clock)["waiting"][0]["seconds"] == 0


def test_who_waits_longest_comes_first() -> None:
    pair = {
        "pair": "weights",
        "state": "forming",
        "epoch": 0,
        "sides": {"trainer": {"world_size": 2, "ranks": [0]}, "inference": {"world_size": None, "ranks": []}},
        "waiting_for": {"trainer": [1], "inference": [0]},
        "error": "",
        "waits": 41.0,
        "hint": "is another meant?",
    }
    found = shown(
        agent(
            "cpu", pairs=[pair], groups=[group(waits=99.0)], batches=[batch(state="waiting", waiting_for=["t rank 0"])]
        )
    )
    assert [line["where"] for line in found["waiting"]] == ["dp", "weights", "p/b"]
    assert found["waiting"][0]["whom"] == ["rank 0 of a (pid 10 on n0)"]
    assert found["waiting"][1]["whom"] == ["trainer rank 1", "side inference, which nobody joined"]
    assert found["waiting"][1]["hint"] == "is another meant?"


def test_links_are_a_matrix_from_this_hosts_agents_to_all() -> None:
    one = agent("cuda-1", known("a", link("self", "cuda-1")), known("b", link("open", "cuda-1"), pairs=("p",)))
    two = agent(
        "cuda-2", known("a", link("none", "cuda-2")), known("b", link("missing", "cuda-2", "why"), pairs=("q",))
    )
    two["agent"]["id"] = "c" * 8
    one["agent"]["links"] = [{"agent": "b" * 8, "bytes_sent": 5, "bytes_received": 6}]
    found = shown(one, two)["links"]
    assert found["columns"] == ["host-a/cpu", "host-b/cpu"]
    assert [row["agent"] for row in found["rows"]] == ["host-a/cuda-1", "host-a/cuda-2"]
    states = [[(cell["state"], cell["broken"]) for cell in row["cells"]] for row in found["rows"]]
    assert states == [[("self", False), ("open", False)], [("none", False), ("missing", True)]]
    assert (found["rows"][0]["cells"][1]["sent"], found["rows"][1]["cells"][1]["trouble"]) == (5, "why")


def test_a_group_shows_who_is_a_member_who_is_behind_and_who_joins() -> None:
    member = {"replica": "a", "step": 7, "counts": True, "served": True, "rank": 0, "ranks": []}
    line = group(
        members=[
            member,
            {**member, "replica": "b", "rank": 1, "counts": False},
            {**member, "rank": 2, "served": False},
        ],
        joining=[{"replica": "d", "step": 0, "served": True, "ranks": [{"rank": 0, "host": "n", "pid": 4}]}],
    )
    (found,) = shown(agent("cpu", groups=[line]))["groups"]
    assert [one["state"] for one in found["replicas"]] == ["member", "behind", "agent silent", "joins"]
    assert found["replicas"][3]["rank"] is None and found["replicas"][3]["where"] == ["n pid 4"]


def test_a_transfer_that_several_agents_tell_is_one_line_with_the_slowest_ones_phases() -> None:
    slow = Phases(wait=0.1, move=2.0)
    found = shown(
        happenings=(
            recorded("a"),
            recorded("b", payload=Payload(received=1000), phases=slow, at=51.0),
            recorded("a", seq=8, at=60.0, outcome="aborted", code="peer_lost", reason="it died"),
        )
    )
    assert [(one["seq"], one["failed"]) for one in found["transfers"]] == [(8, True), (7, False)]
    last = found["transfers"][1]
    assert (last["bytes"], last["seconds"], last["place"]) == (1000, 2.1, "a/cpu, b/cpu")
    assert dict(zip(found["phases"], last["phases"], strict=True))["move"] == 2.0 and found["phases"] == list(PHASES)
    assert found["failures"] == 1 and "it died" in found["transfers"][0]["text"]


def test_as_many_lines_are_sent_as_the_page_has_room_for() -> None:
    events = tuple(of_event({"id": f"{n}000-0", "kind": "formed", "pair": "p", "epoch": n}) for n in range(EVENTS + 9))
    transfers = tuple(recorded("a", seq=n, at=float(n)) for n in range(TRANSFERS + 9))
    found = shown(happenings=events + transfers)
    assert len(found["events"]) == EVENTS and len(found["transfers"]) == TRANSFERS
    assert found["events"][0]["at"] == EVENTS + 8 and found["transfers"][0]["seq"] == TRANSFERS + 8


def test_what_the_page_has_no_place_for_is_a_table_of_its_keys() -> None:
    lines = [{"name": "llama", "holders": [{"rank": 0, "lag": 2}], "live": True}, {"name": "x", "bytes": 2_000_000}]
    found = shown({**agent("cpu"), "models": lines, "empty": [], "number": 3})
    assert found["more"] == {
        "models": {
            "columns": ["name", "holders", "live", "bytes"],
            "rows": [["llama", "rank 0, lag 2", "yes", ""], ["x", "", "", "2,000,000"]],
        }
    }


def test_control_characters_are_written_out_and_markup_is_left_to_the_page() -> None:
    found = shown(agent("cpu", batches=[batch(version="<b>\x1b[2J\u202e")]))
    assert found["batches"][0]["version"] == "<b>\\x1b[2J\\u202e"


def test_a_publication_shows_who_holds_what_and_from_whom() -> None:
    def subscriber(name: str, **more: Any) -> dict[str, Any]:
        line = {"subscriber": name, "state": "current", "seq": 4, "version": "step-40", "lag": 0, "lag_seconds": 0.0}
        line |= {"source": "trainer/7", "seconds": 0.25, "places": 1, "readers": [], "world_size": 1, "error": ""}
        return {**line, "ranks": [{"rank": 0, "host": "host-b", "pid": 12}], **more}

    line = {
        "publication": "policy",
        "state": "open",
        "publisher": "trainer",
        "seq": 4,
        "version": "step-40",
        "age": 2.0,
        "subscribers": [
            subscriber("a", readers=[f"r{number}" for number in range(LISTED + 1)]),
            subscriber("b", state="behind", seq=0, version=None, lag=4, source="", seconds=0.0),
            subscriber("c", seq=3, version=3),
        ],
        "holders": [
            {
                "holder": "trainer/7",
                "publisher": True,
                "orphan": False,
                "places": 2,
                "used": 1,
                "slots": [{"slot": 0, "seq": 3, "version": 3}, {"slot": 1, "seq": 4, "version": "step-40"}],
            },
            {"holder": "a/8", "publisher": False, "orphan": False, "places": 1, "used": 1, "slots": []},
        ],
        "hops": [],
        "queue": [],
    }
    (found,) = shown(agent("cpu", publications=[line]))["publications"]
    assert (found["kept"], found["places"]) == (["step-40 (number 4)", "3"], "1 of 2")
    a, b, c = found["subscribers"]
    assert (a["version"], a["source"], a["feeds"][-1]) == ("step-40 (number 4)", "trainer", "and 1 more")
    assert (b["version"], b["seconds"], b["lag"], b["source"]) == ("", None, 4, "")
    assert (c["version"], c["where"]) == ("3", ["host-b pid 12"])
