"""Redis Cluster with TLS and access control, and Redis Sentinel: reads, writes, failovers."""

import itertools
import threading
import time
from functools import partial

import numpy as np
import pytest

from hps.errors import ConfigError, TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.redis import RedisTier
from hps.tiers.redis.layout import TableLayout
from hps.tiers.wrappers import GuardedTier
from hps.types import EmbeddingTable, version_now
from tests.support.redis_servers import Cluster, Watched, need, shared_cluster
from tests.support.rows import rising_rows
from tests.support.waiting import until

DIM = 4
N = 5000


rows_of = partial(rising_rows, dim=DIM)


def fill(tier, table, n=N):
    keys = np.arange(n)
    tier.insert(table, keys, rows_of(keys), np.full(n, version_now(), np.uint64))
    return keys


def right(tier, table, keys):
    """Check the rows that were found; return their number."""
    part = Part.make(table, keys)
    tier.fetch([part], FetchContext(deadline=time.monotonic() + 60))
    at = np.flatnonzero(part.source)
    np.testing.assert_array_equal(part.out[at], rows_of(keys[at]))
    return len(at)


@pytest.fixture
def cluster():
    return shared_cluster()


@pytest.fixture
def table():
    return EmbeddingTable.make("user", DIM, model="ctr")


@pytest.fixture
def open_tier():
    opened = []

    def make(settings):
        opened.append(RedisTier(settings))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


# -- cluster ---------------------------------------------------------------------------------------


def test_table_is_spread_over_nodes(cluster, open_tier, table):
    tier = open_tier(cluster.settings())
    keys = fill(tier, table)
    assert right(tier, table, keys) == N
    sizes = [server.ask("DBSIZE") for server in cluster.servers[:3]]
    assert min(sizes) > 0
    assert tier.usage(table).entries == N
    assert [each.name for each in tier.find_tables()] == ["user"]
    assert sum(len(some) for some, _, _ in tier.scan(table)) == N
    assert tier.erase("ctr") == 1 + 2 * 8  # of each partition: its rows, and what it keeps of them
    assert right(tier, table, keys) == 0


def test_overflow_and_positions_work_in_cluster(cluster, open_tier, table):
    from tests.integration.test_redis import changes

    tier = open_tier(cluster.settings(overflow_margin=500, overflow_policy="oldest"))
    for start in range(0, 20_000, 1000):
        keys = np.arange(start, start + 1000)
        tier.insert(table, keys, rows_of(keys), np.full(1000, version_now(), np.uint64))
    assert tier.usage(table).entries <= 8 * 500
    from hps.tiers.positions import StreamPosition

    tier.apply(table, changes([1, 2, 3]), [StreamPosition("t", 0, 5)])
    assert tier.applied(table, "t", 0) == 5


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"password": "wrong"}, "refuses this user .*check tiers.redis.username, and password"),
        ({"tls": None}, "cannot be reached"),
        ({"tls": {"ca": None}}, "certificate is not trusted"),
        ({"tls": {"server_name": "another.test"}}, "certificate is not trusted"),
        ({"tls": {"server_name": None}}, "certificate is not trusted"),
        ({"tls": {"certificate": None, "key": None}}, "cannot be reached|certificate"),
    ],
)
def test_rejected_access_names_reason(cluster, open_tier, table, given, named):
    wanted = cluster.settings(timeout_ms=60_000)
    update = dict(given)
    if update.get("tls"):
        update["tls"] = wanted.tls.model_copy(update=update["tls"])
    tier = open_tier(wanted.model_copy(update=update))
    start = time.monotonic()
    with pytest.raises(TierError, match=named):
        tier.check(table)
    assert time.monotonic() - start < 30


def test_missing_certificate_files_are_rejected(cluster, tmp_path):
    wanted = cluster.settings()
    tls = wanted.tls.model_copy(update={"ca": tmp_path / "none.pem"})
    with pytest.raises(ConfigError, match=r"tiers\.redis\.tls: .*none.pem cannot be used: No such"):
        RedisTier(wanted.model_copy(update={"tls": tls}))


def test_cluster_server_in_single_mode_is_reported(cluster, open_tier, table):
    wanted = cluster.settings(addresses=[cluster.servers[0].address], mode="single")
    with pytest.raises(TierError, match="mode: cluster"):
        fill(open_tier(wanted), table)


def move_slot(cluster, key):
    """Begin to move a key's slot to another primary; returns (slot, from, to)."""
    source = cluster.holder(key)
    target = next(each for each in cluster.servers[:3] if each is not source)
    slot = source.ask("CLUSTER", "KEYSLOT", key)
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID").decode())
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID").decode())
    return slot, source, target


def migrate(cluster, slot, source, target):
    keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)
    for key in keys:
        source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 20_000)


def settle(cluster, slot, target):
    identity = target.ask("CLUSTER", "MYID").decode()
    for each in [target, *cluster.servers[:3]]:
        each.ask("CLUSTER", "SETSLOT", slot, "NODE", identity)


def test_moving_slots_are_followed(cluster, open_tier, table):
    """ASK while a slot moves, MOVED when it has; for reads and writes."""
    tier = open_tier(cluster.settings())
    keys = fill(tier, table)
    name = b"hps:{ctr/1/user/p3}v"
    slot, source, target = move_slot(cluster, name)
    try:
        assert right(tier, table, keys) == N
        migrate(cluster, slot, source, target)
        assert right(tier, table, keys) == N  # ASK
        new = np.arange(N, N + 500)
        tier.insert(table, new, rows_of(new), np.full(500, version_now(), np.uint64))
        assert right(tier, table, np.arange(N + 500)) == N + 500
        target.ask("SCRIPT", "FLUSH")  # a node that is new, and is sent nothing else
        new = new[TableLayout(table, "native", 8).partition_of(new) == 3]
        tier.insert(table, new, rows_of(new), np.full(len(new), version_now(), np.uint64))
    finally:
        settle(cluster, slot, target)
    until(lambda: cluster.holder(name) is target)
    assert right(tier, table, np.arange(N + 500)) == N + 500  # MOVED
    assert right(open_tier(cluster.settings()), table, np.arange(N + 500)) == N + 500
    until(cluster.complete)


def test_script_with_split_hashes_is_retried(cluster, open_tier, table):
    """TRYAGAIN; reads of one hash continue meanwhile."""
    tier = open_tier(cluster.settings(overflow_margin=N, overflow_policy="oldest"))
    keys = fill(tier, table)
    name = b"hps:{ctr/1/user/p3}v"
    slot, source, target = move_slot(cluster, name)
    failures = []

    def write():
        try:
            fill(tier, table)
        except TierError as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    try:
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 20_000)
        writer.start()
        for _ in range(10):
            assert right(tier, table, keys) == N
            time.sleep(0.02)
        assert writer.is_alive()
        migrate(cluster, slot, source, target)
        writer.join(60)
        assert not writer.is_alive()
    finally:
        migrate(cluster, slot, source, target)
        settle(cluster, slot, target)
    assert not failures
    until(lambda: cluster.holder(name) is target)
    assert right(tier, table, keys) == N
    until(cluster.complete)


def test_replica_takes_over_for_killed_primary(tmp_path, open_tier, table):
    """Requests are answered in time, and no row is wrong."""
    need("openssl")
    cluster = Cluster(tmp_path, failover=True)
    try:
        cluster.start()
        tier = open_tier(cluster.settings(timeout_ms=20_000))
        keys = fill(tier, table)
        for each in cluster.servers[:3]:
            replicated(each)
        guarded = GuardedTier(tier, deadline_s=0.2, failures_to_open=3, retry_after_s=0.1)
        victim = cluster.holder(b"hps:{ctr/1/user/p0}v")
        degraded, found, slowest = answer_while(guarded, table, keys, victim.kill)
        assert found == N
        assert degraded > 0
        assert slowest < 5.0
        assert fill(tier, table, 100) is not None
    finally:
        cluster.kill()


def replicated(primary):
    """Wait until the replica has every write."""
    written = primary.ask("ROLE")[1]
    until(lambda: [int(replica[2]) >= written for replica in primary.ask("ROLE")[2]] == [True])


def answer_while(guarded, table, keys, disturb, timeout_s=90.0):
    """Ask all the time while something happens, until the tier is well again. Returns the degraded
    answers, how many rows the last one found, and the slowest answer's seconds."""
    degraded, slowest = 0, 0.0
    until_s = time.monotonic() + timeout_s
    for turn in itertools.count():
        if turn == 5:
            disturb()
        part, ctx = Part.make(table, keys), FetchContext()
        start = time.monotonic()
        guarded.fetch([part], ctx)
        slowest = max(slowest, time.monotonic() - start)
        at = np.flatnonzero(part.source)
        np.testing.assert_array_equal(part.out[at], rows_of(keys[at]))
        degraded += bool(ctx.degraded)
        if (turn > 10 and degraded and not ctx.degraded) or time.monotonic() > until_s:
            return degraded, len(at), slowest
        time.sleep(0.02)
    raise AssertionError


# -- sentinels -------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path):
    made = Watched(tmp_path)
    try:
        yield made.start()
    finally:
        made.kill()


def test_sentinels_report_primary_and_its_successor(watched, open_tier, table):
    tier = open_tier(watched.settings(timeout_ms=20_000))
    keys = fill(tier, table)
    assert right(tier, table, keys) == N
    replicated(watched.primary)
    guarded = GuardedTier(tier, deadline_s=0.2, failures_to_open=3, retry_after_s=0.1)

    def disturb():
        watched.sentinels[0].kill()
        watched.primary.kill()

    degraded, found, slowest = answer_while(guarded, table, keys, disturb)
    assert found == N
    assert degraded > 0
    assert slowest < 5.0
    new = np.arange(N, N + 10)
    tier.insert(table, new, rows_of(new), np.full(10, version_now(), np.uint64))
    assert right(tier, table, np.arange(N + 10)) == N + 10


def test_demoted_primary_is_abandoned(watched, open_tier, table):
    """The demoted primary answers reads and rejects writes."""
    tier = open_tier(watched.settings())
    fill(tier, table)
    watched.sentinels[0].ask("SENTINEL", "FAILOVER", watched.SERVICE)
    until(lambda: watched.replica.ask("ROLE")[0] == b"master")
    until(lambda: watched.primary.ask("ROLE")[0] == b"slave")
    new = np.arange(N, N + 10)
    tier.insert(table, new, rows_of(new), np.full(10, version_now(), np.uint64))
    assert right(tier, table, np.arange(N + 10)) == N + 10


def test_unknown_sentinel_service_is_reported(watched, open_tier, table):
    tier = open_tier(watched.settings(sentinel_service="other"))
    with pytest.raises(TierError, match="knows no service 'other'"):
        tier.check(table)
    wrong = open_tier(watched.settings(sentinel_password="wrong"))
    with pytest.raises(TierError, match="refuses this user"):
        wrong.check(table)


def test_many_threads_share_few_connections(cluster, open_tier, table):
    tier = open_tier(cluster.settings(connections=3))
    keys = fill(tier, table)
    outcomes = []

    def work():
        outcomes.extend(right(tier, table, keys) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [N] * 80
    assert max(len(node.idle) for node in tier._client._servers.all) <= 3
