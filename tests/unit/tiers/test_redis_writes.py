"""Write order of a stream batch: no position before its rows."""

import re

import numpy as np
import pytest

from hps.config.store_settings import RedisSettings
from hps.errors import TierError
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.redis.layout import WRITE_SLICE, TableLayout
from hps.tiers.redis.maintenance import RedisMaintenance
from hps.tiers.redis.tables import RedisTable
from hps.tiers.redis.writes import RedisWriter
from hps.types import EmbeddingTable, version_now

PARTITIONS = 2
TABLE = EmbeddingTable.make("user", 2, model="ctr")
POSITIONS = [StreamPosition("rows", 3, 17)]


class Recording:
    """Stands for the client and the tables; records the commands of each run. Run ``fails`` fails."""

    def __init__(self, kind, fails=None):
        self.runs, self.fails = [], fails
        layout, zeros = TableLayout(TABLE, kind, PARTITIONS), [0] * PARTITIONS
        self.table = RedisTable(layout, zeros, 0, list(zeros))

    losses = 0

    def deadline(self):
        return 0.0

    def writable(self, _table, _deadline):
        return self.table

    usable = writable

    def run(self, commands, _receive, _deadline, *, allow_partial=False):
        assert not allow_partial  # a stream waits for a failover
        self.runs.append([command.request for command in commands])
        if len(self.runs) == self.fails:
            raise TierError("redis", "no")
        for command in commands:
            command.reply = 1


def apply(kind, upserts, deletions=0, recording=None):
    recording = recording or Recording(kind)
    settings = RedisSettings(layout=kind, partitions=PARTITIONS)
    writes = RedisWriter(recording, recording, RedisMaintenance(recording, recording, settings))
    keys = np.arange(upserts)
    deleted = np.arange(10**6, 10**6 + deletions)
    changes = TableChanges(
        keys,
        np.zeros((upserts, 2), np.float32),
        np.full(upserts, version_now(), np.uint64),
        deleted,
        np.full(deletions, version_now(), np.uint64),
    )
    try:
        writes.apply(TABLE, changes, POSITIONS)
    finally:
        writes._maintenance.close()
    return recording.runs


def written(requests):
    """Rows that go with these commands, by the number of their arguments."""
    counts = [int(re.match(rb"\*(\d+)", request)[1]) for request in requests]
    heads = [3 + int(re.search(rb"\r\n\$1\r\n(\d)\r\n", request)[1]) for request in requests]
    noted = [9 if b"rows/3" in request else 6 for request in requests]
    return sum((c - h - n) // 2 for c, h, n in zip(counts, heads, noted, strict=True))


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_small_batch_takes_one_call_per_partition(kind):
    (run,) = apply(kind, 100)
    assert len(run) == PARTITIONS
    assert all(b"rows/3" in request for request in run)
    assert written(run) == 100


@pytest.mark.parametrize("kind", ["native", "hps"])
@pytest.mark.parametrize("upserts", [0, 1])
def test_partitions_without_rows_store_position_too(kind, upserts):
    (run,) = apply(kind, upserts)
    assert sum(b"rows/3" in request for request in run) == PARTITIONS
    assert written(run) == upserts


@pytest.mark.parametrize("kind", ["native", "hps"])
def test_position_is_written_after_all_other_rows(kind):
    n = 50 * WRITE_SLICE
    *early, last = apply(kind, n, 10 if kind == "native" else 0)
    assert len(last) == PARTITIONS
    assert all(b"rows/3" in request for request in last)
    assert not any(b"rows/3" in request for run in early for request in run)
    assert sum(map(written, [*early, last])) == n + (10 if kind == "native" else 0)


@pytest.mark.parametrize(("kind", "upserts", "deletions"), [("native", 5000, 0), ("hps", 10, 10)])
def test_position_is_not_written_after_failed_slice(kind, upserts, deletions):
    recording = Recording(kind, fails=1)
    with pytest.raises(TierError):
        apply(kind, upserts, deletions, recording)
    (only,) = recording.runs
    assert not any(b"rows/3" in request for request in only)
