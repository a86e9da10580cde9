"""Predictions: lookup and network, for REST, gRPC and the Triton backend.

Candidates: features and dense inputs marked ``context`` may have batch 1. They are fetched once and
broadcast over the batch of the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import DenseSpec, TensorSpec
from hps.dense.base import DATATYPES, DenseModel
from hps.errors import BadRequest, DeadlineExceeded, DenseModelError
from hps.lookup.base import Lookup
from hps.lookup.padding import TruncatedKeys
from hps.lookup.request_sample import NO_SAMPLE
from hps.observability.meters import DenseMeter
from hps.observability.metrics import Metrics
from hps.predict.checks import TOP_K_INDEX, Arrays, PredictChecks
from hps.predict.network_feed import NetworkFeed
from hps.predict.scheduler.scheduled_model import PreparedPrediction, ScheduledModel
from hps.threads import BoundedThreadPool, CompletedFuture, chain_future
from hps.tracing import call_timed, timed_wait
from hps.types import LookupRequest, LookupResult, PredictRequest, PredictResult


class DevicePredictor(Protocol):
    """A model whose rows and vectors are on one device. Thread-safe."""

    @property
    def lookup(self) -> Lookup:
        """The lookup whose vectors stay on the device."""
        ...

    def quick(
        self, request: PredictRequest, inputs: Arrays, batch: int, names: tuple[str, ...]
    ) -> tuple[Arrays, LookupResult] | None:
        """Predict if memory holds every row; else return None.

        Returns the outputs ``names`` and the lookup's result without vectors. ``inputs (batch, ...)``."""
        ...

    def run(
        self,
        rows: LookupResult,
        inputs: Arrays,
        batch: int,
        names: tuple[str, ...],
        deadline: float | None = None,
    ) -> Arrays:
        """Compute the outputs ``names`` from the result of ``lookup``.

        A remote network is not waited for after ``deadline``."""
        ...


@dataclass(frozen=True, slots=True)
class ModelNetwork:
    """The network of the model ``name``: its description, the network, and the meter of its runs."""

    name: str
    spec: DenseSpec
    dense: DenseModel
    meter: DenseMeter | None = None
    """None: runs are counted in metrics that are not exposed."""


class InferencePipeline:
    """Predictions of one model, from keys and dense tensors to named outputs. Thread-safe."""

    def __init__(
        self,
        network: ModelNetwork,
        lookup: Lookup,
        workers: BoundedThreadPool,
        devices: Sequence[DevicePredictor] = (),
    ) -> None:
        """``devices`` are used in turn; without any, rows and network are on the host. Raises
        ``ModelError`` if the network and its specification do not match."""
        name, spec, dense = network.name, network.spec, network.dense
        self.name = name
        self.lookup = lookup
        self.dense = dense
        self._workers = workers
        self._devices = tuple(devices)
        self._turn = count()
        self._meter = network.meter or DenseMeter(Metrics(), name, 0)
        self._scheduled: ScheduledModel | None = None
        self.sample = NO_SAMPLE
        """Gets requests while it is armed."""
        self._check = PredictChecks(name, spec, lookup.features)
        self._outputs = {tensor.name: tensor for tensor in spec.outputs}
        self._ranking = spec.ranking_output or spec.outputs[0].name
        self._feed = NetworkFeed(name, spec, lookup.features, dense)
        self._pads = any(each.max_length is not None for each in lookup.features.values())

    def schedule(self, scheduled: ScheduledModel) -> None:
        """Run predictions in common batches on the GPU, as far as ``scheduled`` takes them."""
        self._scheduled = scheduled

    @property
    def is_scheduled(self) -> bool:
        """True if predictions run in common batches on a GPU."""
        return self._scheduled is not None

    def predict(self, request: PredictRequest) -> PredictResult:
        """Like ``submit``, but wait for the result."""
        return self._begin(request, waits=True).result()

    def submit(self, request: PredictRequest) -> Future[PredictResult]:
        """Start a prediction; already done if memory held every row and the network runs inline.

        Never blocks. Raises ``BadRequest``, ``Unavailable`` (overloaded), and the error of an inline run;
        later errors are the future's exception.
        """
        return self._begin(request, waits=False)

    def _begin(self, request: PredictRequest, *, waits: bool) -> Future[PredictResult]:
        """Start a prediction. ``waits``: its caller only waits for the result."""
        inputs, batch = self._check.inputs(request)
        wanted = self._check.outputs(request)
        if self.sample.armed:
            self.sample.add(request)
        if self._scheduled is None or (waits and self._scheduled.gains_alone(batch)):
            return self._run_alone(request, inputs, batch, wanted)
        names = self._computed(request, wanted)
        finish = partial(self._finish_scheduled, request, wanted, batch)
        begun = self._scheduled.start(request, inputs, batch, names, finish)
        return self._run_alone(request, inputs, batch, wanted) if begun is None else begun

    def prepare(
        self, request: PredictRequest, places: Mapping[str, tuple[int, int]]
    ) -> PreparedPrediction | None:
        """Prepare ``submit`` for messages that differ from ``request`` only in their tensors' elements.

        ``places``: offset and bytes of each tensor in a message, by its name there. None: use ``submit``."""
        if self._scheduled is None:
            return None
        inputs, batch = self._check.inputs(request)
        wanted = self._check.outputs(request)
        names = self._computed(request, wanted)
        alike = replace(request, features={}, dense={}, origin=None, deadline=None)
        finish = partial(self._finish_scheduled, alike, wanted, batch)
        return self._scheduled.prepare(request, inputs, names, places, finish)

    def _finish_scheduled(
        self,
        request: PredictRequest,
        wanted: tuple[str, ...],
        batch: int,
        outputs: Arrays,
        rows: LookupResult,
        seconds: float | None,
    ) -> PredictResult:
        if seconds is not None:
            self._judge(outputs, batch, seconds)
        return self._result(request, wanted, outputs, batch, rows)

    def submit_alone(self, request: PredictRequest) -> Future[PredictResult]:
        """Like ``submit``, but never in a batch of the GPU's scheduler."""
        inputs, batch = self._check.inputs(request)
        return self._run_alone(request, inputs, batch, self._check.outputs(request))

    def _run_alone(
        self, request: PredictRequest, inputs: Arrays, batch: int, wanted: tuple[str, ...]
    ) -> Future[PredictResult]:
        if not self._devices:
            return self._slow_path(request, inputs, batch, wanted, None)
        device = self._devices[next(self._turn) % len(self._devices)]

        def finish(answer: PredictResult | None) -> Future[PredictResult]:
            if answer is not None:
                return CompletedFuture(answer)
            return self._slow_path(request, inputs, batch, wanted, device)

        quick = partial(self._device_path, request, inputs, batch, wanted, device)
        if batch == 0 or self.dense.runs_inline(batch):
            return finish(quick())
        begun = self._workers.submit(timed_wait(request.origin, quick), request.deadline)
        return chain_future(begun, finish)

    def _slow_path(
        self,
        request: PredictRequest,
        inputs: Arrays,
        batch: int,
        wanted: tuple[str, ...],
        device: DevicePredictor | None,
    ) -> Future[PredictResult]:
        truncated = None
        if self._pads:
            truncated = TruncatedKeys.of(self.lookup.model, request.features, batch)
            request = replace(request, features=truncated.features)
        lookup = (self.lookup if device is None else device.lookup).submit(
            LookupRequest(
                request.features,
                request.deadline,
                request.want_source,
                origin=request.origin,
            )
        )
        score = partial(self._score, request, inputs, batch, wanted, device)

        def run(rows: LookupResult) -> Future[PredictResult]:
            """Run the network: an inline one on the thread that has the rows, any other on the pool."""
            if truncated is not None:
                rows = truncated.report_all(rows)
            if batch == 0 or self.dense.runs_inline(batch):
                return CompletedFuture(score(rows))
            return self._workers.submit(
                timed_wait(request.origin, partial(score, rows)), request.deadline
            )

        return run(lookup.result()) if lookup.done() else chain_future(lookup, run)

    def _device_path(
        self,
        request: PredictRequest,
        inputs: Arrays,
        batch: int,
        wanted: tuple[str, ...],
        device: DevicePredictor,
    ) -> PredictResult | None:
        names = self._computed(request, wanted)
        start = time.perf_counter()
        answer = call_timed(request.origin, "device", device.quick, request, inputs, batch, names)
        if answer is None:
            return None
        outputs, rows = answer
        self._judge(outputs, batch, time.perf_counter() - start)
        return self._result(request, wanted, outputs, batch, rows)

    def _score(
        self,
        request: PredictRequest,
        inputs: Arrays,
        batch: int,
        wanted: tuple[str, ...],
        device: DevicePredictor | None,
        rows: LookupResult,
    ) -> PredictResult:
        if request.deadline is not None and time.monotonic() > request.deadline:
            raise DeadlineExceeded("deadline exceeded before the dense model could run")
        names = self._computed(request, wanted)
        if batch == 0:
            outputs = {name: _nothing(self._outputs[name]) for name in names}
        else:
            start = time.perf_counter()
            if device is None:
                feed = call_timed(
                    request.origin,
                    "feed",
                    self._feed,
                    inputs,
                    request.features,
                    rows.vectors,
                    batch,
                )
                with _span(request, "dense"):
                    outputs = self.dense.predict(feed, names, request.deadline)
            else:
                with _span(request, "dense"):
                    outputs = device.run(rows, inputs, batch, names, request.deadline)
            self._judge(outputs, batch, time.perf_counter() - start)
        return self._result(request, wanted, outputs, batch, rows)

    def _computed(self, request: PredictRequest, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the outputs to compute: those requested, and the one that ``top_k`` sorts by."""
        if request.top_k is not None and self._ranking not in wanted:
            return (*wanted, self._ranking)
        return wanted

    def _result(
        self,
        request: PredictRequest,
        wanted: tuple[str, ...],
        outputs: Arrays,
        batch: int,
        rows: LookupResult,
    ) -> PredictResult:
        if request.top_k is not None:
            scores = outputs[self._ranking]
            if scores.size != batch:
                raise BadRequest(
                    f"top_k sorts by one number per sample, output {self._ranking!r} has "
                    f"{list(scores.shape[1:])}; name another as dense.ranking_output"
                )
            best = top_k(scores, request.top_k)
            outputs = {name: outputs[name][best] for name in wanted}
            outputs[TOP_K_INDEX] = best
        return PredictResult(outputs, rows.sources, rows.defaulted, rows.degraded, rows.stale_s)

    def _judge(self, outputs: Arrays, batch: int, seconds: float) -> None:
        """Count a run of ``seconds``; raise DenseModelError unless it gave one row per sample."""
        self._meter.ran(seconds)
        for name, values in outputs.items():
            if values.shape[:1] != (batch,):
                raise DenseModelError(
                    f"output {name!r} has shape {list(values.shape)} for a batch of {batch}"
                )
            if values.dtype.kind != "f":
                continue
            finite = np.isfinite(values)
            if others := finite.size - int(np.count_nonzero(finite)):
                self._meter.not_finite(name, others)
                values = values[finite]
            if finite.size == batch:
                self._meter.scored(name, values)


def _span(request: PredictRequest, name: str) -> AbstractContextManager[object]:
    return nullcontext() if request.origin is None else request.origin.part(name)


def top_k(scores: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the positions ``(min(k, n),)`` of the highest ``scores (n,)`` or ``(n, 1)``, best first.

    Equal scores keep their order; NaN comes last.
    """
    order = np.argsort(-scores.reshape(-1).astype(np.float64), kind="stable")
    return order[:k].astype(np.int64, copy=False)


def _nothing(tensor: TensorSpec) -> NDArray[Any]:
    """Make the output of an empty batch."""
    return np.empty((0, *(max(size, 0) for size in tensor.shape[1:])), DATATYPES[tensor.datatype])
