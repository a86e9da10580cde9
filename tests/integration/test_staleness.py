"""Staleness of a node's rows on a real stream: answers flagged or requests rejected, then fresh again."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

import hps
from benchmarks.peers.kafka_broker import KafkaBroker
from hps.config import configuration_from
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.server_settings import ServerSettings
from hps.errors import ConfigError, Unavailable
from hps.models.version_writer import write_version
from hps.updates.topics import native_topic
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState
from tests.support.kafka_brokers import (
    SEES_NEW_TOPICS_SOON,
    fresh_broker,
    make_topic,
    shared_broker,
    unique,
)
from tests.support.kafka_updates import native, sending
from tests.support.waiting import PATIENT_GUARD, until

LIMIT_S = 1.0


@pytest.fixture
def model():
    return unique("m")


def settings_of(folder, model: str, broker: KafkaBroker, on_stale: str, topic=True) -> dict:
    """Settings with two tables, one of which gets no updates during the test."""
    tables = [TableSpec(name=name, dim=2, default=-1.0) for name in ("items", "quiet")]
    rows = np.arange(100), np.zeros((100, 2), np.float32)
    write_version(
        folder / "models", ModelSpec(name=model, tables=tables), 1, {"items": rows, "quiet": rows}
    )
    if topic:
        make_topic(broker, native_topic(model))
    return {
        "models": {"repository": str(folder / "models")},
        "tiers": {
            "rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"enabled": True},
        },
        "updates": {
            "max_staleness_s": LIMIT_S,
            "on_stale": on_stale,
            "kafka": {
                "brokers": broker.address,
                "group": model,
                "options": SEES_NEW_TOPICS_SOON,
            },
        },
    }


def send(broker: KafkaBroker, model: str, value: float) -> None:
    with sending(broker) as producer:
        row = native(model, 5, value, int(value), made_ms=int(time.time() * 1000))
        producer.produce(native_topic(model), row)


def ask(node: hps.Node, method: str, path: str, body=None) -> httpx.Response:
    state = FrontendState()
    state.serve(node)
    app = admin_app(state, ServerSettings(), Authorizer())

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


def infer(node: hps.Node, model: str) -> httpx.Response:
    keys = {"name": "items", "shape": [1, 1], "datatype": "INT64", "data": [5]}
    return ask(node, "POST", f"/v2/models/{model}/infer", {"inputs": [keys]})


def lookup(node: hps.Node, model: str):
    return node.lookup(model, {"items": np.array([5])})


def metric(node: hps.Node, name: str, **labels: str) -> float:
    wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    for line in node.metrics.render().decode().splitlines():
        if line.startswith(f"{name}{{{wanted}}}"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} {labels} is not reported")


def caught_up(node: hps.Node, model: str, value: float) -> bool:
    return lookup(node, model).vectors["items"][0, 0] == value


def test_answers_are_stale_while_a_stream_is_paused(tmp_path, model):
    broker = shared_broker()
    with hps.open(settings_of(tmp_path, model, broker, "flag")) as node:
        send(broker, model, 1.0)
        until(lambda: caught_up(node, model, 1.0))
        until(lambda: lookup(node, model).stale_s == 0)
        node.streams.pause()
        assert lookup(node, model).stale_s == 0, "nothing waits"
        send(broker, model, 2.0)
        until(lambda: lookup(node, model).stale_s >= 1)
        answer = infer(node, model)
        assert answer.status_code == 200
        assert answer.json()["parameters"]["hps_stale_s"] >= 1
        assert ask(node, "GET", "/v2/health/ready").status_code == 200
        assert metric(node, "hps_update_age_seconds", model=model, table="items") > LIMIT_S
        flagged = metric(node, "hps_stale_answers_total", model=model, result="flagged")
        assert flagged >= 2
        node.streams.resume()
        until(lambda: lookup(node, model).stale_s == 0)
        assert caught_up(node, model, 2.0)
        assert "hps_stale_s" not in infer(node, model).json()["parameters"]
        assert metric(node, "hps_update_age_seconds", model=model, table="items") == 0.0
        # Table quiet shares the topic: others' rows do not make it look old.
        assert metric(node, "hps_update_age_seconds", model=model, table="quiet") == 0.0


def test_requests_are_rejected_while_rows_are_stale(tmp_path, model):
    broker = shared_broker()
    with hps.open(settings_of(tmp_path, model, broker, "refuse")) as node:
        send(broker, model, 1.0)
        until(lambda: caught_up(node, model, 1.0))
        node.streams.pause()
        send(broker, model, 2.0)
        until(lambda: infer(node, model).status_code == 503)
        answer = infer(node, model)
        assert "updates of table" in answer.json()["error"]
        assert "updates.max_staleness_s" in answer.json()["error"]
        assert "retry-after" in answer.headers
        with pytest.raises(Unavailable, match="max_staleness_s"):
            lookup(node, model)
        assert ask(node, "GET", "/v2/health/ready").status_code == 200, "stays ready"
        assert metric(node, "hps_stale_answers_total", model=model, result="refused") >= 2
        rows = ask(node, "GET", f"/v1/tables/{model}/items/rows?keys=5")
        assert rows.status_code == 200, "an operator may look"
        node.streams.resume()
        until(lambda: infer(node, model).status_code == 200)
        assert caught_up(node, model, 2.0)


def test_rows_become_stale_without_a_broker(tmp_path, model):
    broker = fresh_broker(tmp_path / "kafka").start()
    try:
        settings = settings_of(tmp_path, model, broker, "flag")
        send(broker, model, 1.0)
        broker.kill()
        with hps.open(settings) as node:
            until(lambda: lookup(node, model).stale_s >= 2)
            assert ask(node, "GET", "/v2/health/ready").status_code == 200, "stays ready"
            broker.start()
            until(lambda: caught_up(node, model, 1.0), 120)
            until(lambda: lookup(node, model).stale_s == 0)
            broker.kill()
            until(lambda: lookup(node, model).stale_s > 3, 120)
            broker.start()
            until(lambda: lookup(node, model).stale_s == 0, 120)
    finally:
        broker.kill()


def test_table_without_a_topic_is_not_stale(tmp_path, model):
    settings = settings_of(tmp_path, model, shared_broker(), "refuse", topic=False)
    with hps.open(settings) as node:
        opened = time.monotonic()
        until(lambda: time.monotonic() - opened > 2 * LIMIT_S)
        until(lambda: infer(node, model).status_code == 200)
        until(lambda: metric(node, "hps_update_age_seconds", model=model, table="items") == 0.0)
        make_topic(shared_broker(), native_topic(model))
        send(shared_broker(), model, 1.0)
        until(lambda: infer(node, model).json().get("outputs", [{"data": [0]}])[0]["data"][0] == 1)


def test_rows_are_stale_while_files_wait(tmp_path, model):
    settings = settings_of(tmp_path, model, shared_broker(), "flag")
    del settings["updates"]["kafka"]
    folder = tmp_path / "in"
    settings["updates"]["directory"] = {"path": str(folder)}
    with hps.open(settings) as node:
        node.streams.pause()
        (folder / ".one").write_bytes(native(model, 5, 1.0, 1))
        (folder / ".one").rename(folder / "one.hpsu")
        until(lambda: lookup(node, model).stale_s >= 1)
        node.streams.resume()
        until(lambda: lookup(node, model).stale_s == 0)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"max_staleness_s": 5}, "updates.max_staleness_s: needs updates.kafka"),
        (
            {"on_stale": "refuse"},
            "updates.on_stale: is refuse, which needs max_staleness_s",
        ),
        ({"max_staleness_s": 0}, "updates.max_staleness_s"),
    ],
)
def test_settings_without_effect_are_rejected(updates, message):
    with pytest.raises(ConfigError) as error:
        configuration_from({"updates": updates})
    assert message in str(error.value)
