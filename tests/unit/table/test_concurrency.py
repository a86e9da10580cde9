"""Readers and writers in parallel: no torn row, no row of another key, no lost write, no deadlock."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.tables import BACKENDS, everything, make

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
DIM = 32
SECONDS = 1.0


def stamped(keys, stamps):
    """Rows whose elements all state their key and a stamp; equal elements show that a row is whole."""
    values = (np.asarray(keys) % 4096 * 4096 + np.asarray(stamps)).astype(np.float32)
    return np.repeat(values[:, None], DIM, axis=1)


def check_whole(keys, rows, scores):
    """Each row is of its key, whole, and of the write that set its score."""
    assert (rows == rows[:, :1]).all()
    np.testing.assert_array_equal(
        rows[:, 0], (keys % 4096 * 4096 + scores % 4096).astype(np.float32)
    )


def run_all(*workers):
    """Run each worker in a thread until SECONDS have passed; raise what any raised."""
    end = time.monotonic() + SECONDS
    errors = []

    def repeat(worker, seed):
        rng = np.random.default_rng(seed)
        try:
            while time.monotonic() < end and not errors:
                worker(rng)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=repeat, args=(worker, i)) for i, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("growing", [False, True])
def test_readers_see_whole_rows_while_writers_write_evict_and_grow(backend, growing):
    sizes = {"max_capacity": 1 << 13} if growing else {}
    table = make(backend, 1 << 9, dim=DIM, **sizes)

    def write(rng):
        keys = rng.integers(0, 2000, rng.integers(1, 6000))
        stamps = rng.integers(0, 4096, len(keys))
        write = rng.choice([table.insert_or_assign, table.insert_and_evict, table.assign])
        evicted = write(keys, stamped(keys, stamps), stamps)
        if write == table.insert_and_evict:
            check_whole(evicted.keys, evicted.rows, evicted.scores)

    def find(rng):
        keys = rng.integers(0, 2000, rng.integers(1, 6000))
        rows, found, scores = table.find(keys, with_scores=True)
        check_whole(keys[found], rows[found], scores[found].astype(np.int64))
        assert (rows[~found] == 0).all()

    def export(rng):
        part = table.export_batch(1000, int(rng.integers(0, table.capacity)))
        check_whole(part.keys, part.rows, part.scores.astype(np.int64))

    def erase(rng):
        table.erase(rng.integers(0, 2000, 50))
        table.erase_if(lambda keys, scores: scores == 7)

    run_all(write, write, find, find, export, erase)
    keys = np.arange(5)  # the erasing thread may have had the last word
    table.insert_or_assign(keys, stamped(keys, keys), keys)
    contents = everything(table)
    keys, scores = np.array([*contents]), np.array([score for _, score in contents.values()])
    check_whole(keys, np.array([row for row, _ in contents.values()], np.float32), scores)


def test_accumulations_of_many_threads_all_count(backend):
    table, keys = make(backend, 1 << 9, dim=DIM, policy="lfu"), np.arange(100)
    table.insert_or_assign(keys, np.zeros((100, DIM), np.float32), np.zeros(100, np.uint64))

    def add(seed):
        chosen = np.random.default_rng(seed).permutation(np.repeat(keys, 10))
        table.accum_or_assign(chosen, np.ones((1000, DIM), np.float32), np.ones(1000, bool))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))
    rows, found, scores = table.find(keys, with_scores=True)
    assert found.all()
    assert (rows == 120).all()
    assert (scores == 120).all()


def test_inserts_of_many_threads_grow_one_table(backend):
    """HierarchicalKV's dynamic_rehash_on_multi_threads: each thread inserts keys and finds them again."""
    table = make(backend, 128, dim=DIM, max_capacity=1 << 15)

    def insert(part):
        for start in range(0, 3000, 100):
            keys = np.arange(start, start + 100) + 10_000 * part
            table.insert_or_assign(keys, stamped(keys, keys % 7), keys % 7)
            rows, found, scores = table.find(keys, with_scores=True)
            assert found.all()
            check_whole(keys, rows, scores.astype(np.int64))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(insert, range(4)))
    assert table.size == 12_000
    assert table.capacity == 1 << 15


def test_one_thread_gets_each_new_row_of_find_or_insert(backend):
    """Threads that find or insert the same keys agree on the rows."""
    table, keys = make(backend, 1 << 13, dim=DIM), np.arange(2000)

    def find_or_insert(part):
        rows, found, _ = table.find_or_insert(keys, stamped(keys, [part] * 2000), [part] * 2000)
        return rows, found

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(find_or_insert, range(4)))
    rows = table.find(keys).rows
    for got, _ in results:
        np.testing.assert_array_equal(got, rows)
    assert sum((~found).sum() for _, found in results) == 2000


def test_clear_and_changes_of_capacity_run_beside_reads_and_writes(backend):
    table = make(backend, 1 << 8, dim=DIM, max_capacity=1 << 9)

    def write(rng):
        keys = rng.integers(0, 500, 5000)
        table.insert_or_assign(keys, stamped(keys, keys % 9), keys % 9)

    def find(rng):
        keys = rng.integers(0, 500, 5000)
        rows, found, scores = table.find(keys, with_scores=True)
        check_whole(keys[found], rows[found], scores[found].astype(np.int64))

    def change(rng):
        table.clear()
        if table.max_capacity < 1 << 14:
            table.max_capacity = 2 * table.max_capacity

    run_all(write, find, find, change)
    table.clear()
    assert table.size == 0
    assert everything(table) == {}
