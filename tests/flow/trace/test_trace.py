"""ETHA_TRACE of two jobs, merged by ``etha trace`` and read by Perfetto's own trace processor."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import etha
from tests.flow.jobs import Job
from tests.flow.sites import Site, open_site, stop_all
from tests.flow.trace.perfetto import SPANS, Query, args_of, queries
from tests.flow.ways import Way

PATIENCE = 90.0
VERSIONS = 3
ROWS, COLUMNS = 512, 1024


def work(side: str, rank: int, pair: str, options: dict[str, Any]) -> list[Any]:
    """A rank of either side: every transfer's (seq, bytes, seconds, phases)."""
    found = []
    with etha.TensorBusClient(timeout=PATIENCE) as client:
        other = "inference" if side == "trainer" else "trainer"
        client.init_pair(pair, side, other, 2, (2,), rank=rank)
        dim = 0 if side == "trainer" else 1
        shape = [ROWS, COLUMNS]
        shape[dim] //= 2
        tensor = torch.full(shape, float(side == "trainer"))
        handle = client.register_tensors(
            "b", {"w": tensor}, pair_name=pair, placements={"w": [Shard(dim)]}, shapes={"w": (ROWS, COLUMNS)}, **options
        )
        for version in range(VERSIONS):
            if side == "trainer":
                result = handle.transfer("send", version=version)
            else:
                result = handle.transfer("recv")
                assert bool((tensor == 1).all())
            found.append((result.seq, result.bytes, result.seconds, dict(result.phases)))
    return found


@contextlib.contextmanager
def recorded(
    way: Way, pair: str, function: Callable[..., Any], **options: Any
) -> Iterator[tuple[Site, list[Path], dict[tuple[str, int], Any]]]:
    """Two ranks a side, each host's trace in a directory of its own; the results by (side, rank)."""
    with open_site(way) as site:

        def env(side: str, rank: int) -> dict[str, str]:
            place = site.way.place(side, rank)
            return {**site.at(place), "ETHA_TRACE": str(site.directory / f"trace-{place}")}

        with Job(env) as job:
            members = [(side, rank) for side in ("trainer", "inference") for rank in range(2)]
            workers = [job.start(function, *member, pair, options, at=member) for member in members]
            results = dict(zip(members, job.results(workers, PATIENCE), strict=True))
        stop_all(str(site.directory))  # agents write the rest when they leave
        yield site, sorted(site.directory.glob("trace-*")), results


def merged(directories: list[Path], output: Path) -> str:
    """What ``etha trace`` prints."""
    command = [sys.executable, "-m", "etha", "trace", *map(str, directories), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def check_phases(query: Query, results: dict[tuple[str, int], list[Any]]) -> None:
    """Each worker's calls have its results' phases, to the microsecond."""
    for (side, rank), expected in results.items():
        calls = query(
            f"{SPANS} where slice.name = 'transfer' and process.name glob '*worker {side} {rank} *' order by ts"
        )
        assert [int(args_of(query, call)["seq"]) for call in calls] == [seq for seq, *_ in expected]
        for call, (_, nbytes, _, phases) in zip(calls, expected, strict=True):
            assert int(args_of(query, call)["bytes"]) == nbytes
            parts = query(f"select name, sum(dur) as ns from slice where parent_id = {call['id']} group by name")
            found = {part["name"]: part["ns"] / 1e9 for part in parts}
            assert found == pytest.approx({name: s for name, s in phases.items() if round(s * 1e9)}, abs=1e-6)
            assert call["track"] == "calls"


@pytest.mark.needs("node")
def test_two_hosts_are_one_trace_in_perfetto(tmp_path: Path) -> None:
    with recorded(Way.TCP, "traced", work, atomic=True, verify="full") as (_, directories, results):
        assert len(directories) == 2
        printed = merged(directories, tmp_path / "trace.json")
    assert "2 hosts (host-a, host-b), 4 workers, 2 agents, 3 transfers" in printed
    assert "ui.perfetto.dev" in printed
    with queries(tmp_path / "trace.json") as query:
        check_phases(query, results)
        tracks = {(row["process"].split(" (")[0], row["track"]) for row in query(SPANS)}
        assert {(f"host-{host}: agent cpu", "transfers") for host in "ab"} <= tracks
        assert any(process == "host-a: agent cpu" and track.startswith("send host-b cpu") for process, track in tracks)
        assert any(track.startswith("lane ") for _, track in tracks)
        # An arrow from each send to its receive.
        arrows = query(
            "select o.name as source, i.name as target, o.arg_set_id as oargs, i.arg_set_id as iargs from flow "
            "join slice o on flow.slice_out = o.id join slice i on flow.slice_in = i.id where o.name = 'send'"
        )
        assert {(row["source"], row["target"]) for row in arrows} == {("send", "receive")}
        sends = query(f"{SPANS} where slice.name = 'send'")
        assert len(arrows) == len(sends) >= VERSIONS
        assert {args_of(query, send)["batch"] for send in sends} == {"b"}
        assert sum(int(args_of(query, send)["bytes"]) for send in sends) == VERSIONS * ROWS * COLUMNS * 4


def work_in_spans(side: str, rank: int, pair: str, options: dict[str, Any]) -> str:
    """``work`` inside of a span of OpenTelemetry; the id of its trace."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    with trace.get_tracer("job").start_as_current_span("step") as span:
        work(side, rank, pair, options)
        return f"{span.get_span_context().trace_id:032x}"


def test_one_host_with_opentelemetry(tmp_path: Path) -> None:
    """The trace of workers and of their agent names the traces of OpenTelemetry that their calls belong to."""
    with recorded(Way.LOCAL, "alone", work_in_spans) as (_, directories, trace_ids):
        printed = merged(directories, tmp_path / "trace.json")
    assert "1 host " in printed and "largest error of the clocks: none" in printed
    spans = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    names = {span["name"] for span in spans}
    assert {"init_pair", "register_tensors", "transfer", "wait", "move", "commit", "copy"} <= names
    calls = {(s["args"]["side"], s["args"]["rank"]): s["args"] for s in spans if "verb" in s["args"]}
    assert {member: args["trace_id"] for member, args in calls.items()} == trace_ids
    transfers = [s["args"] for s in spans if s["name"] == "transfer" and "sources" in s["args"]]
    assert len(transfers) == VERSIONS
    whole = ROWS * COLUMNS * 4
    assert [(args["bytes"], args["sent"], args["received"]) for args in transfers] == [(whole, whole, whole)] * VERSIONS
    assert all(set(args["trace_id"].split(", ")) == set(trace_ids.values()) for args in transfers)


#: How far the clock of one host is ahead, in seconds.
AHEAD = 1000


@contextlib.contextmanager
def agent_in_its_own_time(site: Site, place: str) -> Iterator[None]:
    """A traced agent at a place, whose CLOCK_MONOTONIC is AHEAD of everybody else's."""
    env = {**os.environ, **site.at(place), "ETHA_TRACE": str(site.directory / f"trace-{place}")}
    ready, theirs = os.pipe()
    command = ["unshare", "--time", "--monotonic", str(AHEAD), "--fork", "--kill-child=TERM"]
    command += [sys.executable, "-m", "etha.agent", "--ready-fd", str(theirs)]
    process = subprocess.Popen(command, env=env, pass_fds=[theirs])
    os.close(theirs)
    try:
        with os.fdopen(ready) as lines:
            assert lines.readline().strip() == "ready"
        yield
    finally:
        process.kill()
        process.wait(PATIENCE)


@pytest.mark.needs("unshare")
def test_a_host_with_another_clock_is_put_on_the_others(tmp_path: Path) -> None:
    """Agents measure on their links how far their clocks are apart, here 1,000 s, and the trace is right to 1 ms."""
    tried = subprocess.run(["unshare", "--time", "--fork", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no time namespaces here: {tried.stderr.strip()}")
    with open_site(Way.TCP) as site, agent_in_its_own_time(site, "b"):

        def env(side: str, rank: int) -> dict[str, str]:
            place = site.way.place(side, rank)
            return {**site.at(place), "ETHA_TRACE": str(site.directory / f"trace-{place}")}

        with Job(env) as job:
            members = [(side, rank) for side in ("trainer", "inference") for rank in range(2)]
            job.results([job.start(work, *member, "apart", {}, at=member) for member in members], PATIENCE)
        stop_all(str(site.directory))
        printed = merged(sorted(site.directory.glob("trace-*")), tmp_path / "trace.json")
    assert "system clocks" not in printed
    events = json.loads((tmp_path / "trace.json").read_text())
    error = events["otherData"]["clock_error_s"]
    assert 0 < error < 0.1
    names = {e["pid"]: e["args"]["name"] for e in events["traceEvents"] if e["name"] == "process_name"}
    ends: dict[int, list[float]] = {}
    for event in events["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "commit" and "agent" in names[event["pid"]]:
            ends.setdefault(event["pid"], []).append(event["ts"] + event["dur"])
    one, other = ends.values()
    assert len(one) == len(other) == VERSIONS
    # Both agents commit within the way of one message, which takes less than a second even on a busy machine.
    assert all(abs(a - b) < 1e6 + error * 1e6 for a, b in zip(one, other, strict=True))
