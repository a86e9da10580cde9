"""The native batch scheduler with lanes that are Python functions."""

import threading
import time

import numpy as np
import pytest

from tests.support.waiting import until

pytest.importorskip("hps.native._core")
from tests.support.native_scheduler import (
    DONE,
    EXPIRED,
    FACTOR,
    FAILED,
    REPLIED,
    UNAVAILABLE,
    Channel,
    opened_scheduler,
)


@pytest.fixture
def scheduler():
    with opened_scheduler() as scheduler:
        yield scheduler


def triple(keys):
    return [FACTOR * key for key in keys]


class Gate:
    """Holds a lane's run, and with it the scheduler's thread, until it is opened."""

    def __init__(self):
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self):
        self.entered.set()
        return self._opened.wait(10)

    def open(self):
        self._opened.set()


# -- forming batches -----------------------------------------------------------------------------------


def test_waiting_requests_form_one_batch(scheduler):
    model, log = scheduler.model((1, 8))
    channels = [Channel(scheduler) for _ in range(3)]
    for i, channel in enumerate(channels):
        channel.submit(model, [10 * i, 10 * i + 1])
    scheduler.start()
    for i, channel in enumerate(channels):
        (answer,) = channel.receive()
        assert answer.status == DONE
        assert answer.values == triple([10 * i, 10 * i + 1])
        assert answer.direct == 2
        assert 0 < answer.launched_ns <= answer.ended_ns <= time.monotonic_ns()
    assert len(log) == 1
    assert sorted(log[0][:6]) == [0, 1, 10, 11, 20, 21]
    counts = {"requests": 3, "samples": 6, "batches": 1}
    others = dict.fromkeys(("expired", "failed", "incomplete", "slow"), 0)
    assert scheduler.counts(model) == counts | others


def test_requests_that_arrive_while_a_batch_runs_form_the_next_one(scheduler):
    gate = Gate()
    model, log = scheduler.model((1, 8), before=gate)
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, [1])
    assert gate.entered.wait(10)
    for key in (2, 3, 4):
        channel.submit(model, [key], ticket=key)
    gate.open()
    assert [each.ticket for each in channel.receive(4)] == [1, 2, 3, 4]
    assert log == [[1], [2, 3, 4, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize(("samples", "batch"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_batch_runs_in_the_smallest_size_class_padded_with_its_first_sample(
    scheduler, samples, batch
):
    model, log = scheduler.model((1, 4, 16))
    channel = Channel(scheduler)
    scheduler.start()
    keys = list(range(7, 7 + samples))
    assert channel.predict(model, keys).values == triple(keys)
    assert log == [keys + [7] * (batch - samples)]


def test_large_request_runs_in_pieces_and_delays_a_small_one_by_one_batch(scheduler):
    model, log = scheduler.model((1, 4))
    channel = Channel(scheduler)
    large = list(range(100, 118))
    channel.submit(model, large, ticket=1)
    channel.submit(model, [5], ticket=2)
    scheduler.start()
    answers = channel.receive(2)
    assert [each.ticket for each in answers] == [2, 1]
    assert answers[0].values == [5 * FACTOR]
    assert answers[1].values == triple(large)
    assert answers[1].direct == 18
    assert log[0] == large[:4]
    assert log[1] == [5, *large[4:7]]


def test_pieces_of_two_large_requests_take_turns(scheduler):
    model, log = scheduler.model((4,))
    channel = Channel(scheduler)
    channel.submit(model, range(12), ticket=1)
    channel.submit(model, range(100, 112), ticket=2)
    scheduler.start()
    assert {a.ticket: a.values[0] for a in channel.receive(2)} == {1: 0, 2: 300}
    assert [keys[0] for keys in log] == [0, 100, 4, 104, 8, 108]


def test_free_lanes_share_the_pieces_of_a_request(scheduler):
    model, _ = scheduler.model((4,), lanes=3)
    scheduler.set_missing(1)  # a lane stays busy until its batch is completed
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, range(12))
    batches = [scheduler.take() for _ in range(3)]
    assert len({id(batch.lane) for batch in batches}) == 3
    for batch in reversed(batches):
        batch.finish()
    assert channel.receive()[0].values == triple(range(12))


def test_models_take_turns_and_begin_alternately(scheduler):
    log = []
    first, _ = scheduler.model((1,), log=log)
    second, _ = scheduler.model((1,), log=log)
    channel = Channel(scheduler)
    for i in range(20):
        channel.submit(first, [1], ticket=i)
    for i in range(20, 40):
        channel.submit(second, [2], ticket=i)
    scheduler.start()
    assert len(channel.receive(40)) == 40
    order = [keys[0] for keys in log]
    pairs = list(zip(order[::2], order[1::2], strict=True))
    assert set(pairs) == {(1, 2), (2, 1)}


# -- deadlines -----------------------------------------------------------------------------------------


def test_expired_request_does_not_run(scheduler):
    model, log = scheduler.model()
    channel = Channel(scheduler)
    channel.submit(model, [1], ticket=1, deadline_s=-0.001)
    channel.submit(model, [2], ticket=2, deadline_s=60)
    scheduler.start()
    assert {a.ticket: a.status for a in channel.receive(2)} == {1: EXPIRED, 2: DONE}
    assert log == [[2]]
    assert scheduler.counts(model)["expired"] == 1


def test_large_request_expires_between_its_pieces(scheduler):
    model, log = scheduler.model((4,), before=lambda: not time.sleep(0.1))
    channel = Channel(scheduler)
    scheduler.start()
    assert channel.predict(model, range(400), deadline_s=0.05).status == EXPIRED
    assert len(log) == 1
    assert scheduler.counts(model)["expired"] == 1
    assert channel.predict(model, [3]).values == [9]


# -- missing rows --------------------------------------------------------------------------------------


def test_batch_with_missing_rows_is_filled_by_a_thread(scheduler):
    model, _ = scheduler.model((1, 4))
    scheduler.set_missing(2)
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, [1, 2, 3])
    batch = scheduler.take()
    assert (batch.size_class, batch.samples) == (1, 3)
    assert not channel.client.receive(20)
    batch.lane.outputs[1][:] = [7, 8, 9, 0]
    batch.finish()
    (answer,) = channel.receive()
    assert (answer.status, answer.values, answer.direct) == (DONE, [7, 8, 9], 0)
    counts = scheduler.counts(model)
    assert (counts["batches"], counts["incomplete"], counts["slow"]) == (1, 1, 0)


def test_batches_that_miss_rows_often_are_filled_at_once(scheduler):
    model, log = scheduler.model((1, 4))
    scheduler.set_missing(1)
    channel = Channel(scheduler)
    scheduler.start()

    def ran(key, size=1):
        channel.submit(model, [key] * size)
        if batch := scheduler.take(0.05):
            batch.finish()
        channel.receive()
        return log[-1:] == [[key] * size]

    assert [key for key in range(1, 10) if ran(key)] == [1, 2, 3]
    assert ran(30, 4)  # another size class
    scheduler.set_missing(0)
    assert not ran(10)
    until(lambda: ran(11), 10)
    assert ran(12)


def test_missing_rows_are_reported_with_the_requests_that_they_answered(scheduler):
    """Keys of requests that take the slow path are counted there."""
    model, _ = scheduler.model((8,))
    scheduler.set_missing(1, [2])
    channel = Channel(scheduler)
    for keys in ([1, 2], [3], [4, 5]):
        channel.submit(model, keys)
    scheduler.start()
    scheduler.take().finish()
    channel.receive(2)
    report = scheduler.native.take_report(5_000)
    assert (report["model"], report["samples"], report["answered"]) == (model, 5, 4)
    counts = {name: report[name].tolist() for name in ("missed", "found", "filled")}
    assert counts == {"missed": [2], "found": [1], "filled": [1]}
    assert (report["features"].tolist(), report["keys"].tolist()) == ([0], [0])
    times = [report[name] for name in ("fetch_s", "gather_s", "request_s")]
    assert [len(each) for each in times] == [1, 1, 2]
    assert all(0 <= each.min() <= each.max() < 10 for each in times)
    assert scheduler.native.take_report(10) is None


def test_pieces_of_a_slow_request_are_not_reported_as_answered(scheduler):
    model, _ = scheduler.model((4,))
    scheduler.set_missing(1)
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, range(8))
    first = scheduler.take()
    scheduler.set_missing(1, [0])
    first.finish()
    scheduler.take().finish()
    assert scheduler.native.take_slow(5_000)
    reports = []
    while report := scheduler.native.take_report(50):
        reports.append(report)
    assert sum(report["samples"] for report in reports) == 8
    assert sum(report["answered"] for report in reports) == 0


def test_fill_that_fails_is_the_error_of_its_requests(scheduler):
    model, _ = scheduler.model((4,))
    scheduler.set_missing(1)
    for lane in scheduler.lanes.values():
        lane.filling = lambda *_batch: False
    channel = Channel(scheduler)
    scheduler.start()
    answer = channel.predict(model, [1])
    assert answer.status == FAILED
    assert "a step of the batch failed" in answer.text
    assert scheduler.counts(model)["failed"] == 1


def test_other_lanes_go_on_while_one_is_filled(scheduler):
    model, _ = scheduler.model((4,), lanes=2)
    channel = Channel(scheduler)
    scheduler.lanes[0].missing[0] = scheduler.lanes[1].missing[0] = 1
    scheduler.start()
    channel.submit(model, [1], ticket=1)
    batch = scheduler.take()
    scheduler.set_missing(0)
    assert channel.predict(model, [2], ticket=2).values == [6]
    batch.finish()
    assert channel.receive()[0].ticket == 1


def test_requests_of_a_batch_without_rows_take_the_slow_path(scheduler):
    model, _ = scheduler.model((1, 4))
    scheduler.set_missing(1, [0, 1, 2])
    channel = Channel(scheduler)
    channel.submit(model, [1], ticket=1)
    channel.submit(model, [2, 3], ticket=2)
    scheduler.start()
    scheduler.take().finish()
    for keys in ([1], [2, 3]):
        number, of, batch, deadline_ns, inputs, outputs = scheduler.native.take_slow(5_000)
        assert (of, batch, deadline_ns) == (model, len(keys), 0)
        assert inputs.view(np.int64).tolist() == keys
        outputs[:2] = np.frombuffer(b"ok", np.uint8)
        scheduler.native.answer_slow(number, REPLIED, 2)
    for answer in channel.receive(2):
        assert (answer.status, answer.text) == (REPLIED, "ok")
    assert scheduler.counts(model)["slow"] == 2


def test_large_request_with_an_incomplete_piece_takes_the_slow_path_once(scheduler):
    model, log = scheduler.model((4,))
    scheduler.set_missing(1, [2])
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, range(40))
    scheduler.take().finish()
    number, _, batch, _, inputs, _ = scheduler.native.take_slow(5_000)
    assert (batch, len(inputs)) == (40, 320)
    scheduler.native.answer_slow(number, REPLIED, 0)
    assert [each.status for each in channel.receive()] == [REPLIED]
    assert scheduler.native.take_slow(50) is None
    assert log == [[0, 1, 2, 3]]


# -- slow requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_lanes", [True, False])
def test_encoded_requests_and_models_without_lanes_take_the_slow_path(scheduler, has_lanes):
    model, log = scheduler.model(lanes=int(has_lanes))
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, [4], batch=0 if has_lanes else 1, deadline_s=60, space=100)
    number, of, batch, deadline_ns, inputs, outputs = scheduler.native.take_slow(5_000)
    assert (of, batch, len(inputs)) == (model, 0 if has_lanes else 1, 8)
    assert 0 < deadline_ns - time.monotonic_ns() < 60e9
    assert len(outputs) == 100
    scheduler.native.answer_slow(number, FAILED, 10_000)  # more than there is space for
    scheduler.native.answer_slow(number, REPLIED, 1)  # it was answered
    (answer,) = channel.receive()
    assert (answer.status, len(answer.data)) == (FAILED, 100)
    assert log == []
    assert scheduler.counts(model)["slow"] == 1


# -- errors --------------------------------------------------------------------------------------------


def test_failed_step_fails_all_requests_of_its_batch_only(scheduler):
    good = [False, True]
    model, _ = scheduler.model((4,), before=lambda: good.pop(0))
    channel = Channel(scheduler)
    for ticket in (1, 2, 3):
        channel.submit(model, [ticket], ticket=ticket)
    scheduler.start()
    answers = channel.receive(3)
    assert [each.ticket for each in answers] == [1, 2, 3]
    assert {each.status for each in answers} == {FAILED}
    assert "a step of the batch failed" in answers[0].text
    assert channel.predict(model, [4]).values == [12]
    assert scheduler.counts(model)["failed"] == 1


def test_step_that_raises_fails_its_batch(scheduler):
    model, _ = scheduler.model(before=lambda: 1 / 0)
    channel = Channel(scheduler)
    scheduler.start()
    assert [channel.predict(model, [1]).status for _ in range(2)] == [FAILED, FAILED]


def test_large_request_fails_once_with_the_reason_of_a_failed_piece(scheduler):
    """Another of its pieces is still in flight when one fails."""
    good = [True, False]
    model, log = scheduler.model((4,), lanes=2, before=lambda: good.pop(0))
    scheduler.lanes[0].missing[0] = 1
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, range(40))
    batch = scheduler.take()
    until(lambda: scheduler.counts(model)["failed"] == 1)
    assert not channel.client.receive(20)
    batch.finish()
    (answer,) = channel.receive()
    assert answer.status == FAILED
    assert "a step of the batch failed" in answer.text
    assert len(log) == 2


@pytest.mark.parametrize("options", [{"batch": 2}, {"space": 0, "width": 0}])
def test_request_without_the_models_layout_fails(scheduler, options):
    model, log = scheduler.model()
    channel = Channel(scheduler)
    scheduler.start()
    answer = channel.predict(model, [1, 2, 3], **options)
    assert (answer.status, log) == (FAILED, [])
    if len(answer.data):
        assert answer.text == "the request does not have the model's layout"


def test_request_for_an_unknown_model_is_unavailable(scheduler):
    scheduler.model()
    channel = Channel(scheduler)
    scheduler.start()
    assert channel.predict(99, [1]).status == UNAVAILABLE


# -- closing -------------------------------------------------------------------------------------------


def test_removal_of_a_model_waits_for_its_batch_and_ends_what_waits(scheduler):
    model, _ = scheduler.model((4,))
    other, _ = scheduler.model((4,))
    scheduler.lanes[0].missing[0] = 1
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, range(6), ticket=1)
    batch = scheduler.take()
    channel.submit(model, [9], ticket=2)
    until(lambda: scheduler.counts(model)["requests"] == 2)
    removals = [threading.Thread(target=scheduler.native.remove_model, args=[model]) for _ in "ab"]
    for each in removals:
        each.start()
    (waiting,) = channel.receive()
    assert (waiting.ticket, waiting.status) == (2, UNAVAILABLE)
    channel.submit(model, [9], ticket=3)
    assert [(a.ticket, a.status) for a in channel.receive()] == [(3, UNAVAILABLE)]
    for each in removals:
        each.join(0.05)
        assert each.is_alive()
    batch.finish()
    for each in removals:
        each.join(10)
        assert not each.is_alive()
    assert [(a.ticket, a.status) for a in channel.receive()] == [(1, UNAVAILABLE)]
    assert set(scheduler.counts(model).values()) == {0}
    assert channel.predict(model, [1]).status == UNAVAILABLE
    assert channel.predict(other, [1]).status == DONE
    scheduler.native.remove_model(model)  # without effect


def test_removed_model_drops_its_lanes_functions(scheduler):
    dropped = threading.Event()

    class Held:
        def __call__(self):
            return True

        def __del__(self):
            dropped.set()

    model, _ = scheduler.model(before=Held())
    scheduler.start()
    assert Channel(scheduler).predict(model, [1]).status == DONE
    scheduler.lanes.clear()
    assert not dropped.is_set()
    scheduler.native.remove_model(model)
    assert dropped.wait(5)


def test_stop_ends_waiting_incomplete_and_slow_requests(scheduler):
    model, _ = scheduler.model((4,))
    scheduler.set_missing(1)
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, range(6), ticket=1)
    batch = scheduler.take()
    channel.submit(model, [9], ticket=2)
    channel.submit(model, [9], ticket=3, batch=0)
    number, *_ = scheduler.native.take_slow(5_000)
    scheduler.native.stop()
    assert not channel.client.receive(20)  # the device still writes the batch
    batch.finish()
    scheduler.stop()
    assert {a.ticket: a.status for a in channel.receive(3)} == dict.fromkeys((1, 2, 3), UNAVAILABLE)
    started = time.monotonic()
    assert scheduler.native.take_slow(5_000) is None
    scheduler.native.take_report(5_000)
    assert scheduler.native.take_report(5_000) is None
    scheduler.native.answer_slow(number, REPLIED, 1)
    scheduler.native.remove_model(model)
    assert time.monotonic() - started < 2


def test_stop_ends_waiters_before_the_thread_ran(scheduler):
    scheduler.native.stop()
    started = time.monotonic()
    assert scheduler.native.take_slow(5_000) is None
    assert scheduler.native.take_report(5_000) is None
    scheduler.native.fill_batches()
    assert time.monotonic() - started < 2
    scheduler.start()
    scheduler.stop()


def test_requests_of_a_removed_channel_are_dropped(scheduler):
    gate = Gate()
    model, log = scheduler.model((2,), before=gate)
    gone, other = Channel(scheduler), Channel(scheduler)
    scheduler.start()
    gone.submit(model, range(100))
    assert gate.entered.wait(10)
    scheduler.native.remove_channel(gone.number)
    other.submit(model, [7])
    gate.open()
    assert other.receive()[0].values == [21]
    assert not gone.client.receive(20)
    assert len(log) <= 3
    assert scheduler.counts(model)["expired"] == 0


def test_slow_request_of_a_removed_channel_stays_readable_until_answered(scheduler):
    model, _ = scheduler.model(lanes=0)
    gone = Channel(scheduler)
    scheduler.start()
    gone.submit(model, [5])
    number, _, _, _, inputs, outputs = scheduler.native.take_slow(5_000)
    scheduler.native.remove_channel(gone.number)
    del gone
    assert inputs.view(np.int64).tolist() == [5]
    outputs[:] = 1
    scheduler.native.answer_slow(number, REPLIED, 4)
    assert scheduler.counts(model)["slow"] == 1


# -- waking and counting -------------------------------------------------------------------------------


def test_sleeping_scheduler_is_woken_by_each_request(scheduler):
    """A lost wake-up would last until the thread's next look, a second later."""
    model, _ = scheduler.model((1,))
    channel = Channel(scheduler)
    scheduler.start()
    slowest = 0.0
    for pause in np.random.default_rng(1).uniform(0, 200e-6, 2_000):
        end = time.perf_counter() + pause
        while time.perf_counter() < end:
            pass
        started = time.perf_counter()
        assert channel.predict(model, [1]).status == DONE
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.7


def test_idle_scheduler_uses_no_cpu_time(scheduler):
    model, _ = scheduler.model()
    channel = Channel(scheduler)
    scheduler.start()
    channel.predict(model, [1])
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_counts_are_read_while_a_batch_runs(scheduler):
    gate = Gate()
    model, _ = scheduler.model((1, 4), before=gate)
    channel = Channel(scheduler)
    scheduler.start()
    channel.submit(model, [1, 2])
    assert gate.entered.wait(10)
    started = time.monotonic()
    assert scheduler.counts(model)["batches"] == 1
    assert time.monotonic() - started < 1
    time.sleep(0.02)
    gate.open()
    channel.receive()
    assert 0.02e9 <= scheduler.native.counts(model)["device_ns"] < 10e9


def test_only_requests_with_unresolved_samples_take_the_slow_path(scheduler):
    model, _ = scheduler.model((8,))
    scheduler.set_missing(1, [2])
    channel = Channel(scheduler)
    for keys in ([1, 2], [3], [4, 5]):
        channel.submit(model, keys)
    scheduler.start()
    batch = scheduler.take()
    assert batch.samples == 5
    batch.finish()
    number, _, batch, *_ = scheduler.native.take_slow(10_000)
    assert batch == 1
    scheduler.native.answer_slow(number, REPLIED, 0)
    assert sorted(answer.status for answer in channel.receive(3)) == [DONE, DONE, REPLIED]
