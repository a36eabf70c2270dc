"""What a first user meets: what importing costs, the command without torch, the package's description."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import etha
from etha.version import __version__

ROOT = Path(__file__).resolve().parents[1]
#: Each takes longer to import than ``etha --help`` may take in all.
HEAVY = {"torch", "numpy", "zmq", "redis", "uvloop", "asyncio", "matplotlib"}


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)


def loaded(code: str) -> set[str]:
    """Which heavy modules a fresh interpreter has loaded after ``code``."""
    done = python("-c", f"{code}\nimport sys; print(' '.join(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["status", "--help"]])
def test_the_command_answers_without_what_is_slow_to_import(words: list[str]) -> None:
    run = "from etha.cli import app\ntry: app({})\nexcept SystemExit as end: assert not end.code"
    assert loaded(run.format(words)) == set()


@pytest.mark.slow
def test_importing_etha_imports_no_torch_until_a_name_is_used() -> None:
    assert loaded("import etha; dir(etha); etha.__version__; from etha import __version__") == set()
    assert loaded("from etha import EthaError; import etha; etha.errors.ConfigError") == set()
    assert "torch" in loaded("from etha import TensorBusClient")


#: What no public name of etha may load, because a worker that moves plain tensors uses none of it. The first two bring
#: sympy and cost half a second.
UNUSED = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "matplotlib", "redis", "etha.agent", "etha.store"),
    *("etha.plan.planner", "etha.plan.proof", "etha.plan.analysis", "etha.plan.plan", "etha.picture", "etha.transport"),
    *("etha.integrations", "etha.groups", "etha.native", "subprocess"),
)


@pytest.mark.slow
def test_importing_every_name_imports_nothing_that_is_not_used() -> None:
    code = """
import sys, torch
had = set(sys.modules)
from etha import *
TensorBusClient, AsyncTensorBusClient, empty, share_module, redistribute
print(*sorted(set(sys.modules) - had))
"""
    done = python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert [name for name in names if any(f"{name}.".startswith(f"{other}.") for other in UNUSED)] == []


@pytest.mark.slow
def test_a_placement_is_known_however_late_its_module_is_imported() -> None:
    code = """
import sys
from etha import LayoutError
from etha.plan import Layout
assert "torch.distributed.tensor" not in sys.modules
try: Layout((2,), ["S"])
except LayoutError as error: assert "not a placement" in str(error), error
from torch.distributed.tensor import Partial, Replicate, Shard
print(Layout((2, 2, 2), [Shard(0), Replicate(), Partial()]))
"""
    done = python("-W", "error", "-c", code)
    assert (done.returncode, done.stdout) == (0, "Layout((2, 2, 2), [S(0), R, P(sum)])\n"), done.stderr


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    module = ast.parse(inspect.getsource(etha))
    guarded = next(node for node in module.body if isinstance(node, ast.If))
    checked = {
        (str(node.module), alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert checked == {(home, name) for home, names in etha._NAMES.items() for name in names}
    assert {name for _, name in checked} | {"__version__"} == set(etha.__all__)
    assert set(etha.__all__) <= set(dir(etha))
    for name in etha.__all__:
        assert getattr(etha, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        etha.nothing  # noqa: B018


@pytest.mark.slow
def test_redistribute_is_the_function_in_whatever_order_things_are_imported() -> None:
    code = "import etha.redistribute.route, etha; print(etha.redistribute.__name__, callable(etha.redistribute))"
    assert python("-W", "error", "-c", code).stdout == "redistribute True\n"
    code = "import etha.redistribute; from etha import redistribute; import etha.redistribute.run; print(redistribute)"
    assert python("-W", "error", "-c", code).stdout.startswith("<function redistribute")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_package_runs_as_a_module(option: str) -> None:
    done = python("-m", "etha", option)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == f"etha {__version__}\n" if option == "--version" else "status" in done.stdout


@pytest.mark.parametrize("name", ["etha.tensor_bus", "etha.tensor_bus.client"])
def test_the_other_projects_module_names_its_replacement(name: str) -> None:
    with pytest.raises(ImportError, match=r"from etha import TensorBusClient.*docs/moving\.md"):
        __import__(name)
    assert (ROOT / "docs" / "moving.md").is_file()


def test_the_table_of_another_project_names_what_there_is() -> None:
    here = " ".join(
        line.split("|")[2] for line in (ROOT / "docs" / "moving.md").read_text().splitlines() if "|" in line
    )
    named = set(re.findall(r"`(?:etha\.)?([A-Z][A-Za-z]+(?:Client|Handle|Result|Future|Error))\b", here))
    assert {"TensorBusClient", "AsyncTensorBusClient", "BatchHandle", "TransferResult"} <= named <= set(etha.__all__)
    parameters = inspect.signature(etha.TensorBusClient.__init__).parameters
    assert {"agent", "device", "timeout"} <= set(parameters)


def test_the_description_says_who_and_what_and_leads_nowhere_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] and project["keywords"] and "readme" in project["dynamic"]
    pythons = {c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert pythons == {"3.11", "3.12", "3.13"} and project["requires-python"] == ">=3.11,<3.14"
    fake = ModuleType("hatchling.metadata.plugin.interface")
    fake.MetadataHookInterface = object  # type: ignore[attr-defined]
    hooks = ModuleType("hatchling.builders.hooks.plugin.interface")
    hooks.BuildHookInterface = list  # type: ignore[attr-defined]
    parents = ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin")
    parents += ("hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin")
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setitem(sys.modules, hooks.__name__, hooks)
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    monkeypatch.delitem(sys.modules, "hatch_build")
    readme = hatch_build.portable((ROOT / "README.md").read_text())
    assert not re.search(r"\]\((?!https?://)", readme)
    assert "docs/recovery.md" in readme and "(Picture in the repository. Two jobs" in readme


def build_wheel(kind: str, directory: Path, **environment: str) -> Path:
    """A wheel or an sdist of this tree, made by the package's own build system."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling, which `make install` brings")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(directory)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (made,) = directory.iterdir()
    return made


def library_of(wheel: Path, directory: Path) -> str:
    """Install the wheel and ask which library groups have then."""
    done = python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(directory), str(wheel))
    assert done.returncode == 0, done.stderr
    code = "import etha.native; print(etha.native.__file__, etha.native.load().name)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stderr == "" and found.stdout.startswith(str(directory)), found.stderr
    return found.stdout.split()[-1]


@pytest.mark.slow
def test_a_wheel_has_the_library_that_was_compiled_for_it(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) on the path")
    wheel = build_wheel("wheel", tmp_path / "wheel")
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"etha/native/executor.c", "etha/native/executor.so"} <= set(names)
    assert library_of(wheel, tmp_path / "site") == "compiled"


@pytest.mark.slow
def test_a_wheel_made_without_a_compiler_is_for_every_platform_and_works(tmp_path: Path) -> None:
    wheel = build_wheel("wheel", tmp_path / "wheel", PATH=str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "etha/native/executor.so" not in zipfile.ZipFile(wheel).namelist()
    assert library_of(wheel, tmp_path / "site") == "python"


@pytest.mark.slow
def test_a_source_distribution_has_the_source_of_the_library_and_not_the_library(tmp_path: Path) -> None:
    with tarfile.open(build_wheel("sdist", tmp_path / "sdist")) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"etha/native/executor.c", "etha/native/build.py", "hatch_build.py"} <= names
    assert "etha/native/executor.so" not in names
