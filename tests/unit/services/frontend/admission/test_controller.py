"""The line before a name, and what one client may ask."""

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
from services.frontend.admission.byte_budget import QueueTimeout
from services.frontend.admission.client_limits import ClientLimits
from services.frontend.admission.controller import AdmissionController
from services.frontend.errors import Overloaded, TooManyRequests, http_status, status_of
from services.frontend.inference_request import InferenceRequest, RequestTemplate
from services.frontend.statistics import execution_samples, queued_ns
from tests.support.waiting import until

FAR = 1e12


class Works:
    """An endpoint whose work ends when the test says so. A call without inputs is answered at once."""

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
        """The work that began first ends."""
        statistics_key, future = self.begun.pop(0)
        future.set_result(statistics_key)


def call(statistics_key="", size=1):
    return InferenceRequest(RequestTemplate(), {"x": np.zeros(size, np.uint8)}, statistics_key)


@pytest.fixture
def made():
    """``made(**settings)``: an endpoint, its line, what lines share and the metrics."""

    def make(**settings):
        works, metrics = Works(), Metrics()
        shared = AdmissionController(AdmissionSettings(**{"running": 1, **settings}))
        return works, shared.add_queue(works, 16, metrics), shared, metrics

    return make


def gauge(metrics, name):
    return metrics.numbers()[name]


def test_work_is_bounded_and_the_rest_waits_in_order(made):
    works, line, shared, metrics = made(running=2)
    futures = [line.submit(call(str(i), size=100), FAR) for i in range(5)]
    assert [name for name, _ in works.begun] == ["0", "1"]
    assert gauge(metrics, m.QUEUE_REQUESTS) == {("m",): 3}
    assert gauge(metrics, m.RUNNING_REQUESTS) == {("m",): 2}
    assert gauge(metrics, m.QUEUE_BYTES) == {(): 300}
    for i in range(5):
        works.end()
        assert futures[i].result(0) == str(i)
    assert (line.running, line.queued, shared.byte_budget.held) == (0, 0, 0)
    assert sum(metrics.histogram(m.QUEUE_SECONDS, "m").read()[0]) == 3
    assert [queued_ns(future) > 0 for future in futures] == [False, False, True, True, True]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_waited_in_the_line_tells_also_of_its_batch(made, at_once):
    """Of the batch's execution, and of the wait for both."""
    works, line, *_ = made()
    line.submit(call(), FAR)
    batched: Future[str] = Future()
    batched.queued_ns, batched.execution = 10**15, iter((7,))
    if at_once:
        batched.set_result("batched")
    waits = line.admit(lambda: batched, 1, FAR)
    assert (queued_ns(waits), execution_samples(waits)) == (0, None)
    works.end()
    if not at_once:
        batched.set_result("batched")
    assert waits.result(0) == "batched"
    assert queued_ns(waits) > 10**15
    assert next(execution_samples(waits)) == 7


def test_another_kind_of_request_stands_in_the_same_line(made):
    works, line, *_ = made(queue=1)
    line.submit(call(), FAR)
    other = line.admit(lambda: works.submit(call("other"), FAR), 5, FAR)
    with pytest.raises(Overloaded):
        line.admit(lambda: CompletedFuture("never"), 5, FAR)
    works.end()
    works.end()
    assert other.result(0) == "other"
    assert line.admit(lambda: CompletedFuture("at once"), 5, FAR).result(0) == "at once"


def test_the_settings_may_leave_open_how_many(made):
    works, line, *_ = made(running=None)
    for _ in range(20):
        line.submit(call(), FAR)
    assert len(works.begun) == 16


def test_what_is_answered_at_once_takes_no_place(made):
    works, line, *_ = made()
    for _ in range(3):
        assert line.submit(InferenceRequest(RequestTemplate(), {}), FAR).result(0) == "at once"
    line.submit(call(), FAR)
    later = line.submit(InferenceRequest(RequestTemplate(), {}), FAR)
    assert not later.done()
    works.end()
    assert later.result(0) == "at once"
    assert line.running == 0


def test_a_full_line_refuses(made):
    _, line, *_ = made(queue=2)
    for _ in range(3):
        line.submit(call(), FAR)
    with pytest.raises(Overloaded, match=r"Exceeds maximum queue size \(2 requests") as refused:
        line.submit(call(), FAR)
    assert refused.value.reason == "queue_full"
    assert status_of(refused.value) == (503, "UNAVAILABLE")
    with pytest.raises(Overloaded):
        line.require_capacity()


def test_a_place_is_kept_for_who_is_expected(made):
    works, line, *_ = made(queue=1, max_wait_ms=60_000)
    assert line.reserve(1) is None
    assert line.is_saturated
    assert line.reserve(1) is None  # it would wait
    with pytest.raises(Overloaded, match=r"1 requests to 'm' are queued"):
        line.require_capacity()
    assert "1 requests to 'm' are queued" in str(line.reserve(1))
    first, second = (line.submit(call(statistics_key), FAR, reserved=1) for statistics_key in "12")
    assert (line.running, line.queued) == (1, 1)
    for future in (first, second):
        works.end()
        future.result(0)
    assert not line.is_saturated


def test_who_was_expected_is_not_refused_when_it_comes(made):
    works, line, *_ = made(queue=0)
    assert line.reserve(1) is None
    line.admit(lambda: works.submit(call("other"), FAR), 1, FAR)  # answered where it came
    waits = line.submit(call("expected"), FAR, reserved=1)
    assert line.queued == 1
    works.end()
    works.end()
    assert waits.result(0) == "expected"


def test_the_bytes_of_the_expected_are_held(made):
    _, line, shared, _ = made(running=2, queue_bytes=100 * 2**20)
    mib = [n * 2**20 for n in range(101)]
    assert line.reserve(mib[80]) is None
    assert f"hold {mib[80]} bytes" in str(line.reserve(mib[80]))
    line.submit(call(size=mib[80]), FAR, reserved=mib[80])
    assert shared.byte_budget.held == 0
    line.submit(call(), FAR)
    assert [line.reserve(mib[40]), line.reserve(mib[40])] == [None, None]
    with pytest.raises(Overloaded, match=f"hold {mib[80]} bytes"):  # larger than its message
        line.submit(call(size=mib[90]), FAR, reserved=mib[40])
    line.cancel_reservation(mib[40])
    assert shared.byte_budget.held == 0


def test_an_expected_request_larger_than_all_there_is_may_come_alone(made):
    works, line, shared, _ = made(queue_bytes=2**20)
    assert line.reserve(200) is None
    line.require_bytes(2**21, 200)  # in shared memory
    line.submit(call(size=2**21), FAR, reserved=200)
    assert line.reserve(200) is None
    waits = line.submit(call("large", size=2**21), FAR, reserved=200)
    assert shared.byte_budget.held == 2**21
    works.end()
    works.end()
    assert waits.result(0) == "large"
    assert shared.byte_budget.held == 0


def test_one_that_does_not_come_gives_its_place_back(made):
    _, line, *_ = made(queue=0)
    assert line.reserve(1) is None
    assert line.reserve(1) is not None
    line.cancel_reservation(1)
    assert line.reserve(1) is None


def test_refusals_hold_nothing(made):
    """Neither frames, nor the requests in them."""
    _, line, *_ = made(queue=0)
    line.submit(call(), FAR)
    gc.disable()
    try:
        with pytest.raises(Overloaded) as caught:
            line.require_capacity()
        error = ref(caught.value)
        del caught
        assert error() is None
    finally:
        gc.enable()


def test_no_line_at_all(made):
    works, line, *_ = made(queue=0)
    line.submit(call(), FAR)
    with pytest.raises(Overloaded):
        line.submit(call(), FAR)
    works.end()
    line.submit(call(), FAR)


def test_bytes_are_bounded_over_all_lines(made):
    _, line, shared, metrics = made(queue_bytes=1 << 20)
    other = shared.add_queue(Works(), 1, metrics)
    for each in (line, other):
        each.submit(call(), FAR)
    line.submit(call(size=2 << 20), FAR)  # alone it may be larger
    for each in (line, other):
        with pytest.raises(Overloaded, match=r"hold 2097152 bytes") as refused:
            each.submit(call(), FAR)
        assert refused.value.reason == "queue_bytes"
    with pytest.raises(Overloaded):
        other.require_capacity(1)


def _clock(monkeypatch):
    """``clock[0]``: what the line takes for now; a whole number of seconds, whose sums are exact."""
    clock = [float(int(time.monotonic()))]
    for each in (module, wait_bound):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_who_would_wait_too_long_is_refused_forced(made, monkeypatch):
    """By how long those under way will still take, and those that wait before it."""
    clock = _clock(monkeypatch)
    _, line, *_ = made(running=2, max_wait_ms=30_000)
    line._estimate.work_s = line._estimate.turn_s = 40.0
    line.submit(call(), FAR)
    clock[0] += 5
    line.submit(call(), FAR)
    clock[0] += 1  # the first is over in 34 s
    with pytest.raises(Overloaded, match="would wait longer than 30000 ms") as refused:
        line.submit(call(), FAR)
    assert refused.value.reason == "queue_wait"
    clock[0] += 4  # 30 s
    line.submit(call(), FAR)
    with pytest.raises(Overloaded):  # behind that one: 35 s, when the second is over
        line.require_capacity()
    clock[0] += 5
    line.submit(call(), FAR)
    with pytest.raises(Overloaded):  # the third of the line: the first place again, 25 + 40 s
        line.require_capacity()
    assert line.queued == 2


def test_who_takes_longer_than_others_may_be_over_at_any_time(made, monkeypatch):
    clock = _clock(monkeypatch)
    _, line, *_ = made(max_wait_ms=10_000)
    line._estimate.work_s = 40.0
    line.submit(call(), FAR)
    with pytest.raises(Overloaded):
        line.require_capacity()
    clock[0] += 100
    line.submit(call(), FAR)
    assert line.queued == 1


def test_what_is_over_when_it_begins_is_not_waited_for(made, monkeypatch):
    """Short requests behind a long one go all at once."""
    clock = _clock(monkeypatch)
    works, line, *_ = made(max_wait_ms=10_000)
    line._estimate.work_s = line._estimate.turn_s = 4.0
    for _ in range(30):
        line.submit(call(), FAR)
        line.submit(InferenceRequest(RequestTemplate(), {}), FAR)
        line.submit(InferenceRequest(RequestTemplate(), {}), FAR)
        clock[0] += 4
        works.end()
    line.submit(call(), FAR)
    for _ in range(4):  # 4 s each would be too long
        line.submit(InferenceRequest(RequestTemplate(), {}), FAR)
    assert line.queued == 4


def test_nobody_is_refused_for_a_wait_while_a_place_is_free(made, monkeypatch):
    _clock(monkeypatch)
    _, line, *_ = made(running=2, max_wait_ms=10_000)
    line._estimate.work_s = line._estimate.turn_s = 40.0
    line.submit(call(), FAR)
    line.require_capacity()  # as if the second had ended since somebody found the line busy
    assert [line._estimate.wait_s(ahead) for ahead in range(4)] == [0, 40, 40, 80]
    line.submit(call(), FAR)
    with pytest.raises(Overloaded):
        line.require_capacity()


@pytest.mark.parametrize("at_once", [True, False])
def test_who_asks_again_when_answered_finds_the_place_free(made, monkeypatch, at_once):
    """Work that was shorter than others is known to be over by the time its client hears of it."""
    clock = _clock(monkeypatch)
    works, line, *_ = made(max_wait_ms=10_000)
    line.submit(call(), FAR)
    waits = line.submit(InferenceRequest(RequestTemplate(), {}) if at_once else call(), FAR)
    asked = []
    waits.add_done_callback(lambda _: asked.append(line.submit(call("again"), FAR)))
    line._estimate.work_s = line._estimate.turn_s = 400.0
    clock[0] += 40
    works.end()
    if not at_once:
        clock[0] += 25
        works.end()
    assert [name for name, _ in works.begun] == ["again"]
    assert (line.running, line.queued) == (1, 0)


def test_a_line_learns_how_long_work_takes(made, monkeypatch):
    """One that took long once is not believed to for ever, though all are refused meanwhile."""
    clock = _clock(monkeypatch)
    works, line, *_ = made(max_wait_ms=10_000)
    line._estimate.work_s = 1e3
    for _ in range(60):
        line.submit(call(), FAR)
        clock[0] += 5
        works.end()
    assert 5 < line._estimate.work_s < 10
    line.submit(call(), FAR)
    line.submit(call(), FAR)
    assert line.queued == 1


def test_work_that_ends_while_it_begins_is_counted_out(made):
    works, line, *_ = made(running=2)
    line.submit(call(), FAR)
    line.submit(call(), FAR)
    answers = [line.submit(InferenceRequest(RequestTemplate(), {}), FAR) for _ in range(3)]
    works.end()
    assert [each.result(0) for each in answers] == ["at once"] * 3
    works.end()
    assert (line.running, line._estimate.begun) == (0, [])


def test_long_work_takes_its_place_before_it_is_submitted(made, monkeypatch):
    """Others that come meanwhile, on other threads, wait."""
    monkeypatch.setattr(Works, "is_long", True)
    works, line, *_ = made()
    submit, let_on, submitting = works.submit, threading.Event(), threading.Event()

    def slowly(asked, deadline):
        submitting.set()
        assert let_on.wait(60)
        return submit(asked, deadline)

    works.submit = slowly
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(line.submit, call("first"), FAR)
        assert submitting.wait(60)
        second = line.submit(call("second"), FAR)
        assert (line.running, line.queued) == (1, 1)
        let_on.set()
        answer = first.result(60)
    works.end()
    works.end()
    assert (answer.result(0), second.result(0)) == ("first", "second")
    assert (line.running, line._estimate.begun) == (0, [])


def test_long_work_that_cannot_be_submitted_gives_its_place_back(made, monkeypatch):
    monkeypatch.setattr(Works, "is_long", True)
    works, line, *_ = made()
    submit = works.submit

    def fails(asked, deadline):
        works.submit = submit
        waits.append(line.submit(call("other"), FAR))
        raise BadRequest("no")

    waits: list[Future[str]] = []
    works.submit = fails
    with pytest.raises(BadRequest):
        line.submit(call(), FAR)
    works.end()
    assert waits[0].result(0) == "other"
    assert (line.running, line._estimate.begun) == (0, [])


def test_what_has_waited_too_long_is_refused(made):
    _, line, shared, _ = made(max_wait_ms=20)
    line.submit(call(), FAR)
    waits = [line.submit(call(), FAR) for _ in range(2)]
    for each in waits:
        with pytest.raises(Overloaded, match="has waited for 20 ms") as refused:
            each.result(60)
        assert refused.value.reason == "queue_wait"
    assert (line.queued, shared.byte_budget.held) == (0, 0)


def test_what_was_answered_in_time_is_let_go(made):
    """With its inputs and its result, and without the collector of cycles."""
    works, line, *_ = made(max_wait_ms=60_000)
    line.submit(call(), FAR)
    asked = call()
    waits = line.submit(asked, FAR)
    works.end()
    works.end()
    assert waits.done()
    kept = [ref(asked.inputs["x"]), ref(waits)]
    del asked, waits
    assert [each() for each in kept] == [None, None]


def test_one_that_cannot_be_refused_does_not_keep_the_others(caplog):
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


def test_who_is_due_is_not_missed_for_one_that_is_gone():
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


def test_deadlines_hold_in_the_line(made):
    works, line, *_ = made()
    line.submit(call("first"), FAR)
    late, good = line.submit(call("late"), time.monotonic() - 1), line.submit(call("good"), FAR)
    works.end()
    with pytest.raises(DeadlineExceeded, match="while the request was queued"):
        late.result(0)
    assert [name for name, _ in works.begun] == ["good"]
    works.end()
    assert good.result(0) == "good"


def test_who_gives_up_makes_room(made):
    works, line, shared, _ = made(queue=1)
    line.submit(call(), FAR)
    gone = line.submit(call("gone"), FAR)
    assert gone.cancel()
    assert shared.byte_budget.held == 0
    stays = line.submit(call("stays"), FAR)
    works.end()
    assert [name for name, _ in works.begun] == ["stays"]
    works.end()
    assert stays.result(0) == "stays"


def test_who_gives_up_later_stops_the_work(made):
    works, line, *_ = made()
    line.submit(call(), FAR)
    waits = line.submit(call(), FAR)
    works.end()
    assert waits.cancel()
    assert works.begun[0][1].cancelled()
    with pytest.raises(Unavailable, match="cancelled"):
        waits.result(0)
    assert line.running == 0


def test_a_fault_in_the_line_is_its_own(made):
    works, line, *_ = made()
    line.submit(call(), FAR)
    wrong, good = line.submit(call("wrong"), FAR), line.submit(call("good"), FAR)
    works.end()
    with pytest.raises(BadRequest):
        wrong.result(0)
    works.end()
    assert good.result(0) == "good"


def test_nothing_is_lost_under_concurrency(made):
    works, line, shared, _ = made(running=3, queue=10_000, max_wait_ms=60_000)
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
        return line.submit(call(str(i)), FAR).result(60)

    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(2000))) == [str(i) for i in range(2000)]
    finally:
        over.set()
        finisher.join(60)
    until(lambda: (line.running, line.queued, shared.byte_budget.held) == (0, 0, 0))


def test_names_that_are_gone_are_told_of_no_more(made):
    _, _, shared, metrics = made()
    shared.retain([])
    assert gauge(metrics, m.QUEUE_REQUESTS) == {}


def test_a_client_has_so_many_requests_at_a_time():
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


def test_a_client_has_so_many_requests_a_second(monkeypatch):
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


def test_clients_that_ask_no_more_are_forgotten():
    clients = ClientLimits(ClientSettings(running=1))
    clients.enter("busy")
    for i in range(10_000):
        clients.enter(str(i))
        clients.leave(str(i))
    assert len(clients._clients) <= 4097
    with pytest.raises(TooManyRequests):
        clients.enter("busy")
