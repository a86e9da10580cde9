"""Shadow traffic: requests to the current version that another version answers, too, for a comparison.

A live request only appends to a queue, and never waits. One thread of the process answers the mirrored
requests, one after the other and for a bounded share of its time. A request that does not fit into the queue,
or that arrives while requests of either version wait for admission, is dropped and counted. Mirrored requests
bypass the admission queues, so that they take no slot from a live one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from random import random
from typing import Any

import numpy as np

from hps.config.traffic_settings import ShadowSettings
from hps.errors import HpsError
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.frontend.admission.queue import AdmissionQueue
from services.frontend.endpoints import Output
from services.frontend.inference_request import InferenceRequest, RequestTemplate

log = logging.getLogger(__name__)
# Mirrored requests of a process that wait, and the bytes of their inputs.
_MOST_QUEUED, _MOST_BYTES = 64, 16 << 20
# The thread pauses for so many times the CPU time that a request took it.
_PAUSES = 4
_TIMEOUT_S = 10.0
# The thread ends when nothing was mirrored for so long.
_IDLE_S = 5.0


@dataclass(slots=True)
class _Mirrored:
    """A request to mirror: ``submit`` sends it to the shadow version.

    ``live``: the live request's result, from which ``live_outputs`` takes its outputs."""

    shadow: Shadow
    size: int
    live: Future[Any]
    live_outputs: Callable[[Any], Sequence[Output]]
    submit: Callable[[float], Future[Any]]
    outputs: Callable[[Any], Sequence[Output]]


class ShadowThread:
    """The thread of a process that answers mirrored requests. Thread-safe."""

    def __init__(self) -> None:
        self._queue: deque[_Mirrored] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._runs = False

    def offer(self, mirrored: _Mirrored) -> bool:
        """Queue a request; False: there is no room."""
        with self._changed:
            if len(self._queue) >= _MOST_QUEUED or self._bytes + mirrored.size > _MOST_BYTES:
                return False
            self._queue.append(mirrored)
            self._bytes += mirrored.size
            if not self._runs:
                threading.Thread(target=self._run, name="hps-shadow", daemon=True).start()
                self._runs = True
            self._changed.notify()
            return True

    def _run(self) -> None:
        while (mirrored := self._next()) is not None:
            began = time.thread_time()
            mirrored.shadow.compare(mirrored)
            spent_s = time.thread_time() - began
            del mirrored  # it refers to the request while the thread waits
            time.sleep(_PAUSES * spent_s)

    def _next(self) -> _Mirrored | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue, _IDLE_S):
                self._runs = False
                return None
            mirrored = self._queue.popleft()
            self._bytes -= mirrored.size
            return mirrored


class Shadow:
    """Mirrors requests of one name to a version. Thread-safe."""

    def __init__(
        self,
        live: AdmissionQueue,
        target: AdmissionQueue,
        settings: ShadowSettings,
        thread: ShadowThread,
        metrics: Metrics,
    ) -> None:
        """``live`` and ``target``: the queues of the current and the shadow version."""
        self.live, self.target, self.settings = live, target, settings
        self._thread = thread
        labels = target.name, target.version
        self._count = {
            result: metrics.counter(m.SHADOW_REQUESTS, *labels, result)
            for result in ("compared", "dropped", "failed", "live_failed")
        }
        self._rows = metrics.counter(m.SHADOW_ROWS, *labels)
        self._differing = metrics.counter(m.SHADOW_DIFFERING_ROWS, *labels)
        self._most = metrics.histogram(m.SHADOW_MAX_DIFFERENCE, *labels)
        self._mean = metrics.histogram(m.SHADOW_MEAN_DIFFERENCE, *labels)
        self._seconds = metrics.histogram(m.SHADOW_SECONDS, *labels)

    def takes(self) -> bool:
        """True if the next request is to be mirrored; counts one that is dropped in an overload."""
        if random() >= self.settings.rate:
            return False
        if self.live.queued or self.target.queued:
            self._count["dropped"].add()
            return False
        return True

    def mirror(self, call: InferenceRequest, live: Future[Any]) -> None:
        """Mirror a request that the live version answers, if it `takes` it."""
        if not self.takes():
            return
        if (
            call.form.memory_refs is not None
        ):  # its client may change the memory once it is answered
            self._count["dropped"].add()
            return
        form = call.form
        own = RequestTemplate(shapes=form.shapes, outputs=form.outputs, top_k=form.top_k)
        mirrored = InferenceRequest(own, None, message=call.message, start=call.start)
        own.raw = form.raw
        if not call.message:
            mirrored = InferenceRequest(own, call.inputs)
        self.add(
            live,
            partial(self.live.outputs, call),
            partial(self.target.submit_unadmitted, mirrored),
            partial(self.target.outputs, mirrored),
            call.size,
        )

    def add(
        self,
        live: Future[Any],
        live_outputs: Callable[[Any], Sequence[Output]],
        submit: Callable[[float], Future[Any]],
        outputs: Callable[[Any], Sequence[Output]],
        size: int,
    ) -> None:
        """Queue a request of ``size`` bytes; see `_Mirrored`."""
        if not self._thread.offer(_Mirrored(self, size, live, live_outputs, submit, outputs)):
            self._count["dropped"].add()

    def compare(self, mirrored: _Mirrored) -> None:
        """Answer a mirrored request, and compare the answers."""
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            live = mirrored.live_outputs(mirrored.live.result(_TIMEOUT_S))
        except BaseException:  # also a cancelled one
            self._count["live_failed"].add()
            return
        began = time.perf_counter()
        try:
            answer = mirrored.submit(deadline).result(_TIMEOUT_S)
            self._seconds.observe(time.perf_counter() - began)
            outputs = dict(mirrored.outputs(answer))
        except Exception as error:
            self._count["failed"].add()
            level = logging.DEBUG if isinstance(error, HpsError) else logging.WARNING
            log.log(level, "%s: mirrored request failed: %s", self.target.name, error)
            return
        self._observe(live, outputs)

    def _observe(self, live: Sequence[Output], outputs: dict[str, Any]) -> None:
        rows = differing = values = 0
        most = total = 0.0
        for name, expected in live:
            if expected.dtype.kind != "f":
                continue  # sources and positions
            width = expected.shape[-1] if expected.ndim > 1 else 1
            count = expected.size // width if width else 0
            rows += count
            found = outputs.get(name)
            if found is None or found.shape != expected.shape:
                differing += count
                continue
            if not count:
                continue
            difference = np.abs(found.astype(np.float64) - expected).reshape(count, width)
            # Not <=, so that NaN differs from all.
            differing += int((~(difference <= self.settings.tolerance)).any(axis=1).sum())
            finite = difference[np.isfinite(difference)]
            values += finite.size
            total += float(finite.sum())
            most = max(most, float(finite.max(initial=0.0)))
        self._count["compared"].add()
        self._rows.add(rows)
        self._differing.add(differing)
        if values:
            self._most.observe(most)
            self._mean.observe(total / values)
