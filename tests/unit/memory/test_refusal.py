"""Which right is missing to read another process's memory, from what /proc shows of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from etha.memory.refusal import why_refused

ALL, NONE, ALL_BUT_PTRACE = "000001ffffffffff", "0000000000000000", "000001fffff7ffff"


def process(
    proc: Path, name: str, *, uid: int = 1000, gid: int = 1000, capabilities: str = NONE, users: str = "0 0 4294967295"
) -> None:
    """What /proc shows of one process."""
    folder = proc / name
    folder.mkdir(parents=True)
    ids = "\n".join(f"{kind}:\t{number}\t{number}\t{number}\t{number}" for kind, number in (("Uid", uid), ("Gid", gid)))
    (folder / "status").write_text(f"Name:\tpython\n{ids}\nCapPrm:\t{capabilities}\nCapEff:\t{capabilities}\n")
    (folder / "uid_map").write_text(f"         {users}\n")


@pytest.mark.parametrize(
    ("here", "there", "itself", "yama", "expected"),
    [
        ({}, {}, False, None, "a seccomp filter of this agent's container forbids process_vm_readv"),
        ({}, {"uid": 1001}, True, None, "process 7 runs with uid 1001, this agent with 1000"),
        ({}, {"gid": 1001}, True, None, "process 7 runs with gid 1001, this agent with 1000"),
        ({"capabilities": ALL_BUT_PTRACE}, {"capabilities": ALL}, True, None, "so the agent needs CAP_SYS_PTRACE"),
        ({}, {"users": "0 1000 1"}, True, None, "process 7 lives in another user namespace"),
        ({}, {}, True, "2", "kernel.yama.ptrace_scope is 2"),
        ({}, {}, True, "3", "kernel.yama.ptrace_scope is 3"),
        ({"uid": 0, "gid": 0, "capabilities": ALL}, {"uid": 1001}, True, "1", "a security module"),
    ],
)
def test_the_missing_right_is_named_and_the_way_without_it(
    tmp_path: Path, here: dict[str, int], there: dict[str, int], itself: bool, yama: str | None, expected: str
) -> None:
    process(tmp_path, "self", **here)  # type: ignore[arg-type]
    process(tmp_path, "7", **there)  # type: ignore[arg-type]
    if yama is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{yama}\n")
    text = why_refused(7, itself=itself, proc=tmp_path)
    assert text.startswith(expected) or expected in text, text
    assert text.endswith("or take the tensors from etha.empty / etha.share_module, which need no such right")
    assert len(text) < 450, "an agent cuts what it is sent to 500 characters"


def test_a_process_that_proc_does_not_show(tmp_path: Path) -> None:
    process(tmp_path, "self")
    assert "does not show process 7: run both in one PID namespace" in why_refused(7, itself=True, proc=tmp_path)
