"""Log lines and spans of single requests, for all protocols."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from hps.observability.otel import Tracer
from hps.tracing import RequestContext
from services.frontend.endpoints import Endpoint
from services.frontend.logs import fields
from services.frontend.statistics import Stages

access = logging.getLogger("hps.access")


def end_span(origin: RequestContext, batch: int, defaulted: int, stages: Stages) -> None:
    """End the recorded span of an answered request of ``batch`` samples."""
    started, parsed, inferred, done = stages
    origin.stage("decode", started, parsed)
    origin.stage("encode", inferred, done)
    origin.note(batch=batch, defaulted=defaulted)
    origin.end()


class RequestObserver:
    """Logs and traces single requests. Thread-safe.

    ``share`` of the requests are logged; at level debug, all are."""

    def __init__(self, share: float = 0.0, tracer: Tracer | None = None) -> None:
        self._share = share
        self._tracer = tracer

    @property
    def watches(self) -> bool:
        """True if a request without id and trace may be reported."""
        return self._share > 0.0 or self._tracer is not None or access.isEnabledFor(logging.DEBUG)

    def begin(
        self, model: str, started: int, request_id: str, sent: RequestContext
    ) -> RequestContext:
        """Context of a request to ``model`` that began at ``started`` (``time.perf_counter_ns``).

        Its trace context is that of ``sent``. It gets an id if it has none and may be reported."""
        if not request_id and self.watches:
            request_id = secrets.token_hex(8)
        if self._tracer is not None:
            begun = self._tracer.request(
                f"infer {model}", started, request_id, sent.traceparent, sent.tracestate
            )
            begun.note(model=model)
            return begun
        if request_id == sent.request_id:
            return sent
        return RequestContext(request_id, sent.traceparent, sent.tracestate)

    def log_answered(
        self,
        protocol: str,
        origin: RequestContext,
        endpoint: Endpoint,
        inputs: Mapping[str, NDArray[Any]],
        defaulted: int,
        stages: Stages,
    ) -> None:
        """Log an answered request."""
        if (level := self._level()) is not None:
            keys = sum(array.size for name, array in inputs.items() if _keys(endpoint, name))
            self._log(
                level,
                origin,
                protocol,
                endpoint,
                (stages[3] - stages[0]) * 1e-6,
                200 if protocol == "http" else "OK",
                keys=keys,
                misses=defaulted,
            )

    def failed(
        self,
        protocol: str,
        origin: RequestContext,
        endpoint: Endpoint | None,
        status: int | str,
        error: BaseException,
        started: int,
    ) -> None:
        """Report a request that was answered with ``error``."""
        origin.end(error)
        if (level := self._level()) is not None:
            ms = (perf_counter_ns() - started) * 1e-6
            self._log(level, origin, protocol, endpoint, ms, status, error=str(error))

    def close(self) -> None:
        """Send the recorded spans."""
        if self._tracer is not None:
            self._tracer.close()

    def _level(self) -> int | None:
        """Log level of the current request; None: it is not logged."""
        if self._share and random.random() < self._share:
            return logging.INFO
        return logging.DEBUG if access.isEnabledFor(logging.DEBUG) else None

    def _log(
        self,
        level: int,
        origin: RequestContext,
        protocol: str,
        endpoint: Endpoint | None,
        ms: float,
        status: int | str,
        **more: Any,
    ) -> None:
        event = fields(
            request_id=origin.request_id,
            trace_id=origin.trace_id,
            span_id=origin.span_id,
            protocol=protocol,
            model="" if endpoint is None else endpoint.name,
            model_version="" if endpoint is None else endpoint.version,
            status=status,
            dur_ms=round(ms, 3),
            **more,
        )
        access.log(level, "request %s", event)


def _keys(endpoint: Endpoint, name: str) -> bool:
    """True if an input is keys: it has a rule that says so, or no rule (a table of the lookup service)."""
    rule = endpoint.rules.get(name)
    return rule is None or rule.is_keys
