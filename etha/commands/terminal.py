"""What the commands share: where they print, and how they end on Ctrl-C. Imports nothing that takes long."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

#: Columns if the output is not a terminal.
PLAIN_WIDTH = 132

out = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH)


def print_json(value: dict[str, Any]) -> None:
    """Print one line of JSON and flush it, so that the reader of a pipe gets it at once."""
    typer.echo(json.dumps(value))
    sys.stdout.flush()


@contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """End the command without a traceback on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@contextmanager
def closed_pipe_ends() -> Iterator[None]:
    """End the command without a word once nobody reads its output any more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        raise typer.Exit(0) from None
