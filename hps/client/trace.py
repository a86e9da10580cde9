"""The caller's trace, by OpenTelemetry when the caller uses it."""

from __future__ import annotations

import sys


def trace_headers() -> dict[str, str]:
    """W3C ``traceparent`` and ``tracestate`` of the span that is current; empty without one."""
    if "opentelemetry.trace" not in sys.modules:  # then there is no span
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers
