"""Equal registrations are planned once; whatever an evaluation depends on makes another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etha.agent.protocol.evaluation import Evaluation, EvaluationCache, Where, evaluate
from tests.unit.agent.protocol.test_evaluation import SHARDED, Roster, tensor

PLACES = {"t": ["a", "a"], "i": ["a", "a"]}
HOSTS = {"t": ["h", "h"], "i": ["h", "h"]}


def roster(**given: Any) -> Roster:
    return Roster().sides({"w": tensor(SHARDED)}, {"w": tensor()}, **given)


def of(known: EvaluationCache, some: Roster, where: Where | None = None) -> Evaluation:
    return known.of(some.records, some.manifests, where or Where(agents=PLACES, hosts=HOSTS))


def test_the_same_registration_has_the_same_plans_and_its_own_number() -> None:
    known = EvaluationCache()
    first = of(known, roster())
    again = of(known, roster(i={"seq": 7}))
    assert again.plans["t"] is first.plans["t"] and again.plans["i"] is first.plans["i"]
    assert (first.seq, again.seq, len(known)) == (0, 7, 1)
    some = roster(i={"seq": 7})
    fresh = evaluate(some.records, some.manifests, Where(agents=PLACES, hosts=HOSTS))
    assert again.digest == fresh.digest and replace(again, plans=fresh.plans) == fresh
    assert of(known, roster()).seq == 0


@pytest.mark.parametrize(
    "other", [{"atomic": True}, {"verify": "full"}, {"bucket_size": 4096}, {"direction": "recv"}, {"form": "list"}]
)
def test_other_options_are_another_registration(other: dict[str, Any]) -> None:
    known = EvaluationCache()
    first = of(known, roster())
    second = of(known, roster(i=other))
    assert len(known) == 2 and second is not first
    some = roster(i=other)
    fresh = evaluate(some.records, some.manifests, Where(agents=PLACES, hosts=HOSTS))
    assert (second.atomic, second.verify, second.bucket_size, second.violations) == (
        fresh.atomic, fresh.verify, fresh.bucket_size, fresh.violations,
    )  # fmt: skip


def test_another_place_or_another_manifest_is_planned_anew() -> None:
    known = EvaluationCache()
    first = of(known, roster())
    elsewhere = of(known, roster(), Where(agents=PLACES, hosts={"t": ["h", "h"], "i": ["h", "k"]}))
    others = of(known, roster(), Where(agents={"t": ["a", "b"], "i": ["a", "a"]}, hosts=HOSTS))
    assert len({first.digest, elsewhere.digest, others.digest}) == 3
    some = roster()
    some.manifests["other"] = replace(some.manifests["i0"], tensors={"w": tensor(dtype="bfloat16")})
    for rank in (0, 1):
        some.records["i", rank] = replace(some.records["i", rank], manifest="other")
    assert of(known, some).digest not in {first.digest, elsewhere.digest, others.digest}


def test_a_refusal_is_kept_as_well() -> None:
    known = EvaluationCache()
    wrong = Roster().sides({"w": tensor(SHARDED)}, {"w": tensor(shape=(5,))})
    assert of(known, wrong).refused and of(known, wrong).refused == of(known, wrong).refused and len(known) == 1


def test_the_one_used_longest_ago_goes() -> None:
    known = EvaluationCache(kept=2)
    first = of(known, roster())
    of(known, roster(i={"atomic": True}))
    assert of(known, roster()).plans["t"] is first.plans["t"]
    of(known, roster(i={"verify": "full"}))
    assert len(known) == 2 and of(known, roster()).plans["t"] is first.plans["t"]
    assert of(known, roster(i={"atomic": True})).plans["t"] is not first.plans["t"]
