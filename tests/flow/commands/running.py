"""``etha WORDS`` in a process of its own: forked from one that has torch loaded, which a user's command loads anew."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from tests.flow import nursery
from tests.processes import CONTEXT

SECONDS = 60


def etha(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``etha WORDS`` with ``variables`` in its environment."""
    env = {**os.environ, "COLUMNS": "200", **variables}
    with tempfile.TemporaryDirectory() as directory:
        process = CONTEXT.Process(target=_command, args=(words, env, directory, nursery.address()))
        process.start()
        process.join(SECONDS)
        status = process.exitcode
        process.kill()
        process.join()
        process.close()
        out, err = (Path(directory, name).read_text() for name in ("out", "err"))
    if status is None:
        raise subprocess.TimeoutExpired(["etha", *words], SECONDS, out, err)
    return subprocess.CompletedProcess(["etha", *words], status, out, err)


@contextmanager
def agent(*words: str) -> Iterator[int]:
    """``etha agent`` in the foreground, once it serves; its pid. It leaves with status 0 at the end."""
    near, far = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_agent, args=(("agent", *words), dict(os.environ), far), daemon=True)
    process.start()
    far.close()
    with near, open(near.fileno(), closefd=False) as lines:
        try:
            reported = []
            for line in lines:
                reported.append(line)
                if "serves" in line:
                    break
            else:
                raise AssertionError("the agent ended: " + "".join(reported))
            assert process.pid is not None
            yield process.pid
        finally:
            process.terminate()
            process.join(SECONDS)
    assert process.exitcode == 0
    process.close()


def _agent(words: Sequence[str], env: Mapping[str, str], far: Connection) -> None:
    os.dup2(far.fileno(), sys.stderr.fileno())
    far.close()
    _run(words, env)


def _command(words: Sequence[str], env: Mapping[str, str], directory: str, agents: str | None) -> None:
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        with Path(directory, name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    nursery.use(agents)
    _run(words, env)


def _run(words: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["etha", *words]
    from etha.cli import main

    main()
