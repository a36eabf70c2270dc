"""What a coordinator counts of READYs, against definitions that look at all of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from etha.agent.protocol.coordinator import Readiness
from etha.errors import ProtocolError, TransferError
from etha.peer.messages import Ready
from tests.examples import examples

#: Agent b serves ranks of both sides, and two of one.
AGENTS = {"s": ("a", "b", "b"), "t": ("b", "c")}
KEYS = [("a", "s"), ("b", "s"), ("b", "t"), ("c", "t"), ("c", "s"), ("x", "t")]

said = st.builds(
    lambda key, **rest: (key, Ready(side=key[1], **rest)),
    st.sampled_from(KEYS),
    verb=st.sampled_from(["send", "recv"]),
    attempt=st.integers(0, 3),
    version=st.sampled_from([None, None, 1, 2, "1"]),
    digest=st.sampled_from(["d", "d", "d", "e"]),
    edition=st.sampled_from(["", "", "n1", "n2"]),
    lane=st.booleans(),
    expects=st.sampled_from([None, None, None, 1, 2]),
)
events = st.lists(
    st.one_of(
        said.map(lambda each: ("add", *each)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS)),
        st.tuples(st.just("lose"), st.sampled_from("abc")),
        st.tuples(st.just("unbook"), st.sampled_from("abc"), st.integers(-8, -1)),
        st.tuples(st.just("unbook all")),
        st.tuples(st.just("clear")),
    ),
    max_size=20,
)


def judge(ready: dict[tuple[str, str], Ready]) -> dict[str, Any]:
    """All answers, each as its sentence says it, from the READYs in the order in which they came."""
    wanted = {(agent, side) for side in AGENTS for agent in AGENTS[side]}
    sends = [m for (_, side), m in ready.items() if side == "s" and m.verb == "send"]
    receives = [m for (_, side), m in ready.items() if side == "t" and m.verb == "recv"]
    newest = sends[-1].edition if sends else ""
    expected = max((m.expects for m in receives if m.expects is not None), default=None)
    missing = []
    for side, verb in (("s", "send"), ("t", "recv")):
        for rank, agent in enumerate(AGENTS[side]):
            m = ready.get((agent, side))
            fits = m is not None and m.verb == verb and (verb == "recv" or m.edition == newest)
            if fits and expected is not None:
                fits = (m.version if verb == "send" else m.expects) == expected
            if not fits:
                missing.append((side, rank))
    labels = {str(m.version) for m in sends if m.version is not None}
    editions = {m.edition for m in sends}
    if set(ready) == wanted and all(m.verb == "send" for m in ready.values()):
        conflict = "both sides send"
    elif "" in editions and len(editions) > 1:
        conflict = "send a snapshot, others"
    elif len(labels) > 1 and len(editions) == 1:
        conflict = f"different versions, {', '.join(sorted(labels))}"
    elif len({m.digest for m in [*sends, *receives]}) > 1:
        conflict = "different plans (d, e)"
    else:
        conflict = ""
    named = sorted((key, m.version) for key, m in ready.items() if m.verb == "send" and m.version is not None)
    offering = {agent for (agent, side), m in ready.items() if side == "s" and m.verb == "send" and m.edition == newest}
    return {
        "missing": tuple(missing),
        "complete": not missing,
        "edition": newest,
        "expected": expected,
        "offered": offering == set(AGENTS["s"]),
        "label": named[0][1] if named else None,
        "conflict": conflict,
    }


@settings(max_examples=examples(400), deadline=None)
@given(events)
def test_counts_say_what_all_readys_say(happened: list[tuple[Any, ...]]) -> None:
    readiness = Readiness("batch", "s", "t", AGENTS)
    ready: dict[tuple[str, str], Ready] = {}
    for event in happened:
        match event:
            case ("add", key, message) if key in readiness.wanted:
                readiness.add(key[0], message)
                ready.pop(key, None)
                ready[key] = message
            case ("remove", key):
                readiness.remove(key)
                ready.pop(key, None)
            case ("lose", agent):
                readiness.remove_agent(agent)
                ready = {key: m for key, m in ready.items() if key[0] != agent}
            case ("unbook", agent, number):
                held = [k for k, m in ready.items() if k[0] == agent and m.lane and m.held_number == number]
                assert readiness.without_booking(agent, number) is bool(held)
            case ("unbook all",):
                readiness.without_bookings()
                assert not any(m.lane for _, m in readiness)
            case ("clear",):
                readiness.clear()
                ready.clear()
        kept = {key: (m.verb, m.attempt, m.version, m.edition, m.expects) for key, m in ready.items()}
        assert {key: (m.verb, m.attempt, m.version, m.edition, m.expects) for key, m in readiness} == kept
        ready = dict(readiness)
        judged = judge(ready)
        error = readiness.conflict()
        assert (judged.pop("conflict") in error.message) if error is not None else not judged.pop("conflict")
        assert error is None or isinstance(error, ProtocolError if "plans" in error.message else TransferError)
        assert {name: getattr(readiness, name) for name in judged if name not in ("missing", "label")} == {
            name: value for name, value in judged.items() if name not in ("missing", "label")
        }
        assert (readiness.missing(), readiness.label()) == (judged["missing"], judged["label"])
