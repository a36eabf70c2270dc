"""What Etha says has happened, waited for: events of its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from redis import Redis

from tests.vllm.nursery import PATIENCE, Child


class Happenings:
    """The events of a runtime directory from now on."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._key = f"etha:{{{namespace}}}:events"
        last = redis.xrevrange(self._key, count=1)
        self._after = last[0][0] if last else "0"

    def wait(self, *wanted: dict[str, str]) -> None:
        """Until an event with these fields has come for each of ``wanted``, in any order."""
        left = list(wanted)
        while left:
            found = self._redis.xread({self._key: self._after}, count=1, block=int(PATIENCE * 1000))
            assert found, f"no event in {PATIENCE} s, of {left}"
            ((_, ((self._after, event),)),) = found  # type: ignore[str-unpack]
            left = [fields for fields in left if not event.items() >= fields.items()]


@contextmanager
def happenings(env: dict[str, str], log: Path) -> Iterator[Happenings]:
    """Listen; the agent and its Redis are started before, for there would be nobody to listen to."""
    Child(_start_agent, env=env, log=log).hear()
    path = Path(env["ETHA_RUNTIME_DIR"]) / "redis.sock"
    with Redis(unix_socket_path=str(path), decode_responses=True, socket_timeout=2 * PATIENCE) as redis:
        yield Happenings(redis, env["ETHA_NAMESPACE"])


def _start_agent(pipe: Connection) -> None:
    from etha import TensorBusClient

    with TensorBusClient() as client:
        client.status(timeout=PATIENCE)
    pipe.send(None)
