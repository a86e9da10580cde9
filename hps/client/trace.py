"""The caller's trace, if the caller uses OpenTelemetry."""

from __future__ import annotations

import sys


def trace_headers() -> dict[str, str]:
    """W3C ``traceparent`` and ``tracestate`` of the current span; empty without one."""
    if "opentelemetry.trace" not in sys.modules:  # not imported: there is no span
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers
