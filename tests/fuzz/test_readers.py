"""Mutated values of Redis at everything that reads them: read, or refused by an EthaError of bounded text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from etha.agent.protocol.capabilities import Capabilities
from etha.agent.protocol.records import Manifest, Record, digest_of
from etha.agent.services.manifests import ManifestCache
from etha.errors import EthaError
from etha.plan import Layout
from etha.store.records import AgentRecord, PairState, PairView, RankHolder
from etha.store.rosters import BatchView, Roster, version_from_text

from .mutation import mutated_hash, mutated_text
from .samples import LAYOUT, REGION
from .trial import bounded, judge, rng_of, seeds

Hash = dict[str, str]

AGENT = {
    "host": "h", "device": "cpu", "pid": "7", "address": "127.0.0.1:5000", "public_key": "ab", "started_at": "12.5",
    "version": "0.1", "beats": "3",
}  # fmt: skip
PAIR = {
    "state": "lost", "epoch": "3", "sides": '["b", "a"]', "world_sizes": '{"a": 2, "b": 1}', "reason": "died",
    "launches": '{"a": "auto-1", "b": "run"}', "error": "rank 0 died", "retired": "{}",
}  # fmt: skip
MEMBER = json.dumps({"agent": "a1", "host": "h", "pid": 7, "start": 9, "launch": "auto-1", "epoch": 3})
SIDE = {"0": MEMBER, "1": MEMBER}
BATCH = {
    "state": "registered", "generation": "2", "epoch": "1", "seq": "9", "version": "step-7", "tensors": "3",
    "bytes": "4096", "digest": "ab" * 16, "transport": "tcp", "last_seconds": "0.25", "last_error": "",
}  # fmt: skip
LAYOUTS = {Layout.from_plain(LAYOUT).digest(): Layout.from_plain(LAYOUT)}
(DIGEST,) = LAYOUTS
MANIFEST = {
    "t:w": json.dumps(["weights", "float32", DIGEST, [4, 4], None]),
    "t:b": json.dumps(["weights", "bfloat16", DIGEST, None, [2]]),
    "r:0": json.dumps(["dtype", "x", "no", True]),
}
KEPT = Layout.from_plain(REGION).digest()
KEEPS = {
    "t:w": json.dumps(["weights", "float32", KEPT, [9, 4], None]),
    "t:w [product 1]": json.dumps(["weights", "float32", KEPT, [9, 4], None, "w"]),
}
RECORD = '["0123abcd","map",["weights"],null,4096,true,"full",3]'
VERDICT = 'abcdef [["a2","a3"],false,268435456,4,0,"yes",[["target",1,"w",0]]]'
ROSTER = {"t/0": RECORD, "i/0": RECORD, "token:t/0": "x", "entries": "2", "agent:a1": VERDICT, "closed:t/0": "1"}


class Shelf:
    """A store that holds one manifest and its layouts."""

    def __init__(self, fields: Hash, layouts: Hash) -> None:
        self._fields, self._layouts = fields, layouts
        self.batches = self  # the part of a store that is asked for them

    async def manifest(self, digest: str) -> Hash:
        return self._fields

    async def layouts(self, digests: Any) -> Hash:
        return {digest: text for digest, text in self._layouts.items() if digest in digests}


def fetched(fields: Hash, layouts: Hash) -> None:
    """Through the agent's library, under the digest that the fields really have."""
    library = ManifestCache(Shelf(fields, layouts))  # type: ignore[arg-type]
    asyncio.run(library.fetch([digest_of(fields)]))


#: name -> (valid value, reader); a reader of text gets text, one of a hash a hash.
READERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "agent": (AGENT, lambda v: AgentRecord.from_redis("k", "a1", v)),
    "pair": (PAIR, lambda v: PairState.from_redis("k", "w", v)),
    "pair view": (PAIR, lambda v: PairView.read("k", "w", v, {"a": SIDE, "b": SIDE}).missing()),
    "side": (SIDE, lambda v: PairView.read("k", "w", PAIR, {"a": v}).missing()),
    "member": (MEMBER, lambda v: RankHolder.from_json("k", "0", v)),
    "batch": (BATCH, lambda v: BatchView.from_redis("k", "w", "b", v)),
    "version": ("step-7", version_from_text),
    "roster": (ROSTER, lambda v: Roster.from_redis("k", 1, v)),
    "record": (RECORD, lambda v: Record.from_json("k", v)),
    "verdict": (VERDICT, lambda v: Capabilities.from_text("a1", v)),
    "manifest": (MANIFEST, lambda v: (Manifest.layout_digests(v), Manifest.from_fields(v, LAYOUTS))),
    "parts": (KEEPS, lambda v: Manifest.from_fields(v, {KEPT: Layout.from_plain(REGION)})),
    "library": (MANIFEST, lambda v: fetched(v, {DIGEST: json.dumps(LAYOUT)})),
    "layout": (json.dumps(LAYOUT), lambda v: fetched(MANIFEST, {DIGEST: v})),
    "region": (json.dumps(REGION), lambda v: fetched(KEEPS, {KEPT: v})),
}


def test_what_is_mutated_was_right() -> None:
    for value, read in READERS.values():
        read(value)


@pytest.mark.timeout(1800)
def test_a_mutated_value_is_read_or_refused() -> None:
    names = [name for name in READERS for _ in range(1 if name in ("library", "layout") else 6)]
    with bounded():
        for seed in seeds("Redis readers"):
            rng = rng_of(seed)
            name = rng.choice(names)
            valid, read = READERS[name]
            value = mutated_hash(valid, rng) if isinstance(valid, dict) else mutated_text(valid, rng)
            judge(f"Redis {name}", seed, value, lambda v=value, r=read: r(v), (EthaError,))  # type: ignore[misc]
    test_what_is_mutated_was_right()


@pytest.mark.parametrize("bucket", ["true", "-1", "0", str(1 << 63), "1.5"])
def test_a_bucket_size_that_nobody_can_have_set_is_refused(bucket: str) -> None:
    with pytest.raises(EthaError):
        Record.from_json("k", f'["0123abcd","map",["weights"],null,{bucket},true,null,3]')
