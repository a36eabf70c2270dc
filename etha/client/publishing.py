"""Publication and Subscription of the blocking client: facades over those of the async one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from typing import Any, Generic, Self

from etha.client.loop_thread import in_own_thread
from etha.client.publication import AsyncPublication, PublishedVersion, SubscriberState
from etha.client.results import OfOneProcess, OnCommit, OnProgress, Version
from etha.client.subscription import AsyncSubscription, AsyncVersions, Taken, Update

#: Runs a coroutine on the clients' loop thread and waits for it.
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Publication(OfOneProcess):
    """What ``TensorBusClient.publish`` returns; ``with`` closes it. See ``AsyncPublication``."""

    def __init__(self, inner: AsyncPublication, run: Run, run_closing: Run) -> None:
        """Not for users."""
        self._inner, self._run, self._run_closing = inner, run, run_closing

    @property
    def name(self) -> str:
        """The publication's name."""
        return self._inner.name

    @property
    def version(self) -> Version:
        """The label of the version that this rank has put last; None before the first."""
        return self._inner.version

    @property
    def seq(self) -> int:
        """The number of the version that this rank has put last; that of an earlier launch before the first."""
        return self._inner.seq

    def put(
        self, version: Version = None, *, wait: int = 0, grace: float = 5.0, timeout: float | None = None
    ) -> PublishedVersion:
        """Set the tensors aside as the next version; see ``AsyncPublication.put``."""
        put: PublishedVersion = self._run(self._inner.put(version, wait=wait, grace=grace, timeout=timeout))
        return put

    def subscribers(self, *, timeout: float | None = None) -> list[SubscriberState]:
        """Who follows this publication, by name."""
        found: list[SubscriberState] = self._run(self._inner.subscribers(timeout=timeout))
        return found

    def holders(
        self, *, other_than: Collection[str] | None = None, left: bool = False, timeout: float | None = None
    ) -> frozenset[str]:
        """Names of the subscribers that hold the version put last, or a newer one; see ``AsyncPublication.holders``."""
        found: frozenset[str] = self._run(self._inner.holders(other_than=other_than, left=left, timeout=timeout))
        return found

    def close(self) -> None:
        """End this rank's part. Subscribers keep what they hold. Idempotent."""
        self._run_closing(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Versions(Generic[Taken]):
    """``AsyncVersions`` for the blocking client: ``for`` yields what ``next`` returns, ``with`` closes it."""

    def __init__(self, inner: AsyncVersions[Taken], run: Run, run_closing: Run) -> None:
        """Not for users."""
        self._each, self._run, self._run_closing = inner, run, run_closing

    def close(self) -> None:
        """Follow the publication no more. What was received stays. Idempotent."""
        self._run_closing(self._each.close())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Taken:
        """The next version, however long it takes. Ends when this is closed."""
        try:
            taken: Taken = self._run(self._each.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Subscription(OfOneProcess, Versions[Update]):
    """What ``TensorBusClient.subscribe`` returns; ``with`` closes it, ``for`` yields new versions.

    See ``AsyncSubscription``.
    """

    def __init__(self, inner: AsyncSubscription, run: Run, run_closing: Run) -> None:
        """Not for users."""
        super().__init__(inner, run, run_closing)
        self._inner = inner

    @property
    def name(self) -> str:
        """The publication's name."""
        return self._inner.name

    @property
    def subscriber(self) -> str:
        """This subscriber's name."""
        return self._inner.subscriber

    @property
    def version(self) -> Version:
        """The label of the version that the tensors hold, its ``seq`` if it has none; None if they hold no version."""
        return self._inner.version

    @property
    def seq(self) -> int:
        """The number of the version that the tensors hold whole; 0 if they hold none."""
        return self._inner.seq

    @property
    def lag(self) -> int:
        """How many versions newer than that of the tensors have been announced, as far as this worker has heard."""
        return self._inner.lag

    def next(
        self,
        *,
        newer_than: int | None = None,
        version: Version = None,
        on_commit: OnCommit | None = None,
        progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Update:
        """Receive the newest version, once there is one that the tensors do not hold; see ``AsyncSubscription.next``.

        A plain ``on_commit`` runs on a thread of its own.
        """
        if callable(on_commit):  # anything else is refused below
            on_commit = in_own_thread(on_commit)
        update: Update = self._run(
            self._inner.next(
                newer_than=newer_than, version=version, on_commit=on_commit, progress=progress, timeout=timeout
            )
        )
        return update
