"""The contract of every tier (hps/tiers/base.py): the same tests for all of them."""

import time

import numpy as np
import pytest

from hps.tiers.base import FetchContext, Part
from hps.types import EmbeddingTable, make_version
from tests.support.rows import rows_from

NOW_MS = time.time_ns() // 1_000_000
UNTOUCHED = 7
EXTREME = [-(2**63), 2**63 - 1, 0, -1, 1, -(2**63) + 1, 2**63 - 2, 2**32, -(2**32), 255, 256]


def keys_of(*keys):
    return np.array(keys, np.int64)


def versions_of(*sequence):
    """Versions of this moment with distinct sequence numbers."""
    return np.array([make_version(NOW_MS, s) for s in sequence], np.uint64)


def blank(table, keys):
    """A part whose initial contents differ from every answer."""
    part = Part.make(table, keys, np.full((len(keys), table.dim), UNTOUCHED, table.dtype))
    part.versions[:] = UNTOUCHED
    return part


def fetch(tier, table, *keys):
    part = blank(table, keys_of(*keys))
    tier.fetch([part], FetchContext())
    return part


def put(tier, table, key, sequence, first, verb="insert"):
    getattr(tier, verb)(table, keys_of(key), rows_from(table, first), versions_of(sequence))


def remove(tier, table, key, sequence):
    tier.delete(table, keys_of(key), versions_of(sequence))


def assert_row(ut, part, at, first, sequence=None):
    assert part.out[at].tolist() == rows_from(part.table, first)[0].tolist()
    assert part.source[at] in ut.case.sources
    assert at not in part.missing
    if sequence is not None:
        expected = versions_of(sequence)[0] if ut.case.versioned else 0
        assert part.versions[at] == expected


def assert_missing(part, at):
    assert (part.out[at] == UNTOUCHED).all()
    assert part.versions[at] == UNTOUCHED
    assert part.source[at] == 0
    assert at in part.missing


def assert_tombstone(part, at, sequence):
    assert (part.out[at] == UNTOUCHED).all()
    assert part.versions[at] == versions_of(sequence)[0]
    assert part.source[at] == 0
    assert at not in part.missing


# -- fetch -----------------------------------------------------------------------------------------


def test_misses_leave_arrays_unchanged(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    put(tier, table, 5, 1, 50)
    part = fetch(tier, table, 4, 5, 6)
    assert_missing(part, 0)
    assert_row(under_test, part, 1, 50, sequence=1)
    assert_missing(part, 2)
    assert part.missing.tolist() == [0, 2]
    assert part.missing.dtype == np.int64


def test_only_missing_keys_are_fetched(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    tier.insert(table, keys_of(1, 2, 3), rows_from(table, 10, 20, 30), versions_of(1, 1, 1))
    part = blank(table, keys_of(1, 2, 3, 4))
    part.missing = keys_of(1, 3)
    tier.fetch([part], FetchContext())
    assert part.missing.tolist() == [3]
    assert_row(under_test, part, 1, 20)
    for at in (0, 2):
        assert (part.out[at] == UNTOUCHED).all()
        assert part.source[at] == 0


def test_fetch_does_not_write_to_missing_positions(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    put(tier, table, 1, 1, 10)
    part = blank(table, keys_of(1, 2))
    positions = part.missing
    tier.fetch([part], FetchContext())
    assert positions.tolist() == [0, 1]


def test_negative_and_extreme_keys_round_trip(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    held, firsts = EXTREME[::2], list(range(100, 100 + len(EXTREME[::2])))
    assert len(fetch(tier, table, *EXTREME).missing) == len(EXTREME)
    tier.insert(table, keys_of(*held), rows_from(table, *firsts), versions_of(*[1] * len(held)))
    part = fetch(tier, table, *EXTREME)
    for at, key in enumerate(EXTREME):
        if key in held:
            assert_row(under_test, part, at, firsts[held.index(key)])
        else:
            assert_missing(part, at)


def test_one_fetch_reads_many_tables(under_test):
    tier, tables = under_test.tier, under_test.tables
    for n, table in enumerate(tables):
        tier.insert(table, keys_of(1, 2 + n), rows_from(table, n, 10 + n), versions_of(1, 2))
    parts = [blank(table, keys_of(1, 2, 3, 4)) for table in tables]
    tier.fetch(parts, FetchContext())
    for n, part in enumerate(parts):
        assert_row(under_test, part, 0, n, sequence=1)
        assert_row(under_test, part, 1 + n, 10 + n, sequence=2)
        assert len(part.missing) == 2


def test_unknown_table_misses(under_test):
    tier = under_test.tier
    table = EmbeddingTable.make("unheard_of", 2, dtype=under_test.case.dtype)
    assert_missing(fetch(tier, table, 1), 0)
    put(tier, table, 1, 1, 1, "update")
    tier.evict(table, keys_of(1))
    assert_missing(fetch(tier, table, 1), 0)


def test_large_batch_round_trips(under_test):
    tier, table = under_test.tier, under_test.tables[1]
    keys = np.random.default_rng(1).permutation(20_000)[:4_000] - 10_000
    rows = (keys[:, None] % 1000 + np.arange(table.dim)).astype(table.dtype)
    tier.insert(table, keys, rows, np.full(len(keys), versions_of(1)[0]))
    requested = np.arange(-10_000, 10_000)
    part = blank(table, requested)
    tier.fetch([part], FetchContext())
    found = np.isin(requested, keys)
    assert part.missing.tolist() == np.flatnonzero(~found).tolist()
    expected = (requested[:, None] % 1000 + np.arange(table.dim)).astype(table.dtype)
    np.testing.assert_array_equal(part.out[found], expected[found])
    assert (part.out[~found] == UNTOUCHED).all()


def test_rows_round_trip_bit_for_bit(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    rows = np.array([[np.nan, -0.0, np.inf, -np.inf]], table.dtype)
    tier.insert(table, keys_of(1), rows, versions_of(1))
    assert fetch(tier, table, 1).out.tobytes() == rows.tobytes()


def test_rows_are_copied(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    keys, rows, versions = keys_of(1), rows_from(table, 10), versions_of(1)
    tier.insert(table, keys, rows, versions)
    keys[:], rows[:], versions[:] = 2, 99, 0
    part = fetch(tier, table, 1)
    part.out[:] = 98
    assert_row(under_test, fetch(tier, table, 1), 0, 10, sequence=1)


# -- empty and single batches ----------------------------------------------------------------------


def test_empty_batches_are_accepted(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    none, no_versions = keys_of(), versions_of()
    no_rows = np.empty((0, table.dim), table.dtype)
    put(tier, table, 1, 1, 10)
    tier.insert(table, none, no_rows, no_versions)
    tier.update(table, none, no_rows, no_versions)
    tier.delete(table, none, no_versions)
    tier.evict(table, none)
    tier.fetch([], FetchContext())
    assert len(fetch(tier, table).missing) == 0
    satisfied = blank(table, keys_of(1))
    satisfied.missing = keys_of()
    tier.fetch([satisfied], FetchContext())
    assert satisfied.source[0] == 0
    assert_row(under_test, fetch(tier, table, 1), 0, 10)


# -- writes ----------------------------------------------------------------------------------------


def test_last_of_equal_versions_wins(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    put(tier, table, 1, 5, 10)
    put(tier, table, 1, 5, 20)
    assert_row(under_test, fetch(tier, table, 1), 0, 20, sequence=5)
    keys, firsts = keys_of(2, 3, 2, 3, 2), (1, 2, 3, 4, 5)
    tier.insert(table, keys, rows_from(table, *firsts), versions_of(*[6] * 5))
    part = fetch(tier, table, 2, 3)
    assert_row(under_test, part, 0, 5, sequence=6)
    assert_row(under_test, part, 1, 4, sequence=6)


def test_older_version_never_overwrites(versioned):
    tier, table = versioned.tier, versioned.tables[0]
    put(tier, table, 1, 5, 10)
    put(tier, table, 1, 4, 20)
    put(tier, table, 1, 4, 30, "update")
    remove(tier, table, 1, 4)
    assert_row(versioned, fetch(tier, table, 1), 0, 10, sequence=5)
    put(tier, table, 1, 6, 40)
    assert_row(versioned, fetch(tier, table, 1), 0, 40, sequence=6)


@pytest.mark.parametrize("verb", ["insert", "update"])
def test_highest_version_of_batch_wins(versioned, verb):
    tier, table = versioned.tier, versioned.tables[0]
    tier.insert(table, keys_of(1, 2), rows_from(table, 1, 2), versions_of(1, 1))
    write = getattr(tier, verb)
    write(
        table, keys_of(1, 2, 1, 2, 1), rows_from(table, 3, 4, 5, 6, 7), versions_of(4, 9, 8, 3, 8)
    )
    part = fetch(tier, table, 1, 2)
    assert_row(versioned, part, 0, 7, sequence=8)
    assert_row(versioned, part, 1, 4, sequence=9)


def test_update_touches_resident_rows_only(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    put(tier, table, 1, 1, 10)
    tier.update(table, keys_of(0, 1, 2), rows_from(table, 5, 6, 7), versions_of(2, 2, 2))
    part = fetch(tier, table, 0, 1, 2)
    assert_missing(part, 0)
    assert_row(under_test, part, 1, 6, sequence=2)
    assert_missing(part, 2)


def test_evicted_keys_are_missing(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    tier.insert(table, keys_of(1, 2, 3), rows_from(table, 1, 2, 3), versions_of(9, 9, 9))
    tier.evict(table, keys_of(4, 1, 3, 1))
    part = fetch(tier, table, 1, 2, 3)
    assert part.missing.tolist() == [0, 2]
    assert_row(under_test, part, 1, 2)
    put(tier, table, 1, 2, 10)
    assert_row(under_test, fetch(tier, table, 1), 0, 10, sequence=2)


# -- deletions -------------------------------------------------------------------------------------


def test_deleted_rows_are_missing(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    tier.insert(table, keys_of(1, 2), rows_from(table, 1, 2), versions_of(1, 1))
    tier.delete(table, keys_of(1, 9, 1), versions_of(2, 2, 2))
    part = fetch(tier, table, 1, 2)
    assert part.source[0] == 0
    assert (part.out[0] == UNTOUCHED).all()
    assert_row(under_test, part, 1, 2)
    put(tier, table, 1, 3, 30)
    assert_row(under_test, fetch(tier, table, 1), 0, 30, sequence=3)


def test_tombstone_ends_search(versioned):
    tier, table = versioned.tier, versioned.tables[0]
    put(tier, table, 1, 1, 10)
    tier.delete(table, keys_of(1, 2), versions_of(5, 6))
    part = fetch(tier, table, 1, 2, 3)
    assert_tombstone(part, 0, 5)
    assert_tombstone(part, 1, 6)
    assert_missing(part, 2)


def test_tombstone_blocks_older_upserts_and_deletions(versioned):
    tier, table = versioned.tier, versioned.tables[0]
    remove(tier, table, 1, 5)
    put(tier, table, 1, 4, 10)
    put(tier, table, 1, 4, 10, "update")
    remove(tier, table, 1, 3)
    assert_tombstone(fetch(tier, table, 1), 0, 5)
    remove(tier, table, 1, 6)
    assert_tombstone(fetch(tier, table, 1), 0, 6)


@pytest.mark.parametrize("sequence", [5, 6])
@pytest.mark.parametrize("verb", ["insert", "update"])
def test_newer_or_equal_write_restores_deleted_key(versioned, verb, sequence):
    tier, table = versioned.tier, versioned.tables[0]
    remove(tier, table, 1, 5)
    put(tier, table, 1, sequence, 10, verb)
    assert_row(versioned, fetch(tier, table, 1), 0, 10, sequence=sequence)


def test_evicted_tombstone_is_removed(versioned):
    tier, table = versioned.tier, versioned.tables[0]
    remove(tier, table, 1, 5)
    tier.evict(table, keys_of(1))
    assert_missing(fetch(tier, table, 1), 0)
    put(tier, table, 1, 4, 10)
    assert_row(versioned, fetch(tier, table, 1), 0, 10, sequence=4)


def test_tombstone_expires_after_ttl(versioned):
    tier, table = versioned.tier, versioned.tables[0]
    ttl_ms = int(table.tombstone_ttl_s * 1000)
    old, older = (np.array([make_version(NOW_MS - ttl_ms - ms)], np.uint64) for ms in (5, 10))
    young = np.array([make_version(NOW_MS - ttl_ms + 3_600_000)], np.uint64)
    tier.insert(table, keys_of(1), rows_from(table, 1), older)
    tier.delete(table, keys_of(1), old)
    tier.delete(table, keys_of(2), young)
    part = fetch(tier, table, 1, 2)
    assert_missing(part, 0)
    assert part.missing.tolist() == [0]
    tier.update(table, keys_of(1), rows_from(table, 2), older)
    assert_missing(fetch(tier, table, 1), 0)
    tier.insert(table, keys_of(1, 2), rows_from(table, 3, 3), np.repeat(older, 2))
    part = fetch(tier, table, 1, 2)
    assert part.out[0].tolist() == rows_from(table, 3)[0].tolist()
    assert part.source.tolist()[1] == 0


def test_close_is_idempotent(under_test):
    under_test.tier.close()
    under_test.tier.close()
