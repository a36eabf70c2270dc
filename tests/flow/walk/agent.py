"""An agent that records itself: ``python -m tests.flow.walk.agent CONTROL TRACE [options of etha.agent]``.

CONTROL is the descriptor of a socket. "start" is answered once it records, "stop" once TRACE holds what was recorded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from etha.agent import __main__ as program
from tests.flow.walk.recorder import Recorder


def control(commands: socket.socket, recorder: Recorder, trace: Path) -> None:
    """Obey ``commands`` on the running event loop."""
    loop = asyncio.get_running_loop()

    def obey() -> None:
        word = commands.recv(16)
        if word == b"start":
            # What the agent does all the time belongs to no transfer: its lease, its wake-ups, the status writer's
            # task of an earlier transfer.
            before, here = asyncio.all_tasks(), threading.get_ident()
            recorder.start(lambda: threading.get_ident() == here and asyncio.current_task(loop) in before)
        elif word == b"stop":
            trace.write_text(json.dumps(recorder.stop()))
        else:
            loop.remove_reader(commands)
            return
        commands.send(word)

    loop.add_reader(commands, obey)


def main(descriptor: str, trace: str, *options: str) -> int:
    """The agent, until it is asked to leave."""
    recorder, commands = Recorder("agent"), socket.socket(fileno=int(descriptor))
    serve = program.serve

    async def recorded(*args: Any, **kwargs: Any) -> None:
        control(commands, recorder, Path(trace))
        await serve(*args, **kwargs)

    program.serve = recorded  # type: ignore[assignment]
    return program.main(list(options))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
