"""Dynamic batching of predictions: one lookup and one run of the network for several requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Feature
from hps.lookup.batched_lookup import MergingSubmit, keys_size
from hps.lookup.batching import Batcher, BatchLimits, BatchSize
from hps.lookup.lookup_merge import MergedLookup, check_mergeable, merge_key, split_points
from hps.tracing import RequestContext
from hps.types import LookupRequest, PredictRequest, PredictResult


class PredictionPipeline(Protocol):
    """Interface of a prediction service: `InferencePipeline`, or one that batches."""

    def submit(self, request: PredictRequest) -> Future[PredictResult]: ...


class BatchedPipeline:
    """Answers several requests with one call of ``pipeline``; see `Batcher`. Thread-safe.

    A request with ``top_k``, or with context features of batch 1, runs alone."""

    def __init__(
        self,
        pipeline: PredictionPipeline,
        features: Mapping[str, Feature],
        limits: BatchLimits,
        observe: Callable[[float], None] = lambda _requests: None,
    ) -> None:
        """``features`` are the model's."""
        self._batcher: Batcher[PredictRequest, PredictResult] = Batcher(
            _PredictionWork(pipeline, features), limits, observe
        )

    def submit(self, request: PredictRequest) -> Future[PredictResult]:
        """See ``InferencePipeline.submit``."""
        return self._batcher.submit(request)

    def predict(self, request: PredictRequest) -> PredictResult:
        """Like ``submit``, but wait for the result."""
        return self.submit(request).result()


class _PredictionWork:
    """The `BatchWork` of predictions."""

    def __init__(self, pipeline: PredictionPipeline, features: Mapping[str, Feature]) -> None:
        self._features = features
        self.submit_one = pipeline.submit
        self.submit_batch = MergingSubmit(pipeline.submit, self._merged).begin

    def merge_key(self, request: PredictRequest) -> tuple[Hashable, PredictRequest] | None:
        if request.top_k is not None or request.features.keys() != self._features.keys():
            return None
        fit = check_mergeable(_lookup(request), self._features)
        keys = merge_key(fit)
        batch = keys_size(request.features).rows
        if keys is None or any(np.shape(a)[:1] != (batch,) for a in request.dense.values()):
            return None
        dense = tuple(
            (name, np.asarray(a).dtype, np.shape(a)[1:]) for name, a in request.dense.items()
        )
        if fit.features is not request.features:
            request = replace(request, features=fit.features)
        return (keys, dense, request.outputs), request

    def size(self, request: PredictRequest) -> BatchSize:
        return keys_size(request.features)

    def deadline(self, request: PredictRequest) -> float | None:
        return request.deadline

    def _merged(
        self, requests: Sequence[PredictRequest], want_source: bool, origin: RequestContext | None
    ) -> _MergedPredictions:
        return _MergedPredictions(requests, self._features, want_source, origin)


class _MergedPredictions:
    """One request in place of ``requests``, which have one merge key."""

    def __init__(
        self,
        requests: Sequence[PredictRequest],
        features: Mapping[str, Feature],
        want_source: bool,
        origin: RequestContext | None,
    ) -> None:
        self._requests = requests
        lookups = [_lookup(request) for request in requests]
        self._lookups = MergedLookup(lookups, features, want_source=want_source)
        self._rows = split_points([keys_size(request.features).rows for request in requests])
        joined = self._lookups.request
        dense: dict[str, NDArray[Any]] = {
            name: np.concatenate([request.dense[name] for request in requests])
            for name in requests[0].dense
        }
        self.request = PredictRequest(
            joined.features, dense, None, joined.deadline, want_source, requests[0].outputs, origin
        )

    def split(self, result: PredictResult) -> list[PredictResult]:
        """Return each request's result: slices of the arrays of ``result``."""
        reports = self._lookups.split_sources(result.sources)
        return [
            PredictResult(
                {name: values[rows] for name, values in result.outputs.items()},
                mine.sources if request.want_source else {},
                mine.defaulted,
                result.degraded,
                result.stale_s,
            )
            for request, rows, mine in zip(self._requests, self._rows, reports, strict=True)
        ]


def _lookup(request: PredictRequest) -> LookupRequest:
    return LookupRequest(request.features, request.deadline, request.want_source)


__all__ = ["BatchedPipeline", "PredictionPipeline"]
