"""Asks the engine, as anybody would: over the OpenAI API, and which version it answers with.

python client.py http://ENGINE:PORT
"""

import sys
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Self

import requests
from model import PROMPT
from openai import OpenAI


@dataclass(frozen=True)
class Answer:
    """``text`` begins with the prompt; ``version`` is the engine's weight version that wrote it."""

    version: str
    text: str


def ask(url: str, model: str, prompt: str = PROMPT) -> Answer:
    """The engine's greedy answer; asked again where a new version came in between."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        while True:
            version = weight_version(url)
            found = api.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0.0)
            if weight_version(url) == version:
                return Answer(version, prompt + found.choices[0].text)


class Users:
    """Some threads that ask all the time, from ``start`` until the end of ``with``."""

    def __init__(self, url: str, model: str, count: int = 3) -> None:
        self._url, self._model = url, model
        self._began, self._ended = threading.Event(), threading.Event()
        self._counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """There is a version to ask for."""
        self._began.set()

    def end(self) -> None:
        """No more questions; the last answers are there when this returns."""
        self._ended.set()
        self._began.set()
        for thread in self._threads:
            thread.join()

    def summary(self) -> str:
        """How the requests ended."""
        found = self._counts
        return (
            f"{found['answers']} answers, {found['lost']} requests lost, {found['abort']} answers cut off; a version "
            f"came in during {found['met']} requests"
        )

    def _ask(self) -> None:
        self._began.wait()
        with OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as api:
            while not self._ended.is_set():
                before = weight_version(self._url)
                try:
                    found = api.completions.create(model=self._model, prompt=PROMPT, max_tokens=64, temperature=0.0)
                except Exception as error:
                    self._counts["lost"] += 1
                    print(f"a request was lost: {error}", file=sys.stderr)
                    continue
                self._counts["answers"] += 1
                self._counts[found.choices[0].finish_reason] += 1
                self._counts["met"] += weight_version(self._url) != before


def weight_version(url: str) -> str:
    """What the engine says that it answers with."""
    answer = requests.get(f"{url}/weight_info", timeout=60)
    answer.raise_for_status()
    return str(answer.json()["weight_version"])


if __name__ == "__main__":
    print(ask(sys.argv[1], "tiny"))
