"""Users of a live engine: they ask it without a pause of their own, and every answer is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests

from tests.vllm.engines import PROMPTS
from tests.vllm.nursery import PATIENCE

#: Tokens of each answer.
LENGTH = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: seconds of ``time.monotonic``, its tokens and why it ended ("length" is all that was asked for)."""

    began: float
    ended: float
    tokens: tuple[int, ...]
    finish: str


class Users:
    """``count`` threads that ask ``url``, each its next question when it has an answer, until ``end``."""

    def __init__(self, url: str, count: int = 4) -> None:
        self._url = url
        self.answers: list[Answer] = []
        #: What came instead of an answer.
        self.failed: list[str] = []
        self._changed = threading.Condition()
        self._held, self._ended, self._asking = True, False, 0
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def asking(self) -> Iterator[Users]:
        """They ask in here, and have their answers before it is left."""
        with self._changed:
            self._held = False
            self._changed.notify_all()
        try:
            yield self
        finally:
            with self._changed:
                self._held = True
                assert self._changed.wait_for(lambda: not self._asking, PATIENCE), "requests without an answer"

    def answered(self, since: float, count: int | None = None, timeout: float = PATIENCE) -> float:
        """Wait until ``count`` requests that began after ``since`` have an answer; seconds from ``since`` to the first.

        ``count``: one for each user where it is not given.
        """
        count = len(self._threads) if count is None else count

        def found() -> list[Answer]:
            return [answer for answer in self.answers if answer.began >= since]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count or self.failed, timeout), (
                f"{len(found())} of {count} answers in {timeout} s"
            )
            assert not self.failed, self.failed
            return min(answer.ended for answer in found()) - since

    def end(self) -> None:
        """No more questions."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _ask(self, number: int) -> None:
        with requests.Session() as session:
            while self._turn():
                began = time.monotonic()
                found: Answer | str
                try:
                    body = question(PROMPTS[number % len(PROMPTS)], LENGTH)
                    answer = session.post(f"{self._url}/v1/completions", json=body, timeout=PATIENCE)
                    answer.raise_for_status()
                    (choice,) = answer.json()["choices"]
                    tokens, finish = tuple(choice["token_ids"]), choice["finish_reason"]
                    found = Answer(began, time.monotonic(), tokens, finish)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                with self._changed:
                    self._asking -= 1
                    if isinstance(found, Answer):
                        self.answers.append(found)
                    else:
                        self.failed.append(found)
                    self._changed.notify_all()

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._held)
            if not self._ended:
                self._asking += 1
            return not self._ended


def question(prompt: str | list[int], length: int, **more: Any) -> dict[str, Any]:
    """The body of a request for ``length`` greedy tokens, which come by their numbers."""
    body = {"model": "model", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, **more}
