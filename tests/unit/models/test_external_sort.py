"""External sort: rows in a store's order, in bounded memory, by both methods."""

import os
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.errors import ModelError
from hps.models import external_sort as sorting
from hps.models.external_sort import DuplicateCounter, prefetch, sort_last, sorted_chunks
from hps.models.tables import open_table
from tests.support.waiting import until

SIGN = np.uint64(1 << 63)


def codes(keys):
    return keys.view(np.uint64) ^ SIGN


def files_of(folder, keys, dim=3):
    folder.mkdir(parents=True, exist_ok=True)
    keys = np.asarray(keys, np.int64)
    vectors = np.arange(len(keys) * dim, dtype=np.float32).reshape(-1, dim)
    keys.tofile(folder / "key")
    vectors.tofile(folder / "emb_vector")
    return open_table(folder, "t", dim, None), {
        int(k): v for k, v in zip(keys, vectors, strict=True)
    }


@pytest.fixture(params=["gathered", "copied", "bucketed"])
def method(request, monkeypatch):
    """The method of sorting; buckets are so small that there are many."""
    if request.param == "bucketed":
        monkeypatch.setattr(sorting, "SORT_ROWS", 0)
    if request.param != "gathered":
        monkeypatch.setattr(sorting, "BUCKET_BYTES", 20 * 500)
    monkeypatch.setattr(sorting, "_BLOCK_BYTES", 12 * 256)
    return request.param


@pytest.mark.parametrize(
    "make_keys",
    [
        lambda rng: rng.integers(-(2**63), 2**63 - 1, 5000),
        lambda rng: rng.permutation(5000),
        lambda rng: np.arange(5000),
        lambda rng: rng.integers(0, 50, 5000),
        lambda rng: np.full(5000, 7),
        lambda rng: np.concatenate([np.full(2500, -1), np.arange(2500)]),
        lambda rng: np.array([], np.int64),
        lambda rng: np.array([3]),
    ],
    ids=["random", "permuted", "ascending", "few", "one", "skewed", "none", "single"],
)
def test_chunks_are_ascending_with_the_last_row_of_each_key(tmp_path, method, make_keys):
    keys = make_keys(np.random.default_rng(3))
    files, expected = files_of(tmp_path / "t", keys)
    found, duplicates = {}, DuplicateCounter()
    last = -1
    for code, rows in sorted_chunks(files, codes, duplicates, tmp_path / "scratch"):
        assert len(code) == len(rows)
        assert rows.flags.c_contiguous
        assert int(code[0]) > last
        assert (code[1:] > code[:-1]).all()
        last = int(code[-1])
        for k, row in zip((code ^ SIGN).view(np.int64).tolist(), rows, strict=True):
            found[k] = row.copy()
    assert found.keys() == expected.keys()
    assert all((found[k] == expected[k]).all() for k in expected)
    assert duplicates.count == len(keys) - len(expected)
    assert not (tmp_path / "scratch").exists()


def test_buckets_stay_small_despite_repeated_keys(tmp_path, monkeypatch):
    """Memory is bounded even if one key is repeated very often."""
    monkeypatch.setattr(sorting, "SORT_ROWS", 0)
    monkeypatch.setattr(sorting, "BUCKET_BYTES", 20 * 1000)
    monkeypatch.setattr(sorting, "_BLOCK_BYTES", 12 * 256)
    keys = np.random.default_rng(1).permutation(
        np.concatenate([np.full(30_000, 5), np.arange(30_000)])
    )
    files, _ = files_of(tmp_path / "t", keys)
    sizes = []
    plain = np.fromfile

    def fromfile(path, *words, **settings):
        found = plain(path, *words, **settings)
        if path.suffix == ".rows":
            sizes.append(len(found))
        return found

    monkeypatch.setattr(np, "fromfile", fromfile)
    spread = []
    list(
        sorted_chunks(
            files,
            codes,
            DuplicateCounter(),
            tmp_path / "scratch",
            lambda: nullcontext(spread.append),
        )
    )
    assert sum(spread) == 60_000
    assert len(sizes) > 10
    assert max(sizes) < 3000


def test_scratch_is_removed_when_the_consumer_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(sorting, "SORT_ROWS", 0)
    files, _ = files_of(tmp_path / "t", np.arange(5000))
    chunks = sorted_chunks(files, codes, DuplicateCounter(), tmp_path / "scratch")
    next(chunks)
    assert (tmp_path / "scratch").exists()
    chunks.close()
    assert not (tmp_path / "scratch").exists()


def test_files_shortened_during_the_sort_are_an_error(tmp_path, method):
    """Rows are correct or an error is raised; a shortened mapped file would end the process."""
    files, expected = files_of(tmp_path / "t", np.random.default_rng(2).permutation(5000))
    chunks = sorted_chunks(files, codes, DuplicateCounter(), tmp_path / "scratch")
    found = [next(chunks)]
    os.truncate(files.vector_path, 8)
    found += chunks
    keys = (np.concatenate([c for c, _ in found]) ^ SIGN).view(np.int64)
    rows = np.concatenate([r for _, r in found])
    assert {int(k): r.tolist() for k, r in zip(keys, rows, strict=True)} == {
        k: v.tolist() for k, v in expected.items()
    }
    with pytest.raises(ModelError, match=r"emb_vector was (shortened|changed) while it was"):
        list(sorted_chunks(files, codes, DuplicateCounter(), tmp_path / "scratch"))
    assert not (tmp_path / "scratch").exists()


@given(st.lists(st.integers(0, 20), max_size=40))
def test_sort_last_keeps_the_last_position_like_a_dict(values):
    code = np.array(values, np.uint64)
    duplicates = DuplicateCounter()
    found, at = sort_last(code, duplicates)
    last = {v: i for i, v in enumerate(values)}
    assert list(zip(found.tolist(), at.tolist(), strict=True)) == sorted(last.items())
    assert duplicates.count == len(values) - len(last)


class TestPrefetch:
    def test_prefetch_keeps_order_and_ends(self):
        assert list(prefetch(range(100))) == list(range(100))
        assert list(prefetch(())) == []

    def test_prefetch_stays_within_its_depth(self):
        produced = []

        def items():
            for i in range(20):
                produced.append(i)
                yield i

        reader = prefetch(items(), depth=2)
        assert next(reader) == 0
        time.sleep(0.3)
        assert len(produced) <= 4
        reader.close()

    def test_prefetch_raises_errors_in_the_consumer(self):
        def items():
            yield 1
            raise OSError("gone")

        reader = prefetch(items())
        assert next(reader) == 1
        with pytest.raises(OSError, match="gone"):
            next(reader)

    def test_prefetch_stopped_early_ends_thread_and_source(self):
        closed = threading.Event()

        def items():
            try:
                while True:
                    yield 1
            finally:
                closed.set()

        reader = prefetch(items())
        next(reader)
        reader.close()
        assert closed.wait(60)
        until(lambda: "hps-ahead" not in [t.name for t in threading.enumerate()])
