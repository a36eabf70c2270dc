"""Asks the engine, as anybody would: over the OpenAI API, and which version it answers with.

python client.py http://ENGINE:PORT
"""

import sys
from dataclasses import dataclass

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


def weight_version(url: str) -> str:
    """What the engine says that it answers with."""
    answer = requests.get(f"{url}/weight_info", timeout=60)
    answer.raise_for_status()
    return str(answer.json()["weight_version"])


if __name__ == "__main__":
    print(ask(sys.argv[1], "tiny"))
