"""Gradients of etha.redistribute, and graphs that torch.compile makes of it, over gloo.

Values are small integers, so that sums are exact in any order and results are compared to the bit: with enumerated
tensors, and, on meshes whose ranks ascend, with DTensor's results. On others DTensor puts some to wrong places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import etha
from etha.plan import Layout
from tests.flow.jobs import Job

R, P, A = Replicate(), Partial(), Partial("avg")
S0, S1 = Shard(0), Shard(1)
PERMUTED = (5, 2, 7, 0, 3, 6, 1, 4)
EVEN, UNEVEN = (16, 24), (19, 10)

Case = tuple[tuple[int, ...], Sequence[Placement], Sequence[Placement]]
#: On 8 ranks; among them are all transitions of bench/redistribute.py.
TRANSITIONS: list[Case] = [
    ((4, 2), [P, P], [R, R]),
    ((4, 2), [P, P], [S0, S0]),
    ((4, 2), [P, P], [S0, S1]),
    ((2, 2, 2), [P, P, S0], [S0, S0, S0]),
    ((2, 2, 2), [P, P, P], [R, R, R]),
    ((2, 2, 2), [P, S0, P], [R, R, R]),
    ((2, 2, 2), [P, R, P], [R, R, R]),
    ((2, 2, 2), [P, P, R], [R, R, R]),
    ((4, 2), [S0, S0], [R, R]),
    ((4, 2), [S0, S1], [R, R]),
    ((2, 2, 2), [P, P, R], [S0, S1, R]),
    ((2, 2, 2), [S0, S0, R], [R, R, R]),
    ((2, 2, 2), [P, S0, R], [R, R, R]),
    ((2, 4), [R, P], [R, R]),
    ((2, 4), [A, P], [R, R]),
    ((2, 2, 2), [P, P, P], [R, S0, R]),
    ((2, 4), [P, P], [S0, S0]),
    ((2, 4), [S0, S1], [S1, S0]),
    ((2, 4), [S0, S0], [S1, S1]),
    ((2, 4), [S0, S0], [R, S0]),
    ((2, 4), [S0, S1], [R, S0]),
    ((2, 4), [R, S1], [S0, S0]),
    ((2, 4), [S1, S0], [S0, S1]),
    ((4, 2), [_StridedShard(0, split_factor=2), S0], [R, R]),
    ((4, 2), [_StridedShard(0, split_factor=2), S0], [R, S1]),
    ((2, 2, 2), [S0, S1, S0], [S1, S0, R]),
    ((2, 2, 2), [P, S0, S1], [S0, R, R]),
    ((8,), [P], [R]),
    ((8,), [P], [S0]),
    ((8,), [S0], [R]),
    ((8,), [S0], [S1]),
    # A Partial that stays, and gradients that are Partial themselves.
    ((2, 4), [P, S0], [P, R]),
    ((2, 4), [R, S0], [S1, R]),
    ((8,), [R], [S1]),
]
COMPILED: list[Case] = [
    ((3,), [S0], [S1]),
    ((3,), [S1], [R]),
    ((3,), [P], [R]),
    ((3,), [A], [S0]),
    ((3,), [R], [S1]),
]

Move = Callable[[DTensor], DTensor]


def contribution(mesh: DeviceMesh, placements: Sequence[Placement], at: Sequence[int], seed: int) -> int:
    """The seed of what the rank at these coordinates contributes: the same along axes that are not Partial."""
    return seed + sum(c * 7**i for i, (c, p) in enumerate(zip(at, placements, strict=True)) if p.is_partial())


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float() * 8


def part(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's local tensor."""
    runs = Layout(mesh, placements).with_reading("order").owned(tuple(full.shape), dist.get_rank())
    assert runs is not None
    for dim, owned in enumerate(runs):
        full = torch.cat([full.narrow(dim, a, b - a) for a, b in owned] or [full.narrow(dim, 0, 0)], dim)
    return full.contiguous()


def given(mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...], seed: int) -> DTensor:
    """A leaf that requires grad. Contributions to a Partial differ, everything else is one tensor."""
    place = mesh.get_coordinate()
    assert place is not None
    local = part(whole(shape, contribution(mesh, placements, place, seed)), mesh, placements)
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
    return made.detach()  # type: ignore[return-value]


def total(mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The tensor that ``given`` stands for: the sum, or the mean, of all contributions."""
    axes = [range(n) if p.is_partial() else range(1) for n, p in zip(mesh.shape, placements, strict=True)]
    seeds = [contribution(mesh, placements, at, seed) for at in itertools.product(*axes)]
    summed = torch.stack([whole(shape, one) for one in seeds]).sum(0)
    averaged = [n for n, p in zip(mesh.shape, placements, strict=True) if p.is_partial("avg")]
    return summed / math.prod(averaged)


def back(x: DTensor, move: Move, weight: DTensor) -> tuple[DTensor, DTensor]:
    """What ``move`` makes of ``x``, and the gradient of its product with ``weight``."""
    leaf: Any = x.detach().requires_grad_()  # not clone(), for which DTensor reduces a Partial
    assert leaf.placements == x.placements
    made = move(leaf)
    made.backward(weight)
    assert isinstance(leaf.grad, DTensor)
    return made.detach(), leaf.grad  # type: ignore[return-value]


def differs(ours: DTensor, theirs: DTensor) -> str:
    same = ours.placements == theirs.placements and torch.equal(ours.to_local(), theirs.to_local())
    return "" if same else f"{ours} instead of {theirs}"


def gradients(mesh: DeviceMesh, case: Case, shape: tuple[int, ...], ordered: bool) -> list[str]:
    """What is wrong with one transition, for gradients on the target's layout and for Partial ones.

    ``ordered``: DTensor is right on this mesh.
    """
    _, source, target = case
    found = []
    x = given(mesh, source, shape, 1)
    gradient = tuple(R if p.is_partial() else p for p in target)
    # DTensor refuses a gradient of another kind of Partial than the input.
    partial = gradient if A in source else tuple(P if p == R else p for p in gradient)
    for weights in dict.fromkeys((gradient, partial)):  # in one order on all ranks
        weight = given(mesh, weights, shape, 2)
        ours = back(x, lambda t: etha.redistribute(t, placements=target), weight)
        home = [R if p.is_partial() else p for p in source]
        wanted = (total(mesh, source, shape, 1), target), (total(mesh, weights, shape, 2), home)
        for made, (full, placements) in zip(ours, wanted, strict=True):
            # Of a Partial that stays only the sum is given, and a mean's gradient is DTensor's choice.
            if P in made.placements or (A in source and placements is home):
                continue
            if made.placements != tuple(placements) or not torch.equal(made.to_local(), part(full, mesh, placements)):
                found.append(f"{mesh} {case} {weights} {shape}: {made}")
        if ordered:
            theirs = back(x, lambda t: t.redistribute(placements=target), weight)
            found += [f"{case} {weights}: {text}" for a, b in zip(ours, theirs, strict=True) if (text := differs(a, b))]
    return found


def eight(rank: int) -> list[str]:
    found: list[str] = []
    for ranks in (tuple(range(8)), PERMUTED):
        meshes = {mesh: DeviceMesh("cpu", torch.tensor(ranks).reshape(mesh)) for mesh, _, _ in TRANSITIONS}
        for case in TRANSITIONS:
            strided = any(isinstance(p, _StridedShard) for p in case[1])
            for shape in (EVEN,) if strided else (EVEN, UNEVEN):
                found += gradients(meshes[case[0]], case, shape, ranks != PERMUTED)
    return found[:3]


def second(rank: int) -> list[str]:
    """The gradient of a gradient: the backward is a redistribution like any other."""
    mesh = DeviceMesh("cpu", torch.arange(3))
    found = []
    for _, source, target in COMPILED:
        results: list[Any] = []
        for move in (
            lambda t, to: etha.redistribute(t, placements=to),
            lambda t, to: t.redistribute(placements=to),
        ):
            x = given(mesh, source, UNEVEN, 1).requires_grad_()
            weight: Any = given(mesh, [R if p.is_partial() else p for p in target], UNEVEN, 2).requires_grad_()
            (first,) = torch.autograd.grad(move(x, target), x, weight, create_graph=True)
            (again,) = torch.autograd.grad(first, weight, first.detach().clone())
            results.append(again)
        # The same tensor; where DTensor's lies after two reversals is another matter.
        ours, theirs = results
        if ours.placements != weight.placements or not torch.equal(ours.full_tensor(), theirs.full_tensor()):
            found.append(f"{source} {target}: {ours} instead of {theirs}")
    return found


def elsewhere(rank: int) -> list[str]:
    """To a mesh of other ranks: all ranks call backward, and the gradient comes home."""
    here, there = DeviceMesh("cpu", torch.tensor([0, 1])), DeviceMesh("cpu", torch.tensor([2, 1]))
    local = torch.arange(5.0 * rank, 5.0 * rank + 5) if rank < 2 else torch.empty(0)
    x = DTensor.from_local(local, here, [S0], run_check=False, shape=(10,), stride=(1,)).detach().requires_grad_()
    y = etha.redistribute(x, there, [R])
    weight = torch.arange(10.0) if rank > 0 else torch.empty(0)
    y.backward(DTensor.from_local(weight, there, [R], run_check=False, shape=(10,), stride=(1,)))
    assert isinstance(x.grad, DTensor)
    wanted = torch.arange(10.0).chunk(2)[rank] if rank < 2 else torch.empty(0)
    same = x.grad.device_mesh == here and x.grad.placements == (S0,) and torch.equal(x.grad.to_local(), wanted)
    return [] if same else [f"rank {rank}: {x.grad}"]


def modes(rank: int) -> list[str]:
    """No graph is kept where nobody asks for one."""
    mesh = DeviceMesh("cpu", torch.arange(3))
    x = given(mesh, [S0], UNEVEN, 1)
    with torch.no_grad():
        quiet = etha.redistribute(x.detach().requires_grad_(), placements=[R])
    wanted = [quiet.requires_grad, etha.redistribute(x, placements=[R]).requires_grad]
    asked = etha.redistribute(x.detach().requires_grad_(), placements=[R])
    ok = wanted == [False, False] and asked.requires_grad and asked.grad_fn is not None
    return [] if ok else [f"{wanted} {asked.grad_fn}"]


@contextmanager
def compiling() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(rank: int, backend: str) -> list[str]:
    """Whole graphs, with autograd, beside the same function without a compiler."""
    mesh = DeviceMesh("cpu", torch.arange(3))
    found = []
    for case in COMPILED if backend != "inductor" else COMPILED[2:4]:
        _, source, target = case

        def move(t: DTensor, target: Sequence[Placement] = target) -> DTensor:
            # With the mesh and without: both may be named.
            return etha.redistribute(etha.redistribute(t * 2, mesh, target), placements=target) * 3  # type: ignore

        x = given(mesh, source, UNEVEN, 1)
        weight = given(mesh, [R if p.is_partial() else p for p in target], UNEVEN, 2)
        with compiling():
            graph = torch.compile(move, fullgraph=True, backend=backend)
            for _ in range(2):  # the second call runs the kept graph
                pairs = zip(back(x, graph, weight), back(x, move, weight), strict=True)
                found += [f"{case}: {text}" for a, b in pairs if (text := differs(a, b))]
            with torch.no_grad():
                if text := differs(graph(x), move(x)):
                    found.append(f"{case} without grad: {text}")
    return found


def every_graph(rank: int) -> list[str]:
    """All transitions in one whole graph, forwards and backwards, and without the exact order of additions."""
    meshes = {mesh: DeviceMesh("cpu", torch.arange(8).reshape(mesh)) for mesh, _, _ in TRANSITIONS}
    pairs = []
    for shape in (EVEN, UNEVEN):
        for mesh, source, target in TRANSITIONS:
            if shape == EVEN or not any(isinstance(p, _StridedShard) for p in source):
                weights = [R if p.is_partial() else p for p in target]
                x = given(meshes[mesh], source, shape, 1)
                pairs.append((x, tuple(target), given(meshes[mesh], weights, shape, 2)))

    def move(tensors: list[DTensor], exact: bool) -> list[DTensor]:
        made = []
        for x, (_, target, _) in zip(tensors, pairs, strict=True):
            made.append(etha.redistribute(x, placements=target, exact_order=exact))
        return made

    def results(function: Any, exact: bool) -> list[DTensor]:
        leaves: list[Any] = [x.detach().requires_grad_() for x, _, _ in pairs]
        made = function(leaves, exact)
        torch.autograd.backward(made, [weight for _, _, weight in pairs])
        return [*(m.detach() for m in made), *(leaf.grad for leaf in leaves)]

    found = []
    for exact in (True, False):
        with compiling():
            graph = torch.compile(move, fullgraph=True, backend="aot_eager")
            ours, theirs = results(graph, exact), results(move, exact)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if text := differs(a, b):
                found.append(f"{pairs[i % len(pairs)][:2]} {exact}: {text}")
    return found[:3]


def registered(rank: int) -> list[str]:
    """torch's own check of a registered operator: schema, fake kernel, autograd."""
    from etha.redistribute.request import read_request

    mesh = DeviceMesh("cpu", torch.arange(3))
    request = read_request(given(mesh, [P], UNEVEN, 1), mesh, (S1,))
    assert request is not None
    tests = ("test_schema", "test_faketensor")
    checked = torch.library.opcheck(
        torch.ops.etha.redistribute.default, (torch.ones(UNEVEN), request.to_text()), test_utils=tests
    )
    return [f"{name}: {what}" for name, what in checked.items() if what != "SUCCESS"]


def world(rank: int, size: int, store: str, sections: Sequence[tuple[str, tuple[Any, ...]]]) -> list[list[str]]:
    """One rank of a world: what each section found."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    try:
        return [globals()[name](rank, *args) for name, args in sections]
    finally:
        dist.destroy_process_group()


def launched(size: int, folder: Path, *sections: tuple[str, tuple[Any, ...]]) -> list[list[list[str]]]:
    with Job({"GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}) as job:
        workers = [job.start(world, rank, size, str(folder / "store"), sections) for rank in range(size)]
        return job.results(workers, timeout=200.0)


@pytest.mark.timeout(240)
def test_gradients_are_those_of_dtensor_in_every_transition(tmp_path: Path) -> None:
    assert launched(8, tmp_path, ("eight", ())) == [[[]]] * 8


def test_gradients_of_gradients_other_meshes_and_modes(tmp_path: Path) -> None:
    sections = [(name, ()) for name in ("second", "elsewhere", "modes", "registered")]
    assert launched(3, tmp_path, *sections) == [[[]] * 4] * 3


@pytest.mark.timeout(240)
def test_every_transition_in_a_whole_graph(tmp_path: Path) -> None:
    assert launched(8, tmp_path, ("every_graph", ())) == [[[]]] * 8


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_whole_graph_without_a_break(tmp_path: Path, backend: str) -> None:
    assert launched(3, tmp_path, ("compiled", (backend,))) == [[[]]] * 3
