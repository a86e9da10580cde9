"""Concurrent readers and a writer: each row read belongs to its key and is not torn."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.tiers.base import FetchContext, Part
from hps.types import make_version

KEYS = np.arange(-40, 40)
CYCLE = 1999  # numbers that float16 holds exactly
ROUNDS = 200


def rows_of(table, keys, sequences):
    """Make rows that hold their key, their sequence and, in all other columns, a checksum of both."""
    rows = np.empty((len(keys), table.dim), table.dtype)
    rows[:, 0] = keys
    rows[:, 1] = sequences % CYCLE
    rows[:, 2:] = ((keys * 31 + sequences % CYCLE) % CYCLE)[:, None]
    return rows


@pytest.fixture
def frequent_thread_switches():
    """Switch threads fifty times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(usual)


def write(tier, table):
    """Insert, refresh, delete and evict random keys."""
    rng = np.random.default_rng(1)
    start = time.time_ns() // 1_000_000
    for sequence in range(1, ROUNDS):
        keys = rng.choice(KEYS, 30, replace=False)
        sequences = np.full(len(keys), sequence)
        versions = np.full(len(keys), make_version(start, sequence), np.uint64)
        rows = rows_of(table, keys, sequences)
        tier.insert(table, keys, rows, versions)
        tier.update(table, keys[::-1].copy(), rows[::-1].copy(), versions)
        tier.delete(table, keys[:3].copy(), versions[:3])
        tier.evict(table, keys[3:6].copy())


def read(tier, table, writer, *, versioned):
    """Check every row that is read while ``writer`` runs; return the number of rows."""
    rng = np.random.default_rng()
    found = 0
    while not writer.done() or not found:
        keys = rng.choice(KEYS, 40, replace=False)
        part = Part.make(table, keys, np.full((len(keys), table.dim), -1, table.dtype))
        tier.fetch([part], FetchContext())
        at = np.flatnonzero(part.source)
        rows = part.out[at]
        sequences = rows[:, 1].astype(np.int64)
        np.testing.assert_array_equal(rows, rows_of(table, keys[at], sequences))
        if versioned:
            reported = (part.versions[at] & np.uint64(2**20 - 1)).astype(np.int64)
            np.testing.assert_array_equal(reported % CYCLE, sequences)
        assert not np.intersect1d(part.missing, at).size
        assert not part.versions[part.missing].any()
        found += len(at)
    return found


def test_concurrent_reads_see_no_torn_or_foreign_rows(under_test, frequent_thread_switches):
    tier, table = under_test.tier, under_test.tables[2]
    versioned = under_test.case.versioned
    with ThreadPoolExecutor(4) as pool:
        writer = pool.submit(write, tier, table)
        readers = [pool.submit(read, tier, table, writer, versioned=versioned) for _ in range(3)]
        writer.result()
        assert all(reader.result() > 0 for reader in readers)
