"""A node that is fed by a real Kafka: served rows change within a moment, in every tier."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.server_settings import ServerSettings
from hps.errors import ConfigError, NotFound
from hps.models.version_writer import write_version
from hps.observability import metric_names as m
from hps.types import Source, version_unix_ms
from hps.updates.topics import native_topic
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState
from tests.support.kafka_brokers import SEES_NEW_TOPICS_SOON, shared_broker, unique
from tests.support.kafka_updates import native, sending
from tests.support.redis_servers import shared_server
from tests.support.waiting import PATIENT_GUARD, until

MADE_MS: dict[str, int] = {}


@pytest.fixture
def model():
    return unique("m")


@pytest.fixture
def settings(tmp_path, model):
    """Of a model whose table ``items`` holds 0 for the keys 0 to 99."""
    spec = ModelSpec(name=model, tables=[TableSpec(name="items", dim=2, default=-1.0)])
    rows = np.zeros((100, 2), np.float32)
    write_version(tmp_path / "models", spec, 1, {"items": (np.arange(100), rows)})
    MADE_MS[model] = int(time.time() * 1000) + 1
    return {
        "models": {"repository": str(tmp_path / "models")},
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


def values(node: hps.Node, model: str, *keys: int) -> list[tuple[float, str]]:
    """The value and the tier of each key's row."""
    found = node.lookup(model, {"items": np.array(keys)}, want_source=True)
    sources = [Source(int(code)).name.lower() for code in found.sources["items"]]
    return list(zip(found.vectors["items"][:, 0].tolist(), sources, strict=True))


def send(model: str, *rows: tuple[int, float, int]) -> None:
    """(key, value, sequence) each; NaN deletes. Made a moment after the model's files, whatever the order."""
    with sending(shared_broker()) as producer:
        for key, value, sequence in rows:
            made_ms = MADE_MS[model]
            producer.produce(
                native_topic(model), native(model, key, value, sequence, made_ms=made_ms)
            )


def test_update_changes_rows_in_the_cache_and_the_store(settings, model):
    with hps.open(settings) as node:
        assert values(node, model, 5, 6, 7) == [(0.0, "cpu")] * 3
        send(model, (5, 5.0, 1), (6, np.nan, 1), (200, 2.0, 1))
        served = [(5.0, "cpu"), (-1.0, "default"), (0.0, "cpu")]
        until(lambda: values(node, model, 5, 6, 7) == served)
        until(lambda: values(node, model, 200)[0][0] == 2.0)
        (stream,) = node.status()["updates"]
        assert stream["group"] == "hps.node.here"
        assert (stream["state"], stream["stores"]) == ("running", ["rocksdb"])
        until(lambda: node.streams.status()[0]["lag"] == 0)
        of = f'model="{model}"'
        wanted = [
            f'hps_update_rows_total{{{of},result="upserted",table="items"}} 2.0',
            f'hps_update_rows_total{{{of},result="deleted",table="items"}} 1.0',
            f'hps_update_visible_seconds_count{{{of},table="items",tier="rocksdb"}} 3.0',
            f'hps_update_visible_seconds_count{{{of},table="items",tier="caches"}} 3.0',
            f'hps_update_age_seconds{{{of},table="items"}} 0.0',
        ]
        # A row is served a moment before it is counted.
        until(lambda: set(wanted) <= set(node.metrics.render().decode().splitlines()))
    # Streamed rows are there after a restart, and older messages do not replace them.
    with hps.open(settings) as node:
        assert [value for value, _ in values(node, model, 5, 6, 200)] == [5.0, -1.0, 2.0]
        send(model, (5, 4.0, 0), (7, 7.0, 1))
        until(lambda: values(node, model, 7)[0][0] == 7.0)
        assert values(node, model, 5)[0][0] == 5.0


def test_node_without_a_cache_serves_updates(settings, model):
    settings["tiers"]["cpu_cache"]["enabled"] = False
    with hps.open(settings) as node:
        send(model, (5, 5.0, 1))
        until(lambda: values(node, model, 5) == [(5.0, "rocksdb")])


def test_redis_is_written_once_for_all_nodes_and_every_cache_is_refreshed(
    settings, model, tmp_path
):
    """Two nodes over one Redis, no RocksDB: one of them writes it, both refresh their caches."""
    redis = shared_server()
    tiers = settings["tiers"]
    tiers["rocksdb"] = {"enabled": False}
    tiers["redis"] = {
        "addresses": [redis.address],
        "timeout_ms": 5000,
        "guard": {"deadline_ms": 5000},
    }
    kafka = {**settings["updates"]["kafka"], "group": "there", "shared_writer": "ingest"}
    with hps.open(settings) as one, hps.open({**settings, "updates": {"kafka": kafka}}) as two:
        assert [s["group"] for s in one.status()["updates"]] == ["hps.node.here", "hps.shared"]
        for node in (one, two):
            until(lambda node=node: values(node, model, 5) == [(0.0, "cpu")])
        until(lambda: all(s["partitions"] == [] for n in (one, two) for s in n.status()["updates"]))
        send(model, (5, 5.0, 1), (6, np.nan, 1))
        for node in (one, two):
            until(lambda node=node: values(node, model, 5) == [(5.0, "cpu")])
            until(lambda node=node: values(node, model, 6) == [(-1.0, "default")])
        settings["tiers"]["cpu_cache"]["enabled"] = False
        settings["updates"] = {}
        with hps.open(settings) as third:
            until(lambda: values(third, model, 5) == [(5.0, "redis")])


def test_paused_reader_counts_new_messages_as_lag(settings, model):
    with hps.open(settings) as node:
        send(model, (5, 5.0, 1))
        until(lambda: values(node, model, 5)[0][0] == 5.0)
        node.streams.pause()
        send(model, (5, 6.0, 2), (6, 6.0, 1), (7, 7.0, 1))
        until(lambda: node.streams.status()[0]["lag"] == 3)
        labels = ("hps.node.here", native_topic(model), "0")
        assert node.metrics.numbers()[m.UPDATE_LAG] == {labels: 3}
        node.streams.resume()
        until(lambda: node.streams.status()[0]["lag"] == 0)
        assert values(node, model, 7)[0][0] == 7.0


def test_pause_resume_and_seek(settings, model):
    topic = native_topic(model)
    with hps.open(settings) as node:
        send(model, (5, 5.0, 1))
        until(lambda: values(node, model, 5)[0][0] == 5.0)
        node.streams.pause()
        send(model, (5, 6.0, 2))
        time.sleep(0.5)
        assert values(node, model, 5)[0][0] == 5.0
        assert node.status()["updates"][0]["state"] == "paused"
        node.streams.resume()
        until(lambda: values(node, model, 5)[0][0] == 6.0)
        until(lambda: node.streams.status()[0]["lag"] == 0)
        node.streams.seek(topic, 0, 0)
        until(lambda: node.streams.status()[0]["lag"] == 0)
        assert values(node, model, 5)[0][0] == 6.0, "a replay changes nothing"
        with pytest.raises(NotFound, match="no partition 7 of topic"):
            node.streams.seek(topic, 7, 0)
        with pytest.raises(NotFound, match=r"no reader is of group 'x'; there are: hps.node.here"):
            node.streams.pause("x")


def test_node_without_a_broker_starts_reports_it_and_serves(settings, model):
    settings["updates"]["kafka"]["brokers"] = "127.0.0.1:9"
    begun = time.monotonic()
    with hps.open(settings) as node:
        assert time.monotonic() - begun < 30
        assert values(node, model, 5) == [(0.0, "cpu")]
        until(lambda: "refused" in str(node.status()["updates"][0]["problem"]))
        begun = time.monotonic()
    assert time.monotonic() - begun < 30, "and ends"


def test_invalid_option_fails_the_start(settings):
    settings["updates"]["kafka"]["options"] = {"no.such.option": 1}
    with pytest.raises(ConfigError, match=r"updates.kafka: .*no.such.option"):
        hps.open(settings)


def test_versions_contain_the_event_time(settings, model):
    with hps.open(settings) as node:
        send(model, (5, 5.0, 1))
        until(lambda: values(node, model, 5)[0][0] == 5.0)
        found = node.lookup(model, {"items": np.array([5])}, want_source=True)
        age = time.time() - version_unix_ms(int(found.versions["items"][0])) / 1e3
        assert 0 <= age < 600


def ask(node, method: str, path: str, body=None):
    state = FrontendState()
    state.serve(node)
    app = admin_app(state, ServerSettings(), Authorizer())

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


def test_streams_are_controlled_over_http(settings, model):
    topic = native_topic(model)
    with hps.open(settings) as node:
        send(model, (5, 5.0, 1))
        until(lambda: values(node, model, 5)[0][0] == 5.0)
        until(lambda: node.streams.status()[0]["lag"] == 0)
        (stream,) = ask(node, "GET", "/v1/updates").json()["updates"]
        assert stream["partitions"] == [{"topic": topic, "partition": 0, "lag": 0}]
        for path, state in (("pause", "paused"), ("resume", "running")):
            reply = ask(node, "POST", f"/v1/updates/{path}", {})
            assert reply.json()["updates"][0]["state"] == state
        place = {"topic": topic, "partition": 0, "offset": 0}
        assert ask(node, "POST", "/v1/updates/seek", place).status_code == 200
        for wrong in ({**place, "offset": -1}, {**place, "partition": "0"}, {"topic": 1}, {}):
            assert ask(node, "POST", "/v1/updates/seek", wrong).status_code == 400
        reply = ask(node, "POST", "/v1/updates/pause", {"group": "x"})
        assert reply.status_code == 404
        assert "there are: hps.node.here" in reply.json()["error"]


def test_pause_without_streams_raises_not_found(settings, model):
    settings["updates"] = {}
    with hps.open(settings) as node:
        assert ask(node, "GET", "/v1/updates").json() == {"updates": []}
        reply = ask(node, "POST", "/v1/updates/pause", {})
        assert reply.status_code == 404
        assert "updates.kafka" in reply.json()["error"]


def test_node_applies_update_files(settings, model, tmp_path):
    settings["updates"] = {"directory": {"path": str(tmp_path / "in")}}
    with hps.open(settings) as node:
        assert values(node, model, 5, 6) == [(0.0, "cpu")] * 2
        messages = [
            native(model, 5, 5.0, 1, made_ms=MADE_MS[model]),
            native(model, 6, np.nan, 1, made_ms=MADE_MS[model]),
        ]
        hidden = tmp_path / "in" / ".one"
        hidden.write_bytes(b"".join(messages))
        hidden.rename(tmp_path / "in" / "one.hpsu")
        until(lambda: values(node, model, 5, 6) == [(5.0, "cpu"), (-1.0, "default")])
        until(lambda: (tmp_path / "in" / "applied" / "one.hpsu").exists())
        until(lambda: node.status()["updates"][0]["lag"] == 0)
        assert node.status()["updates"][0]["group"] == "directory"
        with pytest.raises(NotFound, match="no partition 0"):
            node.streams.seek(str(tmp_path / "in"), 0, 0)


def test_reading_starts_at_the_watermark_of_the_files(settings, model, tmp_path):
    """Three messages; the files say that they contain the first two."""
    made_ms = (
        MADE_MS[model] + 60_000
    )  # newer than the files of version 2, so only the offset keeps them out
    topic = native_topic(model)
    with sending(shared_broker()) as producer:
        for key in (1, 2, 3):
            producer.produce(topic, native(model, key, 9.0, 1, made_ms=made_ms))
    spec = ModelSpec(name=model, tables=[TableSpec(name="items", dim=2, default=-1.0)])
    rows = np.full((100, 2), 4.0, np.float32)
    write_version(
        tmp_path / "models", spec, 2, {"items": (np.arange(100), rows)}, watermark={topic: {"0": 2}}
    )
    with hps.open(settings) as node:
        until(lambda: values(node, model, 3)[0][0] == 9.0)
        assert [value for value, _ in values(node, model, 1, 2)] == [4.0, 4.0]


def test_loaded_version_has_the_streamed_updates(settings, model, tmp_path):
    """From where its files end; and the previous version gets missed updates when it is served again."""
    with hps.open(settings) as node:
        send(model, (5, 5.0, 1), (6, 6.0, 1))
        until(lambda: values(node, model, 5, 6) == [(5.0, "cpu"), (6.0, "cpu")])
        spec = ModelSpec(name=model, tables=[TableSpec(name="items", dim=2, default=-1.0)])
        rows = np.full((100, 2), 100.0, np.float32)
        # Trained on the first message, the second came later.
        write_version(
            tmp_path / "models",
            spec,
            2,
            {"items": (np.arange(100), rows)},
            watermark={native_topic(model): {"0": 1}},
        )
        assert node.load(model) == 2
        assert values(node, model, 5, 7) == [(100.0, "cpu"), (100.0, "cpu")]
        assert values(node, model, 6)[0][0] == 100.0  # the files are newer than the message
        MADE_MS[model] = int(time.time() * 1000) + 1
        send(model, (8, 8.0, 2))
        until(lambda: values(node, model, 8)[0][0] == 8.0)
        assert node.load(model, 1) == 1
        assert [value for value, _ in values(node, model, 5, 6, 7, 8)] == [5.0, 6.0, 0.0, 8.0]
        # The reader that caught up is replaced by one for all versions.
        until(lambda: [each["state"] for each in node.streams.status()] == ["running"])
