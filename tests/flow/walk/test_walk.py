"""One ``send`` of a registered batch on one host, as the worker's process and the agent really run it.

Every function of ``etha`` that either enters is recorded, from the call of the handle's ``transfer`` to its return. The
agent's record ends with its last answer to the two workers: what its status writer hears, and writes in a task of its
own, comes afterwards. Tasks that the agent had before are left out, because it renews its lease and waits for wake-ups
all the time, and may still write the status of an earlier transfer.

docs/architecture.md tells this walk in a numbered list, and the record must show the list's functions in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from tests.flow.clients.direct import ask_directly
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sites import Site, environment, open_site
from tests.flow.walk.recorder import Recorder, Step
from tests.flow.ways import Way

ROOT = Path(__file__).resolve().parents[3]
#: Files of etha that a reader has to open at most who follows one send.
MOST_FILES = 40
MOST_STEPS = 15
PATIENCE = 120.0
PLACEMENTS = {"device_mesh": (1,), "placements": [Replicate()]}


class Line(NamedTuple):
    """One step as the document tells it."""

    who: str
    file: str
    function: str

    def __str__(self) -> str:
        return " ".join(self)


def listed(mark: str) -> list[tuple[str, Line]]:
    """The lists of docs/architecture.md whose items begin with ``mark``."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(rf"^(?:- )?({mark})\. (Worker|Agent), `([\w/]+\.py)` `([\w.]+)`: ", text, re.MULTILINE)
    return [(number, Line(who.lower(), f"etha/{file}", function)) for number, who, file, function in found]


def numbered() -> list[Line]:
    """The steps of a call that goes over the event loop."""
    found = listed(r"\d+")
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [line for _, line in found]


def lettered() -> list[Line]:
    """Those of a call that its own thread makes: other ones to the agent, and the same ones in it."""
    found = listed("[a-z]")
    assert [letter for letter, _ in found] == ["a", "b", "c"]
    return [*(line for _, line in found), *(line for line in numbered() if line.who == "agent")]


# ---- what is played -----------------------------------------------------------------------------


def receive(pair: str, times: int) -> None:
    """The other side: each of its calls is known to the agent before the test hears so."""

    async def main() -> None:
        async with etha.AsyncTensorBusClient(autostart=False, timeout=PATIENCE) as client:
            await client.init_pair(pair, "inference", "trainer", **PLACEMENTS)
            tensors = {"a": torch.zeros(64, 1024)}
            handle = await client.register_tensors("b", tensors, pair_name=pair)
            for version in range(times):
                await asyncio.to_thread(wait_for, "recv")
                async with asyncio.TaskGroup() as group:
                    group.create_task(handle.transfer("recv"))
                    await asyncio.sleep(0)  # the call is on its way to the agent
                    await client.status()
                    tell("waits")
                assert bool((tensors["a"] == version + 1).all())
            # Not before the sender has stopped recording, which would hear that it has left.
            await asyncio.to_thread(wait_for, "leave")

    asyncio.run(main())


def send_blocking(pair: str, times: int) -> None:
    """A trainer with a blocking client, whose callback needs the event loop; the last of its sends is recorded."""
    _send_blocking(pair, times, lambda done, total: None)


def send_directly(pair: str, times: int) -> None:
    """The same without a callback."""
    _send_blocking(pair, times, None)


def _send_blocking(pair: str, times: int, progress: Callable[[int, int], None] | None) -> None:
    recorder = Recorder("worker")  # before the client starts its loop thread
    with etha.TensorBusClient(autostart=False, timeout=PATIENCE) as client:
        client.init_pair(pair, "trainer", "inference", **PLACEMENTS)
        tensor = torch.zeros(64, 1024)
        handle = client.register_tensors("b", {"a": tensor}, pair_name=pair)
        for _ in range(times):
            wait_for("send")
            tensor += 1
            recorder.start()
            handle.transfer("send", progress=progress)
            tell("sent", recorder.stop())
            if progress is None:
                ask_directly(client, handle)


def send_async(pair: str, times: int) -> None:
    """The same with an async client."""
    recorder = Recorder("worker")

    async def main() -> None:
        async with etha.AsyncTensorBusClient(autostart=False, timeout=PATIENCE) as client:
            await client.init_pair(pair, "trainer", "inference", **PLACEMENTS)
            tensor = torch.zeros(64, 1024)
            handle = await client.register_tensors("b", {"a": tensor}, pair_name=pair)
            for _ in range(times):
                await asyncio.to_thread(wait_for, "send")
                tensor += 1
                recorder.start()
                await handle.transfer("send")
                tell("sent", recorder.stop())

    asyncio.run(main())


#: The agent writes its history by a timer, at any moment: what these files call belongs to no transfer, either.
HISTORY = ("etha/observe/", "etha/agent/runtime/event_writer.py")


def without_history(steps: list[Step]) -> list[Step]:
    """``steps`` of one process without the history's functions, and without what those call."""
    inside: dict[int, int] = {}  # how many of the history's functions each thread is in
    kept: list[Step] = []
    for step in steps:
        history = step.file.startswith(HISTORY)
        if not history and not inside.get(step.thread):
            kept.append(step)
        elif history and step.entered:
            inside[step.thread] = inside.get(step.thread, 0) + 1
        elif history:  # a function that was entered before the record began is left, too
            inside[step.thread] = max(inside.get(step.thread, 0) - 1, 0)
    return kept


class RecordedAgent:
    """The agent of ``site``, in a process of its own."""

    def __init__(self, site: Site) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE)
        self._trace = site.directory / "trace.json"
        self._ready, wrote = os.pipe()
        command = [sys.executable, "-m", "tests.flow.walk.agent", str(theirs.fileno()), str(self._trace)]
        with environment(site.at("a")):
            self._process = subprocess.Popen([*command, "--ready-fd", str(wrote)], pass_fds=[theirs.fileno(), wrote])
        os.close(wrote)
        theirs.close()

    def serves(self) -> None:
        """Wait until workers can connect."""
        with os.fdopen(self._ready) as lines:
            assert lines.read().strip() == "ready"

    def start(self) -> None:
        """From now on it records."""
        self._say(b"start")

    def stop(self) -> list[Step]:
        """What it has recorded."""
        self._say(b"stop")
        return [Step(*step) for step in json.loads(self._trace.read_text())]

    def _say(self, word: bytes) -> None:
        self._control.send(word)
        assert self._control.recv(16) == word

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()


def answered(steps: list[Step]) -> list[Step]:
    """The agent's record to its last answer to a worker."""
    ends = [at for at, step in enumerate(steps) if step.function == "OpenCalls.answer" and not step.entered]
    return steps[: ends[-1] + 1]


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Site, RecordedAgent]]:
    with open_site(Way.LOCAL) as found, contextlib.ExitStack() as stack:
        agent = RecordedAgent(found)
        stack.callback(agent.close)
        agent.serves()
        yield found, agent


@pytest.fixture(scope="module", params=[send_blocking, send_async, send_directly], ids=["blocking", "async", "direct"])
def walk(request: pytest.FixtureRequest, site: tuple[Site, RecordedAgent]) -> list[Step]:
    """One send of both processes, by time; an earlier one has laid out the pieces."""
    place, agent = site
    with Job(place.env) as job:
        receiver = job.start(receive, request.param.__name__, 2, at=("inference", 0))
        sender = job.start(request.param, request.param.__name__, 2, at=("trainer", 0))
        for _ in range(2):
            receiver.go("recv")
            receiver.expect("waits", PATIENCE)
            agent.start()
            sender.go("send")
            sent, answers = (without_history(steps) for steps in (sender.expect("sent", PATIENCE), agent.stop()))
        receiver.go("leave")
        job.results([receiver, sender], PATIENCE)
    return sorted(step for step in sent + answered(answers) if step.entered)


def expected(walk: list[Step]) -> list[Line]:
    """What the document tells of such a walk."""
    return lettered() if any(step.file == "etha/client/direct.py" for step in walk) else numbered()


# ---- what is expected ---------------------------------------------------------------------------


def mistakes(steps: list[Line], walk: list[Step]) -> list[str]:
    """What ``steps`` tell that the record does not show: by when each function was entered first."""
    first: dict[Line, int] = {}
    for step in walk:
        first.setdefault(Line(step.who, step.file, step.function), step.ns)
    found = [f"{step} is not entered" for step in steps if step not in first]
    there = [step for step in steps if step in first]
    return found + [f"{b} comes before {a}" for a, b in pairwise(there) if first[b] <= first[a]]


def test_a_reader_of_one_send_opens_few_files(walk: list[Step]) -> None:
    files = sorted({step.file for step in walk})
    assert len(files) <= MOST_FILES, "\n".join(files)


def test_what_the_history_calls_is_left_out() -> None:
    def step(thread: int, entered: bool, file: str) -> Step:
        return Step(0, "agent", thread, entered, file, "f")

    ring, config, run = "etha/observe/ring.py", "etha/config.py", "etha/agent/runtime/run.py"
    left = [step(1, False, ring), step(1, True, run), step(1, False, run)]
    inside = [step(1, True, ring), step(1, True, config), step(2, True, run), step(1, False, config)]
    after = [step(1, False, ring), step(1, True, config)]
    assert without_history(left + inside + after) == [*left[1:], inside[2], after[1]]


def test_the_document_tells_the_walk_as_it_is(walk: list[Step]) -> None:
    assert 0 < len(expected(walk)) <= MOST_STEPS
    assert mistakes(expected(walk), walk) == []


def test_the_three_walks_are_of_both_kinds(request: pytest.FixtureRequest, walk: list[Step]) -> None:
    assert (expected(walk) == lettered()) is ("direct" in request.node.name)


def test_a_wrong_document_is_noticed(walk: list[Step]) -> None:
    steps = expected(walk)
    for at in range(len(steps) - 1):
        swapped = [*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]]
        assert mistakes(swapped, walk), f"steps {at + 1} and {at + 2} may change places"
    for at, step in enumerate(steps):
        renamed = [*steps[:at], step._replace(function=f"{step.function}_"), *steps[at + 1 :]]
        assert mistakes(renamed, walk) == [f"{renamed[at]} is not entered"]
