"""The lookup in this process: dedup, fetch, defaults, scatter, pool.

Caches are read on the caller's thread, or on the memory pool's if there is much to copy; stores are read
on another bounded pool. So an event loop may call ``submit``. Keys that a store had, or that
``default_then_promote`` answered with a default, go to the cache writer; the engine writes to no tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from hps.errors import DeadlineExceeded
from hps.lookup.base import (
    Lookup,
    LookupModel,
    PreparedRequest,
    PreparedSubmit,
    is_past,
    submit_in_span,
)
from hps.lookup.checks import check_keys, check_out_names, check_sizes, check_targets
from hps.lookup.fast_path import FastPath
from hps.lookup.feature_groups import FeatureGroupCache
from hps.lookup.key_recorder import KeyRecorder, RequestShape
from hps.lookup.lookup_job import FullLookupJob, LookupJob, TableKeys, make_table_keys
from hps.lookup.partial_hits import PartialHit, PartialHitJob
from hps.lookup.request_sample import NO_SAMPLE
from hps.observability.meters import LookupMeter
from hps.observability.metrics import Metrics
from hps.threads import BoundedThreadPool, CompletedFuture, LookupPools, chain_future
from hps.tiers.base import Part, Tier
from hps.tiers.fused_lookup import fused_lookup_of
from hps.tracing import RequestContext, call_timed
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    LookupRequest,
    LookupResult,
)

# A request with more keys than this runs on a pool thread even if memory holds all its rows: it would
# block an event loop for milliseconds.
INLINE_KEYS = 16_384
# After a longer wait in the stores' queue the caches are read again: a promotion takes about this long.
_REFETCH_AFTER_S = 0.002

Promote = Callable[[EmbeddingTable, KeyArray], None]


class LookupEngine(Lookup):
    """Serves one model. Thread-safe; keeps no state of a request.

    ``recorder``: gets the keys of every lookup, if set. ``sample``: gets requests while it is armed.

    ``promote`` must not block; ``caches`` and ``stores`` are the two stages of tiers; ``workers`` is one
    pool of threads for both, or one for each.
    """

    def __init__(
        self,
        model: LookupModel,
        caches: Tier,
        stores: Tier,
        workers: BoundedThreadPool | LookupPools,
        promote: Promote = lambda _table, _keys: None,
        meter: LookupMeter | None = None,
    ) -> None:
        self.model = model
        self.features, self.tables = model.features, model.tables
        self._caches = caches
        self._stores = stores
        self._stores_block = stores.info.blocking
        self._pools = workers if isinstance(workers, LookupPools) else LookupPools(workers, workers)
        self._promote = promote
        self._meter = meter or LookupMeter(Metrics(), model.name, model.version)
        # An object, not a bound method: that would refer to this engine, and a retired version is freed
        # only when nothing refers to its engine any more.
        self._groups = FeatureGroupCache(model)
        self.recorder: KeyRecorder | None = None
        self.sample = NO_SAMPLE
        self._fast_path: FastPath | None = None
        if tier := fused_lookup_of(caches):
            self._fast_path = FastPath(model, tier, self._groups, self._meter, INLINE_KEYS)

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """Start a lookup; see ``Lookup.submit``. A request may name any of the model's features.

        The future fails with ``DeadlineExceeded`` or with the error of a store that has no guard.
        """
        return submit_in_span(self.model.name, request, self._submit)

    def _submit(self, request: LookupRequest) -> Future[LookupResult]:
        if self.recorder is not None:
            self.recorder.add(request)
        if self.sample.armed:
            self.sample.add(request)
        prepared = self._fast_path.prepare(request) if self._fast_path else None
        if prepared is None or is_past(request.deadline):
            return self._slow_path(request)
        keys = [keys.keys for keys in request.features.values()]
        if prepared.inline:
            found = call_timed(request.origin, "memory", prepared, keys)
            return (
                CompletedFuture(found)
                if type(found) is LookupResult
                else self._after_fast_path(request, found)
            )
        run = partial(call_timed, request.origin, "memory", prepared, keys)
        from_memory = self._pools.memory.submit(run, request.deadline)
        return chain_future(from_memory, partial(self._after_fast_path, request))

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """See ``Lookup.prepare``."""
        prepared = self._fast_path.prepare(request) if self._fast_path else None
        prepared_request = PreparedRequest(request)
        shape = RequestShape.of(request)
        from_memory = prepared if prepared is not None and prepared.inline else None

        def submit(
            keys: Sequence[KeyArray],
            deadline: float | None,
            origin: RequestContext | None = None,
            /,
        ) -> Future[LookupResult]:
            found = None
            if self.recorder is not None:
                self.recorder.add_flat(shape, keys)
            if self.sample.armed:
                self.sample.add(prepared_request.request(keys, deadline, origin))
            if from_memory is not None and not is_past(deadline):
                found = from_memory(keys)
                if type(found) is LookupResult:
                    return CompletedFuture(found)
            return self._after_fast_path(prepared_request.request(keys, deadline, origin), found)

        return submit

    def _after_fast_path(
        self, request: LookupRequest, found: LookupResult | PartialHit | None
    ) -> Future[LookupResult]:
        """Continue after the fast path with ``found``, its result; None if it could not answer."""
        if isinstance(found, LookupResult):
            return CompletedFuture(found)
        if found is None:
            return self._slow_path(request)
        job = call_timed(request.origin, "dedup", PartialHitJob, request, found)
        return self._after_caches(job, self._fetch_caches(job))

    def _slow_path(self, request: LookupRequest) -> Future[LookupResult]:
        table_keys, keys = call_timed(request.origin, "dedup", self._table_keys, request)
        job = FullLookupJob(request, table_keys)
        if is_past(request.deadline):
            raise DeadlineExceeded("deadline exceeded before the lookup started")
        return self._begin(job, keys)

    def _begin(self, job: LookupJob, keys: int) -> Future[LookupResult]:
        """Fetch from the caches, on a pool thread if there are many ``keys``, and continue."""
        if keys > INLINE_KEYS:
            fetched = self._pools.memory.submit(
                partial(self._fetch_caches, job), job.request.deadline
            )
            return chain_future(fetched, partial(self._after_caches, job))
        return self._after_caches(job, self._fetch_caches(job))

    # -- stages ------------------------------------------------------------------------------------

    def _after_caches(self, job: LookupJob, missed: list[Part]) -> Future[LookupResult]:
        """Answer after the caches; on a pool thread if ``missed`` parts need a store that blocks."""
        # At shutdown the pools close before the caches are cleared. A miss after that must not be answered
        # with a default.
        self._pools.stores.check_open()
        if missed and self._stores_block:
            run = partial(self._fetch_stores_queued, job, missed, time.perf_counter())
            return self._pools.stores.submit(run, job.request.deadline)
        result = self._fetch_stores(job, missed)
        return self._slow_path(job.request) if result is None else CompletedFuture(result)

    def _fetch_stores_queued(
        self, job: LookupJob, missed: list[Part], queued_at: float
    ) -> LookupResult:
        """Fetch from the stores on a pool thread.

        After a long wait in the pool's queue the caches are read again: many requests may have missed
        the same rows, and the first of these requests had them promoted."""
        if job.request.origin is not None and job.request.origin.is_profiled:
            job.request.origin.stage("wait", int(queued_at * 1e9), time.perf_counter_ns())
        if time.perf_counter() - queued_at > _REFETCH_AFTER_S:
            self._caches.fetch(missed, job.context)
            missed = [part for part in missed if len(part.missing)]
        result = self._fetch_stores(job, missed)
        while result is None:
            job = FullLookupJob(job.request, self._table_keys(job.request)[0])
            result = self._fetch_stores(job, self._fetch_caches(job))
        return result

    def _fetch_caches(self, job: LookupJob) -> list[Part]:
        """Fetch from the caches; return the parts that need the stores."""
        self._caches.fetch(job.parts, job.context)
        missed = [part for part in job.parts if len(part.missing)]
        return self._apply_miss_policies(job, missed) if missed else missed

    def _apply_miss_policies(self, job: LookupJob, parts: list[Part]) -> list[Part]:
        """Return the parts that must wait; promote the missing keys of the others, which get defaults now."""
        missed = []
        for part in parts:
            if _must_wait(job, part):
                missed.append(part)
            else:
                self._promote(part.table, part.keys[part.missing])
        return missed

    def _fetch_stores(self, job: LookupJob, missed: list[Part]) -> LookupResult | None:
        """Fetch ``missed`` parts from the stores, promote the rows found and answer.

        None if rows were evicted in between and the request must start again."""
        if missed:
            missing_positions = [part.missing for part in missed]
            self._stores.fetch(missed, job.context)
            if job.context.degraded and is_past(job.request.deadline):
                # The store was skipped because the request had no time left, not because the store failed.
                raise DeadlineExceeded("deadline exceeded while reading from the stores")
            self._promote_found(missed, missing_positions)
        answered = call_timed(job.request.origin, "merge", job.answer)
        if answered is None:
            return None
        result, sources = answered
        self._meter.finished(sources, time.perf_counter() - job.started, result.degraded)
        return result

    def _promote_found(self, parts: list[Part], missing_positions: list[IndexArray]) -> None:
        """Promote the rows that the stores had at the ``missing`` positions of each part."""
        for part, positions in zip(parts, missing_positions, strict=True):
            found = positions[part.source[positions] != 0]
            if len(found):
                self._promote(part.table, part.keys[found])

    # -- request -> parts --------------------------------------------------------------------------

    def _table_keys(self, request: LookupRequest) -> tuple[list[TableKeys], int]:
        """Validate the request's keys and gather them by table, each key once."""
        groups = self._groups(tuple(request.features), request.by_table)
        total = check_sizes(self.model, request)
        out = request.out or {}
        if out:
            check_out_names(out, request, self.model.name)
        table_keys = []
        for table, features in groups:
            keys = [check_keys(feature, request.features[feature.name]) for feature in features]
            if out:
                check_targets(table, features, keys, out)
            table_keys.append(make_table_keys(table, features, keys, out))
        return table_keys, total


def _must_wait(job: LookupJob, part: Part) -> bool:
    """True if the miss policy fetches the part's missing keys from the stores before the answer."""
    policy = part.table.miss
    if policy.kind == "wait" or not policy.min_hit_rate:
        return policy.kind == "wait"
    distinct = job.distinct_keys(part)
    return distinct - len(part.missing) < policy.min_hit_rate * distinct
