"""What a live vLLM's users notice when trainers join it: late, never, or dead before they have.

    .venv-vllm/bin/python bench/joining.py [--rounds 4] [--requests 125] [--users 4]

One engine (a tiny Qwen3, one worker) answers all the time. Rounds alternate: in one nobody joins, in the next three
trainers of two ranks do. One has a rank that comes late, one is killed while the engine waits for it, one never whole.
All trainers are forked before the first round and idle until they are due, so that both kinds of round have the same
processes. Seconds are the users', from request to answer; a gap is the time between two answers to anybody.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm.checkpoints import make
from tests.vllm.engines import Server
from tests.vllm.fleets.test_meeting import begin
from tests.vllm.happenings import Happenings, happenings
from tests.vllm.trainers import Trainer
from tests.vllm.users import Answer, Users

#: Answers between what happens in a round.
BETWEEN = 20
KINDS = ("quiet", "joining")


def joined(users: Users, events: Happenings, trainers: Sequence[Trainer]) -> None:
    """One trainer comes late, one dies, one is never complete."""
    late, dead, never = trainers
    begin(late, events)
    users.answered(time.monotonic(), BETWEEN)
    late.ranks[1].send("go")
    for rank in late.ranks:
        rank.hear()
    late.end()
    begin(dead, events)
    users.answered(time.monotonic(), BETWEEN)
    dead.kill()
    begin(never, events)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[list[Answer]]]:
    """The answers of each round of either kind."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.vllm.preload"])
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    env = {"ETHA_RUNTIME_DIR": f"{directory}/run", "ETHA_NAMESPACE": "joining", "ETHA_IDLE": "600"}
    model = make("qwen3", directory / "model", seed=0).path
    found: dict[str, list[list[Answer]]] = {kind: [] for kind in KINDS}
    server = Server(model, 1, env, directory / "server.log")
    trainers: list[Trainer] = []
    try:
        server.wait()
        trainers += [
            Trainer((2,), model, server.url, env, directory, stages="alone") for _ in range(3 * options.rounds)
        ]
        users = Users(server.url, options.users)
        with happenings(env, directory / "agent.log") as events:
            with users.asking():
                users.answered(time.monotonic(), options.requests)  # of the first ones, some are slow
            for number in range(options.rounds):
                mine = trainers[3 * number : 3 * number + 3]
                for kind in KINDS:
                    since = time.monotonic()
                    with users.asking():
                        if kind == "joining":
                            joined(users, events, mine)
                        users.answered(since, options.requests)
                    found[kind].append([answer for answer in users.answers if answer.began >= since])
                for trainer in mine:
                    trainer.kill()
        users.end()
        assert not users.failed, users.failed
    except BaseException:
        print(server.child.tail(), file=sys.stderr)
        raise
    finally:
        for trainer in trainers:
            trainer.kill()
        server.child.kill()
    return found


def table(found: dict[str, list[list[Answer]]]) -> str:
    """Seconds of both kinds, and what the one is of the other."""
    lines = [f"{'':<8} {'answers':>8} {'p50 ms':>8} {'p99 ms':>8} {'longest gap ms':>15}"]
    numbers = {}
    for kind, rounds in found.items():
        times = [answer.ended - answer.began for answers in rounds for answer in answers]
        gaps = [b - a for answers in rounds for a, b in pairwise(sorted(answer.ended for answer in answers))]
        numbers[kind] = statistics.quantiles(times, n=100)
        p50, p99 = 1000 * numbers[kind][49], 1000 * numbers[kind][98]
        lines.append(f"{kind:<8} {len(times):>8} {p50:>8.0f} {p99:>8.0f} {1000 * max(gaps):>15.0f}")
    quiet, joining = (numbers[kind] for kind in KINDS)
    lines.append(f"joining of quiet: p50 {joining[49] / quiet[49]:.2f}, p99 {joining[98] / quiet[98]:.2f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=125, help="answers in each round")
    parser.add_argument("--users", type=int, default=4)
    options = parser.parse_args()
    print(harness.machine())
    with harness.private_host() as directory:
        print(table(measure(options, directory)))


if __name__ == "__main__":
    main()
