"""The lookup in this process: dedup -> fetch -> defaults -> scatter -> pool.

Caches are asked on the caller's thread, or on the memory lane's when there is much to copy; stores on
another bounded pool of threads. So an event loop may call ``submit``. Keys found below the caches, or
owed a row under ``default_then_promote``, are handed to the cache writer; nothing here writes to a tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from hps.errors import DeadlineExceeded
from hps.lookup.base import Feature, LookupModel, PreparedSubmit
from hps.lookup.checks import check_keys, check_out_names, check_sizes, check_targets
from hps.lookup.fast_path import FastPath
from hps.lookup.feature_groups import FeatureGroupCache
from hps.lookup.lookup_job import FullLookupJob, LookupJob
from hps.lookup.lookup_span import submit_in_span
from hps.lookup.partial_hits import PartialHit, PartialHitJob
from hps.lookup.table_keys import TableKeys, make_table_keys
from hps.observability.meters import LookupMeter
from hps.observability.metrics import Metrics
from hps.threads import BoundedThreadPool, CompletedFuture, LookupPools, chain_future
from hps.tiers.base import Part, Tier
from hps.tiers.fused_lookup import fused_lookup_of
from hps.tracing import RequestContext, call_timed
from hps.types import (
    EmbeddingTable,
    IndexArray,
    JaggedKeys,
    KeyArray,
    LookupRequest,
    LookupResult,
)

# A request with more keys than this is worth a thread hop even when memory holds them all: it would
# hold up an event loop for milliseconds.
INLINE_KEYS = 16_384
# A promotion takes about as long.
_ASK_AGAIN_S = 0.002

Promote = Callable[[EmbeddingTable, KeyArray], None]


class LookupEngine:
    """Serves one model. Any number of threads may call it; it holds no state of a request.

    ``promote`` must not block; ``caches`` and ``stores`` are the two stages of tiers; ``workers`` may be
    one pool of threads for both or a lane for each.
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
        self._caches = caches
        self._stores = stores
        self._stores_block = stores.info.blocking
        self._lanes = workers if isinstance(workers, LookupPools) else LookupPools(workers, workers)
        self._promote = promote
        self._meter = meter or LookupMeter(Metrics(), model.name, model.version)
        # Not a method of ours: whoever drops a model waits until nothing refers to its engine.
        self._plan = FeatureGroupCache(model)
        self._short: FastPath | None = None
        if tier := fused_lookup_of(caches):
            self._short = FastPath(model, tier, self._plan, self._meter, INLINE_KEYS)

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.model.features

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        return self.model.tables

    def lookup(self, request: LookupRequest) -> LookupResult:
        """Answer ``request``, waiting for stores if need be. Errors as ``submit`` and its future."""
        return self.submit(request).result()

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """Start a lookup; see ``Lookup.submit``. A request may name any of the model's features.

        The future fails with ``DeadlineExceeded`` or with what a store without a guard raised.
        """
        return submit_in_span(self.model.name, request, self._submit)

    def _submit(self, request: LookupRequest) -> Future[LookupResult]:
        form = self._short.form(request) if self._short else None
        if form is None or _is_past(request.deadline):
            return self._ordinary(request)
        keys = [keys.keys for keys in request.features.values()]
        if form.inline:
            found = call_timed(request.origin, "memory", form, keys)
            return (
                CompletedFuture(found)
                if type(found) is LookupResult
                else self._rest(request, found)
            )
        ask = partial(call_timed, request.origin, "memory", form, keys)
        asked = self._lanes.memory.submit(ask, request.deadline)
        return chain_future(asked, partial(self._rest, request))

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """See ``Lookup.prepare``."""
        form = self._short.form(request) if self._short else None
        batches = [(name, keys.batch) for name, keys in request.features.items()]
        bare = replace(request, features={})
        from_memory = form if form is not None and form.inline else None

        def submit(
            keys: Sequence[KeyArray],
            deadline: float | None,
            origin: RequestContext | None = None,
            /,
        ) -> Future[LookupResult]:
            found = None
            if from_memory is not None and not _is_past(deadline):
                found = from_memory(keys)
                if type(found) is LookupResult:
                    return CompletedFuture(found)
            features = {
                name: JaggedKeys(mine, batch)
                for (name, batch), mine in zip(batches, keys, strict=True)
            }
            asked = replace(bare, features=features, deadline=deadline, origin=origin)
            return self._rest(asked, found)

        return submit

    def _rest(
        self, request: LookupRequest, found: LookupResult | PartialHit | None
    ) -> Future[LookupResult]:
        """After the short way, which ``found`` something, or nothing."""
        if isinstance(found, LookupResult):
            return CompletedFuture(found)
        if found is None:
            return self._ordinary(request)
        job = call_timed(request.origin, "dedup", PartialHitJob, request, found)
        return self._go_on(job, self._ask_caches(job))

    def _ordinary(self, request: LookupRequest) -> Future[LookupResult]:
        shares, keys = call_timed(request.origin, "dedup", self._shares, request)
        job = FullLookupJob(request, shares)
        if _is_past(request.deadline):
            raise DeadlineExceeded("the request's deadline had passed when it came")
        if keys > INLINE_KEYS:
            asked = self._lanes.memory.submit(partial(self._ask_caches, job), request.deadline)
            return chain_future(asked, partial(self._go_on, job))
        return self._go_on(job, self._ask_caches(job))

    # -- stages ------------------------------------------------------------------------------------

    def _go_on(self, job: LookupJob, waiting: list[Part]) -> Future[LookupResult]:
        """After the caches: answer, on a thread that may wait if a store must be asked."""
        # Caches are cleared after the workers are closed: what they lack then is no default.
        self._lanes.stores.check_open()
        if waiting and self._stores_block:
            run = partial(self._run_after_waiting, job, waiting, time.perf_counter())
            return self._lanes.stores.submit(run, job.request.deadline)
        result = self._run_below(job, waiting)
        return self._ordinary(job.request) if result is None else CompletedFuture(result)

    def _run_after_waiting(self, job: LookupJob, waiting: list[Part], since: float) -> LookupResult:
        """Ask the caches again if it took a while to get a thread: many may wait for the same rows, and
        those before this one had them promoted."""
        if job.request.origin is not None and job.request.origin.is_profiled:
            job.request.origin.stage("wait", int(since * 1e9), time.perf_counter_ns())
        if time.perf_counter() - since > _ASK_AGAIN_S:
            self._caches.fetch(waiting, job.context)
            waiting = [part for part in waiting if len(part.missing)]
        result = self._run_below(job, waiting)
        while result is None:
            job = FullLookupJob(job.request, self._shares(job.request)[0])
            result = self._run_below(job, self._ask_caches(job))
        return result

    def _ask_caches(self, job: LookupJob) -> list[Part]:
        """Fetch what memory holds; the parts that must wait for the stores."""
        self._caches.fetch(job.parts, job.context)
        waiting = [part for part in job.parts if len(part.missing)]
        return self._apply_miss_policies(job, waiting) if waiting else waiting

    def _apply_miss_policies(self, job: LookupJob, parts: list[Part]) -> list[Part]:
        """The parts that wait; the others' missing keys are promoted and get defaults for now."""
        waiting = []
        for part in parts:
            if _must_wait(job, part):
                waiting.append(part)
            else:
                self._promote(part.table, part.keys[part.missing])
        return waiting

    def _run_below(self, job: LookupJob, waiting: list[Part]) -> LookupResult | None:
        """Fetch ``waiting`` from the stores, have what they held promoted, and answer; None when the request
        must be begun again."""
        if waiting:
            asked = [part.missing for part in waiting]
            self._stores.fetch(waiting, job.context)
            if job.context.degraded and _is_past(job.request.deadline):
                # The store was skipped because this request had no time left: no row is at fault.
                raise DeadlineExceeded("the deadline passed while the stores were asked")
            self._hand_on(waiting, asked)
        answered = call_timed(job.request.origin, "merge", job.answer)
        if answered is None:
            return None
        result, sources = answered
        self._meter.finished(sources, time.perf_counter() - job.started, result.degraded)
        return result

    def _hand_on(self, parts: list[Part], asked: list[IndexArray]) -> None:
        """Have the rows promoted that were found of the positions ``asked`` for."""
        for part, positions in zip(parts, asked, strict=True):
            found = positions[part.source[positions] != 0]
            if len(found):
                self._promote(part.table, part.keys[found])

    # -- request -> parts --------------------------------------------------------------------------

    def _shares(self, request: LookupRequest) -> tuple[list[TableKeys], int]:
        """The request's keys, checked, gathered by table, each key once."""
        groups = self._plan(tuple(request.features), request.by_table)
        total = check_sizes(self.model, request)
        out = request.out or {}
        if out:
            check_out_names(out, request, self.model.name)
        shares = []
        for table, features in groups:
            keys = [check_keys(feature, request.features[feature.name]) for feature in features]
            if out:
                check_targets(table, features, keys, out)
            shares.append(make_table_keys(table, features, keys, out))
        return shares, total


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


def _must_wait(job: LookupJob, part: Part) -> bool:
    """Whether the miss policy has the part's missing keys asked for in the stores."""
    policy = part.table.miss
    if policy.kind == "wait" or not policy.min_hit_rate:
        return policy.kind == "wait"
    asked = job.asked(part)
    return asked - len(part.missing) < policy.min_hit_rate * asked
