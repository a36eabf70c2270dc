"""The docs name everything that users can set, call or meet, and nothing that is not there.

Variables, error codes, commands and their options, keys of Redis, metrics: each is collected from the code and from its
page, and the two must be equal. A message says what to add where.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from etha.config import ENVIRONMENT
from etha.errors import EthaError, Violation
from etha.store.keys import TABLE

from . import commands_page
from .test_docs import ROOT, pages, text_of, tree

#: Pages that tell users something. The history may name what is gone, and a decision what it replaced.
TOLD = [name for name in pages() if name != "CHANGELOG.md" and not name.startswith("docs/adr/")]
VARIABLES, ERRORS, METRICS = "docs/environment.md", "docs/debugging.md", "docs/metrics.md"
OURS = re.compile(r"\bETHA_[A-Z_]*[A-Z]\b")


def same(documented: set[str], there: set[str], what: str, page: str, *, add: str, drop: str = "") -> None:
    """Both sets are equal, or a message that says what to write."""
    missing, too_many = sorted(there - documented), sorted(documented - there)
    said = []
    if missing:
        said.append(f"{page} lacks {what} {', '.join(missing)}: {add}")
    if too_many:
        said.append(f"{page} names {what} {', '.join(too_many)}, which the code does not have: {drop or 'remove it'}")
    assert not said, "\n".join(said)


def first_cells(page: str, heading: str | None = None) -> set[str]:
    """What stands in backticks in the first column of the tables of a page, or of one of its sections."""
    text = text_of(page)
    if heading is not None:
        text = text.partition(f"\n{heading}\n")[2].partition(f"\n{heading.split()[0]} ")[0]
    rows = re.findall(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse(text_of(name))


def package() -> list[str]:
    return sorted(name for name in tree() if name.startswith("etha/") and name.endswith(".py"))


# ---- variables --------------------------------------------------------------------------------


def test_every_variable_of_etha_is_on_the_page_of_variables() -> None:
    for_tests = {
        variable
        for name in tree()
        if name.startswith("tests/") and name.endswith(".py")
        for variable in re.findall(r"^\w+ = .*\"(ETHA_[A-Z_]+)\"", text_of(name), re.MULTILINE)
    } - ENVIRONMENT.keys()
    same(
        {name for name in first_cells(VARIABLES) if name.startswith("ETHA_")},
        ENVIRONMENT.keys() | for_tests,
        "the variables",
        VARIABLES,
        add="add a row with meaning, default, who reads it and an example",
        drop="remove it, or add it to ENVIRONMENT in etha/config.py",
    )


def test_the_package_names_no_variable_that_help_does_not_show() -> None:
    named = {variable for name in package() for variable in OURS.findall(text_of(name))}
    assert sorted(named - ENVIRONMENT.keys()) == [], "add them to ENVIRONMENT in etha/config.py"


@pytest.mark.parametrize("page", TOLD)
def test_a_page_names_no_variable_that_is_not_read(page: str) -> None:
    known = {name for name in first_cells(VARIABLES) if name.startswith("ETHA_")}
    assert sorted(set(OURS.findall(text_of(page))) - known) == [], f"{VARIABLES} has no row for them"


def test_variables_of_others_that_settings_read_are_on_the_page() -> None:
    read = {
        node.value
        for node in ast.walk(syntax("etha/config.py"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"[A-Z][A-Z_]*[A-Z]", node.value) and not node.value.startswith("ETHA_")
    }
    documented = first_cells(VARIABLES, "## Variables of others")
    assert sorted(read - documented) == [], f'{VARIABLES}, "Variables of others", lacks them'


# ---- errors -----------------------------------------------------------------------------------


def codes(cls: type[EthaError] = EthaError) -> set[str]:
    """The code of every public error class of ``etha.errors``."""
    below = {code for child in cls.__subclasses__() if child.__module__ == "etha.errors" for code in codes(child)}
    return below if cls.__name__.startswith("_") else {cls.code, *below}


def test_every_error_code_has_its_section() -> None:
    same(
        set(re.findall(r"^### `(\w+)`$", text_of(ERRORS), re.MULTILINE)),
        codes(),
        "the sections of the error codes",
        ERRORS,
        add="add a row to the table under Errors and a section ### `code` with cause and cure",
    )
    listed = set(re.findall(r"^\| \[`(\w+)`\]\(#\1\) \|", text_of(ERRORS), re.MULTILINE))
    same(listed, codes(), "the error codes in the table under Errors", ERRORS, add="add a row")


def test_every_code_of_a_violation_has_its_row() -> None:
    made = set()
    for name in package():
        for node in ast.walk(syntax(name)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            given = [word.value for word in node.keywords if word.arg == "code"]
            if called in ("Violation", "Problem", "Refusal", "bad"):
                made |= {each.value for each in [*node.args[:1], *given] if isinstance(each, ast.Constant)}
    # One is chosen by a table of the proof.
    made |= {"uncovered", "double_write"} & set(re.findall(r'"(\w+)"', text_of("etha/plan/proof/coverage.py")))
    same(
        first_cells(ERRORS, "### `registration`"), made, "the violations", ERRORS, add="add a row under `registration`"
    )
    said = set(re.findall(r"``(\w+)``", (Violation.__doc__ or "").partition("``side``")[0])) - {"code"}
    same(said, made, "the violations", "the docstring of Violation in etha/errors.py", add="add it")


# ---- commands ---------------------------------------------------------------------------------


def test_the_page_of_commands_is_that_of_the_command_tree() -> None:
    assert text_of(commands_page.PAGE) == commands_page.page(), (
        f"run `{commands_page.MAKE}` and commit {commands_page.PAGE}"
    )


#: What may stand before a command on its line: another command, a variable, a container's image, a wrapper.
BEFORE = r"[;&|($]|\b[A-Z_]+=\S+|\bIMAGE|\bexec \S+|\.sh|\benv|--|\bPOD"


def written_commands(text: str) -> list[str]:
    """Every ``etha ...`` line of a page, from code spans and code blocks."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
    found = [re.search(rf"(?:^|{BEFORE})\s*etha ((?:[a-z]|--).*)", each) for each in [*lines, *spans]]
    return [match[1].split("#")[0] for match in found if match is not None]


@pytest.mark.parametrize("page", [name for name in TOLD if name != commands_page.PAGE])
def test_options_of_commands_that_a_page_writes_are_there(page: str) -> None:
    known, wrong = commands_page.commands(), []
    above = {opt for each in commands_page.options(commands_page.root()) for opt in each.opts} | {"--help"}
    for line in written_commands(text_of(page)):
        words = re.split(r"[\s\[\]]+", line.strip())
        name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in known), None)
        taken = above | ({opt for each in commands_page.options(known[name]) for opt in each.opts} if name else set())
        unknown = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
        wrong += [f"etha {line.strip()}: {word}" for word in unknown if word not in taken]
        if name is None and re.match(r"[a-z]+\b", line) and words[0] not in known:
            wrong.append(f"etha {line.strip()}: there is no such command")
    assert wrong == []


# ---- Redis ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", TOLD)
def test_keys_of_redis_that_a_page_names_are_in_the_table(page: str) -> None:
    """docs/redis.md itself is generated from the table (tests/unit/store/test_keys.py)."""
    patterns = [re.sub(r"[A-Z]{2,}", "[^:']+", re.escape(kind.pattern)) for kind in TABLE]
    named = re.findall(r"etha:\{\w+\}:([\w.:-]+)", text_of(page))
    assert [key for key in named if not any(re.fullmatch(pattern, key) for pattern in patterns)] == [], (
        "add the key to TABLE in etha/store/keys.py and run `python -m etha.store.keys > docs/redis.md`"
    )


# ---- metrics ----------------------------------------------------------------------------------


def metrics() -> set[str]:
    """Names of metrics that the package has, without the suffixes that the exposition adds."""
    if importlib.util.find_spec("etha.observe") is None or importlib.util.find_spec("etha.observe.metrics") is None:
        return set()
    constants = (node for node in ast.walk(syntax("etha/observe/metrics.py")) if isinstance(node, ast.Constant))
    return {bare(node.value) for node in constants if re.fullmatch(r"etha_[a-z0-9_]+", str(node.value))}


def bare(name: str) -> str:
    """A metric's name without what Prometheus adds to those of counters and histograms."""
    return re.sub(r"_(total|bucket|sum|count|created)$", "", name)


@pytest.mark.skipif(not metrics(), reason="the package has no metrics")
def test_every_metric_is_on_the_page_of_metrics() -> None:
    assert (ROOT / METRICS).is_file(), f"write {METRICS}, a table with a row for each of {sorted(metrics())}"
    documented = {bare(name) for name in first_cells(METRICS) if name.startswith("etha_")}
    same(documented, metrics(), "the metrics", METRICS, add="add a row with its type, labels and meaning")


@pytest.mark.parametrize("page", TOLD)
def test_a_page_names_no_metric_that_is_not_there(page: str) -> None:
    named = {bare(name) for name in re.findall(r"`(etha_[a-z0-9_]+)(?:\{[^`]*)?`", text_of(page))}
    files = {Path(name).stem for name in tree()}
    assert sorted(named - metrics() - files) == []
