"""Redis as a tier, on a real server: metadata, eviction, positions, preloading."""

import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import BadRequest, TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.redis import RedisLoadSource, RedisTier
from hps.tiers.redis.layout import READ_SLICE, WRITE_SLICE, TableLayout
from hps.types import EmbeddingTable, make_version, version_now
from tests.support.redis_servers import settings, shared_server
from tests.support.rows import rising_rows
from tests.support.waiting import until

DIM = 4


@pytest.fixture
def server():
    return shared_server()


@pytest.fixture
def open_tier(server):
    opened = []

    def make(**options):
        opened.append(RedisTier(settings(server, **options)))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


@pytest.fixture
def table():
    return EmbeddingTable.make("user", DIM, model="ctr", version=2)


STARTED = SimpleNamespace(ms=0)


@pytest.fixture(autouse=True)
def _started():
    """Start of the current test in Unix milliseconds: rows age while other tests run."""
    STARTED.ms = time.time_ns() // 1_000_000


def rows_of(keys, dim=DIM):
    return rising_rows(keys, dim)


def versions_of(n, ms=None):
    return np.full(n, make_version(STARTED.ms if ms is None else ms), np.uint64)


def fill(tier, table, first, last, ms=None):
    keys = np.arange(first, last)
    tier.insert(table, keys, rows_of(keys, table.dim), versions_of(len(keys), ms))
    return keys


def held(tier, table, keys):
    """Return the keys that are stored with the right rows."""
    part = tier.get(table, np.ascontiguousarray(keys, np.int64))
    at = np.flatnonzero(part.source)
    np.testing.assert_array_equal(part.out[at], rows_of(part.keys[at], table.dim))
    return part.keys[at]


# -- facts -----------------------------------------------------------------------------------------


def test_table_metadata_is_recorded(server, open_tier, table):
    fill(open_tier(), table, 0, 10)
    found = server.ask("HGETALL", "hps:{ctr/2/user}m")
    assert found == {
        b"layout": b"native", b"partitions": b"8", b"dim": b"4", b"dtype": b"float32",
        b"key_bits": b"64",
    }  # fmt: skip


def test_reading_empty_table_writes_nothing(server, open_tier, table):
    """A reader with wrong settings must not record the metadata."""
    wrong = open_tier(partitions=4)
    wrong.check(table)
    assert len(wrong.get(table, np.arange(10)).missing) == 10
    assert not server.ask("EXISTS", "hps:{ctr/2/user}m")
    fill(open_tier(), table, 0, 100)
    with pytest.raises(TierError, match="partitions in Redis: 8, here: 4"):
        fill(wrong, table, 0, 100)
    wrong = open_tier(partitions=4)
    server.ask("DEL", "hps:{ctr/2/user}m")
    with pytest.raises(TierError, match="partitions in Redis: 8, here: 4"):
        wrong.check(table)  # the rows tell


@pytest.mark.parametrize(
    ("given", "other", "named"),
    [
        ({"partitions": 4}, {}, "partitions in Redis: 8, here: 4"),
        ({}, {"dim": 5}, "dim in Redis: 4, here: 5"),
        ({}, {"dtype": np.float16}, "dtype in Redis: float32, here: float16"),
        ({}, {"key_bits": 32}, "key_bits in Redis: 64, here: 32"),
    ],
)
def test_table_with_other_metadata_is_rejected_with_both_values(
    open_tier, table, given, other, named
):
    fill(open_tier(), table, 0, 100)
    kwargs = {"dim": DIM, **other}
    changed_table = EmbeddingTable.make("user", kwargs.pop("dim"), model="ctr", version=2, **kwargs)
    tier = open_tier(**given)
    with pytest.raises(TierError, match=named):
        tier.check(changed_table)
    other_table = EmbeddingTable.make("items", DIM, model="ctr", version=2)
    fill(tier, other_table, 0, 10)
    parts = [Part.make(changed_table, np.arange(10)), Part.make(other_table, np.arange(10))]
    ctx = FetchContext()
    tier.fetch(parts, ctx)
    assert len(parts[0].missing) == 10
    assert len(parts[1].missing) == 0
    assert ctx.degraded == ["redis"]


def test_rejected_table_is_checked_again(server, open_tier, table, monkeypatch):
    monkeypatch.setattr("hps.tiers.redis.tables._RECHECK_S", 0.0)
    fill(open_tier(partitions=4), table, 0, 100)
    tier = open_tier()
    with pytest.raises(TierError, match="partitions"):
        tier.check(table)
    server.ask("FLUSHALL")
    fill(tier, table, 0, 100)
    assert len(held(tier, table, np.arange(100))) == 100


def test_nodes_starting_together_agree_on_metadata(open_tier, table):
    """If their settings differ, one is rejected, whichever was first."""
    tiers = [open_tier(partitions=n) for n in (4, 8) * 4]
    outcomes = []

    def use(tier):
        try:
            fill(tier, table, 0, 50)
            outcomes.append(None)
        except TierError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=use, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(None) == 4


def test_tier_connects_at_first_use():
    tier = RedisTier(settings(shared_server(), addresses=["127.0.0.1:1"]))
    assert tier.rows(EmbeddingTable.make("t", 2)) == 0
    with pytest.raises(TierError, match=r"127\.0\.0\.1:1 cannot be reached"):
        tier.check(EmbeddingTable.make("t", 2))
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.check(EmbeddingTable.make("t", 2))


# -- contents --------------------------------------------------------------------------------------


def test_all_rows_are_scanned(open_tier, table):
    tier = open_tier()
    keys = fill(tier, table, -3000, 3000)
    tier.delete(table, keys[:10].copy(), versions_of(10, STARTED.ms + 1))
    found = {}
    for some, rows, versions in tier.scan(table, 100):
        np.testing.assert_array_equal(rows, rows_of(some))
        assert (versions == versions_of(1)).all()
        found |= dict.fromkeys(some.tolist())
    assert sorted(found) == keys[10:].tolist()
    dead = {k: v for keys, at in tier.tombstones(table, 100) for k, v in zip(keys, at, strict=True)}
    assert dead == dict.fromkeys(keys[:10].tolist(), versions_of(1, STARTED.ms + 1)[0])


def test_usage_reports_entries_and_bytes(open_tier, table):
    tier = open_tier()
    fill(tier, table, 0, 2000)
    assert tier.rows(table) == 2000
    usage = tier.usage(table)
    assert usage.entries == 2000
    assert 2000 * (9 + 4 * DIM + 8) < usage.bytes < 2000 * 500


def test_rows_are_counted_in_background(server, open_tier, table, monkeypatch):
    tier, other = open_tier(), open_tier()
    tier.check(table)
    fill(other, table, 0, 100)
    assert tier.rows(table) == 0
    tier._maintenance._last = -100.0
    until(lambda: tier.rows(table) == 100)


def test_tables_are_listed_and_erased(server, open_tier, table):
    tier = open_tier()
    other = EmbeddingTable.make("user", DIM, model="ctr", version=3)
    for each in (table, other, EmbeddingTable.make("items", DIM, model="ctr2")):
        fill(tier, each, 0, 1000)
    names = [(t.model, t.version, t.name) for t in tier.find_tables()]
    assert names == [("ctr", 2, "user"), ("ctr", 3, "user"), ("ctr2", 1, "items")]
    assert [t.version for t in tier.find_tables("ctr")] == [2, 3]
    tier.erase("ctr", 2)
    assert [t.version for t in tier.find_tables("ctr")] == [3]
    assert tier.rows(table) == 0
    assert not len(held(tier, table, np.arange(1000)))
    assert len(held(tier, other, np.arange(1000))) == 1000
    fill(tier, table, 0, 10)  # its facts come back
    assert server.ask("HGET", "hps:{ctr/2/user}m", "partitions") == b"8"
    tier.erase("ctr", table="user")
    assert [t.model for t in tier.find_tables()] == ["ctr2"]
    assert not [k for k in server.ask("KEYS", "*") if k.startswith(b"hps:{ctr/")]


def test_large_batches_are_sliced_to_let_other_clients_in(server, open_tier, table):
    tier = open_tier()
    before = commands(server)
    keys = fill(tier, table, 0, 60_000)
    assert len(held(tier, table, keys)) == 60_000
    now = commands(server)
    assert now["evalsha"] - before["evalsha"] >= 60_000 / WRITE_SLICE
    assert now["hmget"] - before["hmget"] >= 60_000 / READ_SLICE


def commands(server):
    """Number of calls of each command that the server has served."""
    with server.client() as client:
        stats = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()})


# -- age -------------------------------------------------------------------------------------------


def test_expired_rows_are_not_served_and_are_removed(server, open_tier, table):
    tier = open_tier(ttl_s=60)
    fill(tier, table, 0, 1000, STARTED.ms - 61_000)
    fill(tier, table, 1000, 2000)
    part = Part.make(table, np.array([5, 1005]), np.full((2, DIM), 7, np.float32))
    tier.fetch([part], FetchContext())
    assert part.missing.tolist() == [0]
    assert (part.out[0] == 7).all()
    assert sum(len(keys) for keys, _, _ in tier.scan(table)) == 1000
    assert tier.usage(table).entries == 2000
    assert tier.expire(table) == 1000
    assert tier.usage(table).entries == 1000
    assert len(held(tier, table, np.arange(1000, 2000))) == 1000


def test_expired_rows_are_not_promoted(open_tier, table):
    """Otherwise each lookup that finds them on disk would write them again."""
    tier, keys = open_tier(ttl_s=60), np.arange(10)
    tier.promote(table, keys, rows_of(keys), versions_of(10, STARTED.ms - 61_000))
    assert tier.usage(table).entries == 0
    tier.promote(table, keys, rows_of(keys), versions_of(10))
    assert len(held(tier, table, keys)) == 10


def test_time_to_live_is_set_per_table(open_tier, table):
    other = EmbeddingTable.make("items", DIM, model="ctr")
    tier = open_tier(ttl_s=60, table_ttl_s={"ctr/items": None})
    for each in (table, other):
        fill(tier, each, 0, 10, STARTED.ms - 61_000)
    assert not len(held(tier, table, np.arange(10)))
    assert len(held(tier, other, np.arange(10))) == 10


@pytest.mark.parametrize(("of_table", "of_redis"), [(60, None), (60, 3600), (3600, 60)])
def test_the_shorter_time_to_live_applies(open_tier, of_table, of_redis):
    tier = open_tier(ttl_s=of_redis)
    table = EmbeddingTable.make("user", DIM, model="ctr", ttl_s=of_table)
    fill(tier, table, 0, 10, STARTED.ms - 61_000)
    fill(tier, table, 10, 20)
    assert len(held(tier, table, np.arange(20))) == 10
    assert tier.expire(table) == 10


def test_removed_rows_are_counted(server):
    counted = []
    tier = RedisTier(settings(server), lambda table, rows: counted.append((table.name, rows)))
    table = EmbeddingTable.make("user", DIM, model="ctr", ttl_s=60)
    fill(tier, table, 0, 10, STARTED.ms - 61_000)
    tier.expire(table)
    tier.close()
    assert counted == [("user", 10)]


def test_expired_tombstones_are_removed(open_tier):
    table = EmbeddingTable.make("user", DIM, tombstone_ttl_s=60)
    tier = open_tier()
    tier.delete(table, np.arange(100), versions_of(100, STARTED.ms - 61_000))
    tier.delete(table, np.arange(100, 150), versions_of(50))
    assert tier.expire(table) == 100
    assert tier.usage(table).entries == 50


def test_expired_entries_are_removed_in_background(open_tier, table):
    tier = open_tier(ttl_s=40)
    fill(tier, table, 0, 1000, STARTED.ms - 61_000)
    tier._maintenance._last = -100.0
    until(lambda: tier.rows(table) == 0)


def test_small_partitions_are_checked_once_per_pass(server, open_tier, table, monkeypatch):
    """With a check every ten seconds, thousands of tables would keep the server busy."""
    tier = open_tier()
    fill(tier, table, 0, 1000)
    (opened,), upkeep, steps = tier._tables.opened(), tier._maintenance, []
    step = type(upkeep)._step
    monkeypatch.setattr(upkeep, "_step", lambda *a: steps.append(a[1]) or step(upkeep, *a))
    for _ in range(2 * 360 + 10):  # of ten seconds, in passes of an hour
        server.ask("DEL", "hps:{ctr/2/user}u")
        upkeep.expire(opened, 10.0)
    assert sorted(steps) == sorted([*range(8)] * 2)


# -- overflow --------------------------------------------------------------------------------------

MARGIN, PARTITIONS = 1000, 4
LONG_AGO = struct.pack("<q", 1_000_000_000)
POLICIES = ["random", "least_used", "oldest"]


def entries(server, table, kind):
    stem = "hps:{ctr/2/user" if kind == "native" else "hps_et{hps_et.ctr.user"
    return [server.ask("HLEN", f"{stem}/p{i}}}v") for i in range(PARTITIONS)]


def stamps(server):
    return [each for name in server.ask("KEYS", "hps*}t") for each in server.ask("HVALS", name)]


def overflowing(open_tier, policy, kind="native", **given):
    return open_tier(
        layout=kind,
        partitions=PARTITIONS,
        overflow_margin=MARGIN,
        overflow_policy=policy,
        **given,
    )


@pytest.mark.parametrize("kind", ["native", "hps"])
@pytest.mark.parametrize("policy", POLICIES)
def test_partition_never_stays_above_margin(server, open_tier, table, policy, kind):
    tier = overflowing(open_tier, policy, kind)
    for start in range(0, 40_000, 2000):
        fill(tier, table, start, start + 2000)
        assert max(entries(server, table, kind)) <= MARGIN
    assert min(entries(server, table, kind)) >= 0.6 * MARGIN
    assert sum(server.ask("HLEN", key) for key in server.ask("KEYS", "hps*}t")) <= (
        PARTITIONS * MARGIN
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("target", [0.25, 0.8])
def test_overflow_is_evicted_down_to_target(server, open_tier, table, policy, target):
    tier = overflowing(open_tier, policy, overflow_resolution_target=target)
    fill(tier, table, 0, 3000)
    assert max(entries(server, table, "native")) <= MARGIN
    for start in range(3000, 20_000):
        before = entries(server, table, "native")
        fill(tier, table, start, start + 1)
        after = entries(server, table, "native")
        if any(b > a for b, a in zip(before, after, strict=True)):
            resolved = next(a for b, a in zip(before, after, strict=True) if b > a)
            assert resolved == round(MARGIN * target)
            return
    raise AssertionError("it never overflowed")


def test_nothing_is_evicted_without_margin(server, open_tier, table):
    tier = open_tier(overflow_policy="oldest")
    fill(tier, table, 0, 20_000)
    assert tier.usage(table).entries == 20_000
    assert not server.ask("KEYS", "hps*}t")


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_recently_used_rows_are_kept(server, open_tier, table, kind):
    tier = overflowing(open_tier, "oldest", kind)
    keys = fill(tier, table, 0, 3600)
    for name in server.ask("KEYS", "hps*}t"):  # all used long ago
        fields = server.ask("HKEYS", name)
        for field in fields:
            server.ask("HSET", name, field, LONG_AGO)
    used = keys[::8]
    held(tier, table, used)
    until(lambda: len(keys) - stamps(server).count(LONG_AGO) == len(used))
    fill(tier, table, 10_000, 11_000)
    assert len(held(tier, table, used)) == len(used)
    assert len(held(tier, table, keys)) < 0.9 * len(keys)
    assert len(held(tier, table, np.arange(10_000, 11_000))) == 1000


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_frequently_used_rows_are_kept(server, open_tier, table, kind):
    tier = overflowing(open_tier, "least_used", kind)
    keys = fill(tier, table, 0, 3600)
    used = keys[::8].copy()
    for _ in range(6):
        held(tier, table, used)
    until(lambda: sum(map(int, stamps(server))) == len(keys) + 6 * len(used))
    for start in (10_000, 11_000):
        fill(tier, table, start, start + 1000)
    assert len(held(tier, table, used)) == len(used)
    assert len(held(tier, table, keys)) < 0.9 * len(keys)


def test_use_counts_are_halved_by_eviction(server, open_tier, table):
    """Counts of the remaining rows are halved, so that rows that were popular once can be evicted."""
    tier = overflowing(open_tier, "least_used")
    keys = fill(tier, table, 0, 3600)
    for name in server.ask("KEYS", "hps*}t"):
        for field in server.ask("HKEYS", name):
            server.ask("HSET", name, field, 64)
    for start in range(10_000, 40_000, 1000):
        new = fill(tier, table, start, start + 1000)
    names = server.ask("KEYS", "hps*}t")
    assert max(int(count) for name in names for count in server.ask("HVALS", name)) < 16
    assert len(held(tier, table, new)) > 100
    assert len(held(tier, table, keys)) < 0.5 * len(keys)


def test_entries_without_stamps_are_evicted_first(server, open_tier, table):
    """Entries that HPS wrote with its default settings have no stamps."""
    fill(open_tier(partitions=PARTITIONS), table, 0, 6000)
    assert not server.ask("KEYS", "hps*}t")
    tier = overflowing(open_tier, "oldest")
    for start in range(10_000, 13_000, 500):
        fill(tier, table, start, start + 500)
    assert len(held(tier, table, np.arange(10_000, 13_000))) == 3000
    assert max(entries(server, table, "native")) <= MARGIN


def test_large_overflow_is_evicted_in_steps(server, open_tier, table):
    fill(open_tier(partitions=PARTITIONS), table, 0, 60_000)
    tier = overflowing(open_tier, "random")
    sizes = []
    for start in range(100_000, 101_000, 10):
        fill(tier, table, start, start + 10)
        sizes.append(sum(entries(server, table, "native")))
    assert sizes[0] > 30_000  # no call may take long
    assert sizes[-1] <= PARTITIONS * MARGIN


# -- memory of evicted rows ------------------------------------------------------------------------


def later(ms):
    return versions_of(1, STARTED.ms + ms)


def evicted(tier, reader, table, keys, ms):
    """Rows and a deletion of this age that newer rows have evicted. A read with ``reader`` does not count
    as use."""
    tier.insert(table, keys, rows_of(keys), versions_of(len(keys), STARTED.ms + ms))
    tier.delete(table, keys[:1].copy(), later(ms))
    start = 10_000
    while (reader.get(table, keys).versions > 0).any():
        assert start < 100_000
        fill(tier, table, start, start + 2000, STARTED.ms - 3_600_000)
        start += 2000
    assert start > 10_000


WRITES = ["apply", "insert", "promote", "delete"]


def write(tier, table, keys, verb, ms):
    rows, versions = rows_of(keys), versions_of(len(keys), STARTED.ms + ms)
    if verb == "apply":
        nothing = TableChanges(keys, rows, versions, keys[:0], versions[:0])
        tier.apply(table, nothing, [StreamPosition("t", 0, 1)])
        assert tier.applied(table, "t", 0) == 1
    elif verb == "delete":
        tier.delete(table, keys, versions)
    else:
        getattr(tier, verb)(table, keys, rows, versions)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", WRITES)
def test_older_write_does_not_replace_evicted_row(open_tier, table, policy, verb):
    """This holds for a replay, for a node that lags behind, and for one that evicts nothing itself."""
    tier, keys = overflowing(open_tier, policy), np.arange(40)
    other = open_tier(partitions=PARTITIONS)
    evicted(tier, other, table, keys, ms=0)
    for writer in (tier, other):
        write(writer, table, keys, verb, ms=-1000)
        assert (tier.get(table, keys).versions == 0).all()
    write(tier, table, keys, verb, ms=0)  # the same once more, or what is newer
    assert (tier.get(table, keys).versions == later(0)[0]).all()
    write(tier, table, keys, verb, ms=5)
    assert (tier.get(table, keys).versions == later(5)[0]).all()


def test_floors_expire_like_tombstones(open_tier):
    table = EmbeddingTable.make("user", DIM, model="ctr", version=2, tombstone_ttl_s=60)
    tier, keys = overflowing(open_tier, "random"), np.arange(40)
    evicted(tier, open_tier(partitions=PARTITIONS), table, keys, ms=-61_000)
    write(tier, table, keys, "insert", ms=-62_000)
    assert len(held(tier, table, keys)) == 40


def test_old_rows_not_below_floor_are_promoted(open_tier, table):
    """Except those that share a bucket with a newer evicted row."""
    tier = overflowing(open_tier, "random")
    evicted(tier, open_tier(partitions=PARTITIONS), table, np.arange(400), ms=0)
    cold = np.arange(100_000, 100_500)
    tier.promote(table, cold, rows_of(cold), versions_of(500, STARTED.ms - 3_600_000))
    assert len(held(tier, table, cold)) > 350


def test_floors_take_bounded_memory(server, open_tier, table):
    tier = overflowing(open_tier, "random")
    fill(tier, table, 0, 40_000)
    floors = [key for key in server.ask("KEYS", "hps*") if key.endswith(b"}f")]
    assert len(floors) == PARTITIONS
    assert {server.ask("STRLEN", key) for key in floors} == {8 * MARGIN + 9}
    tier.erase("ctr")
    assert not server.ask("KEYS", "hps*")
    fill(tier, table, 0, 10, STARTED.ms - 1000)
    assert len(held(tier, table, np.arange(10))) == 10


# -- stream positions ------------------------------------------------------------------------------


def changes(upserts=(), deletions=(), ms=None):
    keys, deleted = np.array(upserts, np.int64), np.array(deletions, np.int64)
    return TableChanges(
        keys, rows_of(keys), versions_of(len(keys), ms), deleted, versions_of(len(deleted), ms)
    )


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_positions_are_stored_with_rows(server, open_tier, table, kind):
    tier = open_tier(layout=kind)
    assert tier.applied(table, "ctr.user", 3) is None
    tier.apply(table, changes([1, 2, 3]), [StreamPosition("ctr.user", 3, 17)])
    assert tier.applied(table, "ctr.user", 3) == 17
    assert tier.applied(table, "ctr.user", 4) is None
    assert held(tier, table, [1, 2, 3, 4]).tolist() == [1, 2, 3]
    tier.apply(table, changes([4], [1]), [StreamPosition("ctr.user", 3, 2**40)])
    assert RedisTier(settings(server, layout=kind)).applied(table, "ctr.user", 3) == 2**40
    assert held(tier, table, [1, 2, 3, 4]).tolist() == [2, 3, 4]
    tier.apply(table, changes([1]), [StreamPosition("ctr.user", 3, 5)])  # a replay
    assert tier.applied(table, "ctr.user", 3) == 2**40
    tier.apply(table, changes(), [StreamPosition("ctr.user", 0, 1), StreamPosition("x", 1, 2)])
    assert tier.applied(table, "ctr.user", 0) == 1
    assert tier.applied(table, "x", 1) == 2


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_position_is_reset_for_recreated_topic(server, open_tier, table, kind):
    tier = open_tier(layout=kind)
    tier.apply(table, changes([1]), [StreamPosition("t", 0, 17), StreamPosition("t", 1, 4)])
    assert not tier.identify(table, "t", 0, "first id"), "written before ids were kept"
    assert not tier.identify(table, "t", 0, "first id")
    assert tier.applied(table, "t", 0) == 17
    assert tier.identify(table, "t", 0, "second id")
    assert [tier.applied(table, "t", p) for p in (0, 1)] == [0, 4]
    assert not tier.identify(table, "t", 0, "second id")
    tier.apply(table, changes(), [StreamPosition("t", 0, 5, continues_from=3)])
    assert tier.applied(table, "t", 0) == 0, "it lacks the first three"
    tier.apply(table, changes(), [StreamPosition("t", 0, 5)])
    assert tier.applied(table, "t", 0) == 5
    tier.restart(table, "t", 0)
    assert tier.applied(table, "t", 0) == 0
    assert held(tier, table, [1]).tolist() == [1]


def test_interrupted_identification_is_completed(server, open_tier, table):
    tier = open_tier(partitions=2)
    tier.apply(table, changes([1]), [StreamPosition("t", 0, 17)])
    tier.identify(table, "t", 0, "first id")
    first, second = (f"hps:{{ctr/2/user/p{i}}}o" for i in (0, 1))
    server.ask("HSET", first, "t/0/id", "second id", "t/0", 0)
    assert tier.identify(table, "t", 0, "second id")
    assert server.ask("HMGET", second, "t/0/id", "t/0") == [b"second id", b"0"]


def test_positions_are_lost_with_rows(server, open_tier, table):
    tier = open_tier()
    tier.apply(table, changes([1, 2, 3]), [StreamPosition("t", 0, 17)])
    server.ask("DEL", "hps:{ctr/2/user/p5}o")
    assert tier.applied(table, "t", 0) is None
    tier.apply(table, changes(), [StreamPosition("t", 0, 9)])
    assert tier.applied(table, "t", 0) == 9
    tier.erase("ctr")
    assert tier.applied(table, "t", 0) is None


def test_position_is_not_stored_when_a_slice_fails(server, open_tier, table):
    """One slice of the batch fails; the position is unchanged."""
    tier = open_tier(partitions=2)
    tier.apply(table, changes([1]), [StreamPosition("t", 0, 1)])
    server.ask("CONFIG", "SET", "maxmemory", server.ask("INFO", "memory")["used_memory"] + 300_000)
    try:
        with pytest.raises(TierError, match="out of memory"):
            tier.apply(table, changes(range(30_000)), [StreamPosition("t", 0, 2)])
    finally:
        server.ask("CONFIG", "SET", "maxmemory", 0)
    assert 0 < tier.usage(table).entries < 30_000
    assert tier.applied(table, "t", 0) == 1
    tier.apply(table, changes(range(30_000)), [StreamPosition("t", 0, 2)])
    assert len(held(tier, table, np.arange(30_000))) == 30_000
    assert tier.applied(table, "t", 0) == 2


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_higher_version_of_upsert_and_deletion_wins(open_tier, table, kind):
    tier = open_tier(layout=kind)
    batch = changes([1, 2, 3], [1, 2, 3])
    batch.versions[:] += np.array([1, 0, 0], np.uint64)
    batch.deleted_versions[:] += np.array([0, 0, 1], np.uint64)
    tier.apply(table, batch, [])
    assert held(tier, table, [1, 2, 3]).tolist() == [1]


def test_changes_with_wrong_arrays_are_rejected(open_tier, table):
    batch = changes([1, 2])
    with pytest.raises(BadRequest, match="versions"):
        open_tier().apply(table, TableChanges(batch.keys, batch.vectors, batch.versions[:1],
                                              batch.deleted, batch.deleted_versions), [])  # fmt: skip


# -- preloading ------------------------------------------------------------------------------------


def chunks_of(n, size=10_000):
    for start in range(0, n, size):
        keys = np.arange(start, min(n, start + size))
        yield keys, rows_of(keys)


def test_load_inserts_a_share_of_rows(open_tier, table):
    tier = open_tier()
    seen = []
    loaded = tier.preload(
        table, RedisLoadSource(chunks_of(40_000), version_now(), share=0.25), seen.append
    )
    assert sum(seen) == 40_000
    assert 9_000 < loaded < 11_000
    first = held(tier, table, np.arange(40_000))
    assert len(first) == loaded == tier.usage(table).entries
    assert (
        tier.preload(table, RedisLoadSource(chunks_of(40_000), version_now(), share=0.25)) == loaded
    )
    assert tier.usage(table).entries == loaded  # the same ones


def test_killed_load_continues(open_tier, table, monkeypatch):
    monkeypatch.setattr("hps.tiers.redis.load._CHUNK", 1000)
    tier, version = open_tier(), version_now()

    def broken():
        yield from list(chunks_of(40_000))[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier.preload(table, RedisLoadSource(broken(), version, mark="digest"))
    assert tier.usage(table).entries == 30_000
    restarted = open_tier()
    # Rows sent and not recorded yet are sent again.
    loaded = restarted.preload(table, RedisLoadSource(chunks_of(40_000), version, mark="digest"))
    assert 10_000 <= loaded <= 12_000
    assert len(held(restarted, table, np.arange(40_000))) == 40_000
    assert restarted.preload(table, RedisLoadSource(chunks_of(40_000), version, mark="digest")) == 0
    assert (
        restarted.preload(table, RedisLoadSource(chunks_of(40_000), version, mark="other digest"))
        == 40_000
    )


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_rows_that_redis_lost_are_loaded_again(server, open_tier, table, kind):
    """Only the lost rows are loaded, whether a partition was lost as a whole or only its rows."""
    tier, version, keys = open_tier(layout=kind), version_now(), np.arange(4000)
    assert tier.preload(table, RedisLoadSource(chunks_of(4000), version, mark="digest")) == 4000
    names = TableLayout(table, kind, 8)
    for removed_keys in ([names.rows_keys[3]], [names.rows_keys[5], names.positions_keys[5]]):
        server.ask("DEL", *removed_keys)
        lost = 4000 - len(held(tier, table, keys))
        assert 0 < lost < 1000
        assert (
            open_tier(layout=kind).preload(
                table, RedisLoadSource(chunks_of(4000), version, mark="digest")
            )
            == lost
        )
        assert len(held(tier, table, keys)) == 4000


def test_only_partitions_that_may_have_older_rows_are_read(server, open_tier, table):
    """A write is compared with the partition's highest version; without one, with each row's version."""
    tier, keys = open_tier(), np.arange(1000)
    fill(tier, table, 0, 1000)
    looks = server.ask("INFO", "commandstats").get("cmdstat_hmget", {"calls": 0})["calls"]
    tier.insert(table, keys, rows_of(keys + 1), versions_of(1000, STARTED.ms + 2_000))
    tier.delete(table, keys[500:], versions_of(500, STARTED.ms + 3_000))
    assert server.ask("INFO", "commandstats").get("cmdstat_hmget", {"calls": 0})["calls"] == looks

    # Of the first half newer than the rows and older than the deletions that their partitions have seen.
    tier.insert(table, keys, rows_of(keys + 2), versions_of(1000, STARTED.ms + 2_500))
    part = tier.get(table, keys)
    assert np.flatnonzero(part.source).tolist() == list(range(500))
    assert (part.out[:500] == rows_of(keys[:500] + 2)).all()

    # As written by a process that does not keep it.
    names = TableLayout(table, "native", 8)
    for name in names.positions_keys:
        assert server.ask("HDEL", name, "highest") == 1
    tier.insert(table, keys, rows_of(keys), versions_of(1000, STARTED.ms + 2_400))
    assert (tier.get(table, keys).out[:500] == rows_of(keys[:500] + 2)).all()
    tier.insert(table, keys, rows_of(keys), versions_of(1000, STARTED.ms + 4_000))
    tier.insert(table, keys, rows_of(keys + 1), versions_of(1000, STARTED.ms + 3_999))
    assert (tier.get(table, keys).out == rows_of(keys)).all()


def test_writer_that_does_not_raise_mark_is_overwritten_until_marks_are_removed(
    server, open_tier, table
):
    """As an earlier build: what it wrote last may be overwritten by older rows, until marks are removed as
    docs/redis.md says."""
    tier, keys = open_tier(), np.arange(1000)
    fill(tier, table, 0, 1000)
    names = TableLayout(table, "native", 8).positions_keys
    marks = [server.ask("HGET", name, "highest") for name in names]
    tier.insert(table, keys, rows_of(keys + 3), versions_of(1000, STARTED.ms + 3_000))
    for name, mark in zip(names, marks, strict=True):
        server.ask("HSET", name, "highest", mark)
    tier.insert(table, keys[:500], rows_of(keys[:500] + 2), versions_of(500, STARTED.ms + 2_000))
    assert (tier.get(table, keys).out[:500] == rows_of(keys[:500] + 2)).all()
    for name in names:
        server.ask("HDEL", name, "highest")
    tier.insert(table, keys, rows_of(keys + 1), versions_of(1000, STARTED.ms + 1_000))
    part = tier.get(table, keys)
    assert (part.out[:500] == rows_of(keys[:500] + 2)).all()
    assert (part.out[500:] == rows_of(keys[500:] + 3)).all()


LOADER = """
import sys, numpy as np
import hps.tiers.redis.load
from hps.config.store_settings import RedisSettings
from hps.tiers.redis import RedisLoadSource, RedisTier
from hps.types import EmbeddingTable

hps.tiers.redis.load._CHUNK = 1000
table = EmbeddingTable.make("user", 4, model="ctr", version=2)
keys = np.arange(10**7)
rows = np.ones((len(keys), 4), np.float32)
source = RedisLoadSource([(keys, rows)], 1, mark="digest")
RedisTier(RedisSettings(addresses=[sys.argv[1]])).preload(table, source)
"""


def test_load_continues_after_kill(server, open_tier, table, monkeypatch):
    """``kill -9`` of the process, in the middle."""
    monkeypatch.setattr("hps.tiers.redis.load._CHUNK", 1000)

    def noted():
        names = [f"hps:{{ctr/2/user/p{i}}}o" for i in range(8)]
        found = [server.ask("HGET", name, "loaded") or b":0" for name in names]
        return min(int(each.rpartition(b":")[2]) for each in found)

    def clients():
        return server.ask("CLIENT", "LIST").count(b"addr=")

    others = clients()
    process = subprocess.Popen([sys.executable, "-c", LOADER, server.address])
    try:
        until(lambda: noted() > 5000)
    finally:
        process.kill()
        process.wait()
    until(lambda: clients() <= others)  # what it had sent is done as well
    seen = noted()
    n = seen + 3500
    rows = np.ones((n, DIM), np.float32)
    tier = open_tier()
    assert (
        tier.preload(table, RedisLoadSource([(np.arange(n), rows)], 1, mark="digest")) == n - seen
    )
    part = tier.get(table, np.arange(n))
    assert len(part.missing) == 0
    assert (part.out == 1).all()


def test_load_keeps_newer_rows(open_tier, table):
    tier = open_tier()
    tier.insert(table, np.array([5]), rows_of([500]), versions_of(1))
    tier.preload(table, RedisLoadSource(chunks_of(100), make_version(STARTED.ms - 1000)))
    assert tier.get(table, np.array([5])).out.tolist() == rows_of([500]).tolist()


def test_last_row_of_repeated_key_is_loaded(open_tier, table, monkeypatch):
    """Two chunks are in flight at a time, and the first one takes longer."""
    monkeypatch.setattr("hps.tiers.redis.load._CHUNK", 1000)
    insert = RedisTier.insert

    def slow(self, table, keys, vectors, versions):
        if vectors[0, 0] == 1:
            time.sleep(0.2)
        insert(self, table, keys, vectors, versions)

    monkeypatch.setattr(RedisTier, "insert", slow)
    tier = open_tier()
    rows = np.repeat(np.float32([1, 2]), 1000)[:, None].repeat(DIM, 1)
    tier.preload(table, RedisLoadSource([(np.arange(2000) % 1000, rows)], version_now()))
    assert (tier.get(table, np.arange(1000)).out == 2).all()


def test_source_is_checked_before_first_write(open_tier, table):
    tier = open_tier()
    with pytest.raises(KeyboardInterrupt):
        tier.preload(
            table, RedisLoadSource(chunks_of(100), version_now(), mark="a", before=interrupt)
        )
    assert not len(held(tier, table, np.arange(100)))
    version = version_now()
    assert tier.preload(table, RedisLoadSource(chunks_of(100), version, mark="b")) == 100
    assert (
        tier.preload(table, RedisLoadSource(chunks_of(100), version, mark="b", before=interrupt))
        == 0
    )


def interrupt():
    raise KeyboardInterrupt
