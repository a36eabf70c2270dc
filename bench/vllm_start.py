"""How soon a vLLM engine answers that starts from a publication, beside one that reads safetensors of the same weights.

    .venv-vllm/bin/python bench/vllm_start.py [--rounds 5] [--layers 16] [--hidden 1024]

Both are the whole server, from the start of its process to its first answer of /health; rounds alternate. The file has
been read before, so it lies in the page cache. The publisher is another process of this host, which has put the version
before the engine starts and does nothing meanwhile. Whether the weights are right is compared: the engines answer with
the same tokens. How long the parts of it took is what the engines log.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm.checkpoints import make
from tests.vllm.engines import Server
from tests.vllm.publishers import PUBLICATION, Publisher

#: What is measured of each way to start.
PARTS = {
    "file": ("answers after", "weights are read"),
    "etha": ("answers after", "memory for versions", "a version is received", "it is loaded"),
}
WAYS = tuple(PARTS)
_READ = re.compile(r"Loading weights took ([0-9.]+) seconds")
_TAKEN = re.compile(r"([0-9.]+) s for memory of versions, ([0-9.]+) s to receive it, ([0-9.]+) s to load it")


def started(way: str, model: Path, env: dict[str, str], log: Path) -> tuple[list[float], list[list[int]]]:
    """(seconds until it answers and of the parts that its log names, its tokens)."""
    follows = {"publication": PUBLICATION, "subscriber": "engine"} if way == "etha" else None
    options = () if way == "etha" else ("--load-format", "safetensors")
    begun = time.monotonic()
    server = Server(model, 1, env, log, options=options, follows=follows)
    try:
        server.wait()
        seconds = time.monotonic() - begun
        tokens = server.answers()
    finally:
        server.child.kill()
    text = log.read_text(errors="replace")
    (said,) = (_READ if way == "file" else _TAKEN).findall(text)
    return [seconds, *map(float, [said] if isinstance(said, str) else said)], tokens


def measure(options: argparse.Namespace, directory: Path) -> None:
    """Run all rounds and print the table."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.vllm.preload"])
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    env = {"ETHA_RUNTIME_DIR": f"{directory}/run", "ETHA_NAMESPACE": "start", "ETHA_IDLE": "600"}
    hidden = options.hidden
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": options.layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    model = make("qwen3", directory / "model", seed=0, **sizes, **heads).path
    nbytes = (model / "model.safetensors").stat().st_size
    publisher = Publisher(model, env, directory / "publisher.log")
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    answers = []
    try:
        publisher.put(model, "v1")
        for number in range(options.rounds + 1):
            for way in WAYS:
                seconds, tokens = started(way, model, env, directory / f"{way}-{number}.log")
                answers.append(tokens)
                if number:  # the first of each reads its programs from the disk
                    found[way].append(seconds)
    finally:
        publisher.kill()
    assert all(tokens == answers[0] for tokens in answers), "the engines answer differently"
    print(f"\n{nbytes / harness.MIB:.0f} MiB of weights, {options.rounds} rounds, medians (least to most) in seconds")
    for way, parts in PARTS.items():
        for part, seconds in zip(parts, zip(*found[way], strict=True), strict=True):
            print(f"{way:<6} {part:<22} {statistics.median(seconds):6.2f} ({min(seconds):.2f} to {max(seconds):.2f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    print(harness.machine())
    with harness.private_host() as directory:
        measure(options, directory)


if __name__ == "__main__":
    main()
