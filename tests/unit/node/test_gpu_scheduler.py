"""Predictions of a node and of attached processes in common batches, on a GPU and on a twin of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import BadRequest, DeadlineExceeded, ModelError, Unavailable
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.node import model_opening
from hps.observability import metric_names as m
from hps.predict.scheduler.channel_socket import NODE_ENDED, connect
from hps.predict.scheduler.client import SchedulerClient
from hps.predict.scheduler.host import SchedulerHost
from hps.types import JaggedKeys, PredictRequest, Source, version_now
from tests.support.waiting import PATIENT_GUARD, until
from tests.unit.node.test_gpu_caches import (  # noqa: F401 # fixtures
    DENSE,
    FEATURES,
    HELD,
    TABLES,
    network,
    open_node,
    request_of,
    require_network_on_gpu,
    rows,
    same,
    table_of,
)

pytestmark = pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
ROOT = Path(__file__).parents[3]
HOTNESS = {"item": 3, "seen": 2}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A model whose features have fixed numbers of keys per sample, as common batches need."""
    folder = tmp_path_factory.mktemp("models")
    features = [f.model_copy(update={"hotness": HOTNESS.get(f.name, f.hotness)}) for f in FEATURES]
    spec = ModelSpec(name="m", tables=TABLES, features=features, dense=DENSE)
    keys = np.arange(HELD)
    held = {table.name: (keys, rows(keys, table.dim)) for table in TABLES}
    write_version(folder, spec, 1, held, dense=network())
    return folder


@pytest.fixture(params=["twin", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def open_with_gpu(open_node, device, tmp_path):  # noqa: F811 # a fixture
    """Opens a node with a GPU, or its twin; returns it with its GPU cache."""

    def open_it():
        node, _ = open_node(
            gpus=1 if device == "twin" else None,
            gpu={"share": 0.5, "use": "required"},
            cpu={"shared": {"name": "test", "folder": str(tmp_path)}, "share": 1.0},
            server={"runtime": str(tmp_path / "run")},
        )
        require_network_on_gpu(node)
        return node, node.model("m").on_devices[0].cache

    return open_it


@pytest.fixture
def attached(open_node, open_with_gpu, repository, tmp_path):  # noqa: F811 # a fixture
    """A node with a GPU, a process that is attached to it, a node without one, and the cache."""
    runtime = {"runtime": str(tmp_path / "run")}
    shared = {"shared": {"name": "test", "folder": str(tmp_path)}, "share": 1.0}
    node, cache = open_with_gpu()
    config = {
        "models": {"repository": str(repository)},
        "tiers": {
            "cpu_cache": shared,
            "rocksdb": {"path": str(tmp_path / "db0"), "guard": PATIENT_GUARD},
        },
        "server": runtime,
    }
    with hps.attach(config) as process:
        off = {"gpu": {"use": "off"}, "dense": {"provider": "cpu"}}
        yield node, process, open_node(gpus=None, **off)[0], cache


@pytest.mark.parametrize("batch", [1, 3, 40, 700, 5000])
def test_attached_predictions_equal_host_predictions(attached, batch):
    node, process, plain, _ = attached
    asked = request_of(np.arange(200), batch)
    before = counted(node, m.SCHEDULER_SAMPLES, "m", "1")
    same(process.predict("m", *asked), plain.predict("m", *asked))
    assert counted(node, m.SCHEDULER_SAMPLES, "m", "1") - before == batch


def test_concurrent_requests_of_all_sizes_get_their_own_scores(attached):
    node, process, plain, _ = attached
    asked = [request_of(np.arange(200), batch) for batch in (1, 2, 5, 64, 200, 3000)] * 20
    expected = [plain.predict("m", *each) for each in asked[:6]] * 20
    with ThreadPoolExecutor(16) as threads:
        sides = [node, process] * 60
        answers = list(threads.map(lambda i: sides[i].predict("m", *asked[i]), range(120)))
    for answer, right in zip(answers, expected, strict=True):
        same(answer, right)


def test_node_runs_a_prediction_larger_than_a_batch_as_a_whole(attached):
    node, process, plain, _ = attached
    asked = request_of(np.arange(200), 3000)
    for side, batches in ((node, 0), (process, 2)):
        before = counted(node, m.SCHEDULER_BATCHES, "m", "1")
        same(side.predict("m", *asked), plain.predict("m", *asked))
        assert counted(node, m.SCHEDULER_BATCHES, "m", "1") - before == batches


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("batch", [511, 512, 2048])
def test_large_prediction_runs_alone_while_no_other_is_in_flight(
    attached, batch, busy, monkeypatch
):
    node, process, plain, _ = attached
    if busy:
        monkeypatch.setattr(SchedulerClient, "is_busy", True)
    asked = request_of(np.arange(200), batch)
    for side, common in ((node, busy or batch < 512), (process, True)):
        before = counted(node, m.SCHEDULER_BATCHES, "m", "1")
        same(side.predict("m", *asked), plain.predict("m", *asked))
        assert (counted(node, m.SCHEDULER_BATCHES, "m", "1") > before) == common


def test_client_is_busy_until_its_last_request_ended(attached):
    node, *_ = attached
    served = node.model("m")
    features, dense = request_of(np.arange(200), 64)
    request = PredictRequest(served.keys(features), dense)
    client = node.scheduler._client
    assert not client.is_busy
    futures = [served.pipeline.submit(request) for _ in range(50)]
    seen = client.is_busy
    for future in futures:
        future.result()
    assert seen
    until(lambda: not client.is_busy)


@pytest.mark.parametrize("keys", [np.arange(HELD - 100, HELD), np.arange(HELD + 100)])
def test_attached_predictions_with_missing_rows_equal_host_predictions(attached, keys):
    """Some rows are in host memory only, some nowhere."""
    _, process, plain, _ = attached
    for batch in (1, 40):
        asked = request_of(keys, batch)
        same(process.predict("m", *asked), plain.predict("m", *asked))


def test_deleted_rows_are_reported_as_defaults(attached):
    node, process, _, _ = attached
    users = table_of(node, "users")
    node.writer.delete(users, np.array([3]), np.full(1, version_now(), np.uint64)).result()
    features, dense = request_of(np.arange(10, 200), 2)
    features["user"] = np.array([3, 4])
    features["last"] = np.tile(np.array([50, 60]), (2, 1))
    assert process.predict("m", features, dense).defaulted == 1


def test_requests_without_columns_are_answered_by_the_node(attached):
    node, process, plain, cache = attached
    features, dense = request_of(np.arange(200), 3)
    weights = np.array([0.5, 1, 2, 0, 1, 1], np.float32)
    features["item"] = JaggedKeys(np.arange(9), 3, None, np.ones(9, np.float32))
    features["seen"] = JaggedKeys(np.arange(6), 3, None, weights)
    same(process.predict("m", features, dense), plain.predict("m", features, dense))
    there = cache.top_k(table_of(node, "users"), HELD)[0]
    result = process.predict("m", *request_of(there, 2), want_source=True)
    assert set(result.sources["user"]) == {Source.GPU}


def test_top_k_and_outputs_are_applied_where_the_request_came_from(attached):
    _, process, plain, _ = attached
    asked = request_of(np.arange(200), 30)
    same(process.predict("m", *asked, top_k=5), plain.predict("m", *asked, top_k=5))


@pytest.mark.parametrize(("use", "provider"), [("auto", "cpu"), ("off", "auto")])
def test_network_that_the_node_does_not_run_takes_no_gpu_memory_in_attached_processes(
    open_node,  # noqa: F811 # a fixture
    repository,
    tmp_path,
    monkeypatch,
    use,
    provider,
):
    """Each process would have a CUDA context."""
    runtime = {"runtime": str(tmp_path / "run")}
    open_node(gpus=None, gpu={"use": "off"}, server=runtime)
    opened, real = [], model_opening.open_network

    def open_network(network, settings, device):
        opened.append(settings.provider)
        return real(network, settings, device)

    monkeypatch.setattr(model_opening, "open_network", open_network)
    models = {"repository": str(repository)}
    with hps.attach({"models": models, "tiers": {"gpu": {"use": use}}, "server": runtime}):
        assert opened == [provider]


def test_errors_of_the_node_keep_their_kind(attached):
    _, process, _, _ = attached
    features, dense = request_of(np.arange(200), 3)
    features["user"] = np.arange(7)
    with pytest.raises(BadRequest, match="user"):
        process.predict("m", features, dense)


def test_expired_request_fails_with_deadline_exceeded(attached):
    _, process, _, _ = attached
    with pytest.raises(DeadlineExceeded):
        process.predict("m", *request_of(np.arange(200), 1), timeout_s=1e-9)


def test_end_of_the_node_fails_requests_at_once(attached):
    node, process, _, _ = attached
    node.close()
    started = time.monotonic()
    with pytest.raises(Unavailable, match=NODE_ENDED):
        process.predict("m", *request_of(np.arange(200), 1))
    assert time.monotonic() - started < 1


_NODE = """
import json
import sys
import time
import pytest
import hps
from tests.support import twin_device

if sys.argv[2] == "twin":
    twin_device.install(pytest.MonkeyPatch(), 1)
node = hps.open(json.loads(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


def test_kill_of_the_node_fails_requests_in_flight_at_once(device, repository, tmp_path):
    config = {
        "models": {"repository": str(repository), "warm_up_s": 0},
        "tiers": {
            "gpu": {"use": "required", "share": 1.0},
            "cpu_cache": {"shared": {"name": "test", "folder": str(tmp_path)}, "share": 1.0},
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
        },
        "server": {"runtime": str(tmp_path / "run")},
    }
    command = [sys.executable, "-c", _NODE, json.dumps(config), device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as node:
        assert node.stdout.readline()
        with hps.attach(config) as process, ThreadPoolExecutor(4) as threads:
            answered = []

            def ask(_):
                while True:
                    try:
                        answered.append(process.predict("m", *request_of(np.arange(200), 40)))
                    except Unavailable as error:
                        return time.monotonic(), str(error)

            failed = threads.map(ask, range(4))
            until(lambda: len(answered) > 20)
            node.kill()
            killed = time.monotonic()
            for at, reason in failed:
                assert NODE_ENDED in reason
                assert at - killed < 1


def test_ended_client_leaves_no_open_file_behind(attached):
    node, process, _, _ = attached
    before = len(os.listdir("/proc/self/fd"))
    client = connect(node.socket.answers["scheduler"]({})["path"])
    assert len(os.listdir("/proc/self/fd")) > before
    client.close()
    del client
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert process.predict("m", *request_of(np.arange(200), 1)).outputs


_CLIENT = """
import sys
import threading
import numpy as np
from hps.predict.scheduler.channel_socket import connect

client, columns = connect(sys.argv[1]), [np.zeros(int(n), np.uint8) for n in sys.argv[3:]]
while True:
    client.submit(int(sys.argv[2]), 1, columns, (8, 64), None, lambda answer: answer)
    print("sent", flush=True)
"""


def test_killed_process_leaves_nothing_behind(attached):
    """Its requests in flight are dropped, and its channel is closed; others are answered."""
    node, process, plain, _ = attached
    described = node.socket.answers["scheduler"]({})
    number = described["models"]["m/1"]["number"]
    widths = [8, 24, 16, 16, 4]
    before = len(os.listdir("/proc/self/fd"))
    command = [sys.executable, "-c", _CLIENT, described["path"], str(number), *map(str, widths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline()
        asked = request_of(np.arange(200), 3)
        same(process.predict("m", *asked), plain.predict("m", *asked))
        client.kill()
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
    same(process.predict("m", *asked), plain.predict("m", *asked))


def test_counts_of_the_scheduler_are_metrics_and_part_of_the_status(attached, device):
    node, process, _, _ = attached
    process.predict("m", *request_of(np.arange(200), 3))
    process.predict("m", *request_of(np.arange(200), 2), want_source=True)
    with pytest.raises(DeadlineExceeded):
        node.predict("m", *request_of(np.arange(200), 1), timeout_s=1e-9)
    labels = "m", "1"
    numbers = node.metrics.numbers()
    expected = {
        m.SCHEDULER_REQUESTS: 3,
        m.SCHEDULER_SAMPLES: 4,
        m.SCHEDULER_SLOW: 1,
        m.SCHEDULER_EXPIRED: 1,
        m.SCHEDULER_BATCHES: 1,
        m.SCHEDULER_INCOMPLETE: 0,
        m.SCHEDULER_FAILED: 0,
    }
    if device == "gpu":  # a full table may have no place for one of the rows
        expected[m.SCHEDULER_INCOMPLETE] = numbers[m.SCHEDULER_INCOMPLETE][labels]
    assert {name: numbers[name][labels] for name in expected} == expected
    assert 0 < numbers[m.SCHEDULER_DEVICE_SECONDS][labels] < 60
    (gpu,) = [tier for tier in node.status()["tiers"] if tier["name"] == "gpu"]
    counts = gpu["scheduler"]["m/1"]
    assert 0 < counts.pop("device_s") < 60
    assert counts == {
        "requests": 3, "samples": 4, "batches": 1, "slow": 1, "expired": 1, "failed": 0,
        "incomplete": expected[m.SCHEDULER_INCOMPLETE],
    }  # fmt: skip
    node.close()
    assert not node.metrics.numbers()[m.SCHEDULER_REQUESTS]
    assert node.metrics.render()


def test_lanes_of_a_model_without_memory_for_all_of_them_are_freed(
    open_node,  # noqa: F811 # a fixture
    monkeypatch,
    caplog,
):
    add_lane, hosts = SchedulerHost.add_lane, []

    def add_one(host, model, lane):
        hosts.append(host)
        if len(hosts) % 2 == 0:  # of both attempts
            raise ModelError("no memory")
        add_lane(host, model, lane)

    monkeypatch.setattr(SchedulerHost, "add_lane", add_one)
    node, _ = open_node(dense={"lanes": 2})
    assert "predictions copy their vectors through the host" in caplog.text
    assert not hosts[0]._lanes
    assert node.predict("m", *request_of(np.arange(200), 2)).outputs
    assert not node.metrics.numbers()[m.SCHEDULER_REQUESTS]


def test_process_predicts_on_the_gpu_of_the_node_that_took_the_former_ones_place(
    attached, open_with_gpu
):
    node, process, plain, _ = attached
    asked = request_of(np.arange(200), 3)
    node.close()
    with pytest.raises(Unavailable):
        process.predict("m", *asked)
    second, _ = open_with_gpu()

    def predicts():
        try:
            return process.predict("m", *asked)
        except Unavailable:
            return None

    until(predicts)
    before = counted(second, m.SCHEDULER_SAMPLES, "m", "1")
    same(process.predict("m", *asked), plain.predict("m", *asked))
    assert counted(second, m.SCHEDULER_SAMPLES, "m", "1") - before == 3


@pytest.mark.parametrize("keys", [np.arange(200), np.arange(HELD + 100)])
def test_close_of_the_node_answers_every_request_in_flight(attached, keys):
    node, process, _, _ = attached
    answers, stop = [], threading.Event()

    def ask(models, batch):
        asked = request_of(keys, batch)
        while not stop.is_set():
            try:
                answers.append(models.predict("m", *asked))
            except (Unavailable, RuntimeError) as error:  # closed threads
                answers.append(error)
                return

    threads = [
        threading.Thread(target=ask, args=[models, batch])
        for models in (node, process)
        for batch in (1, 40, 3000)
    ]
    for each in threads:
        each.start()
    until(lambda: len(answers) > 30)
    node.close()
    stop.set()
    for each in threads:
        each.join(20)
        assert not each.is_alive()


def test_arrays_with_strides_are_predicted(attached):
    node, process, plain, _ = attached
    features, dense = request_of(np.arange(200), 6)
    strided = {name: np.repeat(a, 2, axis=0)[::2] for name, a in dense.items()}
    keys = {name: np.repeat(a, 2, axis=0)[::2] for name, a in features.items()}
    for models in (node, process):
        same(models.predict("m", keys, strided), plain.predict("m", features, dense))


def test_only_requests_with_unknown_keys_leave_the_common_batches(attached):
    """One request in ten has a key that no store has."""
    node, process, plain, _ = attached
    asked = [request_of(np.arange(200), 2) for _ in range(40)]
    for features, _ in asked[::10]:
        features["user"] = np.array([3, HELD + 7])
    expected = [plain.predict("m", *each) for each in asked]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda each: process.predict("m", *each), asked))
    for i, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        same(answer, right)
        assert answer.defaulted == (i % 10 == 0)
    (counts,) = node.scheduler.status().values()
    assert counts["slow"] == 4


def counted(node, metric, *labels):
    """The sum of the counters of ``metric`` whose labels contain ``labels``."""
    found = node.metrics.numbers()[metric]
    return sum(n for names, n in found.items() if {*labels} <= {*names})


def test_missing_rows_are_counted_by_their_source_and_promoted(attached):
    node, process, _, cache = attached
    users = table_of(node, "users")
    there = cache.top_k(users, HELD)[0]
    features, dense = request_of(there, 4)
    absent = np.setdiff1d(np.arange(HELD), there)[-2:]
    features["user"] = np.concatenate((there[:2], absent))
    process.predict("m", features, dense)
    until(lambda: counted(node, m.LOOKUP_KEYS, "users", "cpu") == 2)
    assert counted(node, m.LOOKUP_KEYS, "users") + counted(process, m.LOOKUP_KEYS, "users") == 4 * 3
    assert counted(node, m.TIER_KEYS, "gpu", "users", "missed") == 2
    assert counted(node, m.TIER_KEYS, "cpu", "users", "found") == 2
    until(lambda: np.isin(absent, cache.top_k(users, HELD)[0]).all())


def test_keys_of_a_request_that_leaves_its_batch_are_counted_once(attached):
    node, process, _, _ = attached
    features, dense = request_of(np.arange(200), 2)
    features["user"] = np.array([3, HELD + 7])
    assert process.predict("m", features, dense).defaulted == 1
    time.sleep(0.1)  # reports come every 20 ms
    keys = sum(np.size(each) for each in features.values())
    assert counted(node, m.LOOKUP_KEYS) + counted(process, m.LOOKUP_KEYS) == keys
