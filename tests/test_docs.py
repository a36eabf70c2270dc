"""What README, docs and docstrings name is there: files, tests, make targets, commands, variables, public names.

README's two programs run as they stand there.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from etha.cli import app

from .flow.sites import private_directory

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".venv", ".venv-vllm", ".git", "build", "dist", "__pycache__"}


@cache
def tree() -> frozenset[str]:
    """Every file of the repository, by its path from the root."""
    found = set()
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not SKIPPED & set(parts):
            found.add("/".join(parts))
    return frozenset(found)


def pages() -> list[str]:
    return sorted(name for name in tree() if name.endswith(".md") and not name.startswith("bench/results/"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def all_tests() -> str:
    return "\n".join(text_of(name) for name in tree() if name.startswith("tests/") and name.endswith(".py"))


def is_there(path: str) -> bool:
    """Whether a file's path ends so; ``{a,b}`` and ``*`` as a shell reads them."""
    pattern = re.escape(path).replace(r"\*", "[^/]*")
    return any(re.search(rf"(^|/){pattern}$", name) for name in tree())


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", text_of(page))
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages())
def test_links_into_pages_lead_to_a_heading(page: str) -> None:
    here = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text_of(page))
    assert [f"{path}#{name}" for path, name in links if name not in anchors(here.parent / path if path else here)] == []


def blocks(page: str) -> list[str]:
    """The Python on a page."""
    return re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [name for name in pages() if blocks(name)])
def test_the_python_on_a_page_can_be_compiled(page: str) -> None:
    for text in blocks(page):
        compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.slow
def test_readmes_two_programs_run_as_they_stand_and_have_twelve_lines(tmp_path: Path) -> None:
    programs = {}
    for text in blocks("README.md"):
        name = text.splitlines()[0].removeprefix("# ")
        programs[name] = tmp_path / name
        programs[name].write_text(text)
        assert len([line for line in text.splitlines()[1:] if line.strip()]) <= 12
    with private_directory() as directory:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
        environment = {**kept, "ETHA_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT)}
        running = [
            subprocess.Popen(
                [sys.executable, programs[name]],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for name in ("trainer.py", "inference.py")
        ]
        try:
            sent, received = (process.communicate(timeout=100)[0] for process in running)
        finally:
            for process in running:
                process.kill()
                process.communicate()
    assert [process.returncode for process in running] == [0, 0], sent + received
    assert [f"sent version {n}: {8 * 4 * 1024**2:,} bytes" in sent for n in range(1, 6)] == [True] * 5, sent
    assert received.splitlines() == [f"received version {n}: layer7 holds {float(n)}" for n in range(1, 6)]


def test_the_guides_example_of_a_unit_test_passes(tmp_path: Path) -> None:
    [program] = [
        block for block in re.findall(r"```python\n(.*?)```", text_of("docs/guide.md"), re.S) if "def test_" in block
    ]
    (tmp_path / "test_guide.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_of_the_dummies_runs() -> None:
    import torch
    from torch.distributed.tensor import Replicate

    import etha
    import etha.testing

    example = textwrap.dedent((etha.testing.__doc__ or "").split("\n\n")[1])
    assert "assert not" in example
    exec(example, {**vars(etha.testing), "etha": etha, "torch": torch, "Replicate": Replicate})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_tutorials_programs_run_as_they_stand_and_survive_a_kill(tmp_path: Path) -> None:
    for text in blocks("docs/tutorial.md"):
        name = text.splitlines()[0].removeprefix("# ")
        shorter = (
            text.replace("range(1, 2001)", "range(1, 201)")
            .replace("version == 2000", "version == 200")
            .replace("asyncio.sleep(0.5)", "asyncio.sleep(0)")
        )
        assert shorter != text
        (tmp_path / name).write_text(shorter)
    # The one that is killed stops after its first version, because the trainer could be done before the kill.
    line = '{await serve():.4f}", flush=True)'
    assert line in shorter
    (tmp_path / "killed.py").write_text(shorter.replace(line, f"{line}; await asyncio.sleep(1000)"))
    with private_directory() as directory:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
        environment = {**kept, "ETHA_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT)}

        def start(*words: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=tmp_path,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )

        assert "torchrun --standalone --nproc-per-node 2 trainer.py" in text_of("docs/tutorial.md")
        trainer = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "trainer.py")
        first = start("killed.py")
        running = [trainer, first]
        try:
            assert first.stdout is not None
            assert any(line.startswith("version 50: loss") for line in first.stdout)
            first.kill()
            running.append(start("inference.py"))
            sent, _, received = (process.communicate(timeout=200)[0] for process in running)
        finally:
            for process in running:
                process.kill()
                process.communicate()
    assert trainer.returncode == 0, sent + received
    assert "rank 0 sent version 200: 34,308 bytes to (('inference', 0),)" in sent, sent
    assert "rank 1 sent version 200: 33,280 bytes" in sent, sent
    assert "inference rank 0 died" in sent and "epoch 1 is over" in sent, sent
    assert running[-1].returncode == 0 and "version 200: loss" in received, received


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_program_about_process_groups_survives_a_kill_as_it_stands(tmp_path: Path) -> None:
    [program] = [text for text in blocks("docs/groups.md") if text.startswith("# elastic.py\n")]
    (tmp_path / "elastic.py").write_text(program)
    for name in "ab":
        assert f"ETHA_REPLICA={name} python elastic.py" in text_of("docs/groups.md")
    lines: dict[str, list[str]] = {}

    def read(process: subprocess.Popen[str], name: str, wanted: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.setdefault(name, []).append(line)
            if wanted in line:
                return
        pytest.fail(f"{name} has ended: {lines}")

    with private_directory() as directory:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
        kept |= {"ETHA_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

        def start(name: str) -> subprocess.Popen[str]:
            words, env = [sys.executable, "elastic.py"], {**kept, "ETHA_REPLICA": name}
            with (tmp_path / "errors").open("a") as errors:
                return subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=errors)

        running = {name: start(name) for name in "ab"}
        try:
            for name, process in running.items():
                read(process, name, ": 2 replicas, weights ")
            running["b"].kill()
            read(running["a"], "a", ": 1 replicas, weights ")
            running["b"].communicate()
            running["b"] = start("b")
            for _ in range(2):
                for name, process in running.items():
                    read(process, name, ": 2 replicas, weights ")
        finally:
            for process in running.values():
                process.kill()
                process.communicate()
    sums = [dict(re.findall(r"step (\d+): 2 replicas, weights (\S+)", "".join(lines[name]))) for name in "ab"]
    both = sums[0].keys() & sums[1].keys()
    assert both and all(sums[0][step] == sums[1][step] for step in both), lines
    assert lines["a"][-1].startswith("step ") and int(lines["b"][-1].split()[1][:-1]) > 0


@pytest.mark.parametrize("page", [name for name in pages() if name != "CHANGELOG.md"])
def test_files_and_tests_that_a_page_names_are_there(page: str) -> None:
    text = text_of(page)
    files = re.findall(r"`(?:[a-zA-Z0-9_.-]+ )*?((?:[\w.*-]+/)*[\w*-]+\.(?:py|md|lua|json|png|svg|toml|txt))\b", text)
    here = str(Path(page).parent)
    assert sorted({name for name in files if not (is_there(name) or is_there(f"{here}/{name}"))} - NOT_HERE) == []
    named = re.findall(r"`(?:[\w/]+\.py)?(?:::)?(test_\w+)(?!\.py)\b", text)
    assert sorted({name for name in named if f"def {name}(" not in all_tests() and not is_there(f"{name}.py")}) == []
    folders = re.findall(r"`(?:\w+ )?((?:etha|tests|bench|docs|examples)(?:/\w+)*)/`", text)
    assert [name for name in folders if not (ROOT / name).is_dir()] == []


#: Files that pages name and that are not here: a user's, written by a command, or unwanted.
NOT_HERE = {
    "utils.py",
    "elastic.py",
    "trainer.py",
    "inference.py",
    "etha-node.sh",
    "SOURCE.json",
    "TARGET.json",
    "source.json",
    "target.json",
    "out.png",
}


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "adr").glob("0*.md")), ids=lambda path: path.name)
def test_a_decision_is_one_page_with_its_reasons_and_is_listed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences", "Measurement"]
    assert text.startswith(f"# {path.name[:4]}: ") and len(text.splitlines()) <= 50
    assert f"({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages())
def test_targets_and_commands_that_a_page_names_are_there(page: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][\w-]*)", text_of(page))) - targets == set()
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"`etha ([a-z]+)", text_of(page))) - commands == set()


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_targets_that_a_workflow_makes_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of("Makefile"), re.MULTILINE))
    made = re.findall(r"run: make ([a-z][\w-]*)", text)
    for listed in re.findall(r"target: \[([^\]]*)\]", text):
        made += listed.split(", ")
    assert made and set(made) - targets == set()


def test_the_workflow_tests_every_python_that_the_package_supports() -> None:
    supported = re.findall(r"Python :: (3\.\d+)", text_of("pyproject.toml"))
    assert re.findall(r"python: \[(.*)\]", text_of(".github/workflows/ci.yml")) == [
        ", ".join(f'"{version}"' for version in supported)
    ]


@pytest.mark.parametrize("page", pages())
def test_variables_that_a_page_names_are_read_somewhere(page: str) -> None:
    read = "\n".join(text_of(name) for name in tree() if name.endswith((".py", "Makefile", "run")))
    named = set(re.findall(r"\bETHA_[A-Z_]*[A-Z]\b", text_of(page)))
    assert sorted(name for name in named if name not in read) == []


@pytest.mark.parametrize("page", pages())
def test_names_of_the_package_that_a_page_names_are_there(page: str) -> None:
    wrong = []
    for name in set(re.findall(r"`(etha(?:\.\w+)+)", text_of(page))) - {"etha.tensor_bus", "etha.comm"}:
        module, found = "etha", importlib.import_module("etha")
        for part in name.split(".")[1:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                try:
                    found = importlib.import_module(f"{module}.{part}")
                except ImportError:
                    wrong.append(name)
                    break
            module = f"{module}.{part}"
    assert wrong == []


@pytest.mark.parametrize("name", sorted(name for name in tree() if name.startswith("etha/") and name.endswith(".py")))
def test_files_that_a_module_names_are_there(name: str) -> None:
    files = re.findall(r"(?<![\w/.*-])((?:docs|etha|tests|bench|examples)/[\w/-]+\.(?:py|md|lua))\b", text_of(name))
    assert [path for path in files if not is_there(path)] == []
