"""Requests that failed, as metrics and the protocol's statistics count them."""

from __future__ import annotations

from time import perf_counter_ns

from hps import metric_names as m
from hps.metrics import Metrics
from services.frontend.errors import REFUSED, Status
from services.frontend.state import Entry


def count_failure(
    metrics: Metrics,
    method: str,
    entry: Entry | None,
    status: Status,
    started: int,
    reason: str | None = None,
) -> None:
    """A request for ``entry`` that began at ``started`` (``perf_counter_ns``); None when it was for no name
    there is. ``reason``: why it was refused, where the status alone does not tell."""
    done = perf_counter_ns()
    name = ""
    if entry is not None:
        name = entry.name
        entry.statistics.failed(started, done)
    seconds = metrics.histogram(m.REQUEST_SECONDS, "grpc", method, name, status.grpc)
    seconds.observe((done - started) * 1e-9)
    if (reason := reason or REFUSED.get(status.http)) is not None:
        metrics.counter(m.REQUESTS_REFUSED, reason).add()
