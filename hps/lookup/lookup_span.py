"""The span of a lookup in its request's trace."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from hps.tracing import span_until_done
from hps.types import LookupRequest, LookupResult


def submit_in_span(
    model: str, request: LookupRequest, submit: Callable[[LookupRequest], Future[LookupResult]]
) -> Future[LookupResult]:
    """Call ``submit(request)``, in a span if the request is recorded."""
    origin = request.origin
    if origin is None or not origin.is_recorded:
        return submit(request)
    part = origin.begin("lookup")
    part.note(model=model, keys=sum(len(keys.keys) for keys in request.features.values()))
    return span_until_done(part, partial(submit, replace(request, origin=part)), _result_attributes)


def _result_attributes(result: LookupResult) -> dict[str, Any]:
    return {"defaulted": result.defaulted, "degraded": ",".join(result.degraded)}
