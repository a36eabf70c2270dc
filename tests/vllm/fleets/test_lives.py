"""One engine of a larger model: peaks of memory in an update, then trainers and engines that are killed.

The engine answers with a whole version whatever dies, and the pair forms again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etha import PeerLostError
from tests.vllm.checkpoints import Checkpoint, make
from tests.vllm.engines import Server
from tests.vllm.models.test_tokens import check_versions
from tests.vllm.trainers import Trainer, forget_peak, memory

Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
MIB = 1 << 20
#: What Etha may stage, and noise of allocators: a quarter of the smallest thing that must not be copied once more.
BUDGET = 40 * MIB
#: Large enough that a gather, or a second shadow, is several budgets: 160 million parameters.
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def models(room: Path, env: Env) -> list[Path]:
    return [make("qwen3", room / f"large{seed}", seed=seed, **SIZES).path for seed in (0, 1)]


@pytest.fixture(scope="module")
def live(models: list[Path], env: Env, room: Path) -> Iterator[Server]:
    server = Server(models[0], 2, env, room / "large.log")
    try:
        yield server.wait()
    finally:
        server.kill()


def largest_layer(model: Path) -> int:
    """Bytes of the largest module of a checkpoint: what vLLM's reload has twice while it works on it."""
    layers: dict[str, int] = {}
    fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    for name, tensor in Checkpoint(model).tensors().items():
        *path, module, _ = name.split(".")
        owner = ".".join([*path, fused.get(module, module)])
        layers[owner] = layers.get(owner, 0) + tensor.nbytes
    return max(layers.values())


def test_peaks_of_both_sides(models: list[Path], live: Server, env: Env, logs: Path) -> None:
    """A trainer gathers nothing, a worker has one shadow of what it keeps."""
    model, server = models[0], live
    checkpoint = sum(tensor.nbytes for tensor in Checkpoint(model).tensors().values())
    shard = checkpoint * 2 // 2  # float32 at the trainer, on two ranks
    trainer = Trainer((2,), model, server.url, env, logs)
    try:
        workers = server.worker_pids()
        before = [memory("VmRSS", pid) for pid in workers]
        trainer.join()
        kept = [bytes_ for _, bytes_, _ in server.received()]
        for pid in workers:
            forget_peak(pid)
        met = [memory("VmRSS", pid) for pid in workers]
        peaks = [peak for *_, peak in trainer.send(model)]
        worked = [memory("VmHWM", pid) - had for pid, had in zip(workers, met, strict=True)]
        # The packed copy that a CPU makes of a layer, and the layer itself, before the live one is overwritten.
        passing = 2 * largest_layer(model) // 2
        print(f"checkpoint {checkpoint / MIB:.0f} MiB, kept {[k / MIB for k in kept]}, shard {shard / MIB:.0f} MiB")
        print(f"a worker's shadow: {[(a - b) / MIB for a, b in zip(met, before, strict=True)]} MiB")
        print(f"peaks above that in the update: {[w / MIB for w in worked]} MiB, passing {passing / MIB:.0f} MiB")
        print(f"peaks of the trainer's ranks in the update: {[p / MIB for p in peaks]} MiB")
        assert max(peaks) < BUDGET < shard / 4, "no rank of the trainer gathers or copies"
        assert max(kept) < checkpoint * 0.51
        for had, has, needs in zip(before, met, kept, strict=True):
            assert has - had < needs + BUDGET, "one shadow of what it keeps"
        assert max(worked) < BUDGET + passing < max(kept), "a layer at a time, no second shadow"
        again = [memory("VmRSS", pid) for pid in workers]
        trainer.send(model)
        grown = [memory("VmRSS", pid) - had for pid, had in zip(workers, again, strict=True)]
        assert max(grown) < BUDGET, "a second version takes the place of the first"
    finally:
        trainer.end()


def test_two_workers(models: list[Path], live: Server, fresh: Fresh, env: Env, logs: Path) -> None:
    """Versions of every trainer; see test_tokens.py."""
    check_versions(live, models, fresh, env, logs)


def status(env: Env) -> str:
    etha = Path(sys.executable).with_name("etha")
    reported = subprocess.run([etha, "status", "--json"], env={**os.environ, **env}, capture_output=True, timeout=60)
    return json.dumps(json.loads(reported.stdout))


def test_lives_of_both_sides(models: list[Path], live: Server, fresh: Fresh, env: Env, logs: Path) -> None:
    """A trainer's rank dies while bytes move; a whole trainer dies before they do; then the engine dies."""
    (old, new), server = models, live
    (tokens, _), (other, checksums) = fresh(old, 2), fresh(new, 2)
    trainers = [Trainer((2,), old, server.url, env, logs)]
    try:
        trainers[0].join()
        trainers[0].send(old, "first")
        assert server.answers() == tokens

        # A rank is killed in its transfer.
        trainers[0].ranks[1].send("die in the transfer", str(new), "torn")
        with pytest.raises(PeerLostError, match="trainer"):
            trainers[0].ranks[0].ask("send", str(new), "torn")
        assert server.version() == "first"
        assert server.answers() == tokens
        assert "trainer" in status(env)
        trainers[0].kill()

        # A trainer of another size goes on, and is killed when the engine waits for its bytes.
        trainers.append(Trainer((3,), old, server.url, env, logs))
        trainers[1].join()
        trainers[1].send(old, "second")
        assert server.version() == "second"
        for rank in trainers[1].ranks[1:]:
            rank.send("send", str(new), "never")
        assert trainers[1].ranks[0].ask("send, and say when it waits", str(new), "never") == "waits"
        trainers[1].kill()
        assert server.answers() == tokens
        trainers.append(Trainer((), old, server.url, env, logs))
        trainers[2].join()
        trainers[2].send(new, "third")
        assert (server.version(), server.answers()) == ("third", other)

        # The engine is killed; another in its place catches up with the next version.
        server.kill()
        trainers[2].ranks[0].send("send", str(new), "fourth")
        server = Server(old, 2, env, logs / "restarted.log", port=server.port).wait()
        trainers[2].ranks[0].hear()
        assert (server.version(), server.answers(), server.checksums()) == ("fourth", other, checksums)
    finally:
        for trainer in trainers:
            trainer.kill()
        if server is not live:
            server.kill()
