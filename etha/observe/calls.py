"""A client's calls as spans: in its process's trace (ETHA_TRACE), and in OpenTelemetry.

    init_pair, register_tensors
    transfer = copy_in | wait | book | compile | move | verify | commit | copy_out

OpenTelemetry is used if the process has set a tracer provider before it makes a client. The parent of a call's span is
the caller's: the current one of the task, or of the thread that calls the blocking client.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from etha.observe import trace
from etha.observe.trace import Part, Tracer

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)

#: ``_end_otel`` records exceptions, also those that a result reports.
_TOLD_HERE = {"record_exception": False, "set_status_on_exception": False}
#: The name of Etha's tracer, and the prefix of its spans' attributes.
SCOPE = "etha"


class CallSpans:
    """The spans of all clients of a process, or of one client."""

    def __init__(self, tracer: Tracer | None, otel: Any) -> None:
        """``otel``: the module ``opentelemetry.trace``, or None."""
        self._tracer, self._otel = tracer, otel
        self._scope: Any = None if otel is None else otel.get_tracer(SCOPE)
        #: pair -> this worker's (side, rank).
        self._places: dict[str, tuple[str, int]] = {}
        self._warned = False

    def joined(self, pair: str, side: str, rank: int) -> None:
        """This client is ``rank`` of ``side`` in a pair."""
        self._places[pair] = (side, rank)
        if self._tracer is not None:
            places = dict.fromkeys(f"{side} {rank}" for side, rank in self._places.values())
            self._tracer.note(label=", ".join(places))

    def place(self, pair: str) -> dict[str, Any]:
        """This client's side and rank in a pair, as arguments of a span."""
        side, rank = self._places.get(pair, ("", None))
        return {"side": side, "rank": rank}

    def trace_id(self) -> str:
        """That of the current OpenTelemetry span, in hex; "" if there is none."""
        return "" if self._otel is None else _hex(self._otel.get_current_span())

    async def watch(self, name: str, work: Awaitable[T], args: Mapping[str, Any]) -> T:
        """Await ``work`` inside of a span. What it returns or raises tells seq, version, bytes, phases and error."""
        begun, real = time.monotonic_ns(), time.time_ns()
        number = 0
        if self._tracer is not None:
            number = self._tracer.begin("calls", name, begun, args)
        span = self._begin_otel(name, args, real)
        result: Any = None
        error: BaseException | None = None
        try:
            with nullcontext() if span is None else self._otel.use_span(span, end_on_exit=False, **_TOLD_HERE):
                result = await work
            error = getattr(result, "error", None)
            return result  # type: ignore[no-any-return]
        except BaseException as raised:
            error = raised
            raise
        finally:
            ended = time.monotonic_ns()
            about = {**args, **_outcome(result, error)}
            # A result that was skipped has the error of an earlier one, and phases of its own.
            parts = _parts(getattr(error if result is None else result, "phases", None), begun, ended)
            if span is not None:
                about["trace_id"] = _hex(span)
                self._end_otel(span, about, parts, real - begun, error)
            if self._tracer is not None:
                self._tracer.span("calls", name, begun, ended, about, parts, number)

    def _begin_otel(self, name: str, args: Mapping[str, Any], begun: int) -> Any:
        """A span of OpenTelemetry; None if there is none to be had.

        A span processor is the user's or its vendor's. What it raises fails no call: the other side would wait for it,
        or a transfer that was committed would look like one that failed.
        """
        if self._scope is None:
            return None
        span = None
        with self._unharmed():
            span = self._scope.start_span(name, attributes=_attributes(args), start_time=begun)
        return span

    def _end_otel(
        self, span: Any, about: Mapping[str, Any], parts: Iterable[Part], shift: int, error: BaseException | None
    ) -> None:
        """Tell the span how the call ended, and end it."""
        with self._unharmed():
            if span.is_recording():
                span.set_attributes(_attributes({name: value for name, value in about.items() if name != "trace_id"}))
                for name, begun, ns in parts:
                    within = self._otel.set_span_in_context(span)
                    child = self._scope.start_span(name, context=within, start_time=begun + shift)
                    child.end(end_time=begun + ns + shift)
                if error is not None:
                    span.record_exception(error)
                    failed = self._otel.Status(self._otel.StatusCode.ERROR, f"{type(error).__name__}: {error}")
                    span.set_status(failed)
        with self._unharmed():
            span.end()

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """What OpenTelemetry raises is logged once, and fails nothing."""
        try:
            yield
        except Exception:
            if not self._warned:
                self._warned = True
                log.warning("OpenTelemetry failed, calls go on without their spans", exc_info=True)


def spans_of_process() -> CallSpans | None:
    """What a new client tells its calls; None if nobody wants to know."""
    otel = _opentelemetry()
    return None if trace.active is None and otel is None else CallSpans(trace.active, otel)


def _opentelemetry() -> Any:
    """The module ``opentelemetry.trace``, if this process has set a tracer provider; else None.

    Whoever has set one has imported it. Others may have as well, such as torch, so that alone says nothing.
    """
    otel = sys.modules.get("opentelemetry.trace")
    if otel is None or isinstance(otel.get_tracer_provider(), (otel.ProxyTracerProvider, otel.NoOpTracerProvider)):
        return None
    return otel


class Watched(Protocol):
    """A client."""

    _spans: CallSpans | None


S = TypeVar("S", bound=Watched)


def watched(
    what: str,
) -> Callable[
    [Callable[Concatenate[S, P], Coroutine[Any, Any, T]]], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
]:
    """A client's method whose calls are spans of the method's name. Its first argument is ``what``: "pair", "batch"."""

    def decorate(
        method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
        @functools.wraps(method)
        async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if self._spans is None:
                return await method(self, *args, **kwargs)
            first = args[0] if args else next(iter(kwargs.values()), None)
            about = {what: first if isinstance(first, str) else str(type(first).__name__)}
            return await self._spans.watch(method.__name__, method(self, *args, **kwargs), about)

        return call

    return decorate


def _hex(span: Any) -> str:
    """The id of the trace that an OpenTelemetry span belongs to; "" if that is nowhere recorded."""
    trace_id = span.get_span_context().trace_id
    return f"{trace_id:032x}" if trace_id else ""


def _outcome(result: Any, error: BaseException | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if error is not None:
        found["error"] = f"{getattr(error, 'code', type(error).__name__)}: {error}"[:2000]
        if (outcome := getattr(error, "outcome", None)) is not None:
            found["outcome"] = outcome
    elif (seq := getattr(result, "seq", None)) is not None:
        found |= {"seq": seq, "version": result.version, "bytes": result.bytes}
    elif (epoch := getattr(result, "epoch", None)) is not None:
        found["epoch"] = epoch
    return found


def _parts(phases: Iterable[tuple[str, float]] | None, begun: int, ended: int) -> list[Part]:
    """The phases of a call one after the other. The way to the agent and back, which is in none, is halved.

    The agent's own spans (``transfers``) have the moments themselves.
    """
    if phases is None:
        return []
    spans = [(name, round(seconds * 1e9)) for name, seconds in phases]
    way = max(0, ended - begun - sum(ns for _, ns in spans)) // 2
    parts, at = [], begun
    for name, ns in spans:
        if name == "copy_out":
            at = max(at, ended - ns)
        if ns:
            parts.append((name, at, ns))
        at += ns
        if name == "copy_in":
            at += way
    return parts


def _attributes(about: Mapping[str, Any]) -> dict[str, Any]:
    """As OpenTelemetry takes them: no None, and plain values."""
    return {
        f"{SCOPE}.{name}": value if isinstance(value, str | bool | int | float) else str(value)
        for name, value in about.items()
        if value is not None
    }
