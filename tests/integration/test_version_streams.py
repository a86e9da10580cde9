"""Update streams that feed several versions of a model, by a real Kafka."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec, TableSpec
from hps.errors import NotFound, Unavailable
from hps.models.version_writer import write_version
from hps.observability import metric_names as m
from hps.tiers.rocksdb import RocksDbTier
from hps.updates.codec import encode_hps, hps_topic
from hps.updates.topics import native_topic
from tests.support.kafka_brokers import SEES_NEW_TOPICS_SOON, shared_broker, unique
from tests.support.kafka_updates import native, sending
from tests.support.waiting import PATIENT_GUARD, until

KEYS = np.arange(100)


@pytest.fixture
def model():
    return unique("m")


@pytest.fixture
def publish(tmp_path, model):
    """Write a version whose rows have its number as value. They are older than updates sent later."""

    def publish(version: int, dim: int = 2, tables=("items",), **options) -> None:
        spec = ModelSpec(
            name=model, tables=[TableSpec(name=name, dim=dim, default=-1.0) for name in tables]
        )
        rows = np.full((100, dim), float(version), np.float32)
        write_version(
            tmp_path / "models", spec, version, dict.fromkeys(tables, (KEYS, rows)), **options
        )

    publish(1)
    time.sleep(0.01)
    return publish


@pytest.fixture
def settings(tmp_path, publish, model):
    return {
        "models": {
            "repository": str(tmp_path / "models"),
            "catch_up_s": 30.0,
            "serve": {model: {"version": 1}},
        },
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"enabled": True},
        },
        "updates": {
            "kafka": {
                "brokers": shared_broker().address,
                "group": "here",
                "options": SEES_NEW_TOPICS_SOON,
            }
        },
    }


def value(node: hps.Node, model: str, key: int, version=None, table="items") -> float:
    found = node.lookup(model, {table: np.array([key])}, version=version)
    return float(found.vectors[table][0, 0])


_SEQUENCE = iter(range(1, 1 << 19))


def send(
    model: str, key: int, number: float, dim: int = 2, table: str = "items", **attributes: int
) -> None:
    made_ms = int(time.time() * 1000)
    with sending(shared_broker()) as producer:
        row = native(model, key, number, next(_SEQUENCE), table, dim, made_ms, **attributes)
        producer.produce(native_topic(model), row)


def groups(node: hps.Node) -> list[str]:
    return [each["group"] for each in node.streams.status()]


def test_stream_feeds_all_served_versions_and_the_one_kept_for_a_rollback(settings, publish, model):
    publish(2)
    publish(3)
    with hps.open(settings) as node:
        send(model, 1, 11.0)
        until(lambda: value(node, model, 1) == 11.0)
        node.load(model, 2, labels=["canary"], switch=False)
        assert value(node, model, 1, "canary") == 11.0, "it was replayed before it was served"
        node.load(model, 3)
        send(model, 2, 22.0)
        for version in (1, 2, 3):
            until(lambda version=version: value(node, model, 2, version) == 22.0)
            assert value(node, model, 3, version) == version
        until(lambda: groups(node) == ["hps.node.here"])
        send(model, 3, 33.0)
        until(lambda: value(node, model, 3) == 33.0)
        assert node.rollback(model) == 1
        assert [value(node, model, key) for key in (1, 2, 3, 4)] == [11.0, 22.0, 33.0, 1.0]
        node.label(model, "canary", None)
        node.unload(model, 2)
        send(model, 4, 44.0)
        until(lambda: value(node, model, 4) == 44.0 == value(node, model, 4, 3))
        assert not any(each["problem"] for each in node.streams.status())
    # All of them are as far after a restart.
    with hps.open(settings) as node:
        assert value(node, model, 4) == 44.0
        send(model, 5, 55.0)
        until(lambda: value(node, model, 5) == 55.0)


def test_served_version_gets_updates_while_another_one_catches_up(
    settings, publish, model, monkeypatch
):
    gate, apply = threading.Event(), RocksDbTier.apply

    def slow(self, table, changes, positions):
        assert table.version == 1 or not len(changes.keys) or gate.wait(60)
        apply(self, table, changes, positions)

    monkeypatch.setattr(RocksDbTier, "apply", slow)
    publish(2)
    with hps.open(settings) as node:
        send(model, 1, 11.0)
        until(lambda: value(node, model, 1) == 11.0)
        loading = threading.Thread(target=node.load, args=(model, 2))
        loading.start()
        until(lambda: groups(node) == ["hps.node.here", "hps.node.here+2"])
        for number in (12.0, 13.0):
            send(model, 1, number)
            until(lambda number=number: value(node, model, 1) == number)
        ages = node.metrics.numbers()[m.UPDATE_AGE]
        assert list(ages) == [(model, "items")], "of the served version alone"
        assert node.models[model].version == 1
        gate.set()
        loading.join(60)
        assert node.models[model].version == 2
        until(lambda: value(node, model, 1) == 13.0)  # those of the last second may follow


def test_rows_of_another_shape_go_to_the_versions_that_have_it(settings, publish, model):
    with hps.open(settings) as node:
        publish(2, dim=4, tables=("items", "users"), replace_spec=True)
        node.load(model, 2)
        send(model, 1, 11.0)
        send(model, 1, 12.0, dim=4)
        send(model, 1, 13.0, dim=4, table="users")  # version 1 has no such table
        with sending(shared_broker()) as producer:
            for dim, number in ((2, 21.0), (4, 22.0)):
                (row,) = encode_hps(np.array([2]), np.full((1, dim), number, np.float32))
                producer.produce(hps_topic(model, "items"), row)
        for key, old, new in ((1, 11.0, 12.0), (2, 21.0, 22.0)):
            until(lambda key=key, old=old: value(node, model, key, 1) == old)
            until(lambda key=key, new=new: value(node, model, key, 2) == new)
        until(lambda: value(node, model, 1, table="users") == 13.0)
        counted = node.metrics.numbers()
        assert counted[m.UPDATE_ROWS][model, "items", "other_shape"] >= 2
        assert not sum(counted[m.UPDATE_DEAD].values())
        send(model, 1, 12.0, dim=3)
        until(lambda: node.metrics.numbers()[m.UPDATE_DEAD][("row_size",)] == 1)


def test_switch_waits_for_the_remaining_lag(settings, publish, model, monkeypatch):
    settings["models"]["catch_up_s"] = 1.0
    publish(2)
    accepts, apply = threading.Event(), RocksDbTier.apply

    def stuck(self, table, changes, positions):
        if table.version == 2 and len(changes.keys) and not accepts.is_set():
            raise Unavailable("not now")
        apply(self, table, changes, positions)

    monkeypatch.setattr(RocksDbTier, "apply", stuck)
    with hps.open(settings) as node:
        send(model, 1, 11.0)
        for number in range(3):
            send(model, 2, number)
        time.sleep(1.2)  # none of them arrived just now
        limit = r"within 1 s \(models.catch_up_s\): hps.node.here\+2 has 4 messages"
        with pytest.raises(Unavailable, match=limit):
            node.load(model, 2)
        assert node.models[model].version == 1
        until(lambda: groups(node) == ["hps.node.here"])
        accepts.set()
        assert node.load(model, 2) == 2
        assert value(node, model, 2) == 2.0


def test_lag_that_is_allowed_does_not_delay_a_switch(settings, publish, model):
    settings["updates"]["max_lag_at_switch"] = 4
    settings["models"]["catch_up_s"] = 5.0
    publish(2)
    with hps.open(settings) as node:
        for number in range(4):
            send(model, 1, number)
        until(lambda: value(node, model, 1) == 3.0)
        time.sleep(1.2)
        apply = RocksDbTier.apply

        def stuck(self, table, changes, positions):
            if table.version == 2 and len(changes.keys):
                raise Unavailable("not now")
            apply(self, table, changes, positions)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RocksDbTier, "apply", stuck)
            assert node.load(model, 2) == 2
            assert value(node, model, 1) == 2.0
        until(lambda: value(node, model, 1) == 3.0)


def test_direct_writes_go_to_all_served_versions_or_to_one(settings, publish, model):
    publish(2)
    with hps.open(settings) as node:
        node.load(model, 2, labels=["canary"], switch=False)
        node.write(model, "items", [1], [[11.0, 11.0]])
        assert [value(node, model, 1, version) for version in (1, 2)] == [11.0, 11.0]
        node.write(model, "items", [2], [[22.0, 22.0]], version="canary")
        node.write(model, "items", deleted=[3], version=1)
        assert [value(node, model, key) for key in (2, 3)] == [1.0, -1.0]
        assert [value(node, model, key, 2) for key in (2, 3)] == [22.0, 2.0]
        with pytest.raises(NotFound, match="version 9 is not found"):
            node.write(model, "items", [1], [[1.0, 1.0]], version=9)
        node.load(model, 2)
        node.write(model, "items", [4], [[44.0, 44.0]])
        node.rollback(model)
        assert value(node, model, 4) == 44.0


# -- networks --------------------------------------------------------------------------------------


def held(node: hps.Node) -> float:
    return sum(node.metrics.numbers().get(m.UPDATE_HELD, {}).values())


def test_rows_of_a_newer_network_wait_until_it_is_live(settings, publish, model):
    settings["updates"]["hold_for_dense"] = True
    publish(2)
    with hps.open(settings) as node:
        send(model, 1, 11.0, dense_version=1)
        until(lambda: value(node, model, 1) == 11.0)
        send(model, 2, 22.0, dense_version=2)
        send(model, 3, 13.0, dense_version=1)  # behind it in its partition
        until(lambda: held(node) == 2)
        assert [value(node, model, key) for key in (2, 3)] == [1.0, 1.0]
        (stream,) = node.streams.status()
        network = {"topic": native_topic(model), "partition": 0, "offset": 1, "network": 2}
        assert (stream["held"], stream["problem"]) == ([network], None)
        node.load(model, 2, switch=False)
        assert [value(node, model, key, 2) for key in (1, 2, 3)] == [11.0, 22.0, 13.0]
        assert value(node, model, 2) == 1.0, "version 1 is the current one still"
        node.switch(model, 2)
        until(lambda: [value(node, model, key, 1) for key in (2, 3)] == [22.0, 13.0])
        until(lambda: held(node) == 0)
        until(lambda: groups(node) == ["hps.node.here"])


def test_rows_stop_waiting_after_the_longest_time(settings, publish, model):
    settings["updates"] |= {"hold_for_dense": True, "hold_at_most_s": 1.0}
    with hps.open(settings) as node:
        send(model, 2, 22.0, dense_version=2)
        until(lambda: held(node) == 1)
        until(lambda: value(node, model, 2) == 22.0)
        expired = node.metrics.numbers()[m.UPDATE_HOLD_EXPIRED]
        assert expired == {("hps.node.here", native_topic(model)): 1}
        send(model, 3, 33.0, dense_version=2)
        until(lambda: value(node, model, 3) == 33.0)


_HELD = """
import json, sys, time, hps
node = hps.open(json.loads(sys.argv[1]))
while not node.streams.status()[0]["held"]:
    time.sleep(0.05)
print("held", flush=True)
time.sleep(600)
"""


def test_waiting_rows_survive_kill_9(settings, publish, model):
    settings["updates"]["hold_for_dense"] = True
    publish(2)
    send(model, 1, 11.0, dense_version=1)
    send(model, 2, 22.0, dense_version=2)
    send(model, 3, 13.0)
    given = [sys.executable, "-c", _HELD, json.dumps(settings)]
    for _ in range(2):
        with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == "held\n"
            finally:
                process.kill()
    with hps.open(settings) as node:
        until(lambda: held(node) == 2)
        assert [value(node, model, key) for key in (1, 2, 3)] == [11.0, 1.0, 1.0]
        node.load(model, 2)
        assert [value(node, model, key) for key in (1, 2, 3)] == [11.0, 22.0, 13.0]


def test_skew_between_rows_and_networks_is_measured(settings, publish, model):
    publish(2, metadata={"step": 900})
    with hps.open(settings) as node:
        assert not node.metrics.numbers()[m.MODEL_DENSE_SKEW]
        send(model, 1, 11.0, dense_version=3, step=1000)
        until(lambda: value(node, model, 1) == 11.0)
        until(lambda: node.metrics.numbers().get(m.MODEL_DENSE_SKEW) == {(model, "1"): 2})
        assert not node.metrics.numbers().get(m.MODEL_STEP_SKEW), "version 1 states no step"
        node.load(model, 2)
        until(
            lambda: node.metrics.numbers()[m.MODEL_DENSE_SKEW] == {(model, "1"): 2, (model, "2"): 1}
        )
        assert node.metrics.numbers()[m.MODEL_STEP_SKEW] == {(model, "2"): 100}
