"""One of the two jobs: ``python -m etha.demo.job trainer OPTIONS --store FILE --report FD``.

Loads torch once and forks the job's ranks, each with its place in a process group of the job's own.
A rank that dies takes the job down, with a line that says which.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from etha.demo import inference, replica, synthetic, trainer
from etha.demo.events import Reporter
from etha.demo.options import Options, ranks_of
from etha.demo.process import describe, die_with_parent
from etha.demo.seats import DemoSeat, seat

log = logging.getLogger(__name__)


def work(job: str, options: Options, place: DemoSeat, release: int) -> Callable[[Reporter], None]:
    """The function that a rank of ``job`` runs at its ``place``. A job of a fleet ends once ``release`` is closed."""
    if job == "trainer" and options.replicas:
        return lambda report: trainer.publish(options, place, report, release)
    if job.startswith("replica-"):
        return lambda report: asyncio.run(replica.follow(job, options, place, report, release))
    if job == "trainer":
        send = trainer.train if options.synthetic is None else synthetic.send
        return lambda report: send(options, place, report)
    receive = inference.serve if options.synthetic is None else synthetic.receive
    return lambda report: asyncio.run(receive(options, place, report))


def run_rank(job: str, rank: int, options: Options, store: str, report: int, release: int, parent: int) -> None:
    """The whole life of one rank. ``report`` is the pipe to the launcher, which only rank 0 keeps."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    if rank != 0:
        os.close(report)
    pipe = os.fdopen(report, "w", encoding="utf-8") if rank == 0 else None
    size, place = ranks_of(job), seat(job, rank, options)
    place.take()
    dist.init_process_group(
        place.backend,
        store=FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=options.timeout),
    )
    try:
        work(job, options, place, release)(Reporter(job, pipe))
    finally:
        dist.destroy_process_group()
        if pipe is not None:
            pipe.close()


def run_job(job: str, options: Options, store: str, report: int, release: int) -> int:
    """Run all ranks. Returns the exit status: 0, or 1 if any of them failed (the others are then killed)."""
    context = multiprocessing.get_context("fork")
    parent = os.getpid()
    ranks: list[ForkProcess] = [
        context.Process(
            target=run_rank, args=(job, rank, options, store, report, release, parent), name=f"{job} rank {rank}"
        )
        for rank in range(ranks_of(job))
    ]
    for process in ranks:
        process.start()
    os.close(report)
    running = list(ranks)
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running])
        ended = [process for process in running if process.exitcode is not None]
        running = [process for process in running if process not in ended]
        failed = [process for process in ended if process.exitcode != 0]
        if failed:
            for process in running:
                process.kill()
                process.join()
            # Logged last, below what the ranks themselves have written.
            for process in failed:
                log.error("%s %s", process.name, describe(process.exitcode))
            return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point of the module; returns the exit status."""
    parser = argparse.ArgumentParser(prog="etha.demo.job", description=__doc__)
    parser.add_argument("job")
    parser.add_argument("options", type=Options.from_json)
    parser.add_argument("--store", required=True)
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--release", type=int, default=-1)
    args = parser.parse_args(argv)
    die_with_parent(os.getppid())
    return run_job(args.job, args.options, args.store, args.report, args.release)


if __name__ == "__main__":
    sys.exit(main())
