"""The walls of the house (docs/architecture.md), read from the source with ``ast``; nothing is imported."""

from __future__ import annotations

import ast
import gc
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "etha"

#: part -> parts that it may import, itself apart. A module named with a dot is allowed where its whole part is not.
EDGES: dict[str, set[str]] = {
    "version": set(),
    "phases": set(),
    "errors": {"phases"},
    "addresses": {"errors"},
    "config": {"errors", "addresses"},
    # Inner loops: knows no group and no stream.
    "native": {"errors", "config"},
    # What people see of agents, and where it is kept: nothing here knows an agent or a client.
    "observe": {"decoders", "errors", "addresses", "config", "phases", "printable", "units", "version"},
    # What strangers may cost a process: asked by whoever listens.
    "limits": set(),
    # How a thread waits: asked by whoever blocks a user's thread.
    "interruptible": set(),
    # How a package loads what it shows, and what an object of torch.distributed is, without importing either.
    "lazy_names": set(),
    "torch_types": set(),
    "units": set(),
    "printable": set(),
    # How decoders are made in a process of several threads.
    "decoders": set(),
    "picture": {"decoders", "errors", "printable", "units"},
    "plan": {"errors", "picture", "units", "lazy_names", "torch_types"},
    "bus": {"decoders", "errors", "config", "limits", "native", "phases", "memory.handles", "observe"},
    "store": {"addresses", "errors", "config"},
    # A link is ZeroMQ as the bus is: the same strict schema of what travels, the same way to read a socket on a loop.
    "peer": {
        "addresses",
        "decoders",
        "errors",
        "config",
        "limits",
        "version",
        "bus.codec",
        "bus.schema",
        "bus.socket",
        "memory.handles",
        "observe",
    },
    # What is asked of a GPU's driver and of NCCL. Whoever does not meet a GPU loads none of it but the Protocols.
    "cuda": {"errors", "config"},
    "memory": {"errors", "config", "cuda", "native"},
    "transport": {"errors", "config", "limits", "memory", "native", "plan", "cuda", "observe"},
    "agent": {
        "addresses",
        "errors",
        "config",
        "limits",
        "version",
        "plan",
        "bus",
        "store",
        "peer",
        "memory",
        "transport",
        "cuda",
        "phases",
        "observe",
        "picture",
        "printable",
        "units",
    },
    "client": {
        "limits",
        "errors",
        "config",
        "version",
        "phases",
        "bus",
        "memory",
        "native",
        "plan",
        "cuda",
        "observe",
        "interruptible",
        "torch_types",
    },
    "redistribute": {"errors", "config", "plan"},
    # Dummies of the clients for users' tests: the clients over an agent that is played in the same process.
    "testing": {"errors", "config", "version", "client", "bus", "memory"},
    "groups": {
        "addresses",
        "decoders",
        "errors",
        "config",
        "native",
        "memory",
        "cuda",
        "bus",
        "client",
        "interruptible",
        "version",
    },
    "integrations": {"", "addresses", "errors", "config", "client", "plan"},
    # Above the library: they use it as a user would, and "" is its public face.
    "": {"errors", "version", "client", "redistribute", "lazy_names"},
    # Publications on disk: clients of their own that read and write checkpoints.
    "publishing": {"", "errors", "config", "client"},
    "demo": {""},
    "doctor": {
        "addresses",
        "errors",
        "config",
        "memory",
        "native",
        "store",
        "cuda",
        "bus",
        "agent_session",
        "printable",
    },
    "status": {"observe", "printable"},
    "agent_session": {"errors", "config", "version", "bus", "observe"},
    # What `etha events` shows: from files, agents and Redis.
    "events": {"errors", "config", "bus", "observe", "printable", "agent_session", "units"},
    # The page of `etha dashboard`: what the other commands show, served to a browser.
    "dashboard": {
        "addresses",
        "agent_session",
        "config",
        "errors",
        "events",
        "observe",
        "phases",
        "printable",
        "status",
        "units",
    },
    "tensor_bus": set(),
    "__main__": {"cli"},
    "cli": {"version", "errors", "config", "commands", "observe", "printable"},
    "commands": {
        "",
        "addresses",
        "status",
        "events",
        "agent_session",
        "errors",
        "config",
        "plan",
        "agent",
        "client",
        "dashboard",
        "demo",
        "doctor",
        "observe",
        "picture",
        "printable",
        "publishing",
        "units",
    },
}

#: Folders of which every file computes and does no I/O.
PURE_FOLDERS = (
    "agent/protocol",
    "plan/analysis",
    "plan/layouts",
    "plan/planner",
    "plan/proof",
    "transport/geometry",
    "transport/wire",
)
#: Single files that are pure, of packages that have no folder for them.
PURE_FILES = {
    "errors.py",
    "phases.py",
    *(f"observe/{name}.py" for name in ("records", "sentences", "history", "trace_clocks", "trace_lines")),
    "addresses.py",
    "config.py",
    "units.py",
    "printable.py",
    "plan/__init__.py",
    "plan/plan.py",
    "bus/messages.py",
    "bus/codec.py",
    "bus/schema.py",
    "bus/zmtp.py",
    "store/group_view.py",
    "store/keys.py",
    "publishing/checkpoint_index.py",
    "store/publication_records.py",
    "store/publication_view.py",
    "store/records.py",
    "memory/handles.py",
    *(f"peer/{name}.py" for name in ("messages", "introductions", "wire", "tokens")),
    "transport/nccl/schedule.py",
    "dashboard/model.py",
    "demo/report.py",
    "demo/fleet_report.py",
    "demo/options.py",
    "groups/schedule.py",
    "groups/vote.py",
    "groups/recovery/values.py",
    "groups/membership.py",
    "groups/descriptor.py",
    "groups/simulator.py",
}
IMPURE_MODULES = {"asyncio", "zmq", "redis", "threading", "socket", "subprocess", "uvloop", "torch.distributed"}
#: torch.distributed is forbidden in pure files but for what planning reads: placements and meshes as values.
VALUE_MODULES = ("torch.distributed.tensor", "torch.distributed.device_mesh")

#: Every package: its folders import each other in one direction only.
DAG_PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

#: Files that import each other in a circle, and why (docs/architecture.md says it, too).
CIRCLES = {
    ("transport/copy/cpu.py", "transport/copy/device.py", "transport/copy/device_bounce.py"): (
        "a thread's Workspace names its device's Copier as a type only, and that Copier has the CPU copy what the "
        "device cannot reach"
    ),
}

#: Files that may look at the environment, and why.
ENVIRONMENT = {
    "config.py": "the one place that reads settings",
    "client/agent_process.py": "hands the agent that it starts an environment of its own",
    "demo/seats.py": "NCCL has no other way to be told that ranks which share a GPU are hosts of their own",
    "demo/launch.py": "hands the jobs an environment of their own: torch's and gloo's variables, no foreign launcher's",
}
#: Programs: they set up logging because nobody else runs in their process.
PROGRAMS = {"cli.py", "agent/__main__.py"}
#: Python files in one folder.
MOST_FILES = 20
#: No identifier is called so.
AVOIDED = {
    *("told", "gone", "Behind", "Standing", "Kept", "Hall", "Desk", "Lobby"),
    *("Spoilt", "Unquiet", "Stood", "Asked"),
}
#: Names that modules and classes of a package once had, and that said less than those which they have now. The first
#: line: in no package at all.
FORMER_NAMES = {
    "": (
        "behind chronicle conveyor desk door doubt errand exhibition footing gauge hall homes inquiries "
        "inward knock laying ledger library letters lobby mailbox movers portal reservation sheet spoilt "
        "standing stood sweep tally turns unquiet verdict witness"
    ),
    "agent": (
        "batch batches bookings calls card conflict dispatch evaluate evaluations inspection links live move "
        "pace pairs parts products report rest roster service session snapshots transfer translate verify "
        "waiting wires workspaces"
    ),
    "client": "batch gpu handle inspect options place products register report spawn sync_handle sync_pair",
    "plan": "blocks check cover density ends flows held kept model picture program segments sides slots spec",
    "transport": (
        "alias blocks checks device_program device_rehearsal exchange inlets kernels messages outlets relays "
        "ring rounds segments steps ways wire"
    ),
}
#: Packages and modules that users import from: every public name in them and in the files that they import names from
#: has a docstring. Elsewhere only modules must have one, because a forced docstring says nothing.
PUBLIC_API = (
    "__init__.py",
    "plan/__init__.py",
    "redistribute/__init__.py",
    "testing/__init__.py",
    "integrations/fsdp.py",
    "integrations/vllm/__init__.py",
    "publishing/__init__.py",
)
#: A method of so few lines, with types and a telling name, needs no sentence that repeats it.
PLAIN_LINES = 3


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@cache
def tree(name: str) -> ast.Module:
    # Before 3.11.8 a collection that ends in some other thread's or finalizer's parse makes this one a SystemError
    # ("AST constructor recursion depth mismatch", cpython#106905).
    gc.disable()
    try:
        return ast.parse((PACKAGE / name).read_text(encoding="utf-8"), filename=name)
    finally:
        gc.enable()


def part_of(module: str) -> str:
    """``etha.plan.layouts.layout`` is in part "plan", ``etha`` itself in ""."""
    return module.split(".")[1] if "." in module else ""


def home(name: str) -> str:
    return "" if name == "__init__.py" else name.split("/")[0].removesuffix(".py")


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Every imported module by its full name, ``from x import y`` as ``x.y`` where that is a module of etha."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write the full name"
            for alias in node.names:
                if (node.module, alias.name) == ("etha", "__version__"):
                    continue  # a constant, set before anything else is imported
                full = f"{node.module}.{alias.name}"
                path = PACKAGE.parent / full.replace(".", "/")
                is_module = full.startswith("etha.") and (path.is_dir() or path.with_suffix(".py").exists())
                yield (full if is_module else str(node.module)), node.lineno


@pytest.mark.parametrize("name", files())
def test_imports_go_downwards_only(name: str) -> None:
    here = home(name)
    assert here in EDGES, f"{name} belongs to no part of the house: give it a place in EDGES and docs/architecture.md"
    wrong = []
    for module, line in imports(name):
        if module != "etha" and not module.startswith("etha."):
            continue
        there, inside = part_of(module), module.removeprefix("etha").removeprefix(".")
        if there == here or there in EDGES[here] or inside in EDGES[here]:
            continue
        wrong.append(f"{name}:{line}: {here or 'etha'} may not import {module}")
    assert not wrong, "\n".join(wrong)


def test_nobody_inside_imports_an_integration() -> None:
    inside = [name for name in files() if home(name) != "integrations"]
    wrong = [f"{name}:{line}" for name in inside for module, line in imports(name) if part_of(module) == "integrations"]
    assert wrong == []


@pytest.mark.parametrize("package", sorted(DAG_PACKAGES))
def test_folders_of_a_package_form_a_dag(package: str) -> None:
    """Imports under TYPE_CHECKING and inside functions count; a package's top-level files are one folder."""
    below: dict[str, set[str]] = {}
    for name in (name for name in files() if home(name) == package):
        here = str(Path(name).parent)
        for module, _ in imports(name):
            path = module.removeprefix("etha.").replace(".", "/")
            there = path if (PACKAGE / path).is_dir() else str(Path(path).parent)
            if there.split("/")[0] == package and there != here:
                below.setdefault(here, set()).add(there)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(f"folders of {package} import each other in a circle: {' -> '.join(error.args[1])}")


def test_parts_form_a_dag() -> None:
    """What the parts may import of each other leads downwards, whatever they do import."""
    above = {part: {other.split(".")[0] for other in allowed} - {part} for part, allowed in EDGES.items()}
    try:
        TopologicalSorter(above).prepare()
    except CycleError as error:
        pytest.fail(f"parts import each other in a circle: {' -> '.join(error.args[1])}")


def imported_files(name: str) -> set[str]:
    """The files of etha that a file imports, anywhere in it."""
    found = set()
    for module, _ in imports(name):
        if module == "etha" or module.startswith("etha."):
            path = PACKAGE.parent / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            found.add(str(file.relative_to(PACKAGE)))
    return found - {name}


def circles(below: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """The groups of at least two nodes from each of which one comes to every other (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: set[tuple[str, ...]] = set()

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for other in sorted(below.get(node, ())):
            if other not in number:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            group = path[path.index(node) :]
            del path[path.index(node) :]
            if len(group) > 1:
                found.add(tuple(sorted(group)))

    for node in sorted(below):
        if node not in number:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}) == {("a", "b", "c")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """Imports under TYPE_CHECKING and inside functions count."""
    assert circles({name: imported_files(name) for name in files()}) == set(CIRCLES)


def is_pure(name: str) -> bool:
    return name in PURE_FILES or str(Path(name).parent) in PURE_FOLDERS


def test_what_is_said_to_be_pure_is_there() -> None:
    assert PURE_FILES - set(files()) == set()
    assert [folder for folder in PURE_FOLDERS if not (PACKAGE / folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", [name for name in files() if is_pure(name)])
def test_pure_files_do_no_io(name: str) -> None:
    wrong = []
    for module, line in imports(name):
        impure = any(module == bad or module.startswith(f"{bad}.") for bad in IMPURE_MODULES)
        if impure and not module.startswith(VALUE_MODULES):
            wrong.append(f"{name}:{line} imports {module}")
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith | ast.AsyncFor):
            wrong.append(f"{name}:{node.lineno} is asynchronous")
    assert not wrong, "\n".join(wrong)


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and methods; what is inside a function is its own business."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from public(node.body, prefix)


def needs_no_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, *, method: bool) -> bool:
    """Overloads, setters, overrides, and methods of a few plain lines."""
    names = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    if names & {"overload", "override", "typing.override", "typing.overload"} or any(
        n.endswith(".setter") for n in names
    ):
        return True
    lines = (node.body[-1].end_lineno or 0) - node.body[0].lineno + 1
    return method and not isinstance(node, ast.ClassDef) and lines <= PLAIN_LINES


@pytest.mark.parametrize("name", files())
def test_every_module_has_a_docstring(name: str) -> None:
    assert ast.get_docstring(tree(name)) or not tree(name).body


def public_files() -> list[str]:
    found = set(PUBLIC_API)
    for name in PUBLIC_API:
        for module, _ in imports(name):
            path = f"{module.removeprefix('etha.').replace('.', '/')}.py"
            found |= {path} if (PACKAGE / path).exists() else set()
    return sorted(found)


@pytest.mark.parametrize("name", public_files())
def test_every_name_of_the_public_api_has_a_docstring(name: str) -> None:
    module = tree(name)
    missing = []
    inherited = inherited_names(module)
    for label, node in public(module.body):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if ast.get_docstring(node) or needs_no_docstring(node, method="." in label) or label in inherited:
            continue
        missing.append(f"{name}:{node.lineno}: {label}")
    assert not missing, "no docstring:\n" + "\n".join(missing)


def inherited_names(module: ast.Module) -> set[str]:
    """``Class.method`` where a base class in the same file documents the method."""
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}

    def documented(cls: str) -> set[str]:
        node = classes.get(cls)
        if node is None:
            return set()
        own = {
            n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(n)
        }
        return own.union(*(documented(base.id) for base in node.bases if isinstance(base, ast.Name)))

    return {f"{cls}.{method}" for cls in classes for method in documented(cls)}


def library(module: ast.Module) -> Iterator[ast.AST]:
    """All nodes but those under ``if __name__ == "__main__"``, where a file is a small program."""
    for statement in module.body:
        if not (isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"):
            yield from ast.walk(statement)


@pytest.mark.parametrize("name", [name for name in files() if home(name) not in ("cli", "commands")])
def test_only_the_cli_prints_and_configures_logging(name: str) -> None:
    wrong = []
    for node in library(tree(name)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"print", "sys.stdout.write", "sys.stderr.write", "rich.print", "typer.echo"}:
                wrong.append(f"{name}:{node.lineno} prints")
            if called.endswith(("logging.basicConfig", ".addHandler")) and name not in PROGRAMS:
                wrong.append(f"{name}:{node.lineno} configures logging")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", files())
def test_no_pickle_and_no_drawers(name: str) -> None:
    assert Path(name).name not in {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert not [
        m for m, _ in imports(name) if m.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    ]


@pytest.mark.parametrize("name", files())
def test_decoders_of_structs_are_made_by_one_thread_at_a_time(name: str) -> None:
    """``decoders.py`` says why. ``Decoder()`` and ``type=list[...]`` know no structs."""
    alone = {
        id(node)
        for call in ast.walk(tree(name))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "made_alone"
        for node in ast.walk(call)
    }
    wrong = []
    for node in ast.walk(tree(name)):
        if not isinstance(node, ast.Call) or id(node) in alone or name == "decoders.py":
            continue
        called = ast.unparse(node.func)
        kinds = [word.value for word in node.keywords if word.arg == "type"]
        makes = called.endswith("Decoder") and called.startswith(("msgspec", "Decoder")) and node.args
        decodes = called.startswith("msgspec.") and any(isinstance(kind, ast.Name) for kind in kinds)
        if makes or decodes or (called == "msgspec.convert" and isinstance(node.args[1], ast.Name)):
            wrong.append(f"{name}:{node.lineno}: {called}")
    assert wrong == []


@pytest.mark.parametrize("name", files())
def test_only_config_reads_the_environment(name: str) -> None:
    reads = [
        node.lineno
        for node in ast.walk(tree(name))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.environb"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    ]
    assert not reads or name in ENVIRONMENT, f"{name}: lines {reads} read the environment; that is config.py's work"


#: Files with a task of their own outside a TaskGroup, and who waits for it.
OWNED_TASKS = {
    "bus/link.py": "a connection that is being opened: awaited until the session ends, then cancelled",
    "client/aio.py": "ends the client: whoever calls close() awaits it, and each of several does",
    "client/tasks.py": "awaited to its end by the same call, even when that is cancelled",
    "client/transfer.py": "a user's callback: awaited until its call's deadline, and kept until it has ended",
    "client/publication.py": "a question that the call which asks it awaits to its end, also when it is cancelled",
    "client/snapshot.py": "given to the caller as a TransferFuture; ends at the latest with the client",
    "client/subscription.py": "one hop: awaited to its end by the call of next(), even when that is cancelled",
}


@pytest.mark.parametrize("name", files())
def test_tasks_are_owned_and_failures_told(name: str) -> None:
    wrong = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if name in OWNED_TASKS and called == "asyncio.ensure_future":
                continue
            if called in {"asyncio.create_task", "asyncio.ensure_future", "asyncio.wait_for"}:
                wrong.append(f"{name}:{node.lineno}: {called}; use a TaskGroup and asyncio.timeout")
        if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body):
            caught = ast.unparse(node.type) if node.type else ""
            if caught in {"", "Exception", "BaseException"}:
                wrong.append(f"{name}:{node.lineno}: swallows {caught or 'everything'}")
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            wrong.append(f"{name}:{node.lineno}: __del__")
    assert not wrong, "\n".join(wrong)


def test_every_variable_is_named_in_the_help() -> None:
    named = re.findall(r'"(ETHA_[A-Z_]+)"', (PACKAGE / "config.py").read_text(encoding="utf-8"))
    listed = re.findall(r'^    "(ETHA_[A-Z_]+)":', (PACKAGE / "config.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) == set(listed)


@pytest.mark.parametrize("name", files())
def test_modules_that_are_imported_are_there(name: str) -> None:
    """Also those that a function imports when it runs: a type checker that reads only this package lets them pass."""
    missing = []
    for module, line in imports(name):
        path = ROOT / module.replace(".", "/")
        if part_of(module) and module.startswith("etha.") and not (path.is_dir() or path.with_suffix(".py").exists()):
            missing.append(f"{name}:{line}: {module}")
    assert missing == []


def test_public_classes_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = {}
    for name in files():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", files())
def test_no_module_and_no_class_has_a_former_name(name: str) -> None:
    former = {word.replace("_", "") for part in ("", home(name)) for word in FORMER_NAMES.get(part, "").split()}
    classes = [node for node in ast.walk(tree(name)) if isinstance(node, ast.ClassDef)]
    wrong = [f"{name}:{node.lineno}: {node.name}" for node in classes if node.name.strip("_").lower() in former]
    if Path(name).stem.replace("_", "") in former:
        wrong.append(name)
    assert wrong == []


def test_no_folder_holds_more_than_a_reader_can_take_in() -> None:
    tops = [ROOT / "etha", ROOT / "tests"]
    folders = [*tops, *(folder for top in tops for folder in top.rglob("*") if folder.is_dir())]
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


@pytest.mark.parametrize("top", ["etha", "tests", "bench", "examples"])
def test_no_private_vocabulary(top: str) -> None:
    """Words that once named classes and variables here, and that no reader could search for (docs/glossary.md)."""
    wrong = []
    for path in sorted((ROOT / top).rglob("*.py")):
        with path.open("rb") as file:
            tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME]
        wrong += [
            f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}" for token in tokens if token.string in AVOIDED
        ]
    assert wrong == []
