"""A cluster without one shard serves the other shards' rows in time, and all rows after its return."""

import os
import signal
import threading
import time
from copy import copy
from functools import partial

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.redis import RedisLoadSource, RedisTier
from hps.tiers.redis.layout import TableLayout
from hps.tiers.redis.load import RedisLoads
from hps.tiers.wrappers import GuardedTier
from hps.types import EmbeddingTable, version_now
from tests.integration.test_redis_faults import resources
from tests.support.redis_servers import certificates, shared_cluster
from tests.support.rows import rising_rows
from tests.support.waiting import until

DIM = 4
N = 2000
DEADLINE_S = 0.5
SLACK_S = 5.0  # other processes may hold a thread up for as long


rows_of = partial(rising_rows, dim=DIM)


def fill(tier, table, keys):
    tier.insert(table, keys, rows_of(keys), np.full(len(keys), version_now(), np.uint64))


@pytest.fixture
def cluster():
    """A cluster without replicas. Tests share these servers, so each restores what it changed."""
    return shared_cluster()


class Shards:
    """A table in a cluster whose ``victim`` holds the keys ``dead``, and others those ``alive``."""

    def __init__(self, cluster, tier, table):
        self.cluster, self.tier, self.table = cluster, tier, table
        self.keys = np.arange(N)
        fill(tier, table, self.keys)
        layout = TableLayout(table, "native", 8)
        self.victim = cluster.holder(layout.rows_keys[0])
        self.dead_slot = tier._client.slot(layout.rows_keys[0])
        lost = [i for i in range(8) if cluster.holder(layout.rows_keys[i]) is self.victim]
        dead = np.isin(layout.partition_of(self.keys), lost)
        self.dead, self.alive = self.keys[dead], self.keys[~dead]
        assert len(self.dead)
        assert len(self.alive)
        self.guarded = GuardedTier(
            tier, deadline_s=DEADLINE_S, failures_to_open=3, retry_after_s=0.2
        )

    def ask(self, keys):
        """Return the keys found, whether the answer was degraded, and its duration in seconds."""
        part, ctx = Part.make(self.table, keys), FetchContext()
        start = time.monotonic()
        self.guarded.fetch([part], ctx)
        seconds = time.monotonic() - start
        assert seconds < DEADLINE_S + SLACK_S
        at = np.flatnonzero(part.source)
        np.testing.assert_array_equal(part.out[at], rows_of(keys[at]))
        assert sorted([*at, *part.missing]) == list(range(len(keys)))
        return keys[at], bool(ctx.degraded), seconds

    def all_found(self):
        found, degraded, _ = self.ask(self.keys)
        return not degraded and len(found) == N


@pytest.fixture
def shards(cluster):
    guard = {"deadline_ms": DEADLINE_S * 1e3, "failures_to_open": 3}
    tier = RedisTier(cluster.settings(guard=guard, timeout_ms=3000))
    yield Shards(cluster, tier, EmbeddingTable.make("user", DIM, model="ctr"))
    tier.close()


def break_shard(shards, fault):
    if fault == "stopped":
        os.kill(shards.victim.pid, signal.SIGSTOP)
    else:
        shards.victim.kill()


def repair_shard(shards, fault):
    if fault == "stopped":
        os.kill(shards.victim.pid, signal.SIGCONT)
    else:
        shards.victim.start()  # empty
        until(lambda: refilled(shards))
    until(shards.cluster.complete)


def refilled(shards):
    try:
        fill(shards.tier, shards.table, shards.keys)
    except TierError:
        return False
    return True


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_rows_of_other_shards_are_served(shards, fault):
    until(shards.all_found)
    break_shard(shards, fault)
    try:
        answers = [shards.ask(shards.keys) for _ in range(30)]
        for found, degraded, _ in answers:
            assert degraded
            np.testing.assert_array_equal(found, shards.alive)
        # Requests skip it now.
        assert np.median([seconds for _, _, seconds in answers]) < 0.3 * DEADLINE_S
        assert shards.guarded.state == "closed"
        for _ in range(10):  # one shard does not open the circuit breaker
            assert not len(shards.ask(shards.dead)[0])
        assert shards.guarded.state == "closed"
        assert len(shards.ask(shards.alive)[0]) == len(shards.alive)
    finally:
        repair_shard(shards, fault)
    until(shards.all_found)


def test_promotions_do_not_wait_for_unavailable_shard(shards):
    """Rows of other shards are written; the caller gets an error for the rest immediately."""
    break_shard(shards, "stopped")
    try:
        until(lambda: shards.ask(shards.keys) and shards.tier._client.is_down(shards.dead_slot))
        new = np.arange(N, N + 500)
        start = time.monotonic()
        with pytest.raises(TierError, match="no answer in time"):
            shards.tier.promote(shards.table, new, rows_of(new), np.full(500, version_now(), "u8"))
        assert time.monotonic() - start < SLACK_S  # all that it may take are 20 s
        until(lambda: len(shards.ask(new)[0]))
        assert len(shards.ask(new)[0]) < 500
    finally:
        repair_shard(shards, "stopped")
    until(shards.all_found)


def test_node_starts_while_shard_is_unavailable(cluster, shards):
    """It serves the tables whose metadata is readable."""
    holder = cluster.holder(TableLayout(shards.table, "native", 8).metadata_key)
    break_shard(shards, "stopped")
    guard = {"deadline_ms": DEADLINE_S * 1e3, "failures_to_open": 1}
    tier = RedisTier(cluster.settings(guard=guard, timeout_ms=3000))
    try:
        part, ctx = Part.make(shards.table, shards.keys), FetchContext(time.monotonic() + 5)
        tier.fetch([part], ctx)
        assert ctx.degraded == ["redis"]
        served = 0 if holder is shards.victim else len(shards.alive)
        assert len(part.missing) == N - served
    finally:
        repair_shard(shards, "stopped")
        tier.close()
    until(shards.all_found)


def works(server):
    return b"cluster_state:ok" in server.ask("CLUSTER", "INFO")


class Rows:
    """A source of rows that may be read again."""

    def __iter__(self):
        for start in range(0, N, 500):
            keys = np.arange(start, start + 500)
            yield keys, rows_of(keys)


@pytest.mark.parametrize("repeatable", [True, False])
def test_rows_lost_by_a_shard_are_detected(cluster, shards, repeatable, monkeypatch):
    """The shard restarts empty, while the other shards record a complete load."""
    loading, repair = threading.Event(), RedisLoads._repair
    monkeypatch.setattr(RedisLoads, "_repair", lambda *a: loading.wait(60) and repair(*a))
    tier, version = shards.tier, version_now()
    tier.erase("ctr")
    source = Rows() if repeatable else iter(Rows())
    assert tier.preload(shards.table, RedisLoadSource(source, version, mark="digest")) == N
    until(shards.all_found)
    shards.victim.restart()
    until(
        lambda: shards.ask(shards.keys)[1] and len(shards.ask(shards.alive)[0]) == len(shards.alive)
    )
    until(lambda: works(shards.victim))
    until(lambda: not tier._client.is_down(shards.dead_slot))

    def loss_is_reported():
        """A missing row may be lost; a shard that answers late only makes more rows missing."""
        found, degraded, _ = shards.ask(shards.keys)
        assert degraded
        return found.tolist() == shards.alive.tolist()

    for _ in range(5):
        until(loss_is_reported)
        time.sleep(0.1)
    until(lambda: not shards.ask(shards.alive)[1])
    loading.set()
    if not repeatable:  # a node that starts loads what is missing, and only that
        fresh_tier = RedisTier(cluster.settings())
        assert fresh_tier.preload(
            shards.table, RedisLoadSource(Rows(), version, mark="digest")
        ) == len(shards.dead)
        fresh_tier.close()
        tier._maintenance._last = -100.0
    until(shards.all_found)
    until(cluster.complete)


def test_shard_out_of_memory_rejects_only_its_writes(shards):
    """The shard still answers reads."""
    victim, rows = shards.victim, rows_of(shards.keys)
    victim.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    victim.ask("CONFIG", "SET", "maxmemory", 1_000_000)
    try:
        for _ in range(3):
            with pytest.raises(TierError, match=rf"{victim.address} is out of memory .*maxmemory"):
                shards.tier.insert(
                    shards.table, shards.keys, rows, np.full(N, version_now(), np.uint64)
                )
            until(shards.all_found)
        assert shards.guarded.state == "closed"
        some = shards.alive.copy()
        fill(shards.tier, shards.table, some)
    finally:
        victim.ask("CONFIG", "SET", "maxmemory", 0)
    fill(shards.tier, shards.table, shards.keys)
    until(shards.all_found)


def test_shard_with_expired_certificate_keeps_open_connections(cluster, shards):
    """New connections fail; open ones continue."""
    options, server = shards.victim.options, shards.victim
    stale, _ = certificates().make("stale", days=-1, key=options["tls-key-file"])
    server.ask("CONFIG", "SET", "tls-cert-file", str(stale))
    fresh = RedisTier(cluster.settings(timeout_ms=3000, guard={"deadline_ms": DEADLINE_S * 1e3}))
    fresh_tier = copy(shards)
    fresh_tier.guarded = GuardedTier(fresh, DEADLINE_S, 3, 0.2)
    try:
        until(shards.all_found)
        for _ in range(5):
            part, ctx = Part.make(shards.table, shards.keys), FetchContext(time.monotonic() + 1)
            fresh.fetch([part], ctx)
            assert ctx.degraded == ["redis"]
        with pytest.raises(TierError, match=r"certificate is not trusted .*expired.*renew"):
            fill(fresh, shards.table, shards.dead)
    finally:
        server.ask("CONFIG", "SET", "tls-cert-file", str(options["tls-cert-file"]))
    until(fresh_tier.all_found)
    fresh.close()


@pytest.mark.parametrize("unavailable", ["one", "all"])
def test_ten_thousand_failing_requests_leak_nothing(shards, unavailable):
    """If all shards are unavailable, the circuit of the guard opens and is probed repeatedly."""
    victims = [shards.victim] if unavailable == "one" else shards.cluster.servers
    shards.guarded = GuardedTier(shards.tier, DEADLINE_S, 3, 0.02)
    keys = shards.keys[:64].copy()
    for server in victims:
        os.kill(server.pid, signal.SIGSTOP)
    degraded = 0
    try:
        for _ in range(1000):
            shards.ask(keys)
        before = resources()
        for _ in range(10_000):
            part, ctx = Part.make(shards.table, keys), FetchContext()
            shards.guarded.fetch([part], ctx)
            degraded += bool(ctx.degraded)
        after = resources()
    finally:
        for server in victims:
            os.kill(server.pid, signal.SIGCONT)
    assert degraded == 10_000
    assert all(now <= then + more for now, then, more in zip(after, before, (2, 4, 8), strict=True))
    until(shards.all_found)
    until(shards.cluster.complete)


def test_all_shards_unavailable_is_a_failure(shards):
    for server in shards.cluster.servers[:3]:
        os.kill(server.pid, signal.SIGSTOP)
    try:
        for _ in range(10):
            assert not len(shards.ask(shards.keys)[0])
        assert shards.guarded.state != "closed"
    finally:
        for server in shards.cluster.servers[:3]:
            os.kill(server.pid, signal.SIGCONT)
    until(shards.all_found)
    until(shards.cluster.complete)
