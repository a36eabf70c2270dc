"""``etha demo`` as a person runs it: the whole job, what goes wrong in it, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from etha.demo.process import children

SECONDS = 240
pytestmark = pytest.mark.timeout(300)  # six processes load torch on what may be two busy cores
#: Put in front of the demo's own code in every process, by way of PYTHONPATH.
HOOK = "sitecustomize.py"


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the demo's private one, with a name that leaves room for sockets."""
    return tmp_path_factory.mktemp("d")


@contextmanager
def demo(temporary: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """``etha demo`` running; killed at the end if it still is."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from etha.cli import main; main()", "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", **variables},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def await_line(process: subprocess.Popen[str], text: str) -> None:
    """Read the demo's output up to a line with this text."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(process.stderr.read())


def left(temporary: Path) -> list[str]:
    """Commands that still run with the demo's private directory in their environment or arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if str(temporary).encode() in text and int(entry.name) != os.getpid():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def assert_nothing_left(temporary: Path) -> None:
    assert left(temporary) == []
    assert list(temporary.iterdir()) == []


def test_versions_arrive_exact_and_nothing_is_left(temporary: Path) -> None:
    with demo(temporary, "--steps", "3", "--every", "2") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    rows = re.findall(r"│\s+(\d+) │ ([\d,]+) │\s+([\d.]+) │ (\d+) tensors equal │\s+([\d.]+) │\s+([\d.]+) │", out)
    assert [row[0] for row in rows] == ["0", "2", "3"]
    assert {(row[1], row[3]) for row in rows} == {("3,973,760", "53")}
    assert [row[4] for row in rows] == [row[5] for row in rows]
    assert float(rows[-1][4]) < float(rows[0][4])
    assert "version 3 writes:" in out and "3 versions, every element equal" in out
    assert_nothing_left(temporary)


def test_replicas_join_late_are_killed_and_end_with_the_newest_version(temporary: Path) -> None:
    with demo(temporary, "--replicas", "4", "--steps", "6", "--every", "2") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    rows = re.findall(r"│ replica-(\d) │ (\S+) over (\d) +│ +(once|2 times) │ +\d+ │ +6 │ \S+ +│ 53 tensors equal", out)
    assert rows == [
        ("0", "tensor-parallel", "2", "2 times"),
        ("1", "whole", "1", "once"),
        ("2", "rows", "2", "once"),
        ("3", "columns", "2", "once"),
    ], out
    assert "replica-0 is killed" in out and "replica-3 joins late" in out
    assert "4 replicas hold version 6, every element equal" in out
    assert_nothing_left(temporary)


@pytest.mark.more
def test_one_wrong_element_of_a_replica_fails_the_demo(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / HOOK).write_text(
        "import sys\n"
        "if 'etha.demo.job' in sys.orig_argv and 'replica-1' in sys.orig_argv:\n"
        "    import etha.demo.replica as job\n"
        "    whole = job.digests\n"
        "    def digests(tensors, *, here):\n"
        "        spoilt = {name: tensor.clone() for name, tensor in tensors}\n"
        "        spoilt['norm.bias'][7] += 2 ** -20\n"
        "        return whole(spoilt.items(), here=here)\n"
        "    job.digests = digests\n"
    )
    with demo(temporary, "--replicas", "2", "--steps", "1", PYTHONPATH=str(tmp_path)) as process:
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "replica-1: version 1: norm.bias differs" in err and "replica-0" not in err
    assert_nothing_left(temporary)


@pytest.mark.proof
def test_synthetic_data_arrives_exact(temporary: Path) -> None:
    with demo(temporary, "--synthetic", "0.01") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert len(re.findall(r"│ 291 tensors equal │", out)) == 3
    assert_nothing_left(temporary)


@pytest.mark.more
def test_one_wrong_element_fails_the_demo(temporary: Path, tmp_path: Path) -> None:
    """The inference job spoils one element of what it received, as a lost write would."""
    (tmp_path / HOOK).write_text(
        "import sys\n"
        "if 'etha.demo.job' in sys.orig_argv and 'inference' in sys.orig_argv:\n"
        "    import etha.demo.inference as job\n"
        "    whole = job.digests\n"
        "    def digests(tensors, *, here):\n"
        "        tensors = dict(tensors)\n"
        "        tensors['norm.bias'][7] += 2 ** -20\n"
        "        return whole(tensors.items(), here=here)\n"
        "    job.digests = digests\n"
    )
    with demo(temporary, "--steps", "1", PYTHONPATH=str(tmp_path)) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "version 0: norm.bias differs" in err and "version 1: norm.bias differs" in err
    assert "53 tensors equal" not in out
    assert_nothing_left(temporary)


@pytest.mark.more
@pytest.mark.parametrize("job", ["trainer", pytest.param("inference", marks=pytest.mark.proof)])
def test_a_killed_rank_ends_the_demo_with_an_error(temporary: Path, job: str) -> None:
    with demo(temporary, "--steps", "1000", "--every", "1") as process:
        await_line(process, "version 1:")
        (leader,) = (
            pid
            for pid in children(process.pid)
            if f"etha.demo.job\0{job}\0" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(max(children(leader)), signal.SIGKILL)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "the demo failed: the" in err and f"{job} rank" in err and "was killed by SIGKILL" in err
    assert_nothing_left(temporary)


@pytest.mark.more
@pytest.mark.parametrize(("more", "line"), [((), "version 0:"), (("--replicas", "2"), "holds version 0")], ids=str)
def test_sigterm_ends_everything(temporary: Path, more: tuple[str, ...], line: str) -> None:
    with demo(temporary, "--steps", "1000", "--every", "1", *more) as process:
        await_line(process, line)
        process.terminate()
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert_nothing_left(temporary)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_demo_on_one_says_so_and_starts_nothing(temporary: Path) -> None:
    with demo(temporary, "--device", "cuda") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (1, "")
    assert "config: --device cuda" in err and "sees no GPU" in err and "Traceback" not in err
    assert_nothing_left(temporary)
