"""Lets Etha's threads leave the core to which OpenMP has bound an engine's own thread.

On a CPU vLLM has OpenMP bind the threads of a worker to a core each, its main thread to the first one. A thread that
the main thread starts is bound to the same core, and so is an agent that it starts. There they would share one core
with each other and with every step of the engine.
"""

from __future__ import annotations

import os

from etha.client.loop_thread import LoopThread


def leave_bound_core(loop_thread: LoopThread) -> None:
    """Let ``loop_thread``, and what it starts, run wherever the process that started this one may, if this thread is
    bound to one core."""
    own = os.sched_getaffinity(0)
    try:
        allowed = own | os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended, or is another user's
        return
    if len(own) == 1 < len(allowed):
        loop_thread.call(_run_on(allowed))


async def _run_on(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
