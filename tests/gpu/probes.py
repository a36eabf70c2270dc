"""What the tests ask a card, in processes of their own: a spoilt context spoils nobody else."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from etha.cuda.driver import DeviceError, Driver
from etha.cuda.select import driver
from etha.demo.process import die_with_parent
from tests.flow.jobs import tell, wait_for, wait_gone

from .world import Spawned

GIB = 1 << 30


def _card() -> tuple[Driver, str]:
    torch.cuda.init()
    cuda = driver()
    return cuda, cuda.devices()[0].uuid


def _said(name: str, call: Callable[[], Any], found: dict[str, str]) -> Any:
    """What a call answered, or the error and whether it is sticky; noted under ``name``."""
    try:
        value = call()
        found[name] = "ok" if value is None else f"ok ({value})" if isinstance(value, bool | str) else "ok"
        return value
    except DeviceError as error:
        found[name] = f"{error.name}{', sticky' if error.sticky else ''}"
    except RuntimeError as error:  # torch's own
        found[name] = str(error).partition("\n")[0]
    return None


def export(nbytes: int) -> None:
    """Memory of cudaMalloc and an event that is never reached, shown to whoever asks; until it is killed."""
    die_with_parent(os.getppid())
    cuda, uuid = _card()
    address, event = cuda.allocate(uuid, nbytes), cuda.event(uuid, interprocess=True)
    cuda.tensor(uuid, address, nbytes).fill_(7)
    torch.cuda.synchronize()
    tell("shown", (cuda.export(address), cuda.export_event(event)))
    wait_for("work")
    torch.cuda._sleep(1 << 40)
    cuda.record(event, cuda.current_stream(uuid))
    tell("working")
    wait_for("the end")


def exporter_killed(nbytes: int, busy: bool) -> dict[str, str]:
    """What is left of a mapping and an event when their process is killed; ``busy``: while copies read the memory."""
    cuda, uuid = _card()
    other = Spawned({}, export, nbytes)
    try:
        handle, mark = other.expect("shown")
        there, event = cuda.open(uuid, handle), cuda.open_event(uuid, mark)
        here, stream, done = cuda.allocate(uuid, nbytes), cuda.stream(uuid), cuda.event(uuid)
        other.go("work")
        other.expect("working")
        found: dict[str, str] = {}
        rounds = 2000 if busy else 0

        def copy() -> None:
            cuda.copy(here, there, nbytes, stream)
            cuda.record(done, stream)
            cuda.synchronize(done)

        _said("copy, the exporter alive", copy, found)
        for _ in range(rounds):
            cuda.copy(here, there, nbytes, stream)
        cuda.record(done, stream)
        if busy:
            found["copies at the time of the kill"] = "none" if cuda.reached(done) else "running"
        os.kill(other.pid, signal.SIGKILL)
        wait_gone(other.pid)
        _said("copies that ran", lambda: cuda.synchronize(done), found)
        _said("a copy from the mapping", copy, found)
        _said("its event is reached", lambda: cuda.reached(event), found)
        _said("closing the event", lambda: cuda.drop_event(event), found)
        _said("closing the mapping", lambda: cuda.close(there), found)
        _said("opening the handle again", lambda: cuda.open(uuid, handle), found)
        again = _said("cudaMalloc", lambda: cuda.allocate(uuid, nbytes), found)
        if again is not None:
            _said("a copy of its own memory", lambda: cuda.copy(again, here, nbytes, stream), found)
            _said("and its end", lambda: torch.cuda.synchronize(), found)
        return found
    finally:
        other.end()


def opened_twice(nbytes: int) -> dict[str, str]:
    """One handle opened twice: equal addresses, and whether one close leaves it readable."""
    cuda, uuid = _card()
    other = Spawned({}, export, nbytes)
    try:
        handle, _ = other.expect("shown")
        one, two = cuda.open(uuid, handle), cuda.open(uuid, handle)
        found = {"the addresses are": "equal" if one == two else "different"}
        here = cuda.allocate(uuid, nbytes)

        def copy() -> None:
            cuda.copy(here, two, nbytes, 0)
            torch.cuda.synchronize()

        _said("closing it once", lambda: cuda.close(one), found)
        _said("a copy then", copy, found)
        _said("closing it again", lambda: cuda.close(two), found)
        return found
    finally:
        other.end()


def opened_at_home() -> dict[str, str]:
    """A process's own handle, opened by itself."""
    cuda, uuid = _card()
    address = cuda.allocate(uuid, 1 << 20)
    found: dict[str, str] = {}
    _said("opening one's own handle", lambda: cuda.open(uuid, cuda.export(address)), found)
    return found


def exportable() -> dict[str, str]:
    """What the driver says of 64 MiB of torch's allocator as it is set, and of cudaMalloc's."""
    from cuda.bindings import driver as cu
    from cuda.bindings import runtime as rt

    cuda, uuid = _card()
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    found: dict[str, str] = {}
    for name, address in (("torch", tensor.data_ptr()), ("cudaMalloc", cuda.allocate(uuid, 64 << 20))):
        for attribute in ("IS_LEGACY_CUDA_IPC_CAPABLE", "BUFFER_ID", "ALLOWED_HANDLE_TYPES", "MEMPOOL_HANDLE"):
            code = getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
            error, *value = cu.cuPointerGetAttribute(code, address)
            found[f"{name}: {attribute}"] = str(value[0]) if not int(error) else error.name
        error, *extent = cu.cuMemGetAddressRange(address)
        found[f"{name}: cuMemGetAddressRange"] = error.name if int(error) else f"{int(extent[1])} bytes"
        found[f"{name}: cudaIpcGetMemHandle"] = rt.cudaIpcGetMemHandle(address)[0].name
    return found


def throughput(nbytes: int) -> dict[str, float]:
    """GB/s of payload, medians: torch's copy in one process, and the same copy from another process's memory."""
    cuda, uuid = _card()
    other = Spawned({}, export, nbytes)
    try:
        handle, _ = other.expect("shown")
        there, here = cuda.open(uuid, handle), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        own, mapped = torch.ones_like(here), cuda.tensor(uuid, there, nbytes)
        found = {"its own memory": rate(here, own), "by IPC": rate(here, mapped)}
        assert bool((here == 7).all())
        return found
    finally:
        other.end()


def rate(target: torch.Tensor, source: torch.Tensor, runs: int = 21) -> float:
    """Median GB/s of ``copy_``, by events."""
    seconds = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return target.nbytes / statistics.median(seconds[1:]) / 1e9


def nccl_alone(nbytes: int) -> str:
    """A world of one sends to itself inside a group; what NCCL says, and whether the bytes are there."""
    from etha.cuda.nccl import IN_PROGRESS, OK
    from etha.cuda.select import nccl

    cuda, uuid = _card()
    library = nccl()
    comm = library.init(0, 1, 0, library.unique_id())

    def settled() -> str:
        while (state := library.state(comm)) == IN_PROGRESS:
            pass
        return state

    if (state := settled()) != OK:
        return f"init: {state}"
    source, target = (torch.full((nbytes,), value, dtype=torch.uint8, device="cuda") for value in (3, 0))
    torch.cuda.synchronize()
    stream = cuda.stream(uuid)
    library.group_start()
    library.send(comm, source.data_ptr(), nbytes, 0, stream)
    library.receive(comm, target.data_ptr(), nbytes, 0, stream)
    library.group_end(comm)
    if (state := settled()) != OK:
        return f"send and receive: {state}"
    event = cuda.event(uuid)
    cuda.record(event, stream)
    cuda.synchronize(event)
    right = bool((target == 3).all())
    library.abort(comm)
    return f"NCCL {library.version()}: {'every byte arrived' if right else 'other bytes arrived'}"


def nccl_pair(rank: int, unique_id: bytes | None, nbytes: int) -> str:
    """One of two ranks that share a card; rank 0 makes the id and tells it."""
    from etha.cuda.nccl import IN_PROGRESS, OK
    from etha.cuda.select import nccl

    cuda, uuid = _card()
    library = nccl()
    if unique_id is None:
        unique_id = library.unique_id()
        tell("id", unique_id)
    comm = library.init(0, 2, rank, unique_id)
    while (state := library.state(comm)) == IN_PROGRESS:
        pass
    if state != OK:
        return state
    memory = torch.full((nbytes,), 5 if rank == 0 else 0, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream, event = cuda.stream(uuid), cuda.event(uuid)
    library.group_start()
    (library.send if rank == 0 else library.receive)(comm, memory.data_ptr(), nbytes, 1 - rank, stream)
    library.group_end(comm)
    while (state := library.state(comm)) == IN_PROGRESS:
        pass
    if state != OK:
        return state
    cuda.record(event, stream)
    cuda.synchronize(event)
    right = bool((memory == 5).all())
    library.abort(comm)
    return "ok" if right else "other bytes arrived"


def baby_nccl(rank: int, port: int) -> dict[str, Any]:
    """One of two trainers whose groups run NCCL in a child: calls, a child that is killed, and calls again."""
    from etha.errors import GroupLostError
    from etha.groups import ProcessGroupBabyNCCL

    _card()
    group = ProcessGroupBabyNCCL(timeout=60)
    wrong, times = [], []
    for turn in range(2):
        start = time.perf_counter()
        group.configure(f"127.0.0.1:{port}/{turn}", "trainer", rank, 2)
        times.append(time.perf_counter() - start)
        for dtype in (torch.float32, torch.bfloat16):
            for length in (1, 1000, 1 << 22):
                tensor = torch.full((length,), rank + 1.0, dtype=dtype, device="cuda")
                gathered = torch.zeros(2 * length, dtype=dtype, device="cuda")
                tensor.mul_(2)
                group.allreduce([tensor]).wait()
                group.all_gather_single(gathered, tensor).wait()
                if not (bool((tensor == 6).all()) and bool((gathered == 6).all())):
                    wrong.append(f"{dtype} {length}")
        group.barrier().wait()
        if turn == 0:
            if rank == 0:
                os.kill(group.child_pid(), signal.SIGKILL)
            try:
                group.barrier().wait()
                wrong.append("no error after a child was killed")
            except GroupLostError:
                pass
    group.shutdown()
    return {"wrong": wrong, "seconds of configure": times}
