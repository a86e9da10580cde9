"""Several lookups made one, and its result made theirs: keys that they share are fetched once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hps.lookup.base import Feature
from hps.types import JaggedKeys, LookupRequest, LookupResult, Source


def kind(request: LookupRequest) -> Hashable | None:
    """Equal for requests that may be merged: those by table, and those of the same features in the same
    form. None for a request that must be alone, because its caller owns the answer's arrays."""
    if request.out is not None:
        return None
    if request.by_table:
        return "by table"
    return tuple(
        (name, keys.hotness, keys.weights is not None) for name, keys in request.features.items()
    )


class Merged:
    """One request for those of ``requests``, which are of one ``kind``; ``features`` are the model's."""

    def __init__(self, requests: Sequence[LookupRequest], features: Mapping[str, Feature]) -> None:
        self._requests = requests
        by_table = requests[0].by_table
        self._shares: dict[str, list[_Share]] = {}
        joined = {}
        for name in dict.fromkeys(name for each in requests for name in each.features):
            given = [
                (i, each.features[name]) for i, each in enumerate(requests) if name in each.features
            ]
            joined[name] = _joined([keys for _, keys in given])
            by_key = by_table or features[name].pooling == "none"
            rows = _bounds([len(keys.keys) if by_key else keys.batch for _, keys in given])
            asked = _bounds([len(keys.keys) for _, keys in given])
            self._shares[name] = [
                _Share(i, r, k) for (i, _), r, k in zip(given, rows, asked, strict=True)
            ]
        deadlines = [each.deadline for each in requests]
        latest = None if None in deadlines else max(d for d in deadlines if d is not None)
        # Sources tell whose keys were answered with a default.
        self.request = LookupRequest(joined, latest, True, None, by_table)

    def split(self, result: LookupResult) -> list[LookupResult]:
        """What each request is answered with: parts of the arrays of ``result``."""
        answers = [
            LookupResult({}, degraded=result.degraded, stale_s=result.stale_s)
            for _ in self._requests
        ]
        for name, shares in self._shares.items():
            vectors, sources = result.vectors[name], result.sources[name]
            for index, rows, keys in shares:
                answer, mine = answers[index], sources[keys]
                answer.vectors[name] = vectors[rows]
                answer.defaulted += int(np.count_nonzero(mine == Source.DEFAULT))
                if self._requests[index].want_source:
                    answer.sources[name] = mine
        return answers


class _Share(NamedTuple):
    """What is a request's own of a feature: its rows, and its keys."""

    request: int
    rows: slice
    keys: slice


def _joined(keys: Sequence[JaggedKeys]) -> JaggedKeys:
    if len(keys) == 1:
        return keys[0]
    flat = np.concatenate([each.keys for each in keys])
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


def _bounds(sizes: Sequence[int]) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *sizes]))]
