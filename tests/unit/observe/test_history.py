"""What agents' files and Redis tell, merged and said in English."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from etha.agent.runtime.event_writer import entry_of
from etha.observe.history import Happening, merge, of_event, of_record, one_per_transfer
from etha.observe.records import Culprit, Incident, Payload, TransferRecord
from etha.observe.sentences import sentence
from etha.phases import Phases

COMMITTED = TransferRecord(
    at=5.0,
    pairs=("weights",),
    batch="model",
    outcome="committed",
    seq=812,
    version="step 9",
    source="trainer",
    target="inference",
    ranks=(("trainer", 0),),
    payload=Payload(sent=3_200_000_000, ways={"tcp": 3_200_000_000}, staged=True),
    seconds=1.2,
    phases=Phases(wait=2.0, move=1.1, commit=0.1),
)
ABORTED = TransferRecord(
    at=6.0,
    pairs=("weights",),
    batch="model",
    outcome="aborted",
    seq=813,
    source="trainer",
    target="inference",
    torn=True,
    code="peer_lost",
    reason="trainer rank 3 died in the transfer",
    culprits=(Culprit(side="trainer", rank=3, host="a7", pid=99),),
    phases=Phases(wait=0.5, move=12.0),
)


def test_a_committed_transfer_says_where_its_time_went() -> None:
    assert sentence(COMMITTED) == (
        "transfer 812 (version step 9) from trainer to inference committed: 3.2 GB (tcp, staged) in 3.2 s, "
        "2 s of it waiting for the others to call"
    )


def test_a_failure_says_cause_culprit_and_what_was_under_way() -> None:
    assert sentence(ABORTED) == (
        "transfer 813 from trainer to inference was aborted after 12.5 s: trainer rank 3 died in the transfer "
        "[peer_lost]; because of trainer rank 3 (host a7, process 99); it ended while moving bytes; "
        "targets may be half-written"
    )


def entry(host: str, text: str) -> dict[str, str]:
    about = {"pair": "weights", "batch": "model"}
    return {"id": "7000-0", "kind": "transfers", "at": "7.0", "agent": f"of {host}", "on": "h", "text": text, **about}


def test_redis_tells_what_the_files_that_were_read_do_not() -> None:
    records = [of_record(ABORTED, "a", "cpu"), of_record(COMMITTED, "a", "cpu"), of_record(COMMITTED, "a", "cpu")]
    formed = {"id": "5500-3", "kind": "formed", "pair": "weights", "epoch": "2"}
    found = merge(records, [entry("a", "of a"), entry("b", "of b"), formed], {"of a"})
    assert [one.at for one in found] == [5.0, 5.5, 6.0, 7.0]
    assert found[1].text == "both sides are complete: epoch 2 is formed" and not found[1].failed
    assert found[3].text == "of b" and found[3].host == "h"


def reported(record: TransferRecord, *places: str, **changes: Any) -> list[Happening]:
    return [of_record(msgspec.structs.replace(record, **changes), place, "cpu") for place in places]


def test_a_transfer_that_several_agents_tell_is_one_line() -> None:
    received = Payload(received=3_200_000_000, ways={"host": 1, "tcp": 2})
    found = [
        *reported(COMMITTED, "a"),
        *reported(COMMITTED, "b", "c", payload=received, phases=Phases(move=7.0), at=5.1),
        *reported(COMMITTED, "a", seq=813),
    ]
    together, other = one_per_transfer(found)
    assert together.text == (
        "transfer 812 (version step 9) from trainer to inference committed: 6.4 GB (host+tcp, staged) in 7 s, "
        "7 s of it moving bytes on b/cpu"
    )
    assert together.place == "a/cpu, b/cpu, c/cpu" and together.at == 5.0 and not together.failed
    assert other.place == "a/cpu" and "transfer 813" in other.text


def test_a_failure_that_several_agents_tell_names_every_culprit_and_every_cause() -> None:
    ranks = tuple(Culprit(side="trainer", rank=rank) for rank in range(7))
    unknown = {"outcome": "unknown", "reason": "the coordinator is gone", "code": "transfer"}
    found = [
        *reported(ABORTED, "a"),
        *reported(ABORTED, "b", culprits=(Culprit(side="trainer", rank=3), Culprit(agent="x", host="z")), torn=False),
        *reported(ABORTED, "c", "d", culprits=ranks, **unknown),
        *reported(ABORTED, "e", outcome="committed", reason="", code="", culprits=()),
    ]
    [together] = one_per_transfer(found)
    assert together.failed and together.place == "a/cpu, b/cpu, c/cpu and 2 more"
    assert together.text == (
        "transfer 813 from trainer to inference was aborted after 12.5 s: trainer rank 3 died in the transfer "
        "[peer_lost]; because of trainer rank 3 (host a7, process 99), an agent (host z), trainer rank 0, "
        "trainer rank 1, trainer rank 2, trainer rank 4 and 2 more; it ended while moving bytes; targets may be "
        "half-written; on c/cpu, d/cpu it was committed or aborted, which of them is unknown here: the coordinator is "
        "gone [transfer]; on e/cpu it committed"
    )


def test_equal_numbers_of_other_transfers_are_lines_of_their_own() -> None:
    again = reported(COMMITTED, "a", at=8.0)  # Redis has lost its data, and the jobs have begun anew
    late = reported(COMMITTED, "b", at=100.0)
    before = {"seq": None, "outcome": "withdrawn", "reason": "its deadline passed", "code": "transfer_timeout"}
    waiting = reported(COMMITTED, "a", "b", **before)
    found = [*reported(COMMITTED, "a"), *reported(COMMITTED, "a", source="inference"), *again, *late, *waiting]
    assert one_per_transfer(found) == found


def test_what_is_about_others_is_left_out() -> None:
    one = of_record(ABORTED, "a", "cpu")
    assert [only for only in ("", "weights", "model", "weights/model", "weight", "odel") if one.fits(only)] == [
        "",
        "weights",
        "model",
        "weights/model",
    ]
    assert one.fits("", failed=True) and not of_record(COMMITTED, "a", "cpu").fits("", failed=True)


@pytest.mark.parametrize("kind", ["lost", "left", "agent_came", "something of a later version"])
def test_an_event_that_lacks_fields_is_shown(kind: str) -> None:
    found = of_event({"id": "x", "kind": kind})
    assert isinstance(found, Happening) and found.text and found.at == 0.0


@pytest.mark.parametrize(
    ("what", "failed"),
    [("worker_died", True), ("killed", True), ("warning", True), ("error", True), ("link_lost", True), ("new", False)],
)
def test_what_redis_tells_of_a_record_has_failed_if_the_record_has(what: str, failed: bool) -> None:
    record = Incident(at=1.0, what=what, reason="it happened", failed=failed)
    event = entry_of(record, what, "weights", "") | {"id": "1000-0"}
    assert of_event(event).failed is of_record(record, "h", "cpu").failed is failed


def test_an_incident_says_its_reason() -> None:
    incident = Incident(
        at=1.0, what="link_lost", reason="the agent b is gone", culprits=(Culprit(agent="b", host="h"),)
    )
    assert sentence(incident) == "the agent b is gone; because of an agent (host h)"


@pytest.mark.parametrize("at", ["1e300", "1e400", "nan", "-1", "soon"])
def test_an_entry_of_redis_with_a_time_that_is_none_has_that_of_its_id(at: str) -> None:
    assert of_event({"id": "1700000000000-0", "kind": "worker_died", "at": at, "text": "x"}).at == 1.7e9


@pytest.mark.parametrize(
    ("kind", "more", "where", "text", "failed"),
    [
        ("left", {"side": "trainer", "reason": "died", "text": "rank 0 of trainer (pid 7 on host h) died"},
         "policy/trainer", "this launch of trainer is over: rank 0 of trainer (pid 7 on host h) died", True),
        ("left", {"side": "one", "reason": "closed"}, "policy/one", "this launch of one is over: closed", False),
        ("published", {"seq": "3", "version": "step-7"}, "policy", "version step-7 is announced (seq 3)", False),
        ("claim_lapsed", {"subscriber": "one", "source": "trainer", "seq": "3"}, "policy/one",
         "one has not renewed its claim of trainer, which has lapsed (seq 3)", True),
        ("hop_failed", {"subscriber": "one", "source": "trainer", "seq": "3", "text": "the call was cancelled"},
         "policy/one", "one did not get seq 3 from trainer: the call was cancelled", False),
        ("holder_lost", {"holder": "one/4", "text": "the agent of one/4 does not answer"}, "policy/one",
         "one/4 serves nobody any more: the agent of one/4 does not answer", True),
        ("joined", {"side": "one", "rank": "0", "pid": "7", "host": "h"}, "policy/one",
         "one rank 0 joined (process 7 on host h)", False),
    ],
)  # fmt: skip
def test_events_of_publications_name_publication_and_side(
    kind: str, more: dict[str, str], where: str, text: str, failed: bool
) -> None:
    found = of_event({"id": "2000-0", "kind": kind, "publication": "policy", **more})
    assert (found.where, found.text, found.failed) == (where, text, failed)
    assert found.fits("policy")


def test_events_of_elastic_groups_name_group_and_replica() -> None:
    over = "rank 0 of replica b (pid 7 on host h) died"
    left = of_event({"id": "2000-0", "kind": "left", "group": "dp", "replica": "b", "reason": "died", "text": over})
    formed = of_event({"id": "3000-0", "kind": "formed", "group": "dp", "epoch": "4", "text": "a, c"})
    assert (left.where, left.text) == ("dp/b", f"the replica is over: {over}")
    assert (formed.where, formed.text) == ("dp", "epoch 4 is formed: a, c")
    assert [one.fits(only) for one in (left, formed) for only in ("dp", "b", "dp/b")] == [True] * 4 + [False] * 2
