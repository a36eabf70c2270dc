"""Etha beside torchstore, NIXL, Mooncake and Gloo on the same rows, interleaved, in one run.

    python bench/peers [--python nixl=VENV/bin/python ...] [--rows KEY ...] [--peers NAME ...] [--rounds 7] [--busy]

Every round runs each contender of a row once, each time from another one on, and measures the machine's limit: memmove
with two threads, or between "hosts" a copy over as many plain sockets as two of Etha's agents have. A time is from the
first rank's call to the last rank's return; tables show medians. Before the first round and after the last one every
element that a target holds is compared with what its index says. A peer that is not installed is skipped.

--busy repeats each call with a busy Python thread inside every worker, and with as many busy processes beside them;
both begin and end with the call. The load is the same, so that what differs is the GIL.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import harness
from sockets import loopback_limit

import etha
from etha.transport.wire.flows import STREAMS

from .cases import MIB, SIDES, Row, Side, rows
from .contender import BENCH, Contender, Failed

ETHA = "etha_bus"
PEERS = (ETHA, "gloo", "nixl", "mooncake", "torchstore")
ALONE, THREAD, PROCESS = "alone", "busy thread", "busy process"
#: Etha is to be ahead by this, and a busy thread is to cost at most this.
FACTOR = 1.3
LEGEND = f"! behind, or a busy thread costs more than {FACTOR}    ~ ahead by less than {FACTOR}"


def adapter(peer: str) -> ModuleType:
    """The file of a peer; it imports the peer itself only in a rank."""
    return import_module(f"peers.{peer}")


def installed(pythons: Mapping[str, str], peers: Sequence[str]) -> list[str]:
    """Those of ``peers`` that their interpreter can import; a line for each."""
    found = []
    for peer in peers:
        module = adapter(peer)
        command = [pythons[peer], "-c", module.PROBE]
        probe = subprocess.run(command, capture_output=True, text=True, cwd=BENCH, timeout=120)
        if probe.returncode == 0:
            found.append(peer)
            print(f"{module.NAME:12}{probe.stdout.strip().splitlines()[-1]}")
        else:
            reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"{module.NAME:12}skipped: {reason}\n{'':12}to install: {module.INSTALL}")
    return found


@contextmanager
def spinners(count: int) -> Iterator[list[int]]:
    """The pids of ``count`` stopped processes that do nothing but spin when they go on."""
    spin = "print(flush=True)\nwhile True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", spin], stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def once(contender: Contender, how: str) -> None:
    """One call in one of three ways."""
    count = len(contender.ranks)
    with spinners(count if how == PROCESS else 0) as pids:
        seconds = contender.go(["thread"] * count if how == THREAD else pids)
    contender.seconds.setdefault(how, []).append(seconds)


@contextmanager
def failing(contender: Contender) -> Iterator[None]:
    """What goes wrong in a contender ends its part in the row, and is told in the table."""
    try:
        yield
    except Failed as error:
        contender.failure = str(error)
        contender.quit()


def limit(row: Row) -> float:
    """GB/s of the machine now."""
    if row.way == "tcp":
        return loopback_limit(row.nbytes, STREAMS, 1)
    return harness.copy_limit(row.nbytes, 2, 1)


def need(row: Row, peer: str) -> int:
    """Bytes that all variants of a peer hold at a time."""
    return len(adapter(peer).variants(row)) * int(adapter(peer).COPIES) * row.nbytes


def free_bytes() -> int:
    """Memory that this machine can give, with a reserve."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024 * 9 // 10


def together(row: Row, peers: Sequence[str], free: int) -> list[list[str]]:
    """The peers in groups whose tensors fit in ``free`` bytes at the same time; Etha is in every group."""
    ours = [peer for peer in peers if peer == ETHA]
    begin = sum(need(row, peer) for peer in ours) + 2 * row.nbytes  # the limit copies, too
    groups, used = [ours], begin
    for peer in (peer for peer in peers if peer != ETHA):
        if groups[-1] != ours and used + need(row, peer) > free:
            groups.append(ours)
            used = begin
        groups[-1] = [*groups[-1], peer]
        used += need(row, peer)
        if used > free:
            raise SystemExit(f"{row.key} with {peer} needs {used / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB are free")
    return groups


def measure(row: Row, contenders: list[Contender], rounds: int, busy: bool) -> float:
    """Run all rounds; the median of the limit."""
    hows = (ALONE, THREAD, PROCESS) if busy else (ALONE,)
    limits = []
    try:
        for contender in contenders:
            print(f"... {row.key}: {contender.name}", file=sys.stderr)
            with failing(contender):
                contender.start()
                contender.prove(1)
        for number in range(rounds):
            limits.append(limit(row))
            begin = number % len(contenders)
            for contender in contenders[begin:] + contenders[:begin]:
                if not contender.failure:
                    with failing(contender):
                        for how in hows:
                            once(contender, how)
        for contender in contenders:
            if not contender.failure:
                with failing(contender):
                    contender.prove(2)
    finally:
        for contender in contenders:
            contender.quit()
    return statistics.median(limits)


def show(row: Row, contenders: list[Contender], bound: float, busy: bool) -> None:
    """The table of a row."""
    where = 'between two "hosts", tcp' if row.way == "tcp" else "one host"
    what = f"memmove, two threads: {bound:.2f} GB/s" if row.way == "host" else f"{STREAMS} sockets: {bound:.2f} GB/s"
    print(f"\n{row.key}: {row.title}, {row.nbytes / MIB:.1f} MiB, {where}; limit, {what}")
    ours = [c for c in contenders if c.peer == ETHA and not c.failure]
    heads = "".join(f"{f'etha {c.variant}':>24}" for c in ours)
    costs = f"{'busy thread':>13}{'process':>9}{'ratio':>8}" if busy else ""
    print(f"{'':26}{'ms':>9}{'GB/s':>8}{'best':>8}{'of limit':>10}{costs}{heads}")
    for contender in contenders:
        name = f"{adapter(contender.peer).NAME} {contender.variant}"
        if contender.failure:
            print(f"{name:26}failed: {contender.failure}")
            continue
        alone = contender.seconds[ALONE]
        median = statistics.median(alone)
        rate, best = row.nbytes / median / 1e9, row.nbytes / min(alone) / 1e9
        line = f"{name:26}{median * 1e3:9.2f}{rate:8.2f}{best:8.2f}{rate / bound:10.2f}"
        if busy:
            thread, process = (statistics.median(contender.seconds[how]) for how in (THREAD, PROCESS))
            cost = thread / process
            line += f"{thread * 1e3:13.2f}{process * 1e3:9.2f}{cost:7.2f}{'!' if cost > FACTOR else ' '}"
        if contender.peer != ETHA:
            ahead = [median / statistics.median(c.seconds[ALONE]) for c in ours]
            line += "".join(f"{a:23.2f}{'!' if a < 1 else '~' if a < FACTOR else ' '}" for a in ahead)
        print(line.rstrip())
    sys.stdout.flush()


def compete(args: argparse.Namespace, pythons: Mapping[str, str], peers: list[str]) -> bool:
    """All rows; whether Etha got through them."""
    good = True
    with harness.private_host() as directory:
        redis = harness.shared_redis()
        for row in rows(args.shrink):
            if args.rows and row.key not in args.rows:
                continue
            for number, group in enumerate(together(row, peers, free_bytes())):
                contenders = [
                    Contender(
                        peer=peer, variant=variant, row=row, shrink=args.shrink, python=pythons[peer],
                        directory=directory / f"{row.key}-{number}-{peer}-{variant.replace(' -> ', '-')}",
                        environment=adapter(peer).environment(row, variant), places=places(directory, redis, row),
                        paused=variant in adapter(peer).PAUSED,
                    )
                    for peer in group
                    for variant in adapter(peer).variants(row)
                ]  # fmt: skip
                bound = measure(row, contenders, args.rounds, args.busy)
                show(row, contenders, bound, args.busy)
                good &= not any(c.failure for c in contenders if c.peer == ETHA)
    print(f"\n{LEGEND}")
    return good


def places(directory: Path, redis: str, row: Row) -> dict[Side, dict[str, str]]:
    """Both sides of Etha on one agent of one host, or on an agent each of two hosts."""
    way = "local" if row.way == "host" else "tcp"
    return {side: harness.place(directory, redis, way, side) for side in SIDES}


def main() -> int:
    """Measure and print; 1 if Etha failed."""
    parser = argparse.ArgumentParser(
        prog="python bench/peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys, names = [row.key for row in rows()], {adapter(peer).NAME: peer for peer in PEERS}
    parser.add_argument("--rows", nargs="+", choices=keys, metavar="KEY", help=f"some of {', '.join(keys)}")
    parser.add_argument("--peers", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="also beside busy threads and busy processes")
    parser.add_argument("--shrink", type=int, default=1, help="256: rows of 1 MiB instead of 256 MiB")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of a peer; default: this one"
    )
    args = parser.parse_args()
    pythons = dict.fromkeys(PEERS, sys.executable)
    for text in args.python:
        name, found, path = text.partition("=")
        if name not in names or not found:
            parser.error(f"--python {text}: NAME=PATH with a name of {', '.join(names)}")
        pythons[names[name]] = str(Path(path).absolute())
    print(harness.machine())
    if Path(etha.__file__).parent.parent != BENCH.parent:
        print(f"warning   this measures the etha in {Path(etha.__file__).parent}, not the one beside bench")
    peers = installed(pythons, [names[name] for name in args.peers or names])
    return 0 if compete(args, pythons, peers) else 1
