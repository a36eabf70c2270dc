"""Two trainers and two inference workers that have met, for all tests of a module that only need batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.flow.puppets import Puppet
from tests.flow.sites import private_directory

from . import acts
from .world import World, everybody


class Company:
    """``puppets`` by (side, rank), all in epoch 1."""

    def __init__(self, world: World, *, workers: int = 2, places: dict[str, str] | None = None, **devices: str) -> None:
        self.world, self.workers = world, workers
        self._places, self._devices = places or {}, devices
        self.spoilt = False
        self.puppets = {
            (side, rank): self.newcomer(side, rank) for side in ("trainer", "inference") for rank in range(workers)
        }
        self.all(acts.enter)

    def newcomer(self, side: str, rank: int) -> Puppet:
        """A fresh process for that seat."""
        return self.world.puppet(
            side, rank, self.workers, place=self._places.get(side, ""), device=self._devices.get(side, "cuda:0")
        )

    def all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same step in all at once."""
        self.spoilt = True
        found = everybody(list(self.puppets.values()), function, *args)
        self.spoilt = False
        return found

    def replace(self, side: str, rank: int) -> None:
        """Somebody who has died comes again, and all meet in the next epoch."""
        self.puppets[side, rank] = self.newcomer(side, rank)

    def end(self) -> None:
        """Close all clients, look that a played card has everything back."""
        if not self.spoilt:
            self.all(acts.leave)
            for puppet in self.puppets.values():
                puppet.leave()


class Companies:
    """One a stage, made when first asked for; another after a test that failed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._found: dict[bool, Company] = {}

    def of(self, played: bool) -> Company:
        """That of the played or of the real card."""
        found = self._found.get(played)
        if found is None or found.spoilt:
            directory = self._stack.enter_context(private_directory())
            world = self._stack.enter_context(World(directory, played=played))
            found = self._found[played] = Company(world)
            self._stack.callback(found.end)
        return found
