"""Blocking calls that their own threads make: right, and ended by everything that ends the calls of a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.bus.direct import DirectConnection
from etha.client.direct import DirectTransfer
from etha.client.loop_thread import LoopThread
from etha.errors import (
    AgentLostError,
    ConfigError,
    EthaError,
    PeerLostError,
    RegistrationError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from tests.flow.clients.direct import ask_directly, count_direct
from tests.flow.duets import PATIENCE, Background, Duet
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sites import Site
from tests.processes import send_signal
from tests.seconds import within
from tests.unit.bus.echo import open_descriptors

pytestmark = pytest.mark.ways("local")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DirectTransfer]:
    """The calls that threads of this process make themselves."""
    monkeypatch.setattr(DirectTransfer, "_answer", DirectTransfer._answer)  # to be restored
    return count_direct()


def move(duet: Duet) -> tuple[etha.TransferResult, etha.TransferResult]:
    sending = Background(lambda: duet.send.transfer("send"))
    received = duet.recv.transfer("recv")
    return sending.result(), received


@pytest.fixture
def duet(site: Site, pair: str, calls: list[DirectTransfer]) -> Iterator[Duet]:
    """Both of its calls are made by their own threads from now on."""
    with Duet(site, pair) as duet:
        move(duet)
        ask_directly(duet.trainer, duet.send)
        ask_directly(duet.inference, duet.recv)
        assert not calls
        yield duet


def waiting(duet: Duet, calls: list[DirectTransfer], **options: Any) -> Background:
    """A recv whose thread waits for the agent's answer."""
    before = len(calls)
    call = Background(lambda: duet.recv.transfer("recv", **options))
    while len(calls) == before or not asked(calls[-1]):
        assert call.runs(0.001)
    return call


def asked(call: DirectTransfer) -> bool:
    return call.request is not None and call.request.connection.begun


def test_every_version_is_right_and_its_result_says_so(duet: Duet, calls: list[DirectTransfer]) -> None:
    for turn in range(2, 30):
        duet.source.fill_(turn)
        before = duet.target._version
        sent, received = move(duet)
        assert torch.all(duet.target == turn)
        assert duet.target._version > before, "autograd has not heard of it"
        assert (sent.seq, received.seq, sent.bytes, received.bytes) == (turn, turn, 32, 32)
        assert (sent.direction, received.direction) == ("send", "recv")
        assert received.peers == (("trainer", 0),) and received.error is None
        assert all(
            seconds >= 0 for seconds in (received.phases.copy_in, received.phases.wait, received.phases.copy_out)
        )
    assert len(calls) == 2 * 28
    sending = Background(lambda: duet.send.transfer("send", version="v7"))
    assert (
        duet.recv.transfer("recv").version == duet.recv.version == "v7" == sending.result().version == duet.send.version
    )


def test_what_needs_the_loop_goes_over_the_loop(duet: Duet, calls: list[DirectTransfer]) -> None:
    seen: list[tuple[int, int]] = []
    sending = Background(lambda: duet.send.transfer("send", on_error="report"))
    duet.recv.transfer("recv", progress=lambda *at: seen.append(at))
    assert sending.result().error is None and seen and not calls
    for wrong in (lambda: duet.recv.transfer("receive"), lambda: duet.recv.transfer("recv", timeout=-1)):  # type: ignore[arg-type, call-overload]
        with pytest.raises(etha.ConfigError):
            wrong()
    assert not calls
    move(duet)
    assert len(calls) == 2


def test_moved_tensors_and_a_closed_batch_are_refused_as_ever(duet: Duet, calls: list[DirectTransfer]) -> None:
    kept, duet.target.data = duet.target.data, torch.zeros(8)
    with pytest.raises(RegistrationError, match="'w'"):
        duet.recv.transfer("recv", timeout=5)
    duet.target.data = kept
    move(duet)
    duet.recv.close()
    with pytest.raises(RegistrationError, match="is closed"):
        duet.recv.transfer("recv", timeout=5)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_deadline(duet: Duet, calls: list[DirectTransfer], seconds: float) -> None:
    begun = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"not ready: trainer rank 0") as caught:
        duet.recv.transfer("recv", timeout=seconds)
    assert caught.value.outcome == "withdrawn" and caught.value.phases is not None
    assert seconds <= time.monotonic() - begun < within(seconds + 1)
    assert len(calls) == 1
    again(duet)


def again(duet: Duet) -> None:
    """What comes after a call that failed is right, and direct again once it can be."""
    for turn in (5, 6):
        duet.source.fill_(turn)
        move(duet)
        assert torch.all(duet.target == turn)
        ask_directly(duet.trainer, duet.send)
        ask_directly(duet.inference, duet.recv)


def test_what_nobody_could_take_over_is_cancelled(
    duet: Duet, calls: list[DirectTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a second interrupt before the event loop has heard of the call: no later send may meet it."""

    def interrupted(self: LoopThread, work: Any) -> None:
        work.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LoopThread, "call", interrupted)
        call = waiting(duet, calls)
        calls[-1].interrupt("a test")
        assert isinstance(call.error(), KeyboardInterrupt)
    assert calls[-1].request is not None and calls[-1].request.connection.closed
    again(duet)


@pytest.mark.parametrize("what", ["client", "batch"])
def test_a_close_by_another_thread_ends_it(duet: Duet, calls: list[DirectTransfer], what: str) -> None:
    call = waiting(duet, calls)
    begun = time.monotonic()
    (duet.inference if what == "client" else duet.recv).close()
    assert time.monotonic() - begun < within(2)
    assert not call.runs(0), "close has returned before the call"
    error = call.error()
    assert isinstance(error, TransferError) and error.outcome == "withdrawn", error
    assert isinstance(error, TransferAbortedError | PeerLostError), error


def test_the_other_side_leaves(duet: Duet, calls: list[DirectTransfer]) -> None:
    call = waiting(duet, calls)
    duet.trainer.close()
    error = call.error()
    assert isinstance(error, PeerLostError) and error.outcome == "withdrawn", error
    with pytest.raises(PeerLostError):
        duet.recv.transfer("recv", timeout=5)


def test_two_threads_at_once_are_both_right(site: Site, pair: str, calls: list[DirectTransfer]) -> None:
    """One has the direct connection, the other one goes over the loop."""
    with Duet(site, pair) as duet:
        first, second = torch.zeros(8), torch.ones(8)
        sides = [(duet.inference, first), (duet.trainer, second)]
        made = [
            Background(lambda c=c, t=t: c.register_tensors("other", {"w": t}, pair_name=pair))  # type: ignore[misc]
            for c, t in sides
        ]
        recv, send = (one.result() for one in made)
        move(duet)
        ask_directly(duet.trainer, duet.send)
        ask_directly(duet.inference, duet.recv)
        for turn in range(2, 40):
            duet.source.fill_(turn)
            second.fill_(-turn)
            acts: list[Callable[[], Any]] = [
                lambda: duet.send.transfer("send"),
                lambda: send.transfer("send"),
                lambda: duet.recv.transfer("recv"),
                lambda: recv.transfer("recv"),
            ]
            for one in [Background(act) for act in acts]:
                one.result()
            assert torch.all(duet.target == turn) and torch.all(first == -turn)
        assert len(calls) >= 38


def test_descriptors_are_given_back(duet: Duet, calls: list[DirectTransfer]) -> None:
    before = len(open_descriptors())
    for _ in range(20):  # each is handed over, which costs its connection
        with pytest.raises(TransferTimeoutError):
            duet.recv.transfer("recv", timeout=0.01)
        ask_directly(duet.inference, duet.recv)
    assert len(open_descriptors()) == before
    link = duet.recv._inner._registration.connection.link
    assert not link._direct_requests and len(calls) == 20


# ---- in processes of their own ----------------------------------------------------------------------------


class Rank:
    """A side with a blocking client, one tensor, and calls that its thread makes itself."""

    def __init__(self, pair: str, side: Literal["trainer", "inference"]) -> None:
        self.tensor = torch.full((8,), 1.0 if side == "trainer" else 0.0)
        self.verb: Literal["send", "recv"] = "send" if side == "trainer" else "recv"
        self.client = etha.TensorBusClient(timeout=60)
        other = "inference" if side == "trainer" else "trainer"
        self.client.init_pair(pair, side, other, 1, (1,), [Replicate()], rank=0)
        self.batch = self.client.register_tensors("b", {"w": self.tensor}, pair_name=pair)
        self.batch.transfer(self.verb)
        self.connection = ask_directly(self.client, self.batch)
        self.calls = count_direct()

    def move(self, **options: Any) -> etha.TransferResult:
        return self.batch.transfer(self.verb, **options)


def sender(pair: str, turns: int) -> None:
    """Sends its turn's number; the first one is sent by the rank itself."""
    with (rank := Rank(pair, "trainer")).client:
        for turn in range(2, 2 + turns):
            wait_for("send")
            rank.tensor.fill_(turn)
            rank.move()


def interrupted(pair: str, raises: bool) -> Any:
    """Waits in a recv whose main thread gets a signal."""
    with (rank := Rank(pair, "inference")).client:
        if not raises:
            signal.signal(signal.SIGINT, lambda number, at: tell("handled"))
        tell("waits")
        try:
            seq = rank.move().seq
        except KeyboardInterrupt:
            seq = 0
        assert len(rank.calls) == 1
        tell("ended", seq)
        rank.move()
        return seq, rank.tensor.tolist()


def asks(pid: int) -> None:
    """Wait until a process's main thread is in poll(2), as one is that has asked."""
    at = Path(f"/proc/{pid}/task/{pid}/syscall")
    while at.read_text().split()[0] not in ("7", "271", "73"):  # x86-64: poll, ppoll; arm64: ppoll
        pass


def test_ctrl_c_ends_it_at_once_and_consumes_nothing(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        taker = job.start(interrupted, pair, True, at=("inference", 0))
        giver = job.start(sender, pair, 1, at=("trainer", 0))
        taker.expect("waits")
        asks(taker.pid)
        begun = time.monotonic()
        os.kill(taker.pid, signal.SIGINT)
        assert taker.expect("ended") == 0
        assert time.monotonic() - begun < within(1)
        giver.go("send")
        assert taker.result() == (0, [2.0] * 8)
        giver.result()


def test_a_signal_whose_handler_returns_does_not_end_it(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        taker = job.start(interrupted, pair, False, at=("inference", 0))
        giver = job.start(sender, pair, 2, at=("trainer", 0))
        taker.expect("waits")
        for _ in range(5):
            asks(taker.pid)
            os.kill(taker.pid, signal.SIGINT)
            taker.expect("handled")
        giver.go("send")
        assert taker.expect("ended") == 2
        giver.go("send")
        assert taker.result() == (2, [3.0] * 8)
        giver.result()


def storm(pair: str, turns: int) -> tuple[int, int]:
    """(calls that were interrupted, versions received) under signals at any moment, until the last version is here."""
    with (rank := Rank(pair, "inference")).client:
        ends = 0
        while True:
            try:
                tell("begins")
                got = rank.move(timeout=30).version
                assert torch.all(rank.tensor == got), f"{rank.tensor} under version {got}"
                tell("got", got)
            except KeyboardInterrupt:
                ends += 1
            if rank.batch.version == turns:  # an interrupted call, too, may have received it
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                assert torch.all(rank.tensor == turns)
                tell("got", turns)
                return ends, turns
            while True:  # a second one may come before the loop is there again
                try:
                    ask_directly(rank.client, rank.batch)
                    break
                except KeyboardInterrupt:
                    ends += 1


def gives(pair: str, turns: int) -> int:
    """Sends version after version until all have come; how often a send failed because the receiver was interrupted."""
    failed = 0
    with (rank := Rank(pair, "trainer")).client:
        for turn in range(2, turns + 1):
            rank.tensor.fill_(turn)
            while True:
                try:
                    rank.move(version=turn, timeout=30)
                    break
                except TransferError as error:
                    assert error.outcome == "aborted", error
                    failed += 1
        return failed


@pytest.mark.timeout(180)
def test_signals_at_any_moment_mix_nothing_and_hang_nothing(site: Site, pair: str) -> None:
    turns = 60
    with Job(site.env) as job:
        taker = job.start(storm, pair, turns, at=("inference", 0))
        giver = job.start(gives, pair, turns, at=("trainer", 0))
        taker.expect("begins")
        over = threading.Event()

        def interrupt() -> None:
            for turn in range(200):  # not for ever: on a busy machine hardly any call would ever be left alone
                if over.wait(0.002 + turn % 15 * 0.0007):
                    return
                os.kill(taker.pid, signal.SIGINT)

        interrupting = Background(interrupt)
        try:
            for _ in iter(lambda: taker.expect("got"), turns):
                pass
        finally:
            over.set()
            interrupting.result()
        ends, got = taker.result()
        giver.result()
        assert got == turns and ends > 0


def loses_its_agent(pair: str, timeout: float) -> tuple[EthaError, float]:
    with (rank := Rank(pair, "inference")).client:
        tell("agent", rank.client.status()["agent"]["pid"])
        begun = time.monotonic()
        try:
            rank.move(timeout=timeout)
        except EthaError as error:
            assert len(rank.calls) == 1
            return error, time.monotonic() - begun
        raise AssertionError("it has received from nobody")


def lost(pair: str) -> None:
    with Rank(pair, "trainer").client:
        tell("ready")
        wait_for("end")


def test_an_agent_that_is_killed(rough: Site, pair: str) -> None:
    with Job(rough.env) as job:
        taker = job.start(loses_its_agent, pair, 60, at=("inference", 0))
        other = job.start(lost, pair, at=("trainer", 0))
        other.expect("ready")
        agent = taker.expect("agent")
        asks(taker.pid)
        os.kill(agent, signal.SIGKILL)
        error, seconds = taker.result()
        assert isinstance(error, AgentLostError) and error.outcome == "unknown" and seconds < within(2), error
        other.go("end")
        other.result()


def test_an_agent_that_is_frozen(rough: Site, pair: str) -> None:
    with Job(rough.env) as job:
        taker = job.start(loses_its_agent, pair, 1.0, at=("inference", 0))
        other = job.start(lost, pair, at=("trainer", 0))
        other.expect("ready")
        agent = taker.expect("agent")
        asks(taker.pid)
        send_signal(agent, signal.SIGSTOP)
        try:
            error, seconds = taker.result()
        finally:
            os.kill(agent, signal.SIGCONT)
        assert isinstance(error, TransferTimeoutError) and error.outcome == "unknown" and error.quiesced, error
        assert 1.0 <= seconds < within(4)
        other.go("end")
        other.result()


def closes_while_it_opens(pair: str) -> float:
    """Seconds of a close while the agent is frozen, with the direct connection half open."""
    client, frozen = etha.TensorBusClient(timeout=60), threading.Event()
    connect = DirectConnection.connect
    agent = client.status()["agent"]["pid"]

    async def to_a_frozen_one(path: Path, session: str, pid: int) -> DirectConnection | None:
        send_signal(agent, signal.SIGSTOP)
        frozen.set()
        return await connect(path, session, pid)

    DirectConnection.connect = to_a_frozen_one  # type: ignore[method-assign]
    client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
    batch = client.register_tensors("b", {"w": torch.zeros(8)}, pair_name=pair)
    batch.transfer("recv")
    frozen.wait()
    begun = time.monotonic()
    try:
        client.close()
        return time.monotonic() - begun
    finally:
        os.kill(agent, signal.SIGCONT)


def sends_once(pair: str) -> None:
    with etha.TensorBusClient(timeout=60) as client:
        client.init_pair(pair, "trainer", "inference", 1, (1,), [Replicate()], rank=0)
        client.register_tensors("b", {"w": torch.ones(8)}, pair_name=pair).transfer("send", progress=print)


def test_a_close_does_not_wait_for_a_connection_that_is_being_opened(rough: Site, pair: str) -> None:
    with Job(rough.env) as job:
        taker = job.start(closes_while_it_opens, pair, at=("inference", 0))
        giver = job.start(sends_once, pair, at=("trainer", 0))
        assert taker.result() < within(4)
        giver.result()


def nested(pair: str) -> list[float]:
    """A handler of a signal that transfers another batch while the main thread waits in a call."""
    with (rank := Rank(pair, "inference")).client:
        second = torch.zeros(4)
        with rank.client.register_tensors("second", {"w": second}, pair_name=pair) as batch:
            signal.signal(signal.SIGUSR1, lambda number, at: tell("inner", batch.transfer("recv").seq))
            tell("waits")
            rank.move()
            return [*rank.tensor[:2].tolist(), *second[:2].tolist()]


def gives_two(pair: str) -> None:
    with (rank := Rank(pair, "trainer")).client:
        second = torch.full((4,), 9.0)
        with rank.client.register_tensors("second", {"w": second}, pair_name=pair) as batch:
            batch.transfer("send")
            wait_for("first")
            rank.tensor.fill_(2)
            rank.move()


def test_a_handler_of_a_signal_may_transfer_too(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        taker = job.start(nested, pair, at=("inference", 0))
        giver = job.start(gives_two, pair, at=("trainer", 0))
        taker.expect("waits")
        asks(taker.pid)
        os.kill(taker.pid, signal.SIGUSR1)
        assert taker.expect("inner") == 1
        giver.go("first")
        assert taker.result() == [2.0, 2.0, 9.0, 9.0]
        giver.result()


def alarmed(pair: str, turns: int) -> tuple[int, int]:
    """(versions received, calls of the handler) with a handler that transfers at any moment."""
    with (rank := Rank(pair, "inference")).client:
        with rank.client.register_tensors("second", {"w": torch.zeros(4)}, pair_name=pair) as batch:
            handled = []

            def handle(number: int, at: object) -> None:
                with pytest.raises(TransferTimeoutError):
                    batch.transfer("recv", timeout=0)
                handled.append(number)

            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)
            tell("waits")
            for turn in range(2, turns + 1):
                assert rank.move().version == turn and bool((rank.tensor == turn).all())
            signal.setitimer(signal.ITIMER_REAL, 0)
            return turns, len(handled)


def gives_many(pair: str, turns: int) -> None:
    with (rank := Rank(pair, "trainer")).client:
        with rank.client.register_tensors("second", {"w": torch.zeros(4)}, pair_name=pair):
            wait_for("go")
            for turn in range(2, turns + 1):
                rank.tensor.fill_(turn)
                rank.move(version=turn)


def test_a_handler_that_transfers_at_any_moment_hangs_nothing(site: Site, pair: str) -> None:
    """The event loop, for which the handler waits, needs nothing that the interrupted thread holds."""
    with Job(site.env) as job:
        taker = job.start(alarmed, pair, 600, at=("inference", 0))
        giver = job.start(gives_many, pair, 600, at=("trainer", 0))
        taker.expect("waits")
        giver.go("go")
        turns, handled = taker.result()
        assert turns == 600 and handled > 10
        giver.result()


def forks_in_a_handler(pair: str) -> tuple[float, int]:
    """(what it has received, how a child ended that returned from the handler into the call)."""
    with (rank := Rank(pair, "inference")).client:
        parent = os.getpid()

        def fork(number: int, at: object) -> None:
            if os.fork():
                tell("forked")

        signal.signal(signal.SIGUSR1, fork)
        tell("waits")
        try:
            rank.move()
        except ConfigError:
            if os.getpid() != parent:
                os._exit(7)
            raise
        return float(rank.tensor[0]), os.waitstatus_to_exitcode(os.wait()[1])


def test_a_child_that_returns_from_a_handler_leaves_its_parents_call_alone(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        taker = job.start(forks_in_a_handler, pair, at=("inference", 0))
        giver = job.start(sender, pair, 1, at=("trainer", 0))
        taker.expect("waits")
        asks(taker.pid)
        os.kill(taker.pid, signal.SIGUSR1)
        taker.expect("forked")
        giver.go("send")
        assert taker.result() == (2.0, 7)
        giver.result()


def test_several_calls_that_end_at_once_open_one_connection(site: Site, pair: str) -> None:
    with Duet(site, pair) as duet:
        link = duet.recv._inner._registration.connection.link

        async def several() -> None:
            await asyncio.gather(*(link.open_direct() for _ in range(5)))

        before = len(open_descriptors())
        duet.inference._run(several())
        assert len(open_descriptors()) == before + 2, "more than a socket and an eventfd"


def forks(pair: str) -> tuple[str, float]:
    """A child is told that the client is not its own, and its end ends nothing here."""
    with (rank := Rank(pair, "inference")).client:
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                rank.move(timeout=5)
            except BaseException as error:
                os.write(write, type(error).__name__.encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(read, 100).decode()
        tell("ready")
        rank.move()
        assert len(rank.calls) == 1
        return said, float(rank.tensor[0])


def test_a_forked_child_uses_nothing_of_it(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        taker = job.start(forks, pair, at=("inference", 0))
        giver = job.start(sender, pair, 1, at=("trainer", 0))
        taker.expect("ready")
        giver.go("send")
        assert taker.result() == ("ConfigError", 2.0)
        giver.result()


def compiled_nothing(pair: str) -> tuple[float, bool]:
    """Where there is no compiled library, calls go over the loop."""
    os.environ["ETHA_NATIVE"] = "0"
    tensor = torch.zeros(8)
    with etha.TensorBusClient(timeout=60) as client:
        client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
        with client.register_tensors("b", {"w": tensor}, pair_name=pair) as batch:
            for _ in range(2):
                batch.transfer("recv")
            link = batch._inner._registration.connection.link
            return float(tensor[0]), link.direct is None and not link.wants_direct


def test_without_the_compiled_library_there_is_none(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        taker = job.start(compiled_nothing, pair, at=("inference", 0))
        giver = job.start(sender, pair, 1, at=("trainer", 0))
        giver.go("send")
        assert taker.result(PATIENCE) == (2.0, True)
        giver.result()
