"""All of Etha for two hours under attack, on two hosts: nothing is wrong, nobody grows, ``etha events`` explains it.

ETHA_SOAK_SEED and ETHA_SOAK_MINUTES change that. The report is what goes to bench/results.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.flow.endurance.everything import Everything
from tests.flow.jobs import Job
from tests.flow.networks import namespaces
from tests.flow.networks.namespaces import hosts
from tests.flow.sites import open_site
from tests.flow.ways import Way
from tests.unit.store.server import served

SEED = int(os.environ.get("ETHA_SOAK_SEED", "1"))
MINUTES = float(os.environ.get("ETHA_SOAK_MINUTES", "120"))

pytestmark = [pytest.mark.soak, *namespaces.MARKS]


def keep(directory: Path) -> Path:
    """Copy what agents have written, which ends with the test, to ``build/soak-SEED``."""
    kept = Path("build") / f"soak-{SEED}"
    for file in directory.rglob("*"):
        if file.is_file() and file.suffix in (".log", ".jsonl"):
            copy = kept / file.relative_to(directory)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return kept.resolve()


@pytest.mark.timeout(60 * MINUTES + 1800)
def test_everything_is_attacked(tmp_path: Path) -> None:
    with (
        hosts(tmp_path) as net,
        served(tmp_path, "--appendonly", "yes") as server,
        open_site(Way.TCP, server.url) as site,
        Job(lambda side, rank: {}) as job,
    ):
        everything = Everything(site, job, net, server, replicas=4, seed=SEED)
        try:
            everything.run(seconds=60 * MINUTES)
            everything.end()
            assert (everything.grown(), everything.unexplained) == ([], [])
        except BaseException:
            kept = keep(site.directory)
            (kept / "events").write_text("\n".join(map(str, everything.happenings(since=0.0))))
            print(f"\nlogs and events of the agents are in {kept}")
            raise
        finally:
            print(f"\nseed {SEED}, {MINUTES:g} minutes: {everything.report()}")
