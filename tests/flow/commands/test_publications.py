"""``etha publications`` in processes of its own, with a trainer and replicas in this one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Replicate

import etha as library
from tests.flow.commands.running import SECONDS, agent, etha

INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from etha.cli import main; main()"
)


@contextmanager
def watching() -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of ``etha publications --watch --json``."""
    command = [sys.executable, "-c", INTERRUPTIBLE, "publications", "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield map(json.loads, process.stdout)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
    assert process.returncode == 0


def test_without_an_agent_it_says_so_and_starts_nothing(runtime: Path) -> None:
    shown = etha("publications")
    assert shown.returncode == 1
    assert f"agent_unavailable: no agent is running at {runtime}" in " ".join(shown.stderr.split())
    assert not list(runtime.rglob("*.sock"))


def test_who_holds_what_and_who_is_fed_by_whom(runtime: Path) -> None:
    with agent():
        assert etha("publications").stdout.strip() == "no publications"
        assert json.loads(etha("publications", "--json").stdout) == {"publications": []}
        with library.TensorBusClient(autostart=False) as trainer, library.TensorBusClient(autostart=False) as replica:
            source, target = library.empty(64).fill_(1.0), library.empty(64).fill_(0.0)
            options: dict[str, Any] = {"device_mesh": (1,), "placements": {"w": [Replicate()]}, "rank": 0}
            options["timeout"] = SECONDS
            publication = trainer.publish("policy", {"w": source}, **options)
            publication.put(version=7, timeout=SECONDS)
            subscription = replica.subscribe("policy", {"w": target}, subscriber="replica-7", **options)
            assert subscription.next(timeout=SECONDS).version == 7
            publication.put(version=8, timeout=SECONDS)
            [found] = json.loads(etha("publications", "--json").stdout)["publications"]
            assert (found["publication"], found["state"], found["seq"], found["version"]) == ("policy", "open", 2, 8)
            [line] = found["subscribers"]
            assert (line["subscriber"], line["state"], line["version"], line["lag"]) == ("replica-7", "behind", 7, 1)
            assert line["source"].startswith("trainer/") and line["lag_seconds"] > 0
            holders = {
                one["holder"].partition("/")[0]: [held["version"] for held in one["slots"]] for one in found["holders"]
            }
            assert sorted(holders["trainer"]) == [7, 8] and holders["replica-7"] == [7]
            [same] = json.loads(etha("publications", "policy", "--json").stdout)["publications"]
            assert (same["publication"], same["version"], len(same["holders"])) == ("policy", 8, 2)
            unknown = etha("publications", "policies")
            assert unknown.returncode == 1 and unknown.stdout == ""
            assert "config: namespace 'default' has no publication 'policies'; it has policy" in unknown.stderr
            table = etha("publications").stdout
            assert "policy: version 8 (seq 2)" in table and "replica-7" in table and "behind" in table
            with watching() as lines:
                assert next(lines)["publications"][0]["subscribers"][0]["version"] == 7
                subscription.next(timeout=SECONDS)
                for shown in lines:
                    if shown["publications"][0]["subscribers"][0]["version"] == 8:
                        break
            subscription.close()
            publication.close()
        [left] = json.loads(etha("publications", "--json").stdout)["publications"]
        assert (left["state"], left["version"], left["subscribers"]) == ("closed", 8, [])
