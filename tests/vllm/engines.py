"""vLLM engines: a live `vllm serve` that weights are brought into, and fresh ones that loaded them from a file."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import requests

from tests.vllm.checkpoints import VOCABULARY
from tests.vllm.nursery import PATIENCE, Child, serve

PROMPTS = ("the quick brown", "lazy dog. the", "over the")
#: Answers are compared token by token.
TOKENS = 16
#: Of so many steps the logits over the whole vocabulary are compared.
STEPS = 4


def environment(workers: int, core: int = 0) -> dict[str, str]:
    """What a CPU engine of ``workers`` tensor-parallel workers wants on a small machine, from ``core`` on."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    bound = "|".join(str(cores[(core + n) % len(cores)]) for n in range(workers))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Even eager, the first request compiles something of vLLM's, for seconds.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A live `vllm serve` of random weights with the backend "etha", or one that follows a publication."""

    def __init__(
        self,
        model: Path,
        workers: int,
        env: dict[str, str],
        log: Path,
        port: int | None = None,
        *,
        raw_logits: bool = False,
        options: Sequence[str] = (),
        follows: Mapping[str, Any] | None = None,
        core: int = 0,
    ) -> None:
        """``follows``: it starts with a version of a publication and follows that, with these options."""
        self.port, self.workers = port or _free_port(), workers
        self.url = f"http://127.0.0.1:{self.port}"
        load = "dummy" if follows is None else "etha"
        arguments = ["--model", str(model), "--load-format", load, "--dtype", "bfloat16", "--enforce-eager"]
        arguments += ["--max-model-len", "128", "--max-num-seqs", "8", "--tensor-parallel-size", str(workers)]
        arguments += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model"]
        arguments += ["--weight-transfer-config", '{"backend": "etha"}']
        if raw_logits:
            arguments += ["--max-logprobs", "-1", "--logprobs-mode", "raw_logits", "--no-enable-prefix-caching"]
        if follows is not None:
            arguments += ["--additional-config", json.dumps({"etha": dict(follows)})]
        arguments += options
        self.child = Child(_serve, arguments, env={**env, **environment(workers, core)}, log=log)

    def wait(self) -> Server:
        """Until it answers; a server that ends is an error with its log."""
        until = time.monotonic() + PATIENCE
        while True:
            if not self.child.alive or time.monotonic() > until:
                raise AssertionError(f"the server does not come up; log:\n{self.child.tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return self
            except requests.ConnectionError:
                time.sleep(0.2)  # nothing tells of a port that is being listened on

    def answers(self) -> list[list[int]]:
        """The greedy tokens after each of PROMPTS."""
        found = []
        for prompt in PROMPTS:
            body = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body |= {"return_token_ids": True}
            answer = requests.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
            answer.raise_for_status()
            found.append(answer.json()["choices"][0]["token_ids"])
        return found

    def logits(self, model: str = "model") -> list[list[dict[int, float]]]:
        """Of each of PROMPTS, the logits of every token at each of STEPS; of a server with ``raw_logits``."""
        found = []
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": STEPS, "temperature": 0, "ignore_eos": True}
            body |= {"logprobs": VOCABULARY, "return_tokens_as_token_ids": True}
            answer = requests.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
            answer.raise_for_status()
            steps = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
            found.append([{int(name.removeprefix("token_id:")): logit for name, logit in s.items()} for s in steps])
        return found

    def version(self) -> str:
        return str(requests.get(f"{self.url}/weight_info", timeout=60).json()["weight_version"])

    def until_version(self, version: str, timeout: float = PATIENCE) -> None:
        """Wait until it says that it has ``version``."""
        until = time.monotonic() + timeout
        while (found := self.version()) != version:
            assert time.monotonic() < until, f"it has {found!r} and not {version!r}; log:\n{self.child.tail()}"
            time.sleep(0.05)  # nothing tells of a version but a question

    def checksums(self) -> dict[str, str]:
        """Hash of each parameter of each worker, as it lies in memory."""
        answer = requests.post(f"{self.url}/weight_checker", json={"action": "checksum"}, timeout=60)
        return dict(answer.json()["checksums"])

    def received(self) -> list[tuple[int, int, int]]:
        """Of each worker that registered, latest last: rank, bytes it receives, bytes of the checkpoint."""
        found = re.findall(r"rank (\d+) receives (\d+) of (\d+) bytes", self.child.log.read_text(errors="replace"))
        return [(int(rank), int(kept), int(of)) for rank, kept, of in found]

    def worker_pids(self) -> list[int]:
        """The processes of tensor-parallel workers, by rank."""
        found = dict(re.findall(r"\(Worker_TP(\d+) pid=(\d+)\)", self.child.log.read_text(errors="replace")))
        return [int(found[rank]) for rank in sorted(found)]

    def kill(self) -> None:
        """End it and all its processes; what it logged is shown where a test has failed."""
        self.child.kill()
        print(self.child.tail())


def _serve(pipe: Connection, arguments: list[str]) -> None:
    # What `vllm serve` runs; the command itself asks for a distribution called "vllm", which the CPU wheel is not.
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["vllm", *arguments]
    main()


def fresh(model: Path, workers: int, env: dict[str, str], log: Path) -> tuple[list[list[int]], dict[str, str]]:
    """Greedy tokens and checksums of an engine that loaded ``model`` from its file."""
    child = Child(_fresh, str(model), workers, env={**env, **environment(workers)}, log=log)
    try:
        tokens, checksums = child.ask("answers")
    finally:
        child.end()
    return tokens, checksums


def _fresh(pipe: Connection, model: str, workers: int) -> None:
    from vllm import LLM, SamplingParams

    def answers(_: str) -> tuple[list[list[int]], dict[str, str]]:
        engine: Any = LLM(
            model, tensor_parallel_size=workers, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            max_num_seqs=8, disable_log_stats=True,
        )  # fmt: skip
        how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        # One after another, as they are asked of the server: a batch may be computed in another order.
        tokens = [list(engine.generate([prompt], how, use_tqdm=False)[0].outputs[0].token_ids) for prompt in PROMPTS]
        checksums: dict[str, str] = {}
        for of_worker in engine.collective_rpc("compute_weight_checksums"):
            checksums.update(of_worker)
        return tokens, checksums

    serve(pipe, answers)
