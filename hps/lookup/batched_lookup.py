"""A lookup whose requests are batched: keys that several of them ask for are fetched once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from hps.lookup.base import Feature, Lookup, PreparedSubmit
from hps.lookup.batching import Batcher, BatchLimits, BatchSize
from hps.lookup.lookup_merge import MergedLookup, check_mergeable, merge_key
from hps.threads import CompletedFuture, chain_future
from hps.tracing import RequestContext, shared_span, span_until_done
from hps.types import EmbeddingTable, JaggedKeys, KeyArray, LookupRequest, LookupResult


class BatchedLookup:
    """``lookup``, several requests at a time; see `Batcher`. Answers are to the bit those of each request
    alone, but for `degraded`, which is the batch's. Any number of threads may call it."""

    def __init__(
        self,
        lookup: Lookup,
        bounds: BatchLimits,
        observe: Callable[[float], None] = lambda _requests: None,
    ) -> None:
        self._lookup = lookup
        self._batcher: Batcher[LookupRequest, LookupResult] = Batcher(
            _LookupWork(lookup), bounds, observe
        )

    @property
    def features(self) -> Mapping[str, Feature]:
        return self._lookup.features

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        return self._lookup.tables

    def lookup(self, request: LookupRequest) -> LookupResult:
        """See ``Lookup.lookup``."""
        return self.submit(request).result()

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """See ``Lookup.submit``."""
        return self._batcher.submit(request)

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """See ``Lookup.prepare``."""
        alone, batcher = self._lookup.prepare(request), self._batcher
        batches = [(name, keys.batch) for name, keys in request.features.items()]
        bare = replace(request, features={})

        def submit(
            keys: Sequence[KeyArray],
            deadline: float | None,
            origin: RequestContext | None = None,
            /,
        ) -> Future[LookupResult]:
            if batcher.is_idle:
                return batcher.began(alone(keys, deadline, origin))
            features = {
                name: JaggedKeys(mine, batch)
                for (name, batch), mine in zip(batches, keys, strict=True)
            }
            asked = replace(bare, features=features, deadline=deadline, origin=origin)
            return batcher.submit(asked)

        return submit


class _LookupWork:
    """Lookups as the work of a `Batcher`."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self.alone = lookup.submit
        self.together = MergingSubmit(lookup.submit, self._merged).begin

    def kind(self, request: LookupRequest) -> tuple[Hashable, LookupRequest] | None:
        known = self._lookup.tables if request.by_table else self._lookup.features
        if not request.features.keys() <= known.keys():
            return None  # asked alone, it is told what is wrong
        fit = check_mergeable(request, self._lookup.features)
        found = merge_key(fit)
        return None if found is None else (found, fit)

    def size(self, request: LookupRequest) -> BatchSize:
        size = keys_size(request.features)
        # Keys by table are one sample, however many; what a batch may hold goes by their number.
        return size._replace(samples=1) if request.by_table else size

    def deadline(self, request: LookupRequest) -> float | None:
        return request.deadline

    def _merged(
        self, requests: Sequence[LookupRequest], want_source: bool, origin: RequestContext | None
    ) -> MergedLookup:
        return MergedLookup(requests, self._lookup.features, want_source=want_source, origin=origin)


class CountsDefaults(Protocol):
    """Of a result: how many keys were answered with a default."""

    @property
    def defaulted(self) -> int: ...


class RequestsSources(Protocol):
    """Of a request: whether it asks where its rows come from, and on whose behalf it is."""

    @property
    def want_source(self) -> bool: ...

    @property
    def origin(self) -> RequestContext | None: ...


Request = TypeVar("Request", bound=RequestsSources)
Result = TypeVar("Result", bound=CountsDefaults)
Asked = TypeVar("Asked", covariant=True)


class MergedRequests(Protocol[Asked, Result]):
    """Several requests made one."""

    @property
    def request(self) -> Asked: ...

    def split(self, result: Result) -> list[Result]: ...


class MergingSubmit(Generic[Request, Result]):
    """Several requests begun by ``submit`` as the one that ``merge`` makes of them, with sources or without,
    and on whose behalf it is.

    Asking for sources takes the longer way through the engine. So it is done only while there are keys
    without a row, whose requests have to be told. Any number of threads may call it.
    """

    def __init__(
        self,
        submit: Callable[[Request], Future[Result]],
        merge: Callable[
            [Sequence[Request], bool, RequestContext | None], MergedRequests[Request, Result]
        ],
    ) -> None:
        self._submit = submit
        self._merge = merge
        self._defaults = False  # in the batch that ended last

    def begin(self, requests: Sequence[Request]) -> Future[list[Result]]:
        """An answer for each of ``requests``, which are of one kind."""
        sourced = self._defaults or any(request.want_source for request in requests)
        return self._begin(requests, sourced)

    def _begin(self, requests: Sequence[Request], sourced: bool) -> Future[list[Result]]:
        origin = shared_span("batch", (request.origin for request in requests))
        merged = self._merge(requests, sourced, origin)

        def split(result: Result) -> Future[list[Result]]:
            # Of this batch: `self._defaults` may be another's by the next line.
            some = self._defaults = result.defaulted > 0
            if some and not sourced:
                return self._begin(requests, True)
            return CompletedFuture(merged.split(result))

        begin = partial(self._submit, merged.request)
        asked = begin() if origin is None else span_until_done(origin, begin, lambda _: {})
        return split(asked.result()) if asked.done() else chain_future(asked, split)


def keys_size(features: Mapping[str, JaggedKeys]) -> BatchSize:
    """Samples and keys of a request by feature."""
    rows = keys = 0
    for each in features.values():
        rows, keys = max(rows, each.batch), keys + len(each.keys)
    return BatchSize(rows, keys, rows)


__all__ = ["BatchedLookup", "MergingSubmit", "keys_size"]
