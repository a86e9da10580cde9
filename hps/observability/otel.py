"""Spans by OpenTelemetry, if it is installed (``pip install hps-server[otel]``) and configured.

OpenTelemetry's SDK reads the variables ``OTEL_…``: an endpoint (``OTEL_EXPORTER_OTLP_ENDPOINT``) or an
exporter (``OTEL_TRACES_EXPORTER``) enables it, ``OTEL_SERVICE_NAME`` names the process, and
``OTEL_TRACES_SAMPLER`` decides for requests whose client did not."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from hps.environment import traces_exporter
from hps.errors import ConfigError
from hps.tracing import RequestContext

log = logging.getLogger(__name__)


class Tracer:
    """Starts the spans of a process's requests. Thread-safe."""

    def __init__(self, provider: Any) -> None:
        """``provider``: OpenTelemetry's ``TracerProvider``."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._provider = provider
        self._trace = trace
        self._read = tracecontext.TraceContextTextMapPropagator().extract
        self.tracer = provider.get_tracer("hps")

    def request(
        self, name: str, started: int, request_id: str, traceparent: str, tracestate: str
    ) -> RequestContext:
        """Start a request's span in its client's trace.

        The request began at ``started`` (``time.perf_counter_ns``). Returns a plain `RequestContext` if the
        sampler drops it."""
        carrier = {"traceparent": traceparent, "tracestate": tracestate}
        context = self._read(carrier) if traceparent else None
        span = self.tracer.start_span(
            name, context, self._trace.SpanKind.SERVER, start_time=_epoch_ns(started)
        )
        if request_id:
            span.set_attribute("hps.request_id", request_id)
        return _request_context(self, span, request_id)

    def batch(self, name: str, traceparents: Iterable[str]) -> RequestContext:
        """Start a span for work on several requests: a new trace, linked to theirs."""
        contexts = [self._read({"traceparent": parent}) for parent in dict.fromkeys(traceparents)]
        spans = [self._trace.get_current_span(context).get_span_context() for context in contexts]
        links = [self._trace.Link(span) for span in spans if span.is_valid]
        kind = self._trace.SpanKind.CONSUMER
        return _request_context(self, self.tracer.start_span(name, kind=kind, links=links), "")

    def child(self, span: Any, name: str, started: int | None = None) -> Any:
        context = self._trace.set_span_in_context(span)
        return self.tracer.start_span(name, context, start_time=started)

    def failed(self, span: Any, error: BaseException) -> None:
        span.record_exception(error)
        span.set_status(self._trace.StatusCode.ERROR, str(error))

    def close(self) -> None:
        """Send the recorded spans."""
        self._provider.shutdown()


class _RecordedSpan(RequestContext):
    """A recorded span: a request, or a part of its work."""

    __slots__ = ("_span", "_tracer")

    is_recorded = True

    def __init__(self, tracer: Tracer, span: Any, request_id: str, parent: str, state: str) -> None:
        super().__init__(request_id, parent, state)
        self._tracer = tracer
        self._span = span

    def begin(self, name: str) -> RequestContext:
        return _request_context(self._tracer, self._tracer.child(self._span, name), self.request_id)

    def note(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(f"hps.{name}", value)

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._tracer.failed(self._span, error)
        self._span.end()

    def stage(self, name: str, started: int, ended: int) -> None:
        self._tracer.child(self._span, name, _epoch_ns(started)).end(_epoch_ns(ended))


def _request_context(tracer: Tracer, span: Any, request_id: str) -> RequestContext:
    context = span.get_span_context()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    state = context.trace_state.to_header()
    if not span.is_recording():
        return RequestContext(request_id, parent, state)
    return _RecordedSpan(tracer, span, request_id, parent, state)


def _epoch_ns(instant: int) -> int:
    return time.time_ns() - (time.perf_counter_ns() - instant)


def tracer(role: str, attributes: Mapping[str, Any] | None = None) -> Tracer | None:
    """Create this process's tracer from the environment; None if tracing is off.

    Raises ``ConfigError`` if it is on but unavailable."""
    exporter = traces_exporter()
    if exporter is None:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "the environment asks for traces (OTEL_…), which needs OpenTelemetry: pip install "
            "'hps-server[otel]', or set OTEL_SDK_DISABLED=true"
        ) from None
    exporters = entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not exporters:
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER: there is no exporter {exporter!r}; install the package that has it, "
            "pip install 'hps-server[otel]' for otlp"
        )
    (entry,) = list(exporters)[:1]
    resource = Resource({"hps.role": role, **(attributes or {})}).merge(Resource.create())
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "hps"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(entry.load()()))
    log.info("exporting traces with OpenTelemetry's exporter %s", exporter)
    return Tracer(provider)
