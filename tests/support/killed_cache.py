"""Writers and readers of a shared cache table, killed in mid-work: python killed_cache.py ROUNDS. Ends with
an error when the table is not whole afterwards. A process of its own, because it forks."""

import ctypes
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback

import numpy as np

from hps.native import _core

ROWS, KEYS, DIM, BATCH = 400, 600, 16, 20_000
CODE = 2


def rows_of(keys, versions):
    """(n, DIM) int64: a row is made of its key and version, its last word is the sum of the others."""
    row = keys[:, None] * np.arange(1, DIM) + versions[:, None].astype(np.int64)
    return np.ascontiguousarray(np.hstack([row, row.sum(axis=1, keepdims=True)]))


def write(table, draw, batches, begun):
    """Until killed; nearly all the time in the middle of a write."""
    begun[0] = 1
    while True:
        keys, rows, versions = batches[draw.integers(len(batches))]
        verb = draw.integers(6)
        if verb == 0:
            table.evict(keys[: KEYS // 8])
        elif verb == 1:
            table.write(keys[:KEYS], None, versions[:KEYS], 0, False)
        else:
            table.write(keys, rows, versions, 0, bool(verb == 2))


def make_batches(draw):
    """Each of many keys, with repetitions, of rising versions."""
    for _ in range(4):
        keys = draw.integers(0, KEYS, BATCH)
        versions = np.arange(BATCH, dtype=np.uint64) + np.uint64(time.time_ns())
        yield keys, rows_of(keys, versions), versions


def read(table):
    """The keys that have a row; raises when one is torn."""
    keys = np.arange(KEYS)
    out = np.zeros((KEYS, DIM), np.int64)
    versions, source = np.zeros(KEYS, np.uint64), np.zeros(KEYS, np.uint8)
    table.fetch(keys, keys, 0, out, versions, source)
    found = source == CODE
    assert (out[found] == rows_of(keys[found], versions[found])).all(), "a torn row"
    return keys[found]


def read_for_ever(table):
    while True:
        read(table)


def spawn(work, *args):
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test
            if os.getppid() != parent:
                os._exit(1)
            work(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"


def check_whole(table):
    """Counts are right, and every row number belongs to one key."""
    assert len(table.top_k(10 * KEYS)[0]) == table.rows, "the count of rows is wrong"
    assert len(read(table)) == table.rows
    assert table.rows + table.tombstones <= ROWS
    # All rows but those of tombstones can be used again: none was lost, none is there twice.
    keys, version = np.arange(KEYS), np.uint64(time.time_ns())
    table.evict(keys)
    assert (table.rows, table.tombstones) == (0, 0), "a tombstone is counted that is not there"
    fill = keys[:ROWS]
    versions = np.full(ROWS, version)
    before = table.evictions
    table.write(fill, rows_of(fill, versions), versions, 0, False)
    assert table.rows == ROWS, f"only {table.rows} rows can be used"
    assert table.evictions == before, "a row number was lost"
    assert (read(table) == fill).all()


def main(rounds):
    repaired = 0
    like = np.empty((0, DIM), np.int64)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        table = _core.CacheTable(ROWS, like, "lru", CODE, file=file.fileno())
        for _ in range(rounds):
            draw = np.random.default_rng()
            readers = [spawn(read_for_ever, table) for _ in range(2)]
            batches = list(make_batches(draw))
            begun = mmap.mmap(-1, 1)
            writer = spawn(write, table, draw, batches, begun)
            while not begun[0]:
                time.sleep(0.0005)
            time.sleep(random.uniform(0.002, 0.006))
            kill(readers.pop())  # while a writer runs
            kill(writer)
            read(table)  # before it is repaired
            table = _core.CacheTable.attach(file.fileno(), like, CODE)
            repaired += table.repair()
            assert not table.repair(), "repaired twice"
            kill(readers.pop())
            check_whole(table)
    print(f"{rounds} rounds, {repaired} repaired")
    assert repaired > rounds // 20, "hardly a writer was killed in mid-work"


if __name__ == "__main__":
    main(int(sys.argv[1]))
