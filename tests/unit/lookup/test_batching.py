"""Dynamic batching: queue order, merge keys, limits, deadlines and errors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

from hps.errors import BadRequest, DeadlineExceeded, Unavailable
from hps.lookup.batched_lookup import BatchedLookup, MergingSubmit
from hps.lookup.batching import Batcher, BatchLimits, BatchSize
from hps.lookup.lookup_merge import MergedLookup
from hps.threads import CompletedFuture
from hps.types import JaggedKeys, LookupRequest
from tests.support.waiting import until

LARGE = BatchLimits(rows=100, keys=10_000)


class FakeRequest:
    """A request of ``size`` samples; ``fault`` is raised by every run it is in."""

    def __init__(self, size=1, *, kind="k", fault=None, deadline=None):
        self.rows, self.kind, self.fault, self.deadline = size, kind, fault, deadline


class Works:
    """Runs end when the test ends them, or immediately."""

    def __init__(self, *, at_once=False):
        self.runs, self.futures, self.at_once = [], [], at_once

    def merge_key(self, request):
        return None if request.kind is None else (request.kind, request)

    def size(self, request):
        return BatchSize(request.rows, request.rows, request.rows)

    def deadline(self, request):
        return request.deadline

    def submit_one(self, request):
        return self.began([request], single=True)

    def submit_batch(self, requests):
        return self.began(list(requests), single=False)

    def began(self, requests, *, single):
        self.runs.append(requests)
        faults = [each.fault for each in requests if each.fault]
        if self.at_once:
            if faults:
                raise faults[0]
            return CompletedFuture(requests[0] if single else requests)
        future = Future()
        self.futures.append((future, faults, requests, single))
        return future

    def end(self):
        """The run that began first ends."""
        future, faults, requests, single = self.futures.pop(0)
        if faults:
            future.set_exception(faults[0])
        else:
            future.set_result(requests[0] if single else requests)


def test_request_starts_alone_when_idle():
    works = Works()
    batcher = Batcher(works, LARGE)
    first = batcher.submit(FakeRequest())
    assert len(works.runs) == 1
    assert not first.done()


def test_queued_requests_form_the_next_batch():
    works, seen = Works(), []
    batcher = Batcher(works, LARGE, seen.append)
    submitted = [FakeRequest() for _ in range(4)]
    answers = [batcher.submit(each) for each in submitted]
    assert [len(run) for run in works.runs] == [1]
    works.end()
    assert works.runs[1] == submitted[1:]
    assert seen == [3]
    works.end()
    assert [answer.result(0) for answer in answers] == submitted
    assert batcher.is_idle


def test_batches_keep_limits_and_request_order():
    works = Works()
    batcher = Batcher(works, BatchLimits(rows=5, keys=100))
    sizes = [1, 2, 2, 4, 1, 9, 1]
    answers = [batcher.submit(FakeRequest(size)) for size in sizes]
    while works.futures:
        works.end()
    assert [[each.rows for each in run] for run in works.runs] == [[1], [2, 2], [4, 1], [9], [1]]
    assert [answer.result(0).rows for answer in answers] == sizes


def executions(answers):
    """Samples of the batches of ``answers``, each reported once, in the order of the answers."""
    sizes = (next(answer.execution, None) for answer in answers)
    return [samples for samples in sizes if samples is not None]


def test_each_batch_is_observed_once():
    works = Works()
    batcher = Batcher(works, BatchLimits(rows=7, keys=100))
    alone = batcher.submit(FakeRequest())
    answers = [batcher.submit(FakeRequest(size)) for size in (4, 2, 1, 6)]
    gone = batcher.submit(FakeRequest())
    assert gone.cancel()
    while works.futures:
        works.end()
    assert not hasattr(alone, "execution")
    assert executions(reversed(answers)) == [6, 7]
    assert executions(answers) == []


def test_queue_time_of_a_request_is_reported():
    works = Works()
    batcher = Batcher(works, LARGE)
    batcher.submit(FakeRequest())
    since = time.monotonic_ns()
    first = batcher.submit(FakeRequest())
    time.sleep(0.02)
    second = batcher.submit(FakeRequest())
    works.end()
    ended = time.monotonic_ns()
    time.sleep(0.02)  # of work
    works.end()
    assert 19_000_000 <= first.queued_ns - second.queued_ns <= first.queued_ns <= ended - since


def test_merge_keys_are_not_mixed_and_none_is_starved():
    works = Works()
    batcher = Batcher(works, LARGE)
    for kind in "xabab":
        batcher.submit(FakeRequest(kind=kind))
    works.end()
    works.end()
    assert ["".join(each.kind for each in run) for run in works.runs] == ["x", "aa", "bb"]


def test_request_without_merge_key_runs_alone():
    works = Works()
    batcher = Batcher(works, LARGE)
    batcher.submit(FakeRequest())
    alone = batcher.submit(FakeRequest(kind=None))
    assert len(works.runs) == 2
    works.end()
    works.end()
    assert alone.result(0).kind is None


@pytest.mark.parametrize("at_once", [True, False])
def test_invalid_request_fails_alone(at_once):
    works = Works()
    batcher = Batcher(works, LARGE)
    batcher.submit(FakeRequest())
    submitted = [FakeRequest(), FakeRequest(fault=BadRequest("yours")), FakeRequest()]
    answers = [batcher.submit(each) for each in submitted]
    if at_once:
        works.at_once = True
    works.end()
    while works.futures:
        works.end()
    assert answers[0].result(0) is submitted[0]
    assert answers[2].result(0) is submitted[2]
    assert executions((answers[0], answers[2])) == [1, 1]  # each was tried alone
    with pytest.raises(BadRequest, match="yours"):
        answers[1].result(0)
    assert batcher.is_idle


def test_search_for_the_invalid_request_counts_as_one_batch_in_flight():
    """One run at a time, and few of them; what comes meanwhile waits as for any batch."""
    works = Works()
    batcher = Batcher(works, LARGE)
    batcher.submit(FakeRequest())
    submitted = [FakeRequest() for _ in range(64)]
    submitted[10].fault = BadRequest("yours")
    answers = [batcher.submit(each) for each in submitted]
    works.end()
    later = batcher.submit(FakeRequest())
    while not answers[-1].done():
        assert len(works.futures) == 1
        assert not later.done()
        works.end()
    assert len(works.runs) <= 1 + 13 + 1
    assert [answer.exception(0) for answer in answers if answer.exception(0)] == [
        submitted[10].fault
    ]
    works.end()
    assert later.done()
    assert batcher.is_idle


def test_server_error_fails_the_whole_batch_without_retry():
    works = Works()
    batcher = Batcher(works, LARGE)
    batcher.submit(FakeRequest())
    answers = [batcher.submit(FakeRequest(fault=Unavailable("full"))) for _ in range(3)]
    works.end()
    works.end()
    assert len(works.runs) == 2
    for answer in answers:
        with pytest.raises(Unavailable):
            answer.result(0)


def test_queued_request_can_expire_or_be_cancelled():
    works = Works()
    batcher = Batcher(works, LARGE)
    batcher.submit(FakeRequest())
    late = batcher.submit(FakeRequest(deadline=time.monotonic() - 1))
    gone = batcher.submit(FakeRequest())
    stays = FakeRequest()
    batcher.submit(stays)
    assert gone.cancel()
    works.end()
    assert works.runs[1:] == [[stays]]
    with pytest.raises(DeadlineExceeded, match="while the request was queued"):
        late.result(0)


def test_delay_ends_early_when_a_batch_is_full():
    works = Works(at_once=True)
    long = Batcher(works, BatchLimits(rows=3, keys=100, delay_s=60.0))
    first, second = long.submit(FakeRequest()), long.submit(FakeRequest())
    assert not works.runs
    third = long.submit(FakeRequest())
    assert [len(run) for run in works.runs] == [3]
    assert all(each.done() for each in (first, second, third))
    short = Batcher(works, BatchLimits(rows=3, keys=100, delay_s=0.01))
    wait([short.submit(FakeRequest()), short.submit(FakeRequest())], timeout=60)
    until(lambda: sum(map(len, works.runs)) == 5)


def requests(random, n):
    """Lookups of various forms, keys in memory, in the store and nowhere."""
    made = []
    for _ in range(n):
        batch, by_table = int(random.integers(0, 5)), bool(random.random() < 0.2)
        names = ["user", "item"] if random.random() < 0.7 else ["user"]
        features = {}
        for name in names:
            if not by_table and random.random() < 0.4:
                bags = random.integers(0, 4, batch)
                offsets = np.concatenate([[0], np.cumsum(bags)])
                features[name] = JaggedKeys(random.integers(0, 60, offsets[-1]), batch, offsets)
            else:
                features[name] = JaggedKeys(random.integers(0, 60, 2 * batch), batch)
        made.append(
            LookupRequest(features, want_source=bool(random.random() < 0.3), by_table=by_table)
        )
    return made


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_batched_results_are_bit_identical_to_single_ones(make_world, delay_s):
    world = make_world(threads=4, queued=1000)
    for name in ("user", "item"):
        world.put(world.cache, name, range(20))
        world.put(world.store, name, range(40))
    seen = []
    batched = BatchedLookup(world.engine, BatchLimits(16, 10_000, delay_s), seen.append)
    submitted = requests(np.random.default_rng(5), 400)
    alone = [world.engine.lookup(each) for each in submitted]
    world.store.seconds = 0.002
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(batched.lookup, submitted))
    assert max(seen) > 1
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.defaulted == expected.defaulted
        for report in ("vectors", "sources", "versions"):
            actual, reference = getattr(answer, report), getattr(expected, report)
            assert actual.keys() == reference.keys()
            for name, values in reference.items():
                np.testing.assert_array_equal(actual[name], values, strict=True)


def held(world, batched):
    """A lookup that keeps the batcher busy until the store may answer."""
    world.store.leave.clear()
    future = batched.submit(LookupRequest({"user": JaggedKeys.dense([30])}))
    until(lambda: world.store.calls)
    return future


def test_invalid_offsets_do_not_affect_other_requests(make_world):
    world = make_world()
    world.put(world.store, "user", range(40))
    batched = BatchedLookup(world.engine, LARGE)
    held(world, batched)
    good = JaggedKeys(np.array([1, 2]), 1, np.array([0, 2]))
    wrong = JaggedKeys(np.array([7, 8, 9]), 1, np.array([0, 2]))
    first = batched.submit(LookupRequest({"user": good}))
    with pytest.raises(BadRequest, match="offsets run from 0 to 2"):
        batched.submit(LookupRequest({"user": wrong}))
    second = batched.submit(LookupRequest({"user": good}))
    world.store.leave.set()
    for answer in (first, second):
        rows = world.row(world.tables["user"], [1, 2])
        np.testing.assert_array_equal(answer.result(60).vectors["user"][0], rows.sum(axis=0))


def test_unsigned_keys_are_merged_correctly(make_world):
    world = make_world()
    key = 2**63 + 5
    world.put(world.store, "user", np.array([key], np.uint64).view(np.int64))
    batched = BatchedLookup(world.engine, LARGE)
    held(world, batched)
    submitted = [np.array([key], np.uint64), np.array([3], np.int64), np.array([key], np.uint64)]
    answers = [
        batched.submit(LookupRequest({"user": JaggedKeys(keys, 1)}, by_table=by_table))
        for by_table in (False, True)
        for keys in submitted
    ]
    world.store.leave.set()
    found = [answer.result(60).defaulted for answer in answers]
    assert found == [0, 1, 0, 0, 1, 0]


def test_unknown_feature_raises_immediately(make_world):
    world = make_world()
    batched = BatchedLookup(world.engine, LARGE)
    held(world, batched)
    with pytest.raises(BadRequest, match="no feature 'users'"):
        batched.submit(LookupRequest({"users": JaggedKeys.dense([1])}))
    world.store.leave.set()


def test_prepared_lookups_join_batches(make_world):
    world = make_world()
    world.put(world.cache, "user", range(5))
    world.put(world.store, "user", range(40))
    seen = []
    batched = BatchedLookup(world.engine, LARGE, seen.append)
    submit = batched.prepare(LookupRequest({"user": JaggedKeys.dense([1])}))
    assert submit([np.array([4])], None).done()
    held(world, batched)
    submitted = [np.array([key]) for key in (4, 30, 31)]
    answers = [submit([keys], None) for keys in submitted]
    world.store.leave.set()
    for keys, answer in zip(submitted, answers, strict=True):
        rows = world.row(world.tables["user"], keys)
        np.testing.assert_array_equal(answer.result(60).vectors["user"], rows)
    assert seen == [3]


def test_by_table_requests_count_one_sample_each(make_world):
    world = make_world()
    batched = BatchedLookup(world.engine, BatchLimits(rows=8, keys=100))
    held(world, batched)
    keys = JaggedKeys.dense([1, 2, 3])
    submitted = [LookupRequest({"user": keys, "item": keys}, by_table=True) for _ in range(3)]
    submitted += [LookupRequest({"user": keys, "item": keys}) for _ in range(2)]
    answers = [batched.submit(each) for each in submitted]
    world.store.leave.set()
    for answer in answers:
        answer.result(60)
    assert executions(answers) == [2, 1, 6]


def test_one_timer_serves_many_threads():
    works = Works(at_once=True)
    batcher = Batcher(works, BatchLimits(rows=8, keys=100, delay_s=0.002))
    start = threading.Barrier(8)

    def ask(_):
        start.wait(60)
        return [batcher.submit(FakeRequest()).result(60) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        assert sum(map(len, pool.map(ask, range(8)))) == 160
    assert sum(map(len, works.runs)) == 160


class OthersEnd(MergingSubmit):
    """Batches during which another one without defaults always ends."""

    @property
    def _defaults(self):
        return False

    @_defaults.setter
    def _defaults(self, _):
        pass


def test_defaults_are_counted_despite_a_concurrent_batch_without(make_world):
    engine = make_world().engine

    def merge(requests, want_source, origin):
        return MergedLookup(requests, engine.features, want_source=want_source, origin=origin)

    submitted = [LookupRequest({"user": JaggedKeys.dense([1, 2])}) for _ in range(2)]
    answers = OthersEnd(engine.submit, merge).begin(submitted).result(60)
    assert [answer.defaulted for answer in answers] == [2, 2]
