"""What ``etha status`` makes of the agents' reports: one JSON of several, and which links and names are wrong."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from etha.status import events_table, group_line, linked_lines, publication_tables, status_tables, whole


def link(state: str, device: str = "cpu", trouble: str = "") -> dict[str, Any]:
    silent = 0.4 if state == "open" else None
    return {"from": device, "link": state, "silent": silent, "round_trip": 0.0003, "trouble": trouble}


def known(name: str, *links: dict[str, Any], pairs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "id": name * 8,
        "host": f"host-{name}",
        "host_id": name,
        "device": "cpu",
        "pid": 7,
        "version": "1",
        "address": "10.0.0.1:7000",
        "started_at": 1.0,
        "heartbeat": 2.0,
        "pairs": list(pairs),
        "links": list(links),
    }


def report(device: str, *agents: dict[str, Any], pairs: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "agent": {"id": "a" * 8, "device": device, "namespace": "default", "pid": 1, "links": [], "stale": ""},
        "agents": list(agents),
        "pairs": list(pairs),
        "batches": [],
    }


def lines_of(found: dict[str, Any]) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_tables(found))
    return capture.get().split("\n")


def text_of(found: dict[str, Any]) -> str:
    return " ".join(" ".join(lines_of(found)).split())


def test_one_agent_that_is_alone_is_shown_without_a_table_of_others() -> None:
    shown = text_of(whole([report("cpu", known("a", link("self")))]))
    assert "agents that Redis knows" not in shown and "linked" not in shown


def test_names_and_versions_of_others_cannot_command_the_terminal() -> None:
    nasty = "v\x1b]0;title\x07\nforged"
    batch = {"pair": "p", "batch": "b", "version": nasty, "last_error": nasty}
    pair = {"pair": "p", "state": "lost", "epoch": 1, "sides": {nasty: 1}, "error": nasty}
    found = report("cpu", {**known("a", link("failed", trouble=nasty)), "host": nasty}, known("b"), pairs=(pair,))
    shown = text_of(whole([{**found, "batches": [batch]}]))
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b]0;title" in shown


def test_linked_agents_are_said_to_be_linked() -> None:
    shown = text_of(whole([report("cpu", known("a", link("self")), known("b", link("open"), pairs=("weights",)))]))
    assert "host-b" in shown and "open, heard 0.4 s ago, 0.3 ms" in shown and "2 s ago" in shown
    assert "linked: all 1 links that formed pairs need are open" in shown and "not linked" not in shown


def test_the_pairs_of_the_agent_that_is_asked_are_shown_and_need_no_link_to_itself() -> None:
    agents = [known("a", link("self"), pairs=("weights",)), known("b", link("open"), pairs=("weights",))]
    rows = {line.split("│")[1].strip(): line for line in lines_of(whole([report("cpu", *agents)])) if "│" in line}
    for host in ("host-a", "host-b"):
        assert rows[host].split("│")[8].strip() == "weights", rows[host]
    assert linked_lines(agents) == ["linked: all 1 links that formed pairs need are open"]


def test_a_link_that_no_pair_of_its_agent_needs_is_not_counted_as_needed() -> None:
    """Of two agents of this host, only one is in a pair with the far one."""
    far = known("b", link("open", "cuda-1"), link("none", "cuda-2"), pairs=("weights",))
    assert linked_lines([far]) == ["linked: all 1 links that formed pairs need are open"]


def test_a_link_that_is_missing_or_failed_is_named_with_its_cause() -> None:
    agents = [
        known("a", link("self")),
        known("b", link("missing"), pairs=("weights",)),
        known("c", link("failed", trouble="3 s ago: it did not answer")),
        known("d", link("none")),
    ]
    assert linked_lines(agents) == [
        "not linked: cpu -> cpu of host host-b (missing, needed by weights)",
        "not linked: cpu -> cpu of host host-c (failed): 3 s ago: it did not answer",
    ]


def test_several_agents_of_a_host_give_one_list_with_the_links_of_each() -> None:
    one = report("cuda-1", known("a", link("self", "cuda-1")), known("b", link("open", "cuda-1"), pairs=("p",)))
    two = report("cuda-2", known("a", link("none", "cuda-2")), known("b", link("missing", "cuda-2"), pairs=("q",)))
    found = whole([one, two])
    assert [line["id"] for line in found["agents"]] == ["a" * 8, "b" * 8] and found["local"] == [one, two]
    (_, b) = found["agents"]
    assert [(line["from"], line["link"]) for line in b["links"]] == [("cuda-1", "open"), ("cuda-2", "missing")]
    assert b["pairs"] == ["p", "q"] and len(one["agents"][1]["links"]) == 1, "the reports are left as they are"


def test_who_came_first_to_a_pair_can_be_recognised() -> None:
    pair = {
        "pair": "weigths",  # codespell:ignore weigths
        "state": "forming",
        "epoch": 0,
        "sides": {"trainer": {"world_size": 2, "ranks": [0]}, "inference": {"world_size": None, "ranks": []}},
        "waiting_for": {"trainer": [1], "inference": [0]},
        "error": "",
        "waits": 41.2,
        "hint": "Other pairs are there, is one of them meant? pair 'weights' of inference and trainer",
    }
    shown = text_of(report("cpu", known("a", link("self")), pairs=(pair,)))
    assert "waits 41 s for trainer rank 1 and side inference, of which nobody has come." in shown
    assert "is one of them meant? pair 'weights'" in shown


def test_watched_events_say_what_etha_events_says() -> None:
    events: list[dict[str, Any]] = [
        {
            "id": "1795428523228-0",
            "kind": "transfers",
            "pair": "weights",
            "batch": "policy",
            "at": "1795428523.228",
            "on": "vm",
            "device": "cpu",
            "text": "4 transfers of batch 'policy', versions 0..3, 33.6 MB, slowest 7.49 ms",
        },
        {"id": "1795428524228-0", "kind": "formed", "pair": "weights\x1b[2J", "epoch": "3"},
        {"id": "none", "kind": "agent_came", "agent": "a1", "device": "cpu", "host": "node"},
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(events_table(events))
    shown = capture.get()
    assert "weights/policy" in shown and "4 transfers of batch 'policy'" in shown and "epoch 3 is formed" in shown
    assert not any(raw in shown for raw in ("1795428523", "kind", "device cpu", "\x1b[2J"))


def group(**more: Any) -> dict[str, Any]:
    member = {"rank": 0, "replica": "a", "step": 7, "counts": True, "served": True}
    line = {
        "group": "dp",
        "state": "changing",
        "epoch": 3,
        "step": 7,
        "world_size": 2,
        "broken": False,
        "members": [{**member, "ranks": [{"rank": n, "host": f"n{n // 2}", "pid": 10 + n} for n in range(3)]}],
        "joining": [],
        "waits": 12.4,
        "waiting_for": [{"replica": "a", "rank": 0, "host": "n0", "pid": 10}],
        "min_replicas": 1,
        "complete": 1,
    }
    return {**line, **more}


def test_a_group_shows_its_members_by_host_and_whom_the_next_epoch_waits_for() -> None:
    late = {"rank": 1, "replica": "b", "step": 3, "counts": False, "served": False}
    new = {"replica": "c", "step": 0, "served": True, "ranks": [{"rank": 0, "host": "n9", "pid": 90}]}
    lines = group_line(
        group(
            members=[*group()["members"], {**late, "ranks": [{"rank": 0, "host": "n8", "pid": 80}]}],
            joining=[new],
            waiting_for=[*group()["waiting_for"], {"replica": "c", "rank": 1, "host": "", "pid": None}],
        )
    )
    assert lines["members"] == [
        "0: a, pids 10, 11 on n0; pid 12 on n1",
        "1: b, pid 80 on n8, agent silent, step 3, behind",
        "joins: c, pid 90 on n9, step 0",
    ]
    assert lines["waits for"] == ["12 s for rank 0 of a, pid 10 on n0", "rank 1 of c, which has not come"]
    shown = text_of({**report("cpu", known("a", link("self"))), "groups": [group()]})
    assert "elastic groups" in shown and "12 s for rank 0 of a, pid 10 on n0" in shown


def test_a_group_says_that_too_few_replicas_are_there_and_that_one_is_lost() -> None:
    line = group_line(group(waiting_for=[], min_replicas=3, complete=1, state="formed", broken=True))
    assert line["waits for"] == ["12 s for at least 3 replicas, 1 of them there"]
    assert line["state"] == "formed, has lost a replica"


def test_of_many_ranks_that_are_waited_for_the_first_are_named() -> None:
    missing = [{"replica": "b", "rank": n, "host": "", "pid": None} for n in range(20)]
    shown = group_line(group(waiting_for=missing))["waits for"]
    assert len(shown) == 9 and shown[-1] == "and 12 more ranks"


def test_a_group_is_shown_once_from_the_agent_that_knows_most_of_its_steps() -> None:
    reports = [{**report("cpu"), "groups": [group(step=step)]} for step in (7, 9, 8)]
    assert [line["step"] for line in whole(reports)["groups"]] == [9]
    assert "elastic groups" not in text_of(whole([report("cpu"), report("cuda-1")]))


def subscriber(name: str, **more: Any) -> dict[str, Any]:
    line = {
        "subscriber": name,
        "state": "current",
        "seq": 4,
        "version": 4,
        "lag": 0,
        "lag_seconds": 0.0,
        "source": "trainer/1700000000000",
        "seconds": 0.2,
        "places": 1,
        "readers": [],
        "world_size": 1,
        "ranks": [{"rank": 0, "host": "n1", "pid": 20}],
        "error": "",
    }
    return {**line, **more}


def publication(**more: Any) -> dict[str, Any]:
    line = {
        "publication": "policy",
        "state": "open",
        "publisher": "trainer",
        "seq": 4,
        "version": 4,
        "age": 3.2,
        "subscribers": [
            subscriber("r0", readers=["r1"]),
            subscriber("r1", state="receiving", seq=3, version="three", lag=1, lag_seconds=3.25, source="r0/17"),
            subscriber("r2", places=0, seq=0, version=None, lag=4, state="waiting", error="cut \x1b[2J", source=""),
        ],
        "holders": [
            {
                "holder": "trainer/1700000000000",
                "publisher": True,
                "orphan": False,
                "places": 2,
                "used": 1,
                "slots": [{"slot": 0, "seq": 4, "version": 4}, {"slot": 1, "seq": 3, "version": "three"}],
            }
        ],
        "hops": [],
        "queue": ["r2/19"],
    }
    return {**line, **more}


def shown_publications(*lines: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(publication_tables(list(lines)))
    return capture.get()


def test_publications_show_who_holds_what_and_who_is_fed_by_whom() -> None:
    shown = shown_publications(publication())
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[1:-1]]
        for line in shown.split("\n")
        if "│" in line
    }
    assert "policy: version 4, 3 s old, published by trainer" in shown
    assert rows["r0"] == ["r0", "current", "4", "-", "trainer", "r1", "pid 20 on n1", "-"]
    assert rows["r1"] == ["r1", "receiving", "three", "1 version, 3.2 s", "r0", "-", "pid 20 on n1", "-"]
    assert rows["r2"][:6] == ["r2", "waiting", "-", "4 versions, 0.0 s", "-", "does not serve"]
    assert "trainer: slot 0 version 4, slot 1 version three; serves 1 of at most 2" in shown
    assert "\x1b[2J" not in shown and "cut" in rows["r2"][7]


def test_publications_say_that_there_is_none_and_that_a_publisher_has_ended() -> None:
    assert shown_publications() == "no publications\n"
    lost = publication(state="lost", version="v4", age=None, subscribers=[])
    lost["holders"][0]["orphan"] = True
    shown = " ".join(shown_publications(lost).split())
    assert "policy: version v4 (seq 4), published by trainer, which does not answer or has died" in shown
    assert "its agents keep this until another holder has it" in shown
    empty = publication(seq=0, version=None, publisher="", state="closed", holders=[])
    assert "no version yet, published by nobody, which has left" in " ".join(shown_publications(empty).split())


def test_publications_are_those_of_an_agent_that_could_read_them() -> None:
    reports = [report("cpu"), {**report("cuda-1"), "publications": [publication()]}]
    assert [line["publication"] for line in whole(reports)["publications"]] == ["policy"]
