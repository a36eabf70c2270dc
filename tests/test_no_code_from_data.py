"""Nothing in etha makes code or objects of data: no pickle, no eval, no exec, and nothing that unpickles inside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "etha"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "copyreg", "runpy", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
#: Methods that unpickle or evaluate, whatever they are called on.
CALLS = {
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "pickle.loads",
    "os.system",
    "os.popen",
}
#: ``shell=True`` makes a command line of text; pyzmq's pickling sockets.
KEYWORDS = {"shell", "allow_pickle"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized"}


def found(source: str) -> list[str]:
    """What in ``source`` is not to be there."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module).split(".")[0]]
        wrong += [f"{node.lineno}: imports {name}" for name in names if name in MODULES]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            bad = called in BUILTINS | CALLS or called.rpartition(".")[2] in ATTRIBUTES
            bad = bad or any(k.arg in KEYWORDS and ast.unparse(k.value) != "False" for k in node.keywords)
            if bad:
                wrong.append(f"{node.lineno}: calls {called}")
    return wrong


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_code_comes_from_data(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "eval(x)", "torch.load(f)", "s.recv_pyobj()", "run(x, shell=True)"],
)
def test_what_is_looked_for_is_found(source: str) -> None:
    assert len(found(source)) == 1
