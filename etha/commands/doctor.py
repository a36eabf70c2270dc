"""``etha doctor``: what this machine can do for Etha, and how to mend what it cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from etha.commands.terminal import out, progress
from etha.config import Settings, check_name
from etha.printable import printable

if TYPE_CHECKING:
    from etha.doctor import Finding

#: Colours of the doctor's verdicts.
COLOURS = {"ok": "green", "note": "yellow", "fails": "red"}


def doctor(
    redis: Annotated[
        str | None, typer.Option(help="URL of Redis: also try whether its agents can be reached from this host")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="default: $ETHA_NAMESPACE, else 'default'")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="a list of {check, verdict, found, mend}; verdict: ok, note or fails")
    ] = False,
) -> None:
    """Try what this machine must be able to do, and say how to mend what fails; exit status 1 if anything does.

    With --redis: would another host and this one reach each other? It connects to every live agent of the namespace
    and says which address of this host an agent could listen on. Run it on both hosts.
    """
    settings = Settings.from_env()
    if redis is not None:
        settings = replace(settings, redis_url=redis)
    if namespace is not None:
        settings = replace(settings, namespace=check_name("namespace", namespace))
    with progress("importing torch") as bar:
        from etha.doctor import examine

        findings = examine(settings, between_hosts=redis is not None, progress=bar.at)
    if as_json:
        lines = [
            {"check": finding.name, "verdict": finding.verdict, "found": finding.text, "mend": finding.mend}
            for finding in findings
        ]
        typer.echo(json.dumps(lines, indent=1))
    else:
        show(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def show(findings: Sequence[Finding]) -> None:
    """A table of what was found, and below it what to do."""
    from rich.table import Table

    table = Table()
    for heading in ("check", "verdict", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, Text(finding.verdict, COLOURS[finding.verdict]), Text(printable(finding.text)))
    out.print(table)
    for finding in findings:
        if finding.mend:
            out.print(Text(printable(f"{finding.name}: {finding.mend}"), COLOURS[finding.verdict]))
