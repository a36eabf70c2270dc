"""One table of keys, and the page made from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from etha.errors import ConfigError
from etha.store.keys import TABLE, RedisKeys, markdown
from etha.store.publications import PARTS

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "redis.md").read_text() == markdown(), "python -m etha.store.keys > docs/redis.md"


def test_the_page_is_printed_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-m", "etha.store.keys"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == markdown() and done.stderr == ""


def test_every_key_is_in_the_table_and_under_the_namespace() -> None:
    keys = RedisKeys("prod")
    names = [
        keys.server,
        keys.agents,
        keys.pairs,
        keys.batches,
        keys.events,
        keys.agent("ID"),
        keys.pair("PAIR"),
        keys.side("PAIR", "SIDE"),
        keys.batch("PAIR", "BATCH"),
        keys.roster("PAIR", "BATCH", 3).replace("3", "GENERATION"),
        keys.manifest("DIGEST"),
        keys.layout("DIGEST"),
        keys.groups,
        keys.group("GROUP"),
        keys.replica("GROUP", "REPLICA"),
        keys.group_values("GROUP", 3).replace("3", "EPOCH"),
        keys.publications,
        keys.publication("NAME"),
        keys.publication_side("NAME", "SIDE"),
        keys.publication_table("NAME", "DIGEST"),
        keys.publication_ranks("NAME", "SIDE"),
        *(keys.publication_part("NAME", part) for part in PARTS),
    ]
    assert all(name.startswith("etha:{prod}:") for name in names)
    assert {name.removeprefix("etha:{prod}:") for name in names} == {kind.pattern for kind in TABLE}


def test_names_cannot_reach_into_other_keys() -> None:
    keys = RedisKeys("prod")
    for bad in ("a:b", "", "x" * 101, "a{b}", "a\n", "ä"):
        for make in (keys.pair, keys.agent, keys.layout, keys.manifest, RedisKeys):
            with pytest.raises(ConfigError):
                make(bad)


def test_every_row_tells_type_and_owner_or_lease() -> None:
    for kind in TABLE:
        assert kind.type in ("hash", "set", "sorted set", "stream") and kind.doc.endswith(".")
        assert re.search(r"; leased for \d+ (s|hour|days), ", kind.lease_text), kind.pattern
