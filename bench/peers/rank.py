"""One rank of one peer: ``python -m peers.rank`` with its seat in the arguments; obeys lines of JSON on stdin.

    {"do": "prepare"} -> what others must know     {"do": "connect", "shares": [...]}     {"do": "fill", "stamp": 1}
    {"do": "go", "beside": null} -> [start, end]     {"do": "check", "stamp": 1} -> a fault or null     {"do": "quit"}

Beside a call may run "thread", a busy thread, or a stopped process that goes on meanwhile, given by its pid.

Each answer is a line, {"good": ...} or {"bad": "traceback"}. What a library prints goes to stderr instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from . import truth
from .cases import rows
from .seat import Adapter, Seat


class Busy:
    """A thread that does nothing but hold the GIL as often as it can, from one moment to another."""

    def __init__(self) -> None:
        self._on = threading.Event()
        threading.Thread(target=self._spin, daemon=True).start()

    def _spin(self) -> None:
        count = 0
        while True:
            self._on.wait()
            while self._on.is_set():
                count += 1

    @contextmanager
    def spinning(self) -> Iterator[None]:
        """While the block runs."""
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()


@contextmanager
def running(pid: int) -> Iterator[None]:
    """A stopped process goes on while the block runs."""
    os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGSTOP)


def go(adapter: Adapter, beside: AbstractContextManager[None]) -> tuple[float, float]:
    """When one call began and ended. What runs beside it begins after the clock: it must not delay the first look."""
    start = time.perf_counter()
    with beside:
        adapter.transfer()
        return start, time.perf_counter()


def obey(order: dict[str, Any], seat: Seat, adapter: Adapter, busy: Busy) -> Any:
    """Do one thing."""
    match order["do"]:
        case "prepare":
            return adapter.prepare()
        case "connect":
            adapter.connect(order["shares"])
        case "fill" if seat.side == "source":
            truth.fill(seat.row, seat.rank, order["stamp"], adapter.held)
        case "fill":
            truth.clear(adapter.held)
        case "go" if order["beside"] == "thread":
            return go(adapter, busy.spinning())
        case "go":
            return go(adapter, running(order["beside"]) if order["beside"] else nullcontext())
        case "check":
            source = seat.side == "source"
            return None if source else truth.fault(seat.row, seat.rank, order["stamp"], adapter.held)
        case "quit":
            adapter.close()
        case other:
            raise ValueError(f"nobody here can {other}")
    return None


def main() -> None:
    """Answer orders until told to quit, or until the runner is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])
    row = next(row for row in rows(arguments["shrink"]) if row.key == arguments["row"])
    seat = Seat(
        row=row,
        side=arguments["side"],
        rank=arguments["rank"],
        variant=arguments["variant"],
        directory=Path(arguments["directory"]),
    )
    adapter: Adapter | None = None
    busy = Busy()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            adapter = adapter or import_module(f"peers.{arguments['peer']}").open_adapter(seat)
            answer = {"good": obey(order, seat, adapter, busy)}
        except Exception:
            answer = {"bad": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if order["do"] == "quit":
            break
    os._exit(0)  # a library's threads and destructors must not keep a rank that has said goodbye


if __name__ == "__main__":
    main()
