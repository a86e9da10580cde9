"""A lookup as a part of its request's trace."""

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
    """``submit(request)``, as a span where the request's are recorded."""
    origin = request.origin
    if origin is None or not origin.is_recorded:
        return submit(request)
    part = origin.begin("lookup")
    part.note(model=model, keys=sum(len(keys.keys) for keys in request.features.values()))
    return span_until_done(part, partial(submit, replace(request, origin=part)), _described)


def _described(result: LookupResult) -> dict[str, Any]:
    return {"defaulted": result.defaulted, "degraded": ",".join(result.degraded)}
