"""torchft 0.2.0's own tests of process groups, run against `etha.groups` with ``torchft.process_group`` replaced.

`make test-torchft` makes a virtual environment with torchft beside this one's torch and runs this module in it. torchft
is no dependency of Etha and nothing of it is copied.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from typing import Any

#: Cases that cannot pass because they look at private fields of torchft's classes.
PRIVATE = {
    "ProcessGroupTest.test_reconfigure_baby_process_group": "compares _future_thread, _future_pipe and _p",
}
#: Where the names of the module that is replaced live.
HOMES = {
    "etha.groups": (
        "ErrorSwallowingProcessGroupWrapper",
        "FakeProcessGroupWrapper",
        "ManagedProcessGroup",
        "ProcessGroup",
        "ProcessGroupBabyGloo",
        "ProcessGroupBabyNCCL",
        "ProcessGroupDummy",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupWrapper",
        "create_store_client",
    ),
    "etha.groups.store_client": ("TCPStore", "PrefixStore"),
}
#: torchft's private names that its tests import, and ours that mean the same.
RENAMED = {"_ErrorSwallowingWork": ("etha.groups.swallowing", "SwallowingWork")}


class Replacement(types.ModuleType):
    """``torchft.process_group``: sets attributes where they are used, so that a test may patch them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HOMES["etha.groups.store_client"]:
            setattr(importlib.import_module("etha.groups.store_client"), name, value)
        super().__setattr__(name, value)


def replace() -> None:
    """Let ``import torchft.process_group`` give names of Etha; torchft's manager stays its own."""
    torchft = importlib.import_module("torchft")
    importlib.import_module("torchft.manager")
    module = Replacement("torchft.process_group")
    for home, names in HOMES.items():
        for name in names:
            value = getattr(importlib.import_module(home), name, None)
            types.ModuleType.__setattr__(module, name, value or missing(name))
    for name, (home, own) in RENAMED.items():
        types.ModuleType.__setattr__(module, name, getattr(importlib.import_module(home), own))
    sys.modules["torchft.process_group"] = module
    torchft.process_group = module  # type: ignore[attr-defined]
    work = importlib.import_module("torchft.work")
    work._DummyWork = importlib.import_module("etha.groups.work").DummyWork  # type: ignore[attr-defined]


def missing(name: str) -> Any:
    """A name that `etha.groups` does not have (yet)."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"etha.groups has no {name}")

    return fail


def cases(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    """All cases of a suite, but those that look at private fields."""
    found: list[unittest.TestCase] = []
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            found += cases(each)
        elif short(each) not in PRIVATE:
            found.append(each)
    return found


def short(case: unittest.TestCase) -> str:
    return ".".join(case.id().split(".")[-2:])


def main(words: list[str]) -> int:
    """Run all cases, or those that have one of ``words`` in their name."""
    replace()
    suite = unittest.defaultTestLoader.loadTestsFromName("torchft.process_group_test")
    chosen = [case for case in cases(suite) if not words or any(word in case.id() for word in words)]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(chosen))
    sys.stdout.flush()
    # Threads of torchft's exporter of telemetry may hold the interpreter.
    sys.stderr.flush()
    os._exit(not result.wasSuccessful() or not result.testsRun)


if __name__ == "__main__":
    main(sys.argv[1:])
