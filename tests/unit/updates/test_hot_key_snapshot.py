"""Hot key snapshots: complete or rejected, and a restarted cache as warm as before."""

import time

import numpy as np
import pytest

from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, NoProgress
from hps.updates.cache_warmup import CacheWarmup
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.hot_key_snapshot import (
    HotKeySnapshots,
    hot_keys_at_start,
    read_hot_keys,
    write_hot_keys,
)
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

TABLE = EmbeddingTable.make("items", 2)
HOT = {
    "m/1/a": (np.array([3, -(2**63), 2**63 - 1]), np.array([255, 7, 0], np.uint8)),
    "m/1/b": (np.array([], np.int64), np.array([], np.uint8)),
}


def insert(cache, keys):
    keys = np.asarray(keys, np.int64)
    cache.insert(TABLE, keys, np.zeros((len(keys), 2), np.float32), np.ones(len(keys), np.uint64))


def test_snapshot_is_read_as_written(tmp_path):
    path = tmp_path / "hot"
    write_hot_keys(path, HOT)
    found = read_hot_keys(path)
    assert list(found) == list(HOT)
    for name, (keys, scores) in HOT.items():
        assert found[name][0].tolist() == keys.tolist()
        assert found[name][1].tolist() == scores.tolist()
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o007 == 0  # keys may identify people


def test_damaged_snapshot_is_detected_and_ignored(tmp_path, caplog):
    path = tmp_path / "hot"
    write_hot_keys(path, HOT)
    good = path.read_bytes()
    for bad in (*(good[:n] for n in range(len(good))), good + b"x"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="hot"):
            read_hot_keys(path)
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(ValueError, match="hot"):
            read_hot_keys(path)
    assert hot_keys_at_start(path) == {}
    assert "without its hot keys" in caplog.text
    assert hot_keys_at_start(tmp_path / "none") == {}


def test_old_snapshot_stays_when_a_write_fails(tmp_path):
    path = tmp_path / "hot"
    write_hot_keys(path, HOT)
    before = path.read_bytes()

    def interrupted(_seconds):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_hot_keys(path, HOT, wait=interrupted)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_write_keeps_to_the_rate_limit(tmp_path):
    waits = []
    write_hot_keys(tmp_path / "hot", HOT, 1000, waits.append)
    size = (tmp_path / "hot").stat().st_size - 4
    assert sum(waits) == pytest.approx(size / 1000)


def test_snapshot_is_written_periodically_and_at_close(tmp_path):
    path, cache = tmp_path / "new" / "hot", CpuCache({TABLE: 100})
    snapshots = HotKeySnapshots(cache, lambda: [TABLE], path, interval_s=0.01, most=2)
    time.sleep(0.1)
    assert not path.exists()  # an empty cache does not replace an earlier node's snapshot
    insert(cache, [1, 2, 3])
    until(path.exists)
    assert len(read_hot_keys(path)[TABLE.id][0]) == 2
    snapshots.close()
    path.unlink()
    last = HotKeySnapshots(cache, lambda: [TABLE], path, interval_s=1000)
    last.close()
    last.close()
    assert sorted(read_hot_keys(path)[TABLE.id][0].tolist()) == [1, 2, 3]


def test_unwritable_folder_only_logs_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = CpuCache({TABLE: 100})
    insert(cache, [1])
    HotKeySnapshots(cache, lambda: [TABLE], tmp_path / "file" / "hot", interval_s=1000).close()
    assert "writing the hot keys to" in caplog.text


def test_warm_up_gives_the_hottest_keys_the_highest_scores():
    keys = np.arange(1000)
    store, cache = MemoryTier(), CpuCache({TABLE: 400})
    insert(store, keys)
    writer = CacheWriter(cache, PromotionSources([store]), 10_000)
    CacheWarmup(writer, NoProgress()).hottest(TABLE, keys[:400], cache)
    assert sorted(cache.top_k(TABLE, 1000)[0].tolist()) == list(range(400))
    insert(cache, range(5000, 5100))
    left = set(cache.top_k(TABLE, 1000)[0].tolist())
    assert len(left & set(range(200))) > len(left & set(range(200, 400))) + 50
    writer.close()
