"""Admission control: run, queue or reject inference requests.

Each version of a name has its queue, so that one model's load does not delay another's requests. Requests
that are answered from memory, such as a lookup of cached rows, bypass the queue; so do health, metadata
and administration."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hps.config.admission_settings import AdmissionSettings
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.frontend.admission.byte_budget import ByteBudget
from services.frontend.admission.client_limits import ClientLimits
from services.frontend.admission.queue import AdmissionQueue
from services.frontend.admission.queued_request import QueueTimeout
from services.frontend.endpoints import Endpoint


class AdmissionController:
    """The admission queues of one process. ``clients`` is None without limits for clients."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self.byte_budget = ByteBudget(settings.queue_bytes)
        self.timeout = QueueTimeout(settings.max_wait_ms / 1e3)
        bounds = settings.client
        self.clients: ClientLimits | None = None
        if bounds.running is not None or bounds.per_second is not None:
            self.clients = ClientLimits(bounds)
        self._queues: list[AdmissionQueue] = []
        self._published: Metrics | None = None

    def add_queue(self, endpoint: Endpoint, running: int, metrics: Metrics) -> AdmissionQueue:
        """Put ``endpoint`` behind a queue; ``running`` is the default of the setting."""
        queue = AdmissionQueue(
            endpoint,
            self._settings,
            self._settings.running or running,
            self.byte_budget,
            self.timeout,
            metrics,
        )
        self._queues = [*self._queues, queue]
        if metrics is not self._published:
            self._published = metrics
            metrics.gauges(m.QUEUE_REQUESTS, lambda: self._values("queued"))
            metrics.gauges(m.RUNNING_REQUESTS, lambda: self._values("running"))
            metrics.gauges(m.RUNNING_LIMIT, lambda: self._values("max_running"))
            metrics.gauge(m.QUEUE_BYTES, lambda: self.byte_budget.held)
        return queue

    def retain(self, queues: Collection[AdmissionQueue]) -> None:
        """Stop exporting metrics of other queues."""
        kept = {id(queue) for queue in queues}
        self._queues = [queue for queue in self._queues if id(queue) in kept]

    def _values(self, attribute: str) -> Iterable[tuple[tuple[str, ...], float]]:
        """Sums over the versions of each name."""
        sums: dict[str, float] = {}
        for queue in self._queues:
            sums[queue.name] = sums.get(queue.name, 0) + getattr(queue, attribute)
        return [((name,), value) for name, value in sums.items()]
