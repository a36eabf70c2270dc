"""Trainers that are killed, and versions that come in, while users keep the engine busy: nobody loses an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests.vllm.engines import PROMPTS, Server
from tests.vllm.nursery import PATIENCE
from tests.vllm.trainers import Trainer
from tests.vllm.users import LENGTH, Users, question

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: Seconds for which an engine waits for a dead trainer, and what a busy machine adds to them at most.
LEASE, SLACK = 2.0, 10.0
#: A trainer's calls from its first to its last, which of its kind each is, and whether the new version is in after it.
CALLS = [
    ("/init_weight_transfer_engine", 1, False),
    ("/start_weight_update", 1, False),
    ("/update_weights", 1, False),  # claims the pause
    ("/pause", 1, False),
    ("/update_weights", 2, False),
    ("/finish_weight_update", 1, True),
    ("/update_weights", 3, True),  # releases it
]
MODES = ["wait", "keep", "abort"]


MOMENTS = [(*call[:2], moment, call[2]) for call in CALLS for moment in ("sent", "answered")]
MOMENTS.insert(4, ("bytes", 1, "moving", False))


@pytest.fixture(scope="module")
def versions(checkpoints: Checkpoints) -> list[Path]:
    return [checkpoints("qwen3", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def live(versions: list[Path], env: Env, room: Path) -> Iterator[Server]:
    server = Server(versions[0], 1, env, room / "load.log")
    try:
        yield server.wait()
    finally:
        server.kill()


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_is_killed_at_any_moment_while_users_ask(
    mode: str, versions: list[Path], fresh: Fresh, live: Server, env: Env, logs: Path
) -> None:
    old, new = versions
    tokens = {path: fresh(path, 1)[0] for path in versions}
    users = Users(live.url)
    again: dict[str, float] = {}
    try:
        for at, (route, number, moment, brought_in) in enumerate(MOMENTS):
            before, after = f"{mode} before {at}", f"{mode} killed {at}"
            trainer = Trainer((), old, live.url, env, logs, lease=LEASE, pause=mode)
            try:
                trainer.join()
                trainer.send(old, before)
                assert (live.version(), live.answers()) == (before, tokens[old]), "the next trainer's"
                if route == "/init_weight_transfer_engine":
                    trainer.end()
                    trainer = Trainer((), old, live.url, env, logs, lease=LEASE, pause=mode)
                with users.asking():
                    users.answered(time.monotonic())
                    kill(trainer, route, number, moment, new, after)
                    again[f"{route} {number} {moment}"] = users.answered(time.monotonic(), timeout=LEASE + SLACK)
            finally:
                trainer.kill()
            assert not users.failed, (route, moment)
            expected = (after, tokens[new]) if brought_in else (before, tokens[old])
            assert (live.version(), live.answers()) == expected, (route, moment)
        cut = [answer for answer in users.answers if answer.finish != "length" or len(answer.tokens) != LENGTH]
        assert all(answer.finish == "abort" for answer in cut), cut
        assert mode == "abort" or not cut, cut
    finally:
        users.end()
    print(f"{mode}: {len(again)} kills, {len(users.answers)} answers, {len(cut)} cut off; seconds to the next answer:")
    print("".join(f"  {seconds:5.2f} {where}\n" for where, seconds in again.items()))


def kill(trainer: Trainer, route: str, number: int, moment: str, new: Path, version: str) -> None:
    """The trainer, which has not joined yet where it is to die as it joins, dies as told; returns when it is dead."""
    (rank,) = trainer.ranks
    if route == "bytes":
        rank.send("die in the transfer", str(new), version)
    elif route == "/init_weight_transfer_engine":
        rank.ask("dies at", route, number, moment)
        rank.send("join")
    else:
        rank.send("die at", route, number, moment, str(new), version)
    rank.ended()


def test_a_request_goes_on_with_the_version_that_comes_in(
    versions: list[Path], live: Server, env: Env, logs: Path
) -> None:
    """With "keep" an answer's beginning is of the old version; its rest is what the new one says after that beginning.

    Keys and values of the beginning are computed anew: else the rest would be of neither.
    """
    trainer = Trainer((), versions[0], live.url, env, logs, pause="keep")
    length, mixed, whole = 100, 0, 0
    try:
        trainer.join()
        trainer.send(versions[0], "first")
        for number in range(1, 201):  # many answers end before a version comes in
            old = ask(live, PROMPTS[0], length)
            answer, prompt = ask_across(live, trainer, versions[number % 2], f"in flight {number}", length)
            new = ask(live, PROMPTS[0], length)
            assert len(answer) == length, "no token is lost"
            assert old != new
            if answer in (old, new):  # it had ended already
                whole += 1
                continue
            common = next(k for k in range(length) if old[k] != answer[k])
            rests = (answer[k:] == ask(live, [*prompt, *answer[:k]], length - k) for k in range(common, 0, -1))
            assert any(rests), f"after {common} tokens the answer is neither version's"
            mixed += 1
            if mixed == 5:
                break
        assert mixed == 5, "requests that a version met"
    finally:
        trainer.end()
    print(f"{mixed + whole} versions, {mixed} met a request, none was lost")


def ask(server: Server, prompt: str | list[int], length: int) -> list[int]:
    answer = requests.post(f"{server.url}/v1/completions", json=question(prompt, length), timeout=PATIENCE)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def ask_across(server: Server, trainer: Trainer, version: Path, name: str, length: int) -> tuple[list[int], list[int]]:
    """An answer that has begun when the trainer sends a version: its tokens, and those of its prompt."""
    body = question(PROMPTS[0], length, stream=True)
    tokens: list[int] = []
    prompt: list[int] = []
    with requests.post(f"{server.url}/v1/completions", json=body, stream=True, timeout=PATIENCE) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            word = line.removeprefix(b"data: ")
            if not word or word == b"[DONE]":
                continue
            (choice,) = json.loads(word)["choices"]
            prompt += choice.get("prompt_token_ids") or []
            if not tokens:
                trainer.ranks[0].send("send", str(version), name)
            tokens += choice["token_ids"] or []
    trainer.ranks[0].hear()
    return tokens, prompt
