"""Two containers on one host, with PID, mount and network namespaces of their own (docs/docker.md).

The documented ways work: an agent outside of them that both reach through a shared directory, with and without the
right to read processes, and an agent in each. What a container lacks is said by the error that it gets.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from etha.agent_session import look
from etha.config import Settings
from etha.doctor import Failing
from etha.doctor.machine import check_agents_reach, check_process_memory
from etha.status import status_tables
from tests.flow.jobs import Job
from tests.flow.networks import namespaces
from tests.flow.networks.containers import (
    SIZE,
    become,
    connect,
    contain,
    freeze,
    hide,
    meet,
    move,
    seen,
    unmount,
    way,
)
from tests.flow.puppets import Failure, Puppet, Stage, together
from tests.flow.sites import private_directory

_PR_CAPBSET_DROP, _CAP_SYS_PTRACE = 24, 19
NOBODY = 65534
#: Sum of what arrives.
ALL = float(SIZE * (SIZE - 1) / 2)

pytestmark = [pytest.mark.timeout(240), *namespaces.MARKS]


@contextmanager
def agent(directory: Path, before: Callable[[], None] | None = None) -> Iterator[int]:
    """An agent outside of all containers, its runtime directory in ``directory``; its pid."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "etha.agent", "--ready-fd", str(write)]
    env = {**os.environ, "ETHA_RUNTIME_DIR": str(directory)}
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL, env=env, preexec_fn=before) as running:
        try:
            os.close(write)
            with os.fdopen(read) as reported:
                assert reported.readline() == "ready\n"
            yield running.pid
        finally:
            running.terminate()


def without_ptrace() -> None:
    """The program that is executed next gets every capability but the one to read others' memory."""
    assert ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE, 0, 0, 0) == 0


def two(job: Job, pair: str) -> list[Puppet]:
    """A trainer and an inference worker, each in a container of its own."""
    stage = Stage(job, pair)
    both = [stage.puppet(side, 0, 1) for side in ("trainer", "inference")]
    assert together(both, contain) == [1, 1]
    return both


def refused(job: Job, *steps: tuple[object, ...], env: dict[str, str] | None = None) -> Failure:
    """The error with which the last of these steps fails in a container of its own."""
    puppet = Stage(job, "refused").puppet("trainer", 0, 1, env)
    for step in steps[:-1]:
        puppet.do(*step)  # type: ignore[arg-type]
    return puppet.begin(*steps[-1]).fails()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A runtime directory that all containers see, with an agent outside of them that may read their memory."""
    with private_directory() as directory, agent(directory):
        yield directory


def test_an_agent_outside_serves_two_containers_and_copies_from_one_to_the_other(shared: Path) -> None:
    with Job({"ETHA_RUNTIME_DIR": str(shared)}) as job:
        both = two(job, "outside")
        assert len({found["pid"] for found in together(both, connect)}) == 1
        together(both, meet)
        assert together(both, move, "plain", False) == [ALL, ALL]
        assert set(both[0].do(seen)) == {"direct"} and both[0].do(way, "plain") == "local"


def test_without_the_right_to_read_processes_tensors_are_staged_and_status_names_the_right() -> None:
    with private_directory() as directory, agent(directory, without_ptrace):
        with Job({"ETHA_RUNTIME_DIR": str(directory)}) as job:
            both = two(job, "unread")
            together(both, connect)
            together(both, meet)
            assert together(both, move, "mapped", True) == [ALL, ALL]
            assert both[0].do(seen) == ["mapped", "mapped"], "nothing of etha.empty is staged"
            assert together(both, move, "plain", False) == [ALL, ALL]
            for text in both[0].do(seen):
                assert text.startswith("staged: the kernel refuses access"), text
                assert "CAP_SYS_PTRACE" in text and "--cap-add SYS_PTRACE" in text and "etha.empty" in text
            # This process may read others' memory; the agent that runs may not.
            settings = Settings.from_env({"ETHA_RUNTIME_DIR": str(directory)})
            assert "process_vm_readv works" in check_process_memory(settings)
            with pytest.raises(Failing, match=r"staged: the kernel refuses access.*CAP_SYS_PTRACE"):
                check_agents_reach(settings)
            workers = [status_tables(found) for found in asyncio.run(look(settings, timeout=30))]
            console = Console(width=200, record=True, file=io.StringIO())
            console.print(*workers)
            assert "trainer 0, staged" in console.export_text()


def test_each_container_with_an_agent_of_its_own_over_tcp_and_a_way_that_is_lost(tmp_path: Path) -> None:
    with namespaces.hosts(tmp_path) as net, private_directory() as directory:
        both = []
        with Job({}) as job:
            stage = Stage(job, "tcp")
            for number, (side, network) in enumerate((("trainer", net.one), ("inference", net.two)), 1):
                env = {
                    "ETHA_RUNTIME_DIR": str(directory),
                    "ETHA_REDIS_URL": net.url,
                    "ETHA_LISTEN": f"10.211.1.{number}:0",
                }
                both.append(stage.puppet(side, 0, 1, env))
                both[-1].do(contain, network)
                both[-1].do(hide, str(directory))
            found = together(both, connect)
            assert len({each["host_id"] for each in found}) == 2, "another PID namespace is another host"
            together(both, meet)
            assert together(both, move, "plain", False) == [ALL, ALL]
            assert both[0].do(way, "plain") == "tcp"
            net.cut()
            for puppet in both:
                puppet.begin(again)
            found = " ".join(puppet.fails(100).text for puppet in both)
            assert "has no route to 10.211.1." in found and "Network is unreachable" in found, found


def again(me: object) -> None:
    """After the loss of the pair: form it again."""
    me.bond.lost.wait(60)  # type: ignore[attr-defined]
    meet(me, 60)  # type: ignore[arg-type]


def test_a_container_is_told_what_it_lacks(shared: Path) -> None:
    directory = str(shared)
    with Job({"ETHA_RUNTIME_DIR": directory}) as job:
        # Another user's directory, or one in another user's.
        error = refused(job, (contain,), (become, NOBODY), (connect,))
        assert error.code == "config" and "set ETHA_RUNTIME_DIR" in error.text, error
        assert "belongs to uid 0 with mode 700" in error.text or "Permission denied" in error.text, error
        # A directory that may only be read and in which no agent runs.
        with private_directory() as empty:
            env = {"ETHA_RUNTIME_DIR": str(empty)}
            for _ in range(2):  # without the namespace's directory, and with it
                error = refused(job, (contain,), (freeze, str(empty)), (connect,), env=env)
                assert error.code == "config" and "Read-only file system" in error.text, error
                assert "mount it writable" in error.text and "ETHA_RUNTIME_DIR" in error.text, error
                (empty / "default").mkdir(mode=0o700, exist_ok=True)
        # The same with an agent in it works: sockets are not written.
        reader = Stage(job, "reads").puppet("trainer", 0, 1)
        reader.do(contain)
        reader.do(freeze, directory)
        assert reader.do(connect)["device"] == "cpu"
        # A directory that is not shared: an agent and a Redis of the container's own, at which nobody comes.
        error = refused(job, (contain,), (hide, directory), (connect,), (meet, 1))
        assert error.code == "rendezvous_timeout", error
        assert "in another container" in error.text and "ETHA_REDIS_URL to one Redis" in error.text, error
        # No /proc, and that of another namespace.
        error = refused(job, (contain, None, False), (unmount, "/proc"), (connect,))
        assert error.code == "config" and "/proc is not mounted" in error.text, error
        error = refused(job, (contain, None, False), (connect,))
        assert error.code == "config" and "another PID namespace" in error.text, error
