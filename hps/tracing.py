"""On whose behalf something is done: a request's id, and its place in a trace.

A request that has neither is no object at all (None), and costs nothing. With OpenTelemetry
(`hps.observability.otel`) spans are recorded; otherwise a request's trace is passed on to the services that
work for it, as W3C Trace Context.
"""

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
    """A request as those know it who work for it. May be used by any thread."""

    __slots__ = ("request_id", "traceparent", "tracestate")

    is_recorded = False
    """Whether spans are kept."""
    is_profiled = False
    """Whether the small parts of its work are kept, too."""

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
        """What others are told of the trace, HTTP's headers or gRPC's metadata."""
        if not self.traceparent:
            return {}
        state = {"tracestate": self.tracestate} if self.tracestate else {}
        return {"traceparent": self.traceparent, **state}

    def begin(self, name: str) -> RequestContext:
        """A part of the work, to be ended by ``end``."""
        return self

    def note(self, **attributes: Any) -> None:
        """Tell something of it."""

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""

    def stage(self, name: str, started: int, ended: int) -> None:
        """A part that is over, between two instants of ``time.perf_counter_ns``."""

    def spent(self, name: str, ns: int) -> None:
        """``ns`` more of its time went into ``name``, which is done a little at a time."""

    def reported(self, name: str, started: int, ended: int, told: bytes) -> None:
        """A part that another process has done, between two instants; ``told``: what it says of it, as
        `hps.profile` has it, or nothing."""

    def part(self, name: str) -> AbstractContextManager[RequestContext]:
        """A part of the work, done by this thread: `current_context` meanwhile."""
        return self.begin(name).whole()

    @contextmanager
    def whole(self) -> Iterator[RequestContext]:
        """All of it is done by this thread: `current_context` meanwhile."""
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
    """``call(*arguments)``, as a part of ``origin``'s work where it is profiled."""
    if origin is None or not origin.is_profiled:
        return call(*arguments)
    with origin.part(name):
        return call(*arguments)


def timed_wait(origin: RequestContext | None, call: Callable[..., T]) -> Callable[..., T]:
    """``call``, to be made later: the time until then is a part of ``origin``'s, where it is profiled."""
    if origin is None or not origin.is_profiled:
        return call
    since, told = perf_counter_ns(), origin

    def run(*arguments: Any) -> T:
        told.stage("wait", since, perf_counter_ns())
        return call(*arguments)

    return run


def timed_total(call: Callable[..., T], name: str) -> Callable[..., T]:
    """``call``, whose time is told as ``spent`` on ``name`` by what is `current_context`; to be used
    where that is profiled."""

    def run(*arguments: Any) -> T:
        started = perf_counter_ns()
        try:
            return call(*arguments)
        finally:
            if (origin := current_context()) is not None:
                origin.spent(name, perf_counter_ns() - started)

    return run


def traceparent_of(header: str) -> str:
    """A header ``traceparent`` that is one, else ""; of a later version, the part that is known."""
    found = _TRACEPARENT.match(header)
    if found is None or (found.end() < len(header) and header[:3] == "00-"):
        return ""
    return found[0]


def tracestate_of(header: str) -> str:
    """A header ``tracestate`` that may be passed on, else ""."""
    return header if _TRACESTATE.fullmatch(header) else ""


def current_context() -> RequestContext | None:
    """On whose behalf this thread works, where that was said."""
    return _current.get()


class Recorder(Protocol):
    """Who keeps spans in this process."""

    def batch(self, name: str, traceparents: Iterable[str]) -> RequestContext:
        """Work done for several requests or messages at once: a trace of its own, linked to theirs."""
        ...


def set_recorder(recorder: Recorder | None) -> None:
    """Have ``recorder`` keep this process's spans, or nobody."""
    global _recorder
    _recorder = recorder


def recorder() -> Recorder | None:
    """Who keeps this process's spans; None when nobody does."""
    return _recorder


def shared_span(name: str, origins: Iterable[RequestContext | None]) -> RequestContext | None:
    """On whose behalf ``name`` is done for several at once, to be ended by ``end``: where spans are kept, one
    that is linked to theirs, else the first of them."""
    known = [origin for origin in origins if origin is not None]
    recorded = [origin.traceparent for origin in known if origin.is_recorded]
    if recorded and _recorder is not None:
        return _recorder.batch(name, recorded)
    return known[0].begin(name) if known else None


def span_until_done(
    part: RequestContext, begin: Callable[[], Future[T]], describe: Callable[[T], Any]
) -> Future[T]:
    """What ``begin`` starts; ``part`` ends with it, having noted what ``describe`` says of its result."""

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
