"""How much memory is left: of the machine, of cgroups of both versions, of the process's own limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etha.config import Settings
from etha.errors import ConfigError
from etha.memory import room
from etha.memory.room import Room

MIB = 1 << 20


def laid(folder: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    files = {
        "meminfo": "MemTotal: 900 kB\nMemAvailable: 3000 kB\nSwapFree: 72 kB",
        "self/statm": "10 5 5 5 0 0 0",
        "self/cgroup": "",
    }
    return laid(tmp_path / "proc", files)


def test_the_machine_leaves_what_is_available_and_swap(proc: Path, tmp_path: Path) -> None:
    assert room.room(proc, tmp_path / "none") == Room(nbytes=3 * MIB, limit="memory and swap of this machine")


@pytest.mark.parametrize("at", ["a/b", "a"], ids=["own", "above"])
def test_a_cgroup_or_one_above_it_leaves_less_and_cached_files_give_way(proc: Path, tmp_path: Path, at: str) -> None:
    laid(proc, {"self/cgroup": "0::/a/b"})
    group = {"memory.max": 2 * MIB, "memory.current": 1 * MIB, "memory.stat": f"anon 5\ninactive_file {MIB // 2}"}
    free = {"memory.max": "max", "memory.current": 5}
    other = {"a/b": "a", "a": "a/b"}[at]
    groups = laid(tmp_path / "groups", {f"{at}/{name}": text for name, text in group.items()})
    laid(groups, {f"{other}/{name}": text for name, text in free.items()})
    found = room.room(proc, groups)
    assert found.nbytes == 3 * MIB // 2 and found.limit == f"memory.max of cgroup {groups / at}"


def test_a_cgroup_of_version_1_whose_path_is_the_hosts(proc: Path, tmp_path: Path) -> None:
    laid(proc, {"self/cgroup": "9:name=systemd:/\n4:cpu,memory:/host/path\n0::/"})
    files = {
        "memory.limit_in_bytes": 2 * MIB,
        "memory.usage_in_bytes": MIB,
        "memory.stat": "cache 3\ntotal_inactive_file 0",
    }
    groups = laid(tmp_path / "groups", {f"memory/{name}": text for name, text in files.items()})
    assert room.room(proc, groups).nbytes == MIB


def test_a_full_cgroup_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    laid(proc, {"self/cgroup": "0::/a"})
    files = {"a/memory.max": MIB, "a/memory.current": 2 * MIB, "a/memory.stat": "inactive_file 0"}
    assert room.room(proc, laid(tmp_path / "groups", files)).nbytes == 0


ASK = """
import resource, sys, torch, etha
from etha.memory import shared
kind, limit = sys.argv[1], int(sys.argv[2])
if kind == "RLIMIT_AS":
    limit += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
if limit:
    resource.setrlimit(getattr(resource, kind), (limit, limit))
def asked(what, call):
    try:
        call()
    except etha.ConfigError as error:
        print(what, error.message)
asked("empty", lambda: etha.empty((2**40,)))
asked("huge", lambda: etha.empty((2**61,), dtype=torch.uint8))
asked("like", lambda: etha.empty_like(torch.empty(1).expand(2**40)))
from etha.client.memory.cpu import CpuMemory
asked("stage", lambda: CpuMemory().stage([torch.empty(1).expand(2**38)] * 3, [True] * 3))
assert not shared.segments()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit", "named"),
    [("none", 0, ""), ("RLIMIT_AS", 1 << 28, "RLIMIT_AS"), ("RLIMIT_FSIZE", 1 << 20, "RLIMIT_FSIZE")],
)
def test_what_cannot_fit_is_refused_with_both_numbers_before_a_page_is_touched(
    kind: str, limit: int, named: str
) -> None:
    """In a process of its own, whose address space is bounded in one of the runs."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, kind, str(limit)], capture_output=True, text=True, timeout=120, check=True
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines.keys() == {"empty", "huge", "like", "stage"}, done.stdout
    assert f"{1 << 42} bytes" in lines["empty"] and f"{1 << 61} bytes" in lines["huge"]
    assert f"{3 << 40} bytes" in lines["stage"]
    assert all(" are left (" in line and named in line for line in lines.values())


def test_the_capacity_is_the_machines_or_a_cgroups_whatever_is_in_use(proc: Path, tmp_path: Path) -> None:
    assert room.capacity(proc, tmp_path / "none") == Room(nbytes=900 * 1024, limit="memory of this machine")
    laid(proc, {"self/cgroup": "0::/a"})
    groups = laid(tmp_path / "groups", {"a/memory.max": 4096, "memory.max": "max"})
    assert room.capacity(proc, groups) == Room(nbytes=4096, limit=f"memory.max of cgroup {groups / 'a'}")


@pytest.mark.slow
def test_staging_beyond_the_machines_memory_is_refused_by_its_variable() -> None:
    def settings(staging: str) -> Settings:
        return Settings.from_env({"ETHA_STAGING": staging})

    most = room.capacity().nbytes
    room.check_staging(settings(str(most)))
    with pytest.raises(ConfigError, match=rf"ETHA_STAGING={most + 1} bytes is more than the {most} that there are"):
        room.check_staging(settings(str(most + 1)))


STAGE = """
import resource, sys, etha
from etha.transport.copy.staging import Budget
kind, limit = sys.argv[1], int(sys.argv[2])
pages = open("/proc/self/statm").read().split()
used = {"RLIMIT_AS": pages[0], "RLIMIT_DATA": pages[5]}.get(kind, 0)
if limit:
    resource.setrlimit(getattr(resource, kind), (limit + int(used) * resource.getpagesize(),) * 2)
budget = Budget(2**45)
try:
    for nbytes in (1, 2**19, 2**40):
        budget.take(nbytes)
except etha.ConfigError as error:
    print(budget.used, error.message)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit", "named"),
    [
        ("none", 0, ""),
        ("RLIMIT_AS", 1 << 28, "RLIMIT_AS"),
        ("RLIMIT_DATA", 1 << 28, "RLIMIT_DATA"),
        ("RLIMIT_FSIZE", 1 << 20, "memory"),
    ],
)
def test_staging_that_does_not_fit_is_refused_with_both_numbers(kind: str, limit: int, named: str) -> None:
    """The size of files bounds no private memory."""
    command = [sys.executable, "-c", STAGE, kind, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    used, said = done.stdout.split(" ", 1)
    assert int(used) == 2**19 + 1, "what was refused is not counted"
    assert f"staging beside the {used} bytes of it that this agent uses needs {1 << 40} bytes of memory, " in said
    assert " are left (" in said and "ETHA_STAGING" in said
    assert named in said and "RLIMIT_FSIZE" not in said
