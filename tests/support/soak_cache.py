"""A CPU cache in shared memory under load: python soak_cache.py SECONDS [spoil].

One process owns it: a thread writes (insert, update, delete, evict; there are three times as many keys as
room) while threads read. Other processes are attached and read; now and then one is killed and
another takes its place. A row says its key and version and carries words made of both. Ends with an
error when a row is torn, another key's or older than one seen before, or when nothing happened.
``spoil``: one row in 2,000 is written with a wrong word, to see that it is noticed.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.attached_cache import AttachedCache
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.segments import Segments
from hps.types import EmbeddingTable

ROOM, BATCH, READERS, THREADS = 4_000, 500, 2, 2
KILL_EVERY_S = 3.0
TABLES = [
    EmbeddingTable.make("wide", 128),
    EmbeddingTable.make("usual", 32),
    EmbeddingTable.make("half", 16, dtype=np.float16),
    EmbeddingTable.make("odd", 18),
]
EVICTIONS = dict(zip(TABLES, ["lru", "lfu", "random", "fifo"], strict=True))


def rows_of(table, keys, versions):
    """(n, dim): eight bytes each of the key, the version and words made of both and the position."""
    at = np.arange(table.row_bytes // 8 - 2, dtype=np.uint64)
    key = keys.astype(np.uint64)
    words = key[:, None] * np.uint64(0x9E3779B97F4A7C15) + versions[:, None] + (at << np.uint64(40))
    words = (words ^ (words >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93)
    return np.column_stack([key, versions, words]).view(table.dtype)


def words_of(rows):
    return np.ascontiguousarray(rows).view(np.uint64)


class Checked:
    """One thread that reads and remembers the newest version of each key that it saw."""

    def __init__(self, cache, seed):
        self.cache, self.random = cache, np.random.default_rng(seed)
        self.newest = {table: np.zeros(3 * ROOM, np.uint64) for table in TABLES}
        self.hits = self.keys_read = 0

    def check(self, table, keys, rows, versions=None):
        held = words_of(rows)
        assert (held[:, 0] == keys.astype(np.uint64)).all(), "another key's row"
        assert (held == words_of(rows_of(table, keys, held[:, 1]))).all(), "a torn row"
        assert versions is None or (held[:, 1] == versions).all(), "another row's version"
        newest = self.newest[table]
        assert (held[:, 1] >= newest[keys]).all(), "an older row after a newer one"
        np.maximum.at(newest, keys, held[:, 1])
        self.hits += len(keys)

    def read(self):
        table = TABLES[self.random.integers(len(TABLES))]
        keys = self.random.integers(0, 3 * ROOM, BATCH)
        part = Part.make(table, keys)
        self.cache.fetch([part], FetchContext())
        found = part.source > 0
        self.check(table, keys[found], part.out[found], part.versions[found])
        self.keys_read += len(keys)
        few = keys[found][:8]
        out = np.empty((len(few), table.dim), table.dtype)
        if self.cache.gather([(table, few, out)]):
            self.check(table, few, out)


def read_until(stop, cache, seed, fail):
    """With several threads until ``stop`` is set; at a wrong row they call ``fail``."""
    readers = [Checked(cache, [seed, i]) for i in range(THREADS)]

    def work(reader):
        try:
            while not stop.is_set():
                reader.read()
        except BaseException as error:
            print(f"reader {os.getpid()}: {error!r}", file=sys.stderr, flush=True)
            fail()

    threads = [threading.Thread(target=work, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    return threads, readers


def attached(folder, seed):
    """A process that reads until its standard input ends, as it does when the owner goes."""
    cache = AttachedCache("soak", TABLES, lambda table, keys: None, folder=folder)
    ended = threading.Event()
    threads, readers = read_until(ended, cache, seed, lambda: os._exit(1))
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    assert sum(reader.hits for reader in readers) > 0, "an attached process found nothing"
    print(sum(reader.keys_read for reader in readers))


class Writer:
    def __init__(self, cache, spoil):
        self.cache, self.spoil, self.written = cache, spoil, 0
        self.random = np.random.default_rng(0)

    def write(self):
        table = TABLES[self.random.integers(len(TABLES))]
        keys = np.unique(self.random.integers(0, 3 * ROOM, BATCH))
        versions = np.full(len(keys), self.written + 1, np.uint64) + np.arange(
            len(keys), dtype=np.uint64
        )
        verb = self.random.integers(8)
        if verb == 0:
            self.cache.delete(table, keys[::8].copy(), versions[::8].copy())
        elif verb == 1:
            self.cache.evict(table, keys[::8].copy())
        else:
            rows = rows_of(table, keys, versions)
            if self.spoil and self.written // 2_000 < (self.written + len(keys)) // 2_000:
                words_of(rows)[len(keys) // 2, -1] ^= np.uint64(1)
            (self.cache.update if verb == 2 else self.cache.insert)(table, keys, rows, versions)
        self.written += len(keys)


def start_reader(folder, seed):
    command = [sys.executable, __file__, "attach", str(folder), str(seed)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def soak(seconds, folder, *, spoil):
    memory = CacheMemory(Segments("soak", folder))
    cache = CpuCache(dict.fromkeys(TABLES, ROOM), evictions=EVICTIONS, memory=memory)
    end, kill_at, killed = time.monotonic() + seconds, time.monotonic() + KILL_EVERY_S, 0
    writer = Writer(cache, spoil)
    stop, wrong = threading.Event(), threading.Event()
    threads, own = read_until(stop, cache, 0, wrong.set)
    others = [start_reader(folder, seed + 1) for seed in range(READERS)]
    try:
        while time.monotonic() < end:
            writer.write()
            assert not wrong.is_set(), "a wrong row"
            assert all(other.poll() is None for other in others), "an attached process ended"
            if time.monotonic() >= kill_at:
                others[0].kill()
                others[0].communicate()
                others = [*others[1:], start_reader(folder, READERS + 1 + killed)]
                killed, kill_at = killed + 1, time.monotonic() + KILL_EVERY_S
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    assert not wrong.is_set(), "a wrong row"
    keys_read = sum(reader.keys_read for reader in own)
    for other in others:
        printed, _ = other.communicate()
        assert other.returncode == 0, "an attached process failed"
        keys_read += int(printed)
    for table in TABLES:
        stats = cache.stats(table)
        assert stats.rows + stats.tombstones <= ROOM
        assert len(cache.top_k(table, 10 * ROOM)[0]) == stats.rows, "the count of rows is wrong"
        assert stats.evictions > 0, "nothing was evicted"
    evicted = sum(cache.stats(table).evictions for table in TABLES)
    cache.close()
    print(
        f"{seconds:g} s: {keys_read / 1e6:.1f} M keys read (without the killed ones'), "
        f"{writer.written / 1e6:.1f} M written, {evicted / 1e6:.1f} M evicted, {killed} readers killed"
    )


if __name__ == "__main__":
    if sys.argv[1] == "attach":
        attached(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            soak(float(sys.argv[1]), Path(shared), spoil="spoil" in sys.argv[2:])
