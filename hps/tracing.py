"""Request context: a request's id, and its position in a trace.

A request without either has no context (None), which costs nothing. With OpenTelemetry
(`hps.observability.otel`) spans are recorded. Without it, the trace is passed on to the services that the
request uses, as W3C Trace Context."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")
_recorder: Recorder | None = None
_current: ContextVar[RequestContext | None] = ContextVar("hps_origin", default=None)


class RequestContext:
    """Id and trace of a request, passed to all code that works for the request. Thread-safe."""

    __slots__ = ("request_id", "traceparent", "tracestate")

    is_recorded = False
    """True if spans are recorded."""
    is_profiled = False
    """True if the request's profile is recorded, too: the small parts of its work."""

    def __init__(self, request_id: str = "", traceparent: str = "", tracestate: str = "") -> None:
        self.request_id = request_id
        self.traceparent = traceparent
        self.tracestate = tracestate

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty without a trace."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits; empty without a trace."""
        return self.traceparent[36:52]

    def headers(self) -> dict[str, str]:
        """HTTP headers, or gRPC metadata, that pass the trace on."""
        if not self.traceparent:
            return {}
        state = {"tracestate": self.tracestate} if self.tracestate else {}
        return {"traceparent": self.traceparent, **state}

    def begin(self, name: str) -> RequestContext:
        """Start a child span; the caller ends it by ``end``."""
        return self

    def note(self, **attributes: Any) -> None:
        """Add attributes to the span."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with its error if it failed."""

    def stage(self, name: str, started: int, ended: int) -> None:
        """Record a completed part of the work, between two instants of ``time.perf_counter_ns``."""

    def spent(self, name: str, ns: int) -> None:
        """Add ``ns`` to the total time of ``name``, which occurs many times per request."""

    def reported(self, name: str, started: int, ended: int, report: bytes) -> None:
        """Record a part that another process executed, between two instants.

        ``report`` is that process's profile, encoded by `hps.observability.profile`, or empty."""

    def part(self, name: str) -> AbstractContextManager[RequestContext]:
        """Child span of work on this thread, whose `current_context` it is until it ends."""
        return self.begin(name).whole()

    @contextmanager
    def whole(self) -> Iterator[RequestContext]:
        """Run the whole span on this thread: it is the `current_context`, and ends with the block."""
        token = _current.set(self)
        try:
            yield self
        except BaseException as error:
            self.end(error)
            raise
        else:
            self.end()
        finally:
            _current.reset(token)


def call_timed(
    origin: RequestContext | None, name: str, call: Callable[..., T], *arguments: Any
) -> T:
    """Call ``call(*arguments)``; record it as a part of ``origin`` if that is profiled."""
    if origin is None or not origin.is_profiled:
        return call(*arguments)
    with origin.part(name):
        return call(*arguments)


def timed_wait(origin: RequestContext | None, call: Callable[..., T]) -> Callable[..., T]:
    """Wrap ``call`` to record the time until it is called as ``origin``'s wait, if that is profiled."""
    if origin is None or not origin.is_profiled:
        return call
    since, context = perf_counter_ns(), origin

    def run(*arguments: Any) -> T:
        context.stage("wait", since, perf_counter_ns())
        return call(*arguments)

    return run


def timed_total(call: Callable[..., T], name: str) -> Callable[..., T]:
    """Wrap ``call`` to add its time to ``name`` of the `current_context`, which must be profiled."""

    def run(*arguments: Any, **options: Any) -> T:
        started = perf_counter_ns()
        try:
            return call(*arguments, **options)
        finally:
            if (origin := current_context()) is not None:
                origin.spent(name, perf_counter_ns() - started)

    return run


def traceparent_of(header: str) -> str:
    """Validate the header ``traceparent``; return "" if it is invalid.

    Of a later version, the part that this version defines is returned."""
    match = _TRACEPARENT.match(header)
    if match is None or (match.end() < len(header) and header[:3] == "00-"):
        return ""
    return match[0]


def tracestate_of(header: str) -> str:
    """Header ``tracestate`` if it is valid, else ""."""
    return header if _TRACESTATE.fullmatch(header) else ""


def current_context() -> RequestContext | None:
    """The request context of this thread's work, or None."""
    return _current.get()


class Recorder(Protocol):
    """Recorder of this process's spans."""

    def batch(self, name: str, traceparents: Iterable[str]) -> RequestContext:
        """Start a span for work on several requests or messages: a new trace, linked to theirs."""
        ...


def set_recorder(recorder: Recorder | None) -> None:
    """Set the recorder of this process's spans; None switches recording off."""
    global _recorder
    _recorder = recorder


def recorder() -> Recorder | None:
    """The recorder of this process's spans, or None."""
    return _recorder


def shared_span(name: str, origins: Iterable[RequestContext | None]) -> RequestContext | None:
    """Start a span ``name`` for work on several requests; the caller ends it by ``end``.

    If any of ``origins`` is recorded, it is a new span linked to the recorded ones; else a child of the
    first."""
    known = [origin for origin in origins if origin is not None]
    recorded = [origin.traceparent for origin in known if origin.is_recorded]
    if recorded and _recorder is not None:
        return _recorder.batch(name, recorded)
    return known[0].begin(name) if known else None


def span_until_done(
    part: RequestContext, begin: Callable[[], Future[T]], describe: Callable[[T], Any]
) -> Future[T]:
    """Call ``begin``; end ``part`` with its future, adding the attributes that ``describe`` returns."""

    def ended(future: Future[T]) -> None:
        if future.cancelled():
            part.end(TimeoutError("cancelled"))
        elif (error := future.exception()) is not None:
            part.end(error)
        else:
            part.note(**describe(future.result()))
            part.end()

    try:
        future = begin()
    except BaseException as error:
        part.end(error)
        raise
    future.add_done_callback(ended)
    return future
