"""Merge several lookups into one and split its result: shared keys are fetched once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hps.lookup.base import Feature
from hps.lookup.checks import check_keys
from hps.tracing import RequestContext
from hps.types import JaggedKeys, LookupRequest, LookupResult, Source, SourceArray, as_keys


def merge_key(request: LookupRequest) -> Hashable | None:
    """Return a value equal for requests that may be merged; None for one that must run alone.

    Requests by table may be merged with each other; so may requests with the same features, of the same
    hotness, all with weights or all without. A request must run alone if its caller owns the answer's
    arrays, or if its features have different batches (candidates with their context)."""
    features = request.features
    if request.out is not None:
        return None
    if request.by_table:
        plain = all(keys.offsets is None and keys.weights is None for keys in features.values())
        return ("by table", request.stored_rows) if plain else None
    if len({keys.batch for keys in features.values()}) != 1:
        return None
    form = [(name, keys.hotness, keys.weights is not None) for name, keys in features.items()]
    return (request.stored_rows, *form)


def check_mergeable(request: LookupRequest, features: Mapping[str, Feature]) -> LookupRequest:
    """Return ``request`` with its keys in the form that can be merged.

    Raises ``BadRequest`` for wrong offsets, sizes or types: merged, they would shift another request's
    keys."""
    if request.by_table:
        return request  # keys by table have no bags to check
    known = {name: keys for name, keys in request.features.items() if name in features}
    fit = {name: check_keys(features[name], keys) for name, keys in known.items()}
    if all(fit[name] is keys for name, keys in known.items()):
        return request
    return replace(request, features={**request.features, **fit})


class MergedLookup:
    """One request in place of ``requests``, which have one `merge_key` and passed `check_mergeable`.

    ``features`` are the model's. Without ``want_source`` the defaults cannot be counted per request.
    ``origin``: the batch's context, see `shared_span`."""

    def __init__(
        self,
        requests: Sequence[LookupRequest],
        features: Mapping[str, Feature],
        *,
        want_source: bool = True,
        origin: RequestContext | None = None,
    ) -> None:
        self._requests = requests
        by_table = requests[0].by_table
        self._slices: dict[str, _FeatureShares] = {}
        spans: dict[tuple[int, ...], list[slice]] = {}  # usually the same for all features
        merged = {}
        everyone = range(len(requests))
        for name in dict.fromkeys(name for each in requests for name in each.features):
            requesters: Sequence[int] = everyone
            if by_table:
                requesters = [i for i in everyone if name in requests[i].features]
            parts = [requests[i].features[name] for i in requesters]
            merged[name] = _joined(parts)
            key_counts = rows = tuple([len(keys.keys) for keys in parts])
            if not by_table and features[name].pooling != "none":
                rows = tuple([keys.batch for keys in parts])
            for sizes in (key_counts, rows):
                if sizes not in spans:
                    spans[sizes] = split_points(sizes)
            self._slices[name] = _FeatureShares(requesters, spans[rows], spans[key_counts])
        deadlines = [each.deadline for each in requests]
        latest = None if None in deadlines else max(d for d in deadlines if d is not None)
        stored = requests[0].stored_rows
        self.request = LookupRequest(merged, latest, want_source, None, by_table, origin, stored)

    def split(self, result: LookupResult) -> list[LookupResult]:
        """Return each request's result: slices of the arrays of ``result``."""
        answers = [
            replace(result, vectors={}, sources={}, versions={}, defaulted=report.defaulted)
            for report in self.split_sources(result.sources)
        ]
        for name, slices in self._slices.items():
            vectors = result.vectors[name]
            for index, rows, keys in zip(*slices, strict=True):
                answer = answers[index]
                answer.vectors[name] = vectors[rows]
                if self._requests[index].want_source:
                    answer.sources[name] = result.sources[name][keys]
                    if name in result.versions:
                        answer.versions[name] = result.versions[name][keys]
        return answers

    def split_sources(self, sources: Mapping[str, SourceArray]) -> list[LookupReport]:
        """Split ``sources``, of all keys, into a report per request."""
        reports = [LookupReport({}, 0) for _ in self._requests]
        for name, codes in sources.items():
            for index, _, keys in zip(*self._slices[name], strict=True):
                own = codes[keys]
                found, defaulted = reports[index]
                found[name] = own
                defaulted += int(np.count_nonzero(own == Source.DEFAULT))
                reports[index] = LookupReport(found, defaulted)
        return reports


class LookupReport(NamedTuple):
    """The sources of a request's rows, and its number of keys answered with a default."""

    sources: dict[str, SourceArray]
    defaulted: int


class _FeatureShares(NamedTuple):
    """The requests that have a feature, with each one's slice of its rows and of its keys."""

    requests: Sequence[int]
    rows: list[slice]
    keys: list[slice]


def _joined(keys: Sequence[JaggedKeys]) -> JaggedKeys:
    if len(keys) == 1:
        return keys[0]
    flat = np.concatenate([each.keys for each in keys])
    if flat.dtype != np.int64:  # NumPy makes float64 of uint64 and int64 together
        flat = np.concatenate([as_keys(each.keys) for each in keys])
    batch = sum(each.batch for each in keys)
    weights = offsets = None
    if keys[0].weights is not None:
        weights = np.concatenate([each.weights for each in keys if each.weights is not None])
    if keys[0].offsets is not None:
        ends = [
            each.offsets[1:] + before
            for each, before in zip(
                keys, np.cumsum([0, *(len(k.keys) for k in keys)]), strict=False
            )
            if each.offsets is not None
        ]
        offsets = np.concatenate([np.zeros(1, np.int64), *ends])
    return JaggedKeys(flat, batch, offsets, weights)


def split_points(sizes: Sequence[int]) -> list[slice]:
    """Return the slice of each of several arrays of these ``sizes`` in their concatenation."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
