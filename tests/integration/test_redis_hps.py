"""A Redis that HPS filled is read and written in place, with the same bytes as HPS."""

import struct
import time
from functools import partial

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.redis import RedisTier
from hps.types import EmbeddingTable, version_now
from tests.support.redis_servers import settings, shared_server
from tests.support.rows import rising_rows
from tests.support.waiting import until
from tests.unit.tiers.test_redis_layout import PARTITIONS

DIM = 4


def name(partition, kind):
    return f"hps_et{{hps_et.wdl.user/p{partition}}}{kind}".encode()


def field(key, bits):
    return struct.pack("<q" if bits == 64 else "<I", key)


rows_of = partial(rising_rows, dim=DIM, modulus=97)


class Hps:
    """Commands of HPS 24.06, one by one."""

    def __init__(self, server, bits=64, policy=None, partitions=8):
        self.server, self.bits, self.policy, self.partitions = server, bits, policy, partitions
        self.column = {8: 0, 16: 1}[partitions]

    def keys(self):
        return [k for k in PARTITIONS if self.bits == 64 or 0 <= k < 2**32]

    def insert(self):
        for key, row in zip(self.keys(), rows_of(self.keys()), strict=True):
            at, stored = PARTITIONS[key][self.column], field(key, self.bits)
            if self.policy == "least_used":
                self.server.ask("HINCRBY", name(at, "t"), stored, 1)
            elif self.policy == "oldest":
                self.server.ask("HSET", name(at, "t"), stored, struct.pack("<q", 1_700_000_000))
            self.server.ask("HSET", name(at, "v"), stored, row.tobytes())

    def fetch(self, key):
        return self.server.ask(
            "HMGET", name(PARTITIONS[key][self.column], "v"), field(key, self.bits)
        )[0]

    def stamp(self, key):
        return self.server.ask(
            "HGET", name(PARTITIONS[key][self.column], "t"), field(key, self.bits)
        )


@pytest.fixture
def server():
    return shared_server()


@pytest.fixture
def open_tier():
    opened = []

    def make(server, **given):
        opened.append(RedisTier(settings(server, layout="hps", **given)))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


def table_of(bits=64, dim=DIM):
    return EmbeddingTable.make("user", dim, model="wdl", version=3, key_bits=bits)


def fetch(tier, table, *keys):
    part = Part.make(table, np.array(keys, np.int64))
    tier.fetch([part], FetchContext())
    return part


@pytest.mark.parametrize("bits", [64, 32])
def test_rows_written_by_hps_are_read(server, open_tier, bits):
    hps = Hps(server, bits)
    hps.insert()
    keys = hps.keys()
    part = fetch(open_tier(server), table_of(bits), *keys, 77)
    assert part.missing.tolist() == [len(keys)]
    np.testing.assert_array_equal(part.out[:-1], rows_of(keys))
    assert not part.versions[:-1].any()


@pytest.mark.parametrize("bits", [64, 32])
def test_written_rows_are_readable_by_hps(server, open_tier, bits):
    hps, tier, table = Hps(server, bits), open_tier(server), table_of(bits)
    keys = np.array(hps.keys())
    tier.insert(table, keys, rows_of(keys), np.full(len(keys), version_now(), np.uint64))
    for key, row in zip(keys.tolist(), rows_of(keys), strict=True):
        assert hps.fetch(key) == row.tobytes()
        assert hps.stamp(key) is None
    tier.delete(table, keys[:1], np.zeros(1, np.uint64))
    assert hps.fetch(keys[0]) is None


def test_last_write_wins_without_versions(server, open_tier):
    hps, tier, table = Hps(server), open_tier(server), table_of()
    hps.insert()
    new = rows_of([50])
    tier.insert(table, np.array([42]), new, np.zeros(1, np.uint64))
    assert hps.fetch(42) == new.tobytes()
    hps.insert()
    assert fetch(tier, table, 42).out.tolist() == rows_of([42]).tolist()


def test_promotion_overwrites_nothing(server, open_tier):
    """Its row was read a while ago; the stored one may be newer, and rows have no versions."""
    hps, tier, table = Hps(server), open_tier(server), table_of()
    hps.insert()
    keys, zero = np.array([42, 1234567]), np.zeros(2, np.uint64)
    tier.promote(table, keys, rows_of(keys) + 1, zero)
    assert fetch(tier, table, 42, 1234567).out.tolist() == [
        rows_of([42])[0].tolist(), (rows_of([1234567])[0] + 1).tolist()
    ]  # fmt: skip


def test_other_partition_count_is_detected_from_rows(server, open_tier):
    """HPS does not record the number of partitions."""
    Hps(server, partitions=16).insert()
    with pytest.raises(TierError, match=r"partitions in Redis: 16, here: 8"):
        open_tier(server).check(table_of())
    server.ask("FLUSHALL")
    Hps(server).insert()
    with pytest.raises(TierError, match=r"partitions in Redis: 8, here: 16"):
        open_tier(server, partitions=16).check(table_of())
    open_tier(server, partitions=8).check(table_of())


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (table_of(dim=5), "bytes per value in Redis: 16, here: 20"),
        (table_of(32), "bytes per key in Redis: 8, here: 4"),
    ],
)
def test_rows_of_another_shape_are_rejected(server, open_tier, table, named):
    hps = Hps(server)
    hps.insert()
    tier = open_tier(server)
    with pytest.raises(TierError, match=named):
        tier.check(table)
    with pytest.raises(TierError, match=named):
        tier.insert(table, np.array([1]), np.zeros((1, table.dim), np.float32), np.zeros(1, "u8"))
    ctx, part = FetchContext(), Part.make(table, np.array([1]))
    tier.fetch([part], ctx)
    assert part.missing.tolist() == [0]
    assert ctx.degraded == ["redis"]
    assert hps.fetch(1) == rows_of([1]).tobytes()


def test_row_of_wrong_length_is_missing(server, open_tier):
    """A row that was written after the table was checked."""
    hps, tier, table = Hps(server), open_tier(server), table_of()
    hps.insert()
    tier.check(table)
    server.ask("HSET", name(PARTITIONS[42][0], "v"), field(42, 64), b"short")
    ctx, part = FetchContext(), Part.make(table, np.array([1, 42, 2]))
    tier.fetch([part], ctx)
    assert part.missing.tolist() == [1]
    assert ctx.degraded == ["redis"]


# -- stamps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [64, 32])
def test_uses_are_counted_as_hps_does(server, open_tier, bits):
    hps = Hps(server, bits, "least_used")
    hps.insert()
    tier = open_tier(server, overflow_margin=100, overflow_policy="least_used")
    assert hps.stamp(42) == b"1"
    fetch(tier, table_of(bits), 42, 77)
    until(lambda: hps.stamp(42) == b"2")
    tier.insert(table_of(bits), np.array([42]), rows_of([42]), np.zeros(1, np.uint64))
    assert hps.stamp(42) == b"3"
    assert hps.stamp(1) == b"1"
    assert server.ask("HLEN", name(PARTITIONS[42][0], "t")) == 2  # 42 and 1000, not 77


def test_use_of_removed_row_leaves_no_stamp(server, open_tier):
    hps = Hps(server, policy="least_used")
    hps.insert()
    tier, table = open_tier(server, overflow_margin=100, overflow_policy="least_used"), table_of()
    (opened,) = tier._tables.ready([table], time.monotonic() + 10)
    tier._touch(opened, np.array([42, 77]), b"n")
    assert hps.stamp(42) == b"2"
    assert sum(server.ask("HLEN", name(i, "t")) for i in range(8)) == len(PARTITIONS)


@pytest.mark.parametrize("bits", [64, 32])
def test_last_use_is_stored_as_hps_does(server, open_tier, bits):
    hps = Hps(server, bits, "oldest")
    hps.insert()
    tier = open_tier(server, overflow_margin=100, overflow_policy="oldest")
    before = int(time.time())
    fetch(tier, table_of(bits), 42)
    until(lambda: struct.unpack("<q", hps.stamp(42))[0] >= before)
    tier.insert(table_of(bits), np.array([2]), rows_of([2]), np.zeros(1, np.uint64))
    assert struct.unpack("<q", hps.stamp(2))[0] >= before
    assert struct.unpack("<q", hps.stamp(1))[0] == 1_700_000_000


def test_removed_row_leaves_no_stamp(server, open_tier):
    hps = Hps(server, policy="least_used")
    hps.insert()
    tier = open_tier(server, overflow_margin=100, overflow_policy="least_used")
    tier.evict(table_of(), np.array([42, 1]))
    assert hps.fetch(42) is hps.stamp(42) is None
    assert hps.stamp(1000) == b"1"


# -- tables ----------------------------------------------------------------------------------------


def test_model_is_listed_and_erased(server, open_tier):
    hps, tier = Hps(server, policy="least_used"), open_tier(server)
    hps.insert()
    other = EmbeddingTable.make("user", DIM, model="wdl2")
    tier.insert(other, np.array([1]), rows_of([1]), np.zeros(1, np.uint64))
    server.ask("SET", "hps_et_of_somebody_else", "1")
    assert [(t.model, t.name) for t in tier.find_tables()] == [("wdl", "user"), ("wdl2", "user")]
    assert tier.rows(other) == 1
    assert tier.erase("wdl") > 0
    assert [t.model for t in tier.find_tables()] == ["wdl2"]
    assert hps.fetch(42) is None
    assert len(fetch(tier, other, 1).missing) == 0
    assert tier.erase("wdl") == 0
    assert server.ask("EXISTS", "hps_et_of_somebody_else") == 1
