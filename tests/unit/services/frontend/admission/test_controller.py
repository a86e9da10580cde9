"""Admission queues, the byte budget, and limits of one client."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest

from hps.config.admission_settings import AdmissionSettings, ClientSettings
from hps.errors import BadRequest, DeadlineExceeded, Unavailable
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.threads import CompletedFuture
from services.frontend.admission import queue as module
from services.frontend.admission import wait_bound
from services.frontend.admission.client_limits import ClientLimits
from services.frontend.admission.controller import AdmissionController
from services.frontend.admission.queued_request import QueueTimeout
from services.frontend.errors import Overloaded, TooManyRequests, http_status, status_of
from services.frontend.inference_request import InferenceRequest, RequestTemplate
from services.frontend.statistics import execution_samples, queued_ns
from tests.support.waiting import until

FAR = 1e12


class Works:
    """An endpoint whose requests end by `end`. A request without inputs is answered immediately."""

    name, version, raw_input, rules = "m", "1", None, {}
    is_long = False

    def __init__(self):
        self.begun, self.lock = [], threading.Lock()

    def submit(self, call, deadline):
        if call.id == "wrong":
            raise BadRequest("wrong")
        if not call.inputs:
            return CompletedFuture("at once")
        future = Future()
        with self.lock:
            self.begun.append((call.id, future))
        return future

    def outputs(self, call, result):
        return [("echo", result)]

    def end(self):
        """End the request that began first."""
        statistics_key, future = self.begun.pop(0)
        future.set_result(statistics_key)


def call(statistics_key="", size=1):
    return InferenceRequest(RequestTemplate(), {"x": np.zeros(size, np.uint8)}, statistics_key)


@pytest.fixture
def make_queue():
    """``make_queue(**settings)``: an endpoint, its queue, the controller and the metrics."""

    def make(**settings):
        works, metrics = Works(), Metrics()
        shared = AdmissionController(AdmissionSettings(**{"running": 1, **settings}))
        return works, shared.add_queue(works, 16, metrics), shared, metrics

    return make


def gauge(metrics, name):
    return metrics.numbers()[name]


def test_requests_beyond_the_limit_are_queued_in_order(make_queue):
    works, queue, shared, metrics = make_queue(running=2)
    futures = [queue.submit(call(str(i), size=100), FAR) for i in range(5)]
    assert [name for name, _ in works.begun] == ["0", "1"]
    assert gauge(metrics, m.QUEUE_REQUESTS) == {("m",): 3}
    assert gauge(metrics, m.RUNNING_REQUESTS) == {("m",): 2}
    assert gauge(metrics, m.QUEUE_BYTES) == {(): 300}
    for i in range(5):
        works.end()
        assert futures[i].result(0) == str(i)
    assert (queue.running, queue.queued, shared.byte_budget.held) == (0, 0, 0)
    assert sum(metrics.histogram(m.QUEUE_SECONDS, "m").read()[0]) == 3
    assert [queued_ns(future) > 0 for future in futures] == [False, False, True, True, True]


def test_request_starts_if_a_slot_becomes_free_while_it_is_enqueued(make_queue):
    works, queue, *_ = make_queue()
    queue.submit(call("first"), FAR)

    class Array:
        @property
        def nbytes(self):  # is read after the slots were counted
            works.end()
            return 1

    queue.submit(InferenceRequest(RequestTemplate(), {"x": Array()}, "second"), FAR)
    assert [name for name, _ in works.begun] == ["second"]
    assert (queue.running, queue.queued) == (1, 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_queued_request_reports_its_batch_and_both_waits(make_queue, at_once):
    works, queue, *_ = make_queue()
    queue.submit(call(), FAR)
    batched: Future[str] = Future()
    batched.queued_ns, batched.execution = 10**15, iter((7,))
    if at_once:
        batched.set_result("batched")
    waits = queue.admit(lambda: batched, 1, FAR)
    assert (queued_ns(waits), execution_samples(waits)) == (0, None)
    works.end()
    if not at_once:
        batched.set_result("batched")
    assert waits.result(0) == "batched"
    assert queued_ns(waits) > 10**15
    assert next(execution_samples(waits)) == 7


def test_requests_of_another_kind_share_the_queue(make_queue):
    works, queue, *_ = make_queue(queue=1)
    queue.submit(call(), FAR)
    other = queue.admit(lambda: works.submit(call("other"), FAR), 5, FAR)
    with pytest.raises(Overloaded):
        queue.admit(lambda: CompletedFuture("never"), 5, FAR)
    works.end()
    works.end()
    assert other.result(0) == "other"
    assert queue.admit(lambda: CompletedFuture("at once"), 5, FAR).result(0) == "at once"


def test_number_of_running_requests_has_a_default(make_queue):
    works, queue, *_ = make_queue(running=None)
    for _ in range(20):
        queue.submit(call(), FAR)
    assert len(works.begun) == 16


def test_request_answered_immediately_takes_no_slot(make_queue):
    works, queue, *_ = make_queue()
    for _ in range(3):
        assert queue.submit(InferenceRequest(RequestTemplate(), {}), FAR).result(0) == "at once"
    queue.submit(call(), FAR)
    later = queue.submit(InferenceRequest(RequestTemplate(), {}), FAR)
    assert not later.done()
    works.end()
    assert later.result(0) == "at once"
    assert queue.running == 0


def test_queue_rejects_when_full(make_queue):
    _, queue, *_ = make_queue(queue=2)
    for _ in range(3):
        queue.submit(call(), FAR)
    with pytest.raises(Overloaded, match=r"Exceeds maximum queue size \(2 requests") as refused:
        queue.submit(call(), FAR)
    assert refused.value.reason == "queue_full"
    assert status_of(refused.value) == (503, "UNAVAILABLE")
    with pytest.raises(Overloaded):
        queue.require_capacity()


def test_reservation_holds_a_slot(make_queue):
    works, queue, *_ = make_queue(queue=1, max_wait_ms=60_000)
    assert queue.reserve(1) is None
    assert queue.is_saturated
    assert queue.reserve(1) is None  # it would be queued
    with pytest.raises(Overloaded, match=r"1 requests to 'm' are queued"):
        queue.require_capacity()
    assert "1 requests to 'm' are queued" in str(queue.reserve(1))
    first, second = (queue.submit(call(statistics_key), FAR, reserved=1) for statistics_key in "12")
    assert (queue.running, queue.queued) == (1, 1)
    for future in (first, second):
        works.end()
        future.result(0)
    assert not queue.is_saturated


def test_reserved_request_is_queued_although_the_queue_is_full(make_queue):
    works, queue, *_ = make_queue(queue=0)
    assert queue.reserve(1) is None
    queue.admit(lambda: works.submit(call("other"), FAR), 1, FAR)  # it needs no reservation
    waits = queue.submit(call("expected"), FAR, reserved=1)
    assert queue.queued == 1
    works.end()
    works.end()
    assert waits.result(0) == "expected"


def test_reservation_holds_bytes(make_queue):
    _, queue, shared, _ = make_queue(running=2, queue_bytes=100 * 2**20)
    mib = [n * 2**20 for n in range(101)]
    assert queue.reserve(mib[80]) is None
    assert f"hold {mib[80]} bytes" in str(queue.reserve(mib[80]))
    queue.submit(call(size=mib[80]), FAR, reserved=mib[80])
    assert shared.byte_budget.held == 0
    queue.submit(call(), FAR)
    assert [queue.reserve(mib[40]), queue.reserve(mib[40])] == [None, None]
    with pytest.raises(Overloaded, match=f"hold {mib[80]} bytes"):  # larger than its message
        queue.submit(call(size=mib[90]), FAR, reserved=mib[40])
    queue.cancel_reservation(mib[40])
    assert shared.byte_budget.held == 0


def test_reserved_request_larger_than_the_byte_budget_runs_alone(make_queue):
    works, queue, shared, _ = make_queue(queue_bytes=2**20)
    assert queue.reserve(200) is None
    queue.require_bytes(2**21, 200)  # in shared memory
    queue.submit(call(size=2**21), FAR, reserved=200)
    assert queue.reserve(200) is None
    waits = queue.submit(call("large", size=2**21), FAR, reserved=200)
    assert shared.byte_budget.held == 2**21
    works.end()
    works.end()
    assert waits.result(0) == "large"
    assert shared.byte_budget.held == 0


def test_cancelled_reservation_frees_its_slot(make_queue):
    _, queue, *_ = make_queue(queue=0)
    assert queue.reserve(1) is None
    assert queue.reserve(1) is not None
    queue.cancel_reservation(1)
    assert queue.reserve(1) is None


def test_rejection_keeps_no_references(make_queue):
    """It refers to no frames, nor to the requests in them."""
    _, queue, *_ = make_queue(queue=0)
    queue.submit(call(), FAR)
    gc.disable()
    try:
        with pytest.raises(Overloaded) as caught:
            queue.require_capacity()
        error = ref(caught.value)
        del caught
        assert error() is None
    finally:
        gc.enable()


def test_queue_of_length_zero_rejects_while_busy(make_queue):
    works, queue, *_ = make_queue(queue=0)
    queue.submit(call(), FAR)
    with pytest.raises(Overloaded):
        queue.submit(call(), FAR)
    works.end()
    queue.submit(call(), FAR)


def test_byte_budget_is_shared_by_all_queues(make_queue):
    _, queue, shared, metrics = make_queue(queue_bytes=1 << 20)
    other = shared.add_queue(Works(), 1, metrics)
    for each in (queue, other):
        each.submit(call(), FAR)
    queue.submit(call(size=2 << 20), FAR)  # the only one may be larger
    for each in (queue, other):
        with pytest.raises(Overloaded, match=r"hold 2097152 bytes") as refused:
            each.submit(call(), FAR)
        assert refused.value.reason == "queue_bytes"
    with pytest.raises(Overloaded):
        other.require_capacity(1)


def _clock(monkeypatch):
    """``clock[0]``: the queue's current time; a whole number of seconds, so that sums are exact."""
    clock = [float(int(time.monotonic()))]
    for each in (module, wait_bound):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_request_with_too_long_expected_wait_is_rejected(make_queue, monkeypatch):
    """The expected wait follows from the remaining time of running requests, and the queued ones."""
    clock = _clock(monkeypatch)
    _, queue, *_ = make_queue(running=2, max_wait_ms=30_000)
    queue.estimate.work_s = queue.estimate.turn_s = 40.0
    queue.submit(call(), FAR)
    clock[0] += 5
    queue.submit(call(), FAR)
    clock[0] += 1  # the first ends in 34 s
    with pytest.raises(Overloaded, match="would wait longer than 30000 ms") as refused:
        queue.submit(call(), FAR)
    assert refused.value.reason == "queue_wait"
    clock[0] += 4  # 30 s
    queue.submit(call(), FAR)
    with pytest.raises(Overloaded):  # behind that one: 35 s, when the second ends
        queue.require_capacity()
    clock[0] += 5
    queue.submit(call(), FAR)
    with pytest.raises(Overloaded):  # the third in the queue: the first slot again, 25 + 40 s
        queue.require_capacity()
    assert queue.queued == 2


def test_rejection_for_the_wait_names_the_limit_that_the_request_exceeds(make_queue, monkeypatch):
    clock = _clock(monkeypatch)
    _, queue, *_ = make_queue(max_wait_ms=30_000)
    queue.estimate.work_s = queue.estimate.turn_s = 2.0
    queue.submit(call(), FAR)
    wait = "a request to 'm' would wait"
    with pytest.raises(
        Overloaded, match=f"{wait} for more than half of the time until its deadline;"
    ):
        queue.submit(call(), clock[0] + 3)
    queue.estimate.work_s = queue.estimate.turn_s = 40.0
    with pytest.raises(
        Overloaded, match=rf"{wait} longer than 30000 ms \(server.admission.max_wait"
    ):
        queue.submit(call(), FAR)
    queue.estimate.work_s = queue.estimate.turn_s = 0.5
    gone = queue.submit(call(), FAR)
    clock[0] += 10
    gone.cancel()  # an overload: requests may wait for 0.5 + 10 * 0.5 s
    queue.estimate.work_s = queue.estimate.turn_s = 20.0
    shortened = r"\(server.admission.max_wait_ms, shortened during an overload\); retry"
    with pytest.raises(Overloaded, match=rf"{wait} longer than 5500 ms {shortened}"):
        queue.submit(call(), FAR)


def test_request_running_longer_than_average_counts_as_about_to_end(make_queue, monkeypatch):
    clock = _clock(monkeypatch)
    _, queue, *_ = make_queue(max_wait_ms=10_000)
    queue.estimate.work_s = 40.0
    queue.submit(call(), FAR)
    with pytest.raises(Overloaded):
        queue.require_capacity()
    clock[0] += 100
    queue.submit(call(), FAR)
    assert queue.queued == 1


def test_requests_that_take_no_time_add_no_expected_wait(make_queue, monkeypatch):
    """Short requests behind a long one all start together."""
    clock = _clock(monkeypatch)
    works, queue, *_ = make_queue(max_wait_ms=10_000)
    queue.estimate.work_s = queue.estimate.turn_s = 4.0
    for _ in range(30):
        queue.submit(call(), FAR)
        queue.submit(InferenceRequest(RequestTemplate(), {}), FAR)
        queue.submit(InferenceRequest(RequestTemplate(), {}), FAR)
        clock[0] += 4
        works.end()
    queue.submit(call(), FAR)
    for _ in range(4):  # 4 s each would be too long
        queue.submit(InferenceRequest(RequestTemplate(), {}), FAR)
    assert queue.queued == 4


def test_no_request_is_rejected_for_its_wait_while_a_slot_is_free(make_queue, monkeypatch):
    _clock(monkeypatch)
    _, queue, *_ = make_queue(running=2, max_wait_ms=10_000)
    queue.estimate.work_s = queue.estimate.turn_s = 40.0
    queue.submit(call(), FAR)
    queue.require_capacity()  # as if the second had ended since the caller found the queue saturated
    assert [queue.estimate.wait_s(ahead) for ahead in range(4)] == [0, 40, 40, 80]
    queue.submit(call(), FAR)
    with pytest.raises(Overloaded):
        queue.require_capacity()


@pytest.mark.parametrize("at_once", [True, False])
def test_slot_is_free_before_the_client_gets_its_answer(make_queue, monkeypatch, at_once):
    """A client may send its next request immediately."""
    clock = _clock(monkeypatch)
    works, queue, *_ = make_queue(max_wait_ms=10_000)
    queue.submit(call(), FAR)
    waits = queue.submit(InferenceRequest(RequestTemplate(), {}) if at_once else call(), FAR)
    repeated = []
    waits.add_done_callback(lambda _: repeated.append(queue.submit(call("again"), FAR)))
    queue.estimate.work_s = queue.estimate.turn_s = 400.0
    clock[0] += 40
    works.end()
    if not at_once:
        clock[0] += 25
        works.end()
    assert [name for name, _ in works.begun] == ["again"]
    assert (queue.running, queue.queued) == (1, 0)


def test_estimate_follows_the_recent_durations(make_queue, monkeypatch):
    """One long request must not cause rejections forever."""
    clock = _clock(monkeypatch)
    works, queue, *_ = make_queue(max_wait_ms=10_000)
    queue.estimate.work_s = 1e3
    for _ in range(60):
        queue.submit(call(), FAR)
        clock[0] += 5
        works.end()
    assert 5 < queue.estimate.work_s < 10
    queue.submit(call(), FAR)
    queue.submit(call(), FAR)
    assert queue.queued == 1


def test_request_that_ends_as_it_begins_releases_its_slot(make_queue):
    works, queue, *_ = make_queue(running=2)
    queue.submit(call(), FAR)
    queue.submit(call(), FAR)
    answers = [queue.submit(InferenceRequest(RequestTemplate(), {}), FAR) for _ in range(3)]
    works.end()
    assert [each.result(0) for each in answers] == ["at once"] * 3
    works.end()
    assert (queue.running, queue.estimate.begun) == (0, [])


def test_long_request_takes_its_slot_before_it_is_submitted(make_queue, monkeypatch):
    """Requests that arrive meanwhile on other threads are queued."""
    monkeypatch.setattr(Works, "is_long", True)
    works, queue, *_ = make_queue()
    submit, let_on, submitting = works.submit, threading.Event(), threading.Event()

    def slowly(request, deadline):
        submitting.set()
        assert let_on.wait(60)
        return submit(request, deadline)

    works.submit = slowly
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(queue.submit, call("first"), FAR)
        assert submitting.wait(60)
        second = queue.submit(call("second"), FAR)
        assert (queue.running, queue.queued) == (1, 1)
        let_on.set()
        answer = first.result(60)
    works.end()
    works.end()
    assert (answer.result(0), second.result(0)) == ("first", "second")
    assert (queue.running, queue.estimate.begun) == (0, [])


def test_long_request_that_fails_to_start_releases_its_slot(make_queue, monkeypatch):
    monkeypatch.setattr(Works, "is_long", True)
    works, queue, *_ = make_queue()
    submit = works.submit

    def fails(request, deadline):
        works.submit = submit
        waits.append(queue.submit(call("other"), FAR))
        raise BadRequest("no")

    waits: list[Future[str]] = []
    works.submit = fails
    with pytest.raises(BadRequest):
        queue.submit(call(), FAR)
    works.end()
    assert waits[0].result(0) == "other"
    assert (queue.running, queue.estimate.begun) == (0, [])


def test_queued_request_is_rejected_after_maximum_wait(make_queue):
    _, queue, shared, _ = make_queue(max_wait_ms=20)
    queue.submit(call(), FAR)
    waits = [queue.submit(call(), FAR) for _ in range(2)]
    for each in waits:
        with pytest.raises(Overloaded, match="has waited for 20 ms") as refused:
            each.result(60)
        assert refused.value.reason == "queue_wait"
    assert (queue.queued, shared.byte_budget.held) == (0, 0)


def test_answered_request_is_freed_without_garbage_collection(make_queue):
    """Its inputs and its result are freed, too."""
    works, queue, *_ = make_queue(max_wait_ms=60_000)
    queue.submit(call(), FAR)
    request = call()
    waits = queue.submit(request, FAR)
    works.end()
    works.end()
    assert waits.done()
    kept = [ref(request.inputs["x"]), ref(waits)]
    del request, waits
    assert [each() for each in kept] == [None, None]


def test_item_that_fails_to_expire_does_not_stop_the_others(caplog):
    class Waits:
        has_ended, expired = False, False

        def __init__(self):
            self.since = time.monotonic()

        def expire(self):
            self.expired = True
            if self is broken:
                raise RuntimeError("broken")

    broken, good = Waits(), Waits()
    expiry = QueueTimeout(0.01)
    expiry.add(broken)
    expiry.add(good)
    until(lambda: good.expired)
    assert broken.expired
    assert "failed to reject a request" in caplog.text


class Stays:
    has_ended, expired = False, False

    def __init__(self, since):
        self.since = since

    def expire(self):
        self.expired = True


def test_freed_item_does_not_delay_the_next_due_one():
    expiry = QueueTimeout(1000.0)
    expiry._sweeper = SimpleNamespace(start=lambda: None)
    assert expiry._next_s() == 1000.0
    now = time.monotonic()
    gone, late, early = Stays(now - 900), Stays(now - 2000), Stays(now)
    for each in (gone, late, early):
        expiry.add(each)
    assert 50 < expiry._next_s() < 150
    del each, gone
    assert expiry._next_s() < 1
    assert expiry._expire_due()
    assert (late.expired, early.expired) == (True, False)
    assert 900 < expiry._next_s() <= 1000
    early.has_ended = True
    assert not expiry._expire_due()


def test_queued_request_fails_after_its_deadline(make_queue):
    works, queue, *_ = make_queue()
    queue.submit(call("first"), FAR)
    late, good = queue.submit(call("late"), time.monotonic() - 1), queue.submit(call("good"), FAR)
    works.end()
    with pytest.raises(DeadlineExceeded, match="while the request was queued"):
        late.result(0)
    assert [name for name, _ in works.begun] == ["good"]
    works.end()
    assert good.result(0) == "good"


def test_cancelled_request_leaves_the_queue(make_queue):
    works, queue, shared, _ = make_queue(queue=1)
    queue.submit(call(), FAR)
    gone = queue.submit(call("gone"), FAR)
    assert gone.cancel()
    assert shared.byte_budget.held == 0
    stays = queue.submit(call("stays"), FAR)
    works.end()
    assert [name for name, _ in works.begun] == ["stays"]
    works.end()
    assert stays.result(0) == "stays"


def test_cancelling_a_started_request_cancels_its_work(make_queue):
    works, queue, *_ = make_queue()
    queue.submit(call(), FAR)
    waits = queue.submit(call(), FAR)
    works.end()
    assert waits.cancel()
    assert works.begun[0][1].cancelled()
    with pytest.raises(Unavailable, match="cancelled"):
        waits.result(0)
    assert queue.running == 0


def test_failing_request_does_not_affect_the_next_one(make_queue):
    works, queue, *_ = make_queue()
    queue.submit(call(), FAR)
    wrong, good = queue.submit(call("wrong"), FAR), queue.submit(call("good"), FAR)
    works.end()
    with pytest.raises(BadRequest):
        wrong.result(0)
    works.end()
    assert good.result(0) == "good"


def test_all_requests_are_answered_under_concurrency(make_queue):
    works, queue, shared, _ = make_queue(running=3, queue=10_000, max_wait_ms=60_000)
    over = threading.Event()

    def finish():
        while not over.is_set() or works.begun:
            with works.lock:
                ended, works.begun = works.begun, []
            for name, future in ended:
                future.set_result(name)

    finisher = threading.Thread(target=finish)
    finisher.start()

    def ask(i):
        return queue.submit(call(str(i)), FAR).result(60)

    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(2000))) == [str(i) for i in range(2000)]
    finally:
        over.set()
        finisher.join(60)
    until(lambda: (queue.running, queue.queued, shared.byte_budget.held) == (0, 0, 0))


def test_metrics_omit_names_that_are_not_served(make_queue):
    _, _, shared, metrics = make_queue()
    shared.retain([])
    assert gauge(metrics, m.QUEUE_REQUESTS) == {}


def test_client_limit_bounds_requests_in_flight():
    clients = ClientLimits(ClientSettings(running=2))
    clients.enter("a")
    clients.enter("a")
    with pytest.raises(TooManyRequests, match="2 requests of yours are in flight") as refused:
        clients.enter("a")
    assert refused.value.reason == "client_running"
    assert http_status(refused.value) == 429
    assert status_of(refused.value).grpc == "RESOURCE_EXHAUSTED"
    clients.enter("b")
    clients.leave("a")
    clients.enter("a")


def test_client_limit_bounds_requests_per_second(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clients = ClientLimits(ClientSettings(per_second=10, burst=3))
    for _ in range(3):
        clients.enter("a")
    with pytest.raises(TooManyRequests, match="10 per second") as refused:
        clients.enter("a")
    assert refused.value.reason == "client_rate"
    now[0] += 0.1
    clients.enter("a")
    with pytest.raises(TooManyRequests):
        clients.enter("a")
    now[0] += 60
    for _ in range(3):
        clients.enter("a")


def test_idle_clients_are_dropped():
    clients = ClientLimits(ClientSettings(running=1))
    clients.enter("busy")
    for i in range(10_000):
        clients.enter(str(i))
        clients.leave(str(i))
    assert len(clients._clients) <= 4097
    with pytest.raises(TooManyRequests):
        clients.enter("busy")
