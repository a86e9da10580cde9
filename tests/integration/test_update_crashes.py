"""No update is lost when nodes, Redis or the broker are killed at random moments."""

import time

import numpy as np
import pytest

import hps
from benchmarks.peers.redis_server import RedisServer
from hps.config.model_schema import ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.updates.topics import native_topic
from tests.support.crash_run import CrashRun
from tests.support.kafka_brokers import make_topic, need_kafka, shared_broker, unique
from tests.support.kafka_updates import native, sending
from tests.support.redis_servers import need
from tests.support.update_stream import ABSENT, UpdateStream, rows_of
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("seed", "ingest", "mapped"), [(1, False, False), (2, True, False), (3, False, True)]
)
def test_every_store_converges_to_the_stream_after_kills(tmp_path, seed, ingest, mapped):
    need_kafka()
    need("redis-server")
    run = CrashRun(tmp_path, seed, seconds=5, ingest=ingest, mapped=mapped)
    run.run()
    assert set(run.killed) == set(run.victims)


def test_checker_detects_rows_of_another_key_or_update():
    stream = UpdateStream(1, 100, 500, 1_700_000_000_000)
    keys = np.flatnonzero(stream.outcome > 0)[:2]
    rows = rows_of(keys, stream.outcome[keys])
    assert stream.numbers(keys, rows).tolist() == stream.outcome[keys].tolist()
    assert stream.numbers(keys, np.full_like(rows, -1.0)).tolist() == [ABSENT, ABSENT]
    torn = rows.copy()
    torn[0, 4:] = rows[1, 4:]
    late = rows.copy()
    late[:, 1] = stream.updates + 1
    for wrong in (rows[::-1], torn, late):
        with pytest.raises(AssertionError, match="was never sent for it"):
            stream.numbers(keys, wrong)


@pytest.mark.parametrize("more", [0, 1], ids=["no further messages", "further messages"])
def test_redis_restarted_empty_is_filled_again(tmp_path, more):
    """The node detects it with and without further messages, and while it runs on."""
    need_kafka()
    need("redis-server")
    broker, model = shared_broker(), unique("m")
    server = RedisServer(tmp_path / "redis").start()
    spec = ModelSpec(name=model, tables=[TableSpec(name="items", dim=2, default=-1.0)])
    write_version(
        tmp_path / "models", spec, 1, {"items": (np.arange(10), np.zeros((10, 2), np.float32))}
    )
    made_ms = time.time_ns() // 10**6 + 1
    topic = native_topic(model)
    make_topic(broker, topic, 2)

    def send(first: int, last: int) -> None:
        with sending(broker) as producer:
            for i in range(first, last):
                message = native(model, i, float(i), 1, made_ms=made_ms)
                producer.produce(topic, message, partition=i % 2)

    settings = {
        "models": {"repository": str(tmp_path / "models")},
        "tiers": {
            "rocksdb": {"enabled": False},
            "redis": {"addresses": [server.address], "guard": {"deadline_ms": 5000}},
            "cpu_cache": {"enabled": False},
        },
        "updates": {"kafka": {"brokers": broker.address, "group": model}},
    }
    try:
        with hps.open(settings) as node:

            def served() -> list[float]:
                return node.lookup(model, {"items": np.arange(60)}).vectors["items"][:, 0].tolist()

            send(0, 50)
            until(lambda: served()[:50] == list(range(50)))
            server.restart()
            send(50, 50 + 10 * more)
            wanted = [float(i) if i < 50 + 10 * more else -1.0 for i in range(60)]
            until(lambda: served() == wanted)
    finally:
        server.kill()
