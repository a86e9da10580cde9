"""The gather of rows that a GPU cache misses: the compiled one against its twin, alone and in parallel."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.cuda.launch import PLACE_ARGS
from hps.native import _core as native
from hps.native import twin_misses
from hps.native.launching import PlaceLaunch
from hps.native.twin_cache import CacheTable as TwinTable

KEYS_HELD = 200
ROWS = [(3, np.float32), (32, np.float32), (16, np.float32), (128, np.float32), (32, np.float16)]


def filled(rows):
    """A table of each twin with the even keys below KEYS_HELD, the first ten deleted."""
    dim, dtype = rows
    like = np.empty((0, dim), dtype)
    tables = native.CacheTable(500, like, "lru", 2), TwinTable(500, like, "lru", 2)
    keys = np.arange(0, KEYS_HELD, 2)
    values = (keys[:, None] + np.arange(dim)).astype(dtype)
    for table in tables:
        table.write(keys, values, np.ones(len(keys), np.uint64), 0, False)
        table.write(keys[:10], None, np.full(10, 2, np.uint64), 0, False)
    return tables


def gather(function, tables, keys, positions, stride, pool=None, listed=False):
    """The results of a gather from parts with ``keys``, one array per table."""
    rows = np.full((len(positions), stride), 7, np.uint8)
    sources, counts = np.zeros(len(positions), np.uint8), np.ones((len(tables), 2), np.uint32)
    bases = np.cumsum([0, *map(len, keys)])[:-1].astype(np.uint32)
    flat = np.concatenate(keys)
    if listed:
        flat = flat[positions]
    left = function(
        tables, bases, flat, positions, rows, sources, 3, counts, listed=listed, pool=pool
    )
    rows[sources == twin_misses.UNANSWERED] = 0  # undefined
    return left, rows.tolist(), sources.tolist(), counts.tolist()


def test_rows_are_placed_as_they_are_gathered():
    """Without a driver the first launch fails, with all rows gathered and its arguments set."""
    table, _ = filled(ROWS[1])
    positions = np.arange(KEYS_HELD, dtype=np.uint32)[::-1].copy()
    rows, sources = np.zeros((KEYS_HELD, 144), np.uint8), np.zeros(KEYS_HELD, np.uint8)
    at, counts, args = np.zeros(1, np.uint32), np.zeros((1, 2), np.uint32), np.zeros((), PLACE_ARGS)
    placing = PlaceLaunch.make(0, 32, args.ctypes.data)
    with pytest.raises(RuntimeError, match=r"no CUDA driver|cuLaunchKernel failed: CUDA_ERROR"):
        native.gather_misses(
            [table], at, np.arange(KEYS_HELD), positions, rows, sources, 3, counts, placing=placing
        )
    assert (sources != 0).all()
    addresses = [array.ctypes.data for array in (positions, rows, sources)]
    assert [int(args[name]) for name in ("positions", "rows", "sources")] == addresses
    assert int(args["n"]) == KEYS_HELD


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*range(len(ROWS)), None]),
            st.lists(st.integers(-3, KEYS_HELD + 3), max_size=80),
        ),
        min_size=1,
        max_size=80,
    ),
    st.data(),
)
def test_both_twins_gather_the_same_rows_of_any_parts_in_any_order(parts, data):
    held = [filled(rows) for rows in ROWS]
    keys = [np.array(own, np.int64) for _, own in parts]
    total = sum(map(len, keys))
    positions = data.draw(
        st.lists(st.integers(0, total - 1), max_size=60) if total else st.just([])
    )
    positions = np.array(positions, np.uint32)
    results = []
    for which, function in ((0, native.gather_misses), (1, twin_misses.gather_misses)):
        tables = [None if at is None else held[at][which] for at, _ in parts]
        results += [
            gather(function, tables, keys, positions, 520, listed=listed)
            for listed in (False, True)
        ]
    assert results[0] == results[1] == results[2] == results[3]


def large_batch(tables=70, per_table=400, seed=1):
    """More parts than one counting sort takes, and many pieces of work."""
    rng = np.random.default_rng(seed)
    held = filled((32, np.float32))
    keys = [rng.integers(0, KEYS_HELD + 20, per_table) for _ in range(tables)]
    positions = rng.permutation(tables * per_table)[:17_000].astype(np.uint32)
    return held, keys, positions


def test_threads_gather_the_same_rows():
    (compiled, twin), keys, positions = large_batch()
    expected = gather(twin_misses.gather_misses, [twin] * len(keys), keys, positions, 128)
    pool = native.WorkerPool(3)
    assert pool.threads == 3
    for _ in range(20):
        assert (
            gather(native.gather_misses, [compiled] * len(keys), keys, positions, 128, pool)
            == expected
        )
    assert expected[0] > 0


def test_calls_from_several_threads_share_a_pool():
    (compiled, twin), keys, positions = large_batch()
    expected = gather(twin_misses.gather_misses, [twin] * len(keys), keys, positions, 128)
    pool, wrong = native.WorkerPool(3), []

    def call():
        for _ in range(15):
            tables = [compiled] * len(keys)
            got = gather(native.gather_misses, tables, keys, positions, 128, pool)
            if got != expected:
                wrong.append(got[0])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_gather_beside_a_writer_returns_whole_rows():
    like, n = np.empty((0, 32), np.float32), 3000
    table, keys, stop = native.CacheTable(n, like, "lru", 2), np.arange(n), threading.Event()

    def write():
        version = 1
        while not stop.is_set():
            values = np.repeat((keys % 97 + version % 7 * 100)[:, None], 32, 1).astype(np.float32)
            table.write(keys, values, np.full(n, version, np.uint64), 0, False)
            version += 1

    writer = threading.Thread(target=write)
    writer.start()
    pool = native.WorkerPool(2)
    positions = np.random.default_rng(1).permutation(n).astype(np.uint32)
    rows, sources = np.zeros((n, 128), np.uint8), np.zeros(n, np.uint8)
    found, bases, counts = 0, np.zeros(1, np.uint32), np.zeros((1, 2), np.uint32)
    for _ in range(200):
        left = native.gather_misses(
            [table], bases, keys, positions, rows, sources, 3, counts, pool=pool
        )
        assert left == np.count_nonzero(sources == 255)
        values = rows.view(np.float32)[sources == 3]
        found += len(values)
        assert (values == values[:, :1]).all()
        assert (values[:, 0] % 100 == keys[positions][sources == 3] % 97).all()
    stop.set()
    writer.join()
    assert found > 0


@pytest.mark.filterwarnings("ignore:os.fork")  # of libraries that other tests have imported
def test_a_child_process_gathers_without_its_parents_workers():
    (compiled, _), keys, positions = large_batch()
    pool, tables = native.WorkerPool(2), [compiled] * len(keys)
    gather(native.gather_misses, tables, keys, positions, 128, pool)
    child = os.fork()
    if child == 0:
        gather(native.gather_misses, tables, keys, positions, 128, pool)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def arguments():
    (compiled, _), keys, positions = large_batch(2, 10)
    n = len(positions)
    return {
        "tables": [compiled, None],
        "bases": np.array([0, 10], np.uint32),
        "keys": np.concatenate(keys),
        "positions": positions,
        "rows": np.zeros((n, 128), np.uint8),
        "sources": np.zeros(n, np.uint8),
        "code": 3,
        "counts": np.zeros((2, 2), np.uint32),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tables", [None]),
        ("tables", ["no table", None]),
        ("bases", np.array([0], np.uint32)),
        ("bases", np.array([1, 10], np.uint32)),
        ("keys", np.zeros(20, np.int32)),
        ("counts", np.zeros((2, 1), np.uint32)),
        ("listed", True),
        ("positions", np.full(20, 20, np.uint32)),
        ("positions", np.zeros(19, np.uint32)),
        ("rows", np.zeros((20, 127), np.uint8)),
        ("sources", np.zeros(19, np.uint8)),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(name, value):
    native.gather_misses(**arguments())
    changed = arguments() | {name: value}
    if name == "listed":
        changed["keys"] = changed["keys"][:19]
    with pytest.raises((TypeError, ValueError)):
        native.gather_misses(**changed)


def test_a_pool_needs_a_thread():
    for pool in (native.WorkerPool, twin_misses.WorkerPool):
        with pytest.raises(ValueError, match="threads must be at least 1"):
            pool(0)


@pytest.mark.parametrize("copy", [native.copy_keys, twin_misses.copy_keys])
@pytest.mark.parametrize("sizes", [[0], [3], [5, 0, 7], [200_000, 1, 70_000, 131_072]])
def test_keys_are_copied_one_array_after_the_other(copy, sizes):
    rng, pools = np.random.default_rng(2), [None, native.WorkerPool(3)]
    arrays = [rng.integers(-(2**63), 2**63, n) for n in sizes]
    arrays[0] = arrays[0].astype(np.longlong)
    for pool in pools:
        out = np.zeros(sum(sizes) + 2, np.int64)
        assert copy(arrays, out, pool) == sum(sizes)
        np.testing.assert_array_equal(out[:-2], np.concatenate(arrays))
        assert out[-2:].tolist() == [0, 0]
        with pytest.raises(ValueError, match="out must hold all keys"):
            copy([*arrays, arrays[0], np.zeros(3, np.int64)], out[: sum(sizes)], pool)
