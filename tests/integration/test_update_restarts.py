"""A killed server applies updates as soon as it is ready again, not after Kafka's session timeout."""

from __future__ import annotations

from pathlib import Path

from tests.support.kafka_brokers import fresh_broker, need_kafka
from tests.support.redis_servers import need, shared_server
from tests.support.restarts import restarts

# Kafka takes the dead member for alive for ten seconds; with other settings for thirty.
_SOON_S = 6.0


def test_killed_server_serves_updates_soon_after_it_is_ready(tmp_path: Path) -> None:
    need_kafka()
    need("redis-server")
    broker = fresh_broker(tmp_path / "kafka")
    try:
        with restarts(tmp_path, broker.start(), shared_server()) as restarted:
            times = restarted.kill_and_start()
            assert max(times.values()) < _SOON_S, times
    finally:
        broker.kill()
