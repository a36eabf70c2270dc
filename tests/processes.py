"""Processes of tests are forked from a server that has loaded what they need: torch and pytest take seconds."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")

#: pytest is the main module of every process: each would load it anew.
_modules = ["pytest"]


def preload(*modules: str) -> None:
    """What the server of this run loads besides what other files have named; call it where a test file is imported."""
    _modules.extend(module for module in modules if module not in _modules)
    CONTEXT.set_forkserver_preload([*_modules, "tests.frozen"])
