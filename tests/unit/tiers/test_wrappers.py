"""GuardedTier and MeteredTier beyond the contract: failures, timeouts, observations."""

import threading
import time

import numpy as np
import pytest

from hps.errors import BadRequest, TierError, TierTimeout
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import DEADLINE_KEYS, GuardedTier, MeteredTier
from hps.types import EmbeddingTable, Source
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

TABLE = EmbeddingTable.make("items", 2)
KEYS = np.arange(4)
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
VERSIONS = np.full(4, 1 << 60, np.uint64)


class Store(MemoryTier):
    """Rows 0..3. ``fault(part)`` is called after half of a part has been answered."""

    def __init__(self, *, blocking):
        super().__init__(TierInfo("store", Source.ROCKSDB, blocking=blocking))
        self.insert(TABLE, KEYS, ROWS, VERSIONS)
        self.fault = lambda part: None
        self.calls = 0
        self.closed = threading.Event()

    def fetch(self, parts, ctx):
        self.calls += 1
        self.deadline = ctx.deadline
        for part in parts:
            half = len(part.missing) // 2
            first, rest = part.missing[:half], part.missing[half:]
            part.missing = first
            super().fetch([part], ctx)
            part.missing = np.concatenate([part.missing, rest])
            self.fault(part)
            super().fetch([part], ctx)

    def close(self):
        self.closed.set()


@pytest.fixture(params=[False, True], ids=["in place", "blocking"])
def store(request):
    return Store(blocking=request.param)


def guard(store, deadline_s=30.0, failures=2, retry_after_s=1e6, **more):
    return GuardedTier(store, deadline_s, failures, retry_after_s, **more)


def end_retry_pause(guarded):
    """End the pause of the open circuit."""
    guarded._breaker._retry_at = 0.0


def blank():
    part = Part.make(TABLE, np.arange(6), np.full((6, 2), 7, np.float32))
    part.missing = np.array([0, 2, 3, 5])
    return part


def fetch(tier, ctx=None):
    part, ctx = blank(), ctx or FetchContext()
    tier.fetch([part], ctx)
    return part, ctx.degraded


def assert_untouched(part):
    assert (part.out == 7).all()
    assert not part.versions.any()
    assert not part.source.any()
    assert part.missing.tolist() == [0, 2, 3, 5]


def fail(_part):
    raise TierError("store", "disk on fire")


def hang_until(gate):
    return lambda _part: gate.wait(60)


def test_answers_pass_through(store):
    part, degraded = fetch(guard(store))
    assert degraded == []
    assert part.missing.tolist() == [5]
    assert part.out[[0, 2, 3]].tolist() == ROWS[[0, 2, 3]].tolist()
    assert (part.out[[1, 4, 5]] == 7).all()
    assert part.source.tolist() == [4, 0, 4, 4, 0, 0]


def test_tombstone_passes_without_row(store):
    store.delete(TABLE, KEYS[:1], np.array([time.time_ns() // 10**6 << 20], np.uint64))
    part, _ = fetch(guard(store))
    assert part.missing.tolist() == [5]
    assert part.versions[0] > 0
    assert part.source[0] == 0
    assert (part.out[0] == 7).all()


def test_failure_half_way_leaves_no_rows(store):
    store.fault = fail
    part, degraded = fetch(guard(store))
    assert_untouched(part)
    assert degraded == ["store"]


def test_lower_tier_answers_for_broken_tier(store):
    store.fault = fail
    below = Store(blocking=False)
    part, degraded = fetch(TierChain([guard(store), below]))
    assert part.missing.tolist() == [5]
    assert degraded == ["store"]


def test_broken_tier_is_skipped_and_recovers(store):
    store.fault = fail
    guarded = guard(store, failures=2)
    fetch(guarded)
    assert guarded.state == "closed"
    fetch(guarded)
    assert guarded.state == "open"
    part, degraded = fetch(guarded)
    assert store.calls == 2
    assert_untouched(part)
    assert degraded == ["store"]
    store.fault = lambda part: None
    end_retry_pause(guarded)
    part, degraded = fetch(guarded)
    assert part.missing.tolist() == [5]
    assert degraded == []
    assert guarded.state == "closed"


@pytest.mark.parametrize("error", [TypeError, KeyError, ZeroDivisionError, BadRequest])
def test_program_errors_pass_through(store, error):
    def raise_it(_part):
        raise error("a fault of the program")

    store.fault = raise_it
    guarded = guard(store, failures=1)
    part, ctx = blank(), FetchContext()
    with pytest.raises(error):
        guarded.fetch([part], ctx)
    assert_untouched(part)
    assert ctx.degraded == []
    assert guarded.state == "closed"


def test_program_error_in_probe_lets_next_call_probe(store):
    store.fault = fail
    guarded = guard(store, failures=1)
    fetch(guarded)
    end_retry_pause(guarded)
    store.fault = lambda part: 1 // 0
    with pytest.raises(ZeroDivisionError):
        fetch(guarded)
    store.fault = lambda part: None
    part, degraded = fetch(guarded)
    assert degraded == []
    assert part.missing.tolist() == [5]


def test_exceeded_deadline_skips_tier(store):
    guarded = guard(store, failures=1)
    part, degraded = fetch(guarded, FetchContext(deadline=time.monotonic() - 0.001))
    assert store.calls == 0
    assert_untouched(part)
    assert degraded == ["store"]
    assert guarded.state == "closed"


def test_tier_gets_earlier_deadline(store):
    before = time.monotonic()
    fetch(guard(store, deadline_s=30.0))
    assert before + 30 <= store.deadline <= time.monotonic() + 30
    near = time.monotonic() + 5
    fetch(guard(store, deadline_s=30.0), FetchContext(near))
    assert store.deadline == near


def test_later_deadline_of_request_does_not_extend_that_of_tier(store):
    before = time.monotonic()
    fetch(guard(store, deadline_s=30.0), FetchContext(before + 60))
    assert before + 30 <= store.deadline <= time.monotonic() + 30


def test_large_fetch_gets_more_time():
    """Ten times the keys take a healthy tier ten times as long."""
    store = Store(blocking=True)
    store.fault = lambda _part: time.sleep(0.2)
    guarded = guard(store, deadline_s=0.3, failures=1)
    parts = [Part.make(TABLE, np.arange(i, 100 * DEADLINE_KEYS, 2)) for i in (0, 1)]
    ctx = FetchContext()
    before = time.monotonic()
    guarded.fetch(parts, ctx)
    assert (ctx.degraded, guarded.state) == ([], "closed")
    assert before + 30 <= store.deadline <= time.monotonic() + 30
    store.fault = lambda _part: time.sleep(1)
    _, degraded = fetch(guarded)
    assert (degraded, guarded.state) == (["store"], "open")


def test_skipped_tier_is_reported_once(store):
    store.fault = fail
    _, degraded = fetch(guard(store), FetchContext(degraded=["store"]))
    assert degraded == ["store"]
    _, degraded = fetch(TierChain([guard(store), guard(store)]))
    assert degraded == ["store"]


def test_degraded_lower_tiers_are_reported(store):
    broken = Store(blocking=False)
    broken.fault = fail
    _, degraded = fetch(guard(TierChain([guard(broken), store])))
    assert degraded == ["store"]


def test_writes_are_never_skipped(store):
    store.fault = fail
    guarded = guard(store, failures=1)
    fetch(guarded)
    assert guarded.state == "open"
    guarded.insert(TABLE, np.array([9]), ROWS[:1], VERSIONS[:1])
    assert store.size(TABLE) == 5
    with pytest.raises(BadRequest):
        guarded.insert(TABLE, np.array([9]), ROWS[:2], VERSIONS[:1])


def test_updates_reach_the_inner_tier(store):
    guard(store).update(TABLE, KEYS[:1], ROWS[1:2], VERSIONS[:1] + 1)
    part, _ = fetch(store)
    assert part.out[0].tolist() == ROWS[1].tolist()
    assert part.versions[0] == VERSIONS[0] + 1


# -- late answers: only of tiers that block --------------------------------------------------------


def test_late_answer_is_dropped_and_never_written():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.1, failures=2)
    start = time.monotonic()
    part, ctx = blank(), FetchContext()
    guarded.fetch([part], ctx)
    assert time.monotonic() - start < 5
    assert ctx.degraded == ["store"]
    assert_untouched(part)
    gate.set()
    guarded.close()
    assert_untouched(part)
    assert ctx.degraded == ["store"]


def test_timeouts_open_circuit():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.1, failures=2)
    fetch(guarded)
    fetch(guarded)
    assert guarded.state == "open"
    fetch(guarded)
    assert store.calls <= 2
    gate.set()


def test_short_request_deadlines_do_not_open_circuit():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=60.0, failures=1)
    for _ in range(3):
        _, degraded = fetch(guarded, FetchContext(time.monotonic() + 0.005))
        assert degraded == ["store"]
    gate.set()
    until(lambda: all(call.ended for call in guarded._given_up))
    _, degraded = fetch(guarded)
    assert degraded == []
    assert guarded.state == "closed"


def test_circuit_opens_for_hanging_tier_with_short_deadlines():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.5, failures=1)
    while not guarded._given_up:  # its thread may come too late
        fetch(guarded, FetchContext(time.monotonic() + 0.1))
    assert guarded.state == "closed"
    until(lambda: store.calls == 1)
    time.sleep(0.5)
    _, degraded = fetch(guarded, FetchContext(time.monotonic() + 0.1))
    assert guarded.state == "open"
    assert store.calls == 1
    assert degraded == ["store"]
    gate.set()


def test_timeout_of_tier_counts_unless_request_deadline_was_short():
    store = Store(blocking=True)

    def time_out(_part):
        raise TierTimeout("store", "no reply")

    store.fault = time_out
    guarded = guard(store, deadline_s=30.0, failures=1)
    fetch(guarded, FetchContext(time.monotonic() + 10))
    assert guarded.state == "closed"
    fetch(guarded)
    assert guarded.state == "open"


def test_hanging_calls_are_bounded():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.05, failures=100, threads=2)
    while store.calls < 2:  # a thread may come too late
        fetch(guarded)
    for _ in range(10):
        fetch(guarded)
    assert store.calls == 2
    gate.set()
    store.fault = lambda part: None
    second_guard = guard(store)
    assert fetch(second_guard)[1] == []


# -- why a tier was skipped, and by whom -----------------------------------------------------------


def test_every_skip_reason_is_reported(store):
    reasons = []
    guarded = guard(store, failures=1, on_skip=reasons.append)
    fetch(guarded, FetchContext(time.monotonic() - 1))
    store.fault = fail
    fetch(guarded)
    fetch(guarded)
    assert reasons == ["no_time", "failed", "open"]


def test_tier_that_skips_a_table_is_counted_and_circuit_stays_closed(store):
    reasons = []
    guarded = guard(store, failures=1, on_skip=reasons.append)
    inner = store.fetch

    def refuse(parts, ctx):
        ctx.degraded.append("store")

    store.fetch = refuse
    part, degraded = fetch(guarded)
    assert (reasons, degraded, guarded.state) == (["refused"], ["store"], "closed")
    assert_untouched(part)
    store.fetch = inner
    assert fetch(guarded)[1] == []
    assert reasons == ["refused"]


def test_busy_tier_is_skipped_without_opening_circuit():
    store, gate, reasons = Store(blocking=True), threading.Event(), []
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=10.0, failures=1, threads=2, on_skip=reasons.append)
    callers = [threading.Thread(target=fetch, args=(guarded,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    until(lambda: store.calls == 2)
    start = time.monotonic()
    part, degraded = fetch(guarded)
    waited = time.monotonic() - start
    assert (reasons, degraded) == (["full"], ["store"])
    assert_untouched(part)
    assert 1.0 <= waited < 8.0  # a tenth of the deadline, not all of it
    assert guarded.state == "closed"
    gate.set()
    for caller in callers:
        caller.join()
    assert fetch(guarded)[1] == []
    assert store.calls == 3


def test_fetch_waits_for_thread_that_becomes_free_in_time():
    store = Store(blocking=True)
    store.fault = lambda part: time.sleep(0.05)
    guarded = guard(store, threads=1)
    answers = []
    callers = [threading.Thread(target=lambda: answers.append(fetch(guarded))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [degraded for _, degraded in answers] == [[], []]


def test_circuit_opens_when_every_call_hangs():
    """There are fewer threads than failures that open the circuit."""
    store, gate, reasons = Store(blocking=True), threading.Event(), []
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.01, failures=100, threads=2, on_skip=reasons.append)
    for _ in range(100):
        assert guarded.state == "closed"
        fetch(guarded)
    assert guarded.state == "open"
    until(lambda: store.calls == 2)
    assert reasons == sorted(reasons, reverse=True)
    assert set(reasons) == {"late", "full"}
    gate.set()


def test_skipped_fetches_leak_no_work_and_no_threads():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.01, failures=1_000_000, threads=2)
    while store.calls < 2:  # a thread may come too late
        fetch(guarded)
    for _ in range(50):
        fetch(guarded)
    assert store.calls == 2
    assert guarded._workers.waiting <= 2
    gate.set()
    guarded.close()
    assert store.calls == 2


def test_only_one_of_parallel_callers_probes():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = fail
    guarded = guard(store, failures=1)
    fetch(guarded)
    store.fault = hang_until(gate)
    end_retry_pause(guarded)
    probe = threading.Thread(target=fetch, args=(guarded,))
    probe.start()
    until(lambda: store.calls == 2)
    assert all(fetch(guarded)[1] == ["store"] for _ in range(20))
    assert store.calls == 2
    assert guarded.state == "half-open"
    gate.set()
    probe.join()
    assert guarded.state == "closed"


def test_close_waits_for_calls_and_is_idempotent(store):
    guarded = guard(store)
    fetch(guarded)
    guarded.close()
    guarded.close()
    assert store.closed.is_set()


def test_hanging_call_closes_tier_when_it_returns():
    store, gate = Store(blocking=True), threading.Event()
    store.fault = hang_until(gate)
    guarded = guard(store, deadline_s=0.01, failures=1_000)
    while not store.calls:  # its thread may come too late
        fetch(guarded)
    guarded.close()
    assert not store.closed.is_set()
    gate.set()
    assert store.closed.wait(60)


def test_close_waits_for_close_of_tier(store):
    store.close = lambda: (time.sleep(0.2), store.closed.set())
    guarded = guard(store)
    fetch(guarded)
    guarded._deadline_s = 0.05  # which the idle threads shall not use up
    for thread in guarded._workers._threads:
        guarded._workers._queue.put(None)
        thread.join()
    guarded.close()
    assert store.closed.is_set()


def test_tier_is_skipped_after_close():
    guarded = guard(Store(blocking=True))
    guarded.close()
    part, degraded = fetch(guarded)
    assert_untouched(part)
    assert degraded == ["store"]


def test_error_of_close_is_raised(store):
    def refuse():
        raise TierError("store", "can't close")

    store.close = refuse
    with pytest.raises(TierError, match="can't close"):
        guard(store).close()


# -- Metered ---------------------------------------------------------------------------------------


def test_parts_of_fetch_are_observed_together():
    store, seen = Store(blocking=False), []
    other = EmbeddingTable.make("users", 2)
    metered = MeteredTier(store, lambda *what: seen.append(what))
    parts = [blank(), Part.make(other, np.arange(3))]
    metered.fetch(parts, FetchContext())
    [(counts, seconds, skipped)] = seen
    assert not skipped
    assert counts == [(TABLE, 4, 3), (other, 3, 0)]
    assert seconds > 0


def test_tombstones_count_as_hits():
    store, seen = Store(blocking=False), []
    store.delete(TABLE, np.array([5]), np.array([time.time_ns() // 10**6 << 20], np.uint64))
    fetch(MeteredTier(store, lambda *what: seen.append(what)))
    assert seen[0][0] == [(TABLE, 4, 4)]


def test_keys_of_skipped_tier_are_not_counted_as_misses(store):
    seen = []
    store.fault = fail
    metered = MeteredTier(guard(store), lambda *what: seen.append(what))
    fetch(metered)
    [(counts, _, skipped)] = seen
    assert (counts, skipped) == ([(TABLE, 4, 0)], True)
    fetch(metered, FetchContext(degraded=["another"]))
    assert seen[1][2]
    store.fault = lambda _part: None
    fetch(
        MeteredTier(guard(store), lambda *what: seen.append(what)), FetchContext(degraded=["other"])
    )
    assert (seen[2][0], seen[2][2]) == ([(TABLE, 4, 3)], False)


def test_fetch_that_raises_is_not_observed():
    store, seen = Store(blocking=False), []
    store.fault = fail
    with pytest.raises(TierError):
        fetch(MeteredTier(store, lambda *what: seen.append(what)))
    assert seen == []
