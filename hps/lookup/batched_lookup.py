"""Dynamic batching of lookups: keys that several requests share are fetched once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, Protocol, TypeVar

from hps.lookup.base import Lookup, PreparedRequest, PreparedSubmit
from hps.lookup.batching import Batcher, BatchLimits, BatchSize
from hps.lookup.lookup_merge import MergedLookup, check_mergeable, merge_key
from hps.threads import CompletedFuture, chain_future
from hps.tracing import RequestContext, shared_span, span_until_done
from hps.types import JaggedKeys, KeyArray, LookupRequest, LookupResult


class BatchedLookup(Lookup):
    """Answers several requests with one call of ``lookup``; see `Batcher`. Thread-safe.

    Results are bit-identical to those of single requests, except `degraded`, which is the batch's."""

    def __init__(
        self,
        lookup: Lookup,
        limits: BatchLimits,
        observe: Callable[[float], None] = lambda _requests: None,
    ) -> None:
        self._lookup = lookup
        self.model, self.features, self.tables = lookup.model, lookup.features, lookup.tables
        self._batcher: Batcher[LookupRequest, LookupResult] = Batcher(
            _LookupWork(lookup), limits, observe
        )

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """See ``Lookup.submit``."""
        return self._batcher.submit(request)

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """See ``Lookup.prepare``."""
        submit_one, batcher = self._lookup.prepare(request), self._batcher
        prepared = PreparedRequest(request)

        def submit(
            keys: Sequence[KeyArray],
            deadline: float | None,
            origin: RequestContext | None = None,
            /,
        ) -> Future[LookupResult]:
            if batcher.is_idle:
                return batcher.track(submit_one(keys, deadline, origin))
            return batcher.submit(prepared.request(keys, deadline, origin))

        return submit


class _LookupWork:
    """The `BatchWork` of lookups."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self.submit_one = lookup.submit
        self.submit_batch = MergingSubmit(lookup.submit, self._merged).begin

    def merge_key(self, request: LookupRequest) -> tuple[Hashable, LookupRequest] | None:
        known = self._lookup.tables if request.by_table else self._lookup.features
        if not request.features.keys() <= known.keys():
            return None  # alone, it gets an error that names the unknown name
        fit = check_mergeable(request, self._lookup.features)
        key = merge_key(fit)
        return None if key is None else (key, fit)

    def size(self, request: LookupRequest) -> BatchSize:
        size = keys_size(request.features)
        # Keys by table count as one sample; their number alone limits the batch.
        return size._replace(samples=1) if request.by_table else size

    def deadline(self, request: LookupRequest) -> float | None:
        return request.deadline

    def _merged(
        self, requests: Sequence[LookupRequest], want_source: bool, origin: RequestContext | None
    ) -> MergedLookup:
        return MergedLookup(requests, self._lookup.features, want_source=want_source, origin=origin)


class CountsDefaults(Protocol):
    """A result that counts the keys answered with a default."""

    @property
    def defaulted(self) -> int: ...


class RequestsSources(Protocol):
    """A request that may ask for sources, with its trace context."""

    @property
    def want_source(self) -> bool: ...

    @property
    def origin(self) -> RequestContext | None: ...


Request = TypeVar("Request", bound=RequestsSources)
Result = TypeVar("Result", bound=CountsDefaults)
Merged = TypeVar("Merged", covariant=True)


class MergedRequests(Protocol[Merged, Result]):
    """Several requests merged into one."""

    @property
    def request(self) -> Merged: ...

    def split(self, result: Result) -> list[Result]: ...


class MergingSubmit(Generic[Request, Result]):
    """Merge several requests with ``merge``, submit the merged one and split its result. Thread-safe.

    Only sources show how many defaults each request got, but they rule out the engine's fast path. So a
    batch has them only if one of its requests wants them, or if the last batch had defaults; a batch
    that turns out to have defaults without sources is submitted again with them."""

    def __init__(
        self,
        submit: Callable[[Request], Future[Result]],
        merge: Callable[
            [Sequence[Request], bool, RequestContext | None], MergedRequests[Request, Result]
        ],
    ) -> None:
        self._submit = submit
        self._merge = merge
        self._defaults = False  # True if the last finished batch had defaults

    def begin(self, requests: Sequence[Request]) -> Future[list[Result]]:
        """Submit ``requests`` of one merge key; the future has a result for each."""
        sourced = self._defaults or any(request.want_source for request in requests)
        return self._begin(requests, sourced)

    def _begin(self, requests: Sequence[Request], sourced: bool) -> Future[list[Result]]:
        origin = shared_span("batch", (request.origin for request in requests))
        merged = self._merge(requests, sourced, origin)

        def split(result: Result) -> Future[list[Result]]:
            # A local copy: another batch may change `self._defaults` before the next line.
            has_defaults = self._defaults = result.defaulted > 0
            if has_defaults and not sourced:
                return self._begin(requests, True)
            return CompletedFuture(merged.split(result))

        begin = partial(self._submit, merged.request)
        merged_future = begin() if origin is None else span_until_done(origin, begin, lambda _: {})
        return (
            split(merged_future.result())
            if merged_future.done()
            else chain_future(merged_future, split)
        )


def keys_size(features: Mapping[str, JaggedKeys]) -> BatchSize:
    """Return the number of samples and of keys of a request."""
    rows = keys = 0
    for each in features.values():
        rows, keys = max(rows, each.batch), keys + len(each.keys)
    return BatchSize(rows, keys, rows)
