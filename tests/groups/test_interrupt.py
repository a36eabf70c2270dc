"""Ctrl-C while a member waits: the member goes on at once, and its group is at an end until the next configure."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys, torch
from torch._C._distributed_c10d import HashStore, PrefixStore
from concurrent.futures import ThreadPoolExecutor
from etha import groups

# A shell that starts something in the background has it ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
store = HashStore()
members = [getattr(groups, sys.argv[1])(timeout=60) for _ in range(2)]

def form(prefix):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: members[rank].configure(PrefixStore(prefix, store), "r", rank, 2), range(2)))

form("a")
work = members[0].allreduce([torch.ones(3)])
while members[0].errored() is None:
    try:
        print("waiting", flush=True)
        work.wait()
    except KeyboardInterrupt:
        continue  # it may come before the wait
error = members[0].errored()
assert isinstance(error, groups.GroupAbortedError) and "was interrupted" in str(error), error
try:
    members[0].barrier().wait()
except groups.GroupAbortedError:
    members[1].abort()
    form("b")
    for work in [member.barrier() for member in members]:
        work.wait()
    print("over", flush=True)
for member in members:
    member.shutdown()
"""


@pytest.mark.parametrize("kind", ["ProcessGroupGloo", "ProcessGroupBabyGloo"])
def test_a_wait_can_be_interrupted(kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as member:
        assert member.stdout is not None and member.stderr is not None
        lines = []
        for line in member.stdout:
            lines.append(line)
            if line == "waiting\n":
                member.send_signal(signal.SIGINT)
        err = member.stderr.read()
    assert lines[-1] == "over\n", err
