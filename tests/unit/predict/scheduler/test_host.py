"""The scheduler's host and its clients: slow requests, failures, missing rows, closing."""

import os
import threading
import time
import weakref
from concurrent.futures import Future

import numpy as np
import pytest

from hps.errors import BadRequest, DeadlineExceeded, DenseModelError, HpsError, Unavailable
from hps.lookup.base import Feature
from hps.types import EmbeddingTable, JaggedKeys, PredictRequest, PredictResult
from tests.support.waiting import until

pytest.importorskip("hps.native._core")
from hps.predict.scheduler import host as host_module
from hps.predict.scheduler.client import Status
from hps.predict.scheduler.columns import ModelColumns, TensorColumn
from hps.predict.scheduler.host import SchedulerHost
from hps.predict.scheduler.replies import decode_reply, encode_request
from tests.support import native_scheduler

COLUMNS = ModelColumns(
    [Feature("key", EmbeddingTable.make("t", 4), hotness=1)],
    [],
    [TensorColumn("score", "<i8", ())],
    100,
)
REPLY_BYTES = 4096


class Lane(native_scheduler.Lane):
    """A lane of `COLUMNS`, as the host takes it."""

    context = stream = 0

    def __init__(self, **options):
        super().__init__((1, 4), [], **options)


@pytest.fixture
def host():
    host = SchedulerHost()
    yield host
    host.close()


@pytest.fixture
def client(host):
    client = host.connect()
    yield client
    client.close()


def answer_at_once(request):
    future = Future()
    keys = request.features["key"].keys
    future.set_result(PredictResult({"score": keys * 7}, {}))
    return future


def send(client, model, keys, *, deadline=None, finish=lambda answer: answer):
    n = len(keys)
    columns = [np.asarray(keys, np.int64)]
    return client.submit(model, n, columns, (8 * n, 8 * n + REPLY_BYTES), deadline, finish)


def send_encoded(client, model, data, *, space=REPLY_BYTES):
    columns = [np.frombuffer(data, np.uint8)]
    return client.submit(model, 0, columns, (0, space), None, lambda answer: answer)


def scores(answer):
    return answer.data.view(np.int64).tolist()


def reply_of(future):
    answer = future.result(10)
    assert answer.status == Status.REPLIED
    return decode_reply(answer.data.tobytes())


# -- lanes ---------------------------------------------------------------------------------------------


def test_lane_answers_with_the_outputs_and_times(host, client):
    model = host.add_model(COLUMNS, answer_at_once)
    host.add_lane(model, Lane())
    answer = send(client, model, [1, 2]).result(10)
    assert (answer.status, scores(answer), answer.direct) == (Status.DONE, [3, 6], 2)
    assert 0 < answer.launched_ns <= answer.ended_ns
    assert host.counts(model)["requests"] == 1


def test_batch_with_missing_rows_is_filled_and_reported(host, client):
    reports = []
    model, lane = host.add_model(COLUMNS, answer_at_once, reports.append), Lane()
    lane.missing[0] = 1
    host.add_lane(model, lane)
    answer = send(client, model, [1, 2]).result(10)
    assert (scores(answer), answer.direct) == ([3, 6], 0)
    assert host.counts(model)["slow"] == 0
    # A report may come between the batch and its requests.
    until(lambda: sum(report["answered"] for report in reports) == 2)
    assert {report["model"] for report in reports} == {model}


def test_removed_model_is_not_held_by_threads_that_wait(host, client):
    """Else its version would never be retired, when its requests were the last."""

    class Call:
        def __init__(self, call):
            self.call = call

        def __call__(self, argument):
            return self.call(argument)

    reports = []
    answer, report = Call(answer_at_once), Call(reports.append)
    held = weakref.ref(answer), weakref.ref(report)
    model, lane = host.add_model(COLUMNS, answer, report), Lane()
    lane.missing[0] = 1
    host.add_lane(model, lane)
    send(client, model, [1, 2]).result(10)
    lane.unresolved = [0]
    send(client, model, [1, 2]).result(10)
    until(lambda: reports)
    host.remove_model(model)
    del answer, report
    until(lambda: [each() for each in held] == [None, None], 10)


def test_batch_whose_rows_are_nowhere_is_answered_by_the_model(host, client):
    model, lane = host.add_model(COLUMNS, answer_at_once), Lane()
    lane.missing[0], lane.unresolved = 1, [0]
    host.add_lane(model, lane)
    assert reply_of(send(client, model, [1, 2])).outputs["score"].tolist() == [7, 14]


def test_report_that_fails_is_logged(host, client, caplog):
    model, lane = host.add_model(COLUMNS, answer_at_once, lambda _report: 1 / 0), Lane()
    lane.missing[0] = 1
    host.add_lane(model, lane)
    send(client, model, [1]).result(10)
    until(lambda: "batches with missing rows were not counted" in caplog.text)


def test_failure_on_the_device_is_the_error_of_each_request(host, client):
    model = host.add_model(COLUMNS, answer_at_once)
    host.add_lane(model, Lane(before=lambda: False))
    with pytest.raises(DenseModelError, match="failed on the GPU: a step of the batch failed"):
        send(client, model, [1]).result(10)


def test_expired_request_fails_with_deadline_exceeded(host, client):
    model = host.add_model(COLUMNS, answer_at_once)
    host.add_lane(model, Lane())
    with pytest.raises(DeadlineExceeded):
        send(client, model, [1], deadline=time.monotonic() - 1).result(10)


# -- slow requests -------------------------------------------------------------------------------------


def test_encoded_request_is_answered_by_the_model_with_its_deadline(host, client):
    asked = []

    def answer(request):
        asked.append(request)
        return answer_at_once(request)

    model = host.add_model(COLUMNS, answer)
    data = encode_request(PredictRequest({"key": JaggedKeys(np.array([5]), 1)}, {}))
    deadline = time.monotonic() + 60
    future = client.submit(
        model, 0, [np.frombuffer(data, np.uint8)], (0, REPLY_BYTES), deadline, lambda a: a
    )
    assert reply_of(future).outputs["score"].tolist() == [35]
    assert asked[0].deadline == pytest.approx(deadline, abs=1e-3)
    send(client, model, [4]).result(10)
    assert asked[1].deadline is None
    assert asked[1].features["key"].keys.tolist() == [4]


def refuse(_request):
    raise BadRequest("not today")


def fail_later(_request):
    future = Future()
    threading.Timer(0.01, future.set_exception, [BadRequest("not today")]).start()
    return future


@pytest.mark.parametrize("answer", [refuse, fail_later])
def test_error_of_the_model_is_the_reply(host, client, answer):
    model = host.add_model(COLUMNS, answer)
    with pytest.raises(BadRequest, match="not today"):
        reply_of(send(client, model, [1]))


@pytest.mark.parametrize("data", [b"no pickle", b""])
def test_request_that_cannot_be_decoded_is_an_error_of_its_own(host, client, data):
    model = host.add_model(COLUMNS, answer_at_once)
    with pytest.raises(HpsError):
        reply_of(send_encoded(client, model, data))
    assert reply_of(send(client, model, [1])).outputs["score"].tolist() == [7]


def test_reply_without_space_is_a_failure(host, client):
    model = host.add_model(COLUMNS, answer_at_once)
    data = encode_request(PredictRequest({"key": JaggedKeys(np.arange(500), 500)}, {}))
    with pytest.raises(DenseModelError, match="larger than the request's space"):
        send_encoded(client, model, data, space=100).result(10)


def test_removed_model_is_unavailable_and_gives_its_lanes_back(host, client):
    model, lane = host.add_model(COLUMNS, answer_at_once), Lane()
    host.add_lane(model, lane)
    send(client, model, [1]).result(10)
    host.remove_model(model)
    assert not host._lanes
    with pytest.raises(Unavailable, match="being closed"):
        send(client, model, [1]).result(10)
    assert set(host.counts(model).values()) == {0}


# -- clients -------------------------------------------------------------------------------------------


def test_error_of_finish_is_the_requests(host, client):
    model = host.add_model(COLUMNS, answer_at_once)
    host.add_lane(model, Lane())
    with pytest.raises(ZeroDivisionError):
        send(client, model, [1], finish=lambda _answer: 1 / 0).result(10)
    assert scores(send(client, model, [1]).result(10)) == [3]


def test_cancelled_request_frees_its_slot(host, client):
    model, lane = host.add_model(COLUMNS, answer_at_once), Lane(before=lambda: not time.sleep(0.05))
    host.add_lane(model, lane)
    futures = [send(client, model, [1]) for _ in range(20)]
    assert futures[-1].cancel()
    assert [scores(each.result(10)) for each in futures[:-1]] == [[3]] * 19
    until(lambda: not client._waiting)


def test_too_many_requests_in_flight_are_unavailable(host, client):
    pending = []

    def answer(request):
        pending.append((request, Future()))
        return pending[-1][1]

    model = host.add_model(COLUMNS, answer)
    futures = [send(client, model, [1]) for _ in range(1024)]
    with pytest.raises(Unavailable, match="too many predictions are in flight to the GPU"):
        send(client, model, [1])
    until(lambda: len(pending) == len(futures))
    for request, future in pending:
        future.set_result(answer_at_once(request).result())
    for each in futures:
        reply_of(each)
    send(client, model, [1])


def test_failed_client_fails_requests_in_flight_and_later_ones(host):
    client = host.connect()
    model = host.add_model(COLUMNS, lambda _request: Future())
    future = send(client, model, [1])
    client.fail("gone")
    client.fail("again")
    for refused in (future.result, lambda _timeout_s: send(client, model, [1])):
        with pytest.raises(Unavailable, match="gone"):
            refused(10)
    assert client.has_failed
    client.close()


def test_closed_host_ends_requests_and_refuses_channels(host):
    client = host.connect()
    model = host.add_model(COLUMNS, lambda _request: Future())
    future = send(client, model, [1])
    until(lambda: host.counts(model)["slow"])
    host.close()
    host.close()
    with pytest.raises(Unavailable, match="stopping"):
        future.result(10)
    with pytest.raises(Unavailable):
        host.open_channel()
    assert host.counts(model) == {}
    host.close_channel(1)
    host.remove_model(model)
    host.hold_back(0)
    client.close()


def test_answer_after_the_hosts_end_is_dropped(host):
    client, late = host.connect(), Future()
    model = host.add_model(COLUMNS, lambda _request: late)
    future = send(client, model, [1])
    until(lambda: host.counts(model)["slow"])
    host.close()
    late.set_result(PredictResult({"score": np.arange(1)}, {}))
    with pytest.raises(Unavailable):
        future.result(10)
    client.close()


def test_host_and_clients_leave_no_open_file():
    before = len(os.listdir("/proc/self/fd"))
    host = SchedulerHost()
    clients = [host.connect() for _ in range(3)]
    number, files = host.open_channel()
    files.close()
    host.close_channel(number)
    for each in clients:
        each.close()
    host.close()
    del host, clients, each
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, 10)


def test_writers_that_cannot_wait_for_the_lanes_fail(host, monkeypatch):
    class Native:
        def hold_back(self, stream):
            return 700

    with monkeypatch.context() as patched:
        patched.setattr(host, "_native", Native())
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            host.hold_back(1)


def test_statuses_are_those_of_the_native_core():
    header = host_module.__file__.replace(
        "predict/scheduler/host.py", "native/include/hps/request_channel.hpp"
    )
    with open(header, encoding="utf-8") as file:
        text = file.read()
    for status in Status:
        assert f"k{status.name.capitalize()} = {status.value}," in text
