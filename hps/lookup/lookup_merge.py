"""Several lookups made one, and its result made theirs: keys that they share are fetched once."""

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
    """Equal for requests that may be merged: those by table, and those of the same features in the same
    form. None for a request that must be alone: its caller owns the answer's arrays, or its features have
    different batches (candidates with their context)."""
    asked = request.features
    if request.out is not None:
        return None
    if request.by_table:
        plain = all(keys.offsets is None and keys.weights is None for keys in asked.values())
        return "by table" if plain else None
    if len({keys.batch for keys in asked.values()}) != 1:
        return None
    return tuple((name, keys.hotness, keys.weights is not None) for name, keys in asked.items())


def check_mergeable(request: LookupRequest, features: Mapping[str, Feature]) -> LookupRequest:
    """``request`` with its keys in the form that can be joined. Raises ``BadRequest`` where a request's
    offsets, sizes or types are wrong: joined, they would be another request's."""
    if request.by_table:
        return request  # they have no form but their number
    known = {name: keys for name, keys in request.features.items() if name in features}
    fit = {name: check_keys(features[name], keys) for name, keys in known.items()}
    if all(fit[name] is keys for name, keys in known.items()):
        return request
    return replace(request, features={**request.features, **fit})


class MergedLookup:
    """One request for those of ``requests``, which are of one ``merge_key`` and ``check_mergeable``;
    ``features`` are the model's. Without ``want_source`` it can't be told whose keys were answered with
    a default. ``origin``: on whose behalf it is, see `on_behalf_of`."""

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
        self._shares: dict[str, _FeatureShares] = {}
        spans: dict[tuple[int, ...], list[slice]] = {}  # mostly the same for all features
        joined = {}
        everybody = range(len(requests))
        for name in dict.fromkeys(name for each in requests for name in each.features):
            who: Sequence[int] = everybody
            if by_table:
                who = [i for i in everybody if name in requests[i].features]
            given = [requests[i].features[name] for i in who]
            joined[name] = _joined(given)
            asked = rows = tuple([len(keys.keys) for keys in given])
            if not by_table and features[name].pooling != "none":
                rows = tuple([keys.batch for keys in given])
            for sizes in (asked, rows):
                if sizes not in spans:
                    spans[sizes] = split_points(sizes)
            self._shares[name] = _FeatureShares(who, spans[rows], spans[asked])
        deadlines = [each.deadline for each in requests]
        latest = None if None in deadlines else max(d for d in deadlines if d is not None)
        self.request = LookupRequest(joined, latest, want_source, None, by_table, origin)

    def split(self, result: LookupResult) -> list[LookupResult]:
        """What each request is answered with: parts of the arrays of ``result``."""
        answers = [
            LookupResult({}, {}, {}, told.defaulted, result.degraded, result.stale_s)
            for told in self.told(result.sources)
        ]
        for name, shares in self._shares.items():
            vectors = result.vectors[name]
            for index, rows, keys in zip(*shares, strict=True):
                answer = answers[index]
                answer.vectors[name] = vectors[rows]
                if self._requests[index].want_source:
                    answer.sources[name] = result.sources[name][keys]
                    if name in result.versions:
                        answer.versions[name] = result.versions[name][keys]
        return answers

    def told(self, sources: Mapping[str, SourceArray]) -> list[LookupReport]:
        """What ``sources``, of all keys, tell each request of its own."""
        told = [LookupReport({}, 0) for _ in self._requests]
        for name, codes in sources.items():
            for index, _, keys in zip(*self._shares[name], strict=True):
                mine = codes[keys]
                found, defaulted = told[index]
                found[name] = mine
                defaulted += int(np.count_nonzero(mine == Source.DEFAULT))
                told[index] = LookupReport(found, defaulted)
        return told


class LookupReport(NamedTuple):
    """Where a request's rows came from, and how many keys were answered with a default."""

    sources: dict[str, SourceArray]
    defaulted: int


class _FeatureShares(NamedTuple):
    """Which requests ask for a feature, and what is each one's own of it: its rows, and its keys."""

    requests: Sequence[int]
    rows: list[slice]
    keys: list[slice]


def _joined(keys: Sequence[JaggedKeys]) -> JaggedKeys:
    if len(keys) == 1:
        return keys[0]
    flat = np.concatenate([each.keys for each in keys])
    if flat.dtype != np.int64:  # unsigned keys beside signed ones would be made floating
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
    """Where each of several arrays of these ``sizes`` is when they are joined."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
