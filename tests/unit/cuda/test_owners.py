"""Owners of keys, peer access and the twin of a split table; no GPU is needed."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.cuda import layout, loader, owners
from hps.cuda.layout import EMPTY, ROOMY_LOAD, TOMBSTONE, plan_table_shape
from hps.cuda.owners import (
    MOST_OWNERS,
    enable_peer_access,
    owner_of,
    partition,
    rows_per_owner,
)
from hps.cuda.twin import TwinTable
from hps.cuda.twin_split import TwinSplit
from hps.errors import GpuUnavailable
from hps.types import EmbeddingTable
from tests.support.rows import distinct_rows

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=50), st.integers(1, MOST_OWNERS))
def test_each_position_is_in_the_list_of_its_keys_owner(keys, count):
    keys = np.array(keys, np.int64)
    owner, lists = owner_of(keys, count), partition(keys, count)
    assert (owner < count).all()
    assert len(lists) == count
    for each, positions in enumerate(lists):
        np.testing.assert_array_equal(positions, np.flatnonzero(owner == each))
    left = partition(keys, count, left_out=0)
    assert len(left[0]) == 0
    for one, other in zip(left[1:], lists[1:], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_shares_are_equal_and_fit_their_capacity(count):
    for first in (0, -(2**40)):
        shares = np.bincount(owner_of(np.arange(first, first + 400_000), count), minlength=count)
        assert shares.max() <= rows_per_owner(400_000, count) < 1.1 * 400_000 / count
        assert shares.min() > 0.95 * 400_000 / count
    assert rows_per_owner(7, 1) == 7
    assert rows_per_owner(0, 2) == 0


def test_keys_of_an_owner_fill_all_halves():
    """An owner by the bits that choose buckets would leave most of them empty."""
    keys = np.arange(200_000)
    for owner in range(4):
        mine = keys[owner_of(keys, 4) == owner]
        halves = layout.half_buckets(mine, 500)
        for choice in (0, 1):
            load = np.bincount(halves[:, choice], minlength=1000)
            assert load.min() > 15
            assert load.max() < 110


def test_kernel_has_the_same_limit():
    text = (loader.FOLDER / "partition.cu").read_text()
    assert f"constexpr int MOST_OWNERS = {MOST_OWNERS};" in text


# -- peer access -----------------------------------------------------------------------------------


class CudaError(Exception):
    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Runtime:
    """CUDA's runtime: devices of ``islands`` can access each other."""

    CUDARuntimeError = CudaError

    def __init__(self, islands, status=0):
        self.islands, self.status, self.current, self.enabled = islands, status, None, []

    def deviceCanAccessPeer(self, one, other):
        return int(any(one in island and other in island for island in self.islands))

    def deviceEnablePeerAccess(self, other):
        self.enabled.append((self.current, other))
        if self.status:
            raise CudaError(self.status)

    def install(self, monkeypatch):
        runtime = self

        class Device:
            def __init__(self, number):
                self.number = number

            def __enter__(self):
                runtime.current = self.number

            def __exit__(self, *_error):
                runtime.current = None

        twin = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=Device))
        monkeypatch.setattr(owners, "cupy", lambda: twin)
        return runtime


@pytest.mark.parametrize("status", [0, 704], ids=["new", "enabled before"])
def test_peer_access_is_enabled_both_ways(monkeypatch, status):
    runtime = Runtime([{0, 1, 2}], status).install(monkeypatch)
    enable_peer_access([0, 2, 1])
    assert sorted(runtime.enabled) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_devices_without_a_connection_are_refused_before_anything_changes(monkeypatch):
    runtime = Runtime([{0, 1}, {2}]).install(monkeypatch)
    with pytest.raises(GpuUnavailable, match=r"GPU 0 can't read the memory of GPU 2.*NVLink"):
        enable_peer_access([0, 1, 2])
    assert runtime.enabled == []


def test_other_errors_of_peer_access_are_raised(monkeypatch):
    Runtime([{0, 1}], 2).install(monkeypatch)
    with pytest.raises(CudaError, match="error 2"):
        enable_peer_access([0, 1])


def test_one_device_needs_no_peer_access(monkeypatch):
    monkeypatch.setattr(owners, "cupy", lambda: pytest.fail("asked for CUDA"))
    enable_peer_access([3])


# -- the twin --------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_twin_answers_like_one_table_whichever_device_is_asked(devices):
    table = EmbeddingTable.make("t", 4)
    shape = plan_table_shape(table, 3000, load=ROOMY_LOAD)
    whole = TwinTable(shape, 4)
    split = TwinSplit([TwinTable(shape, 4) for _ in range(devices)])
    rng = np.random.default_rng(devices)
    for step in range(120):
        keys = rng.permutation(np.arange(-60, 60))[: rng.integers(1, 40)]
        rows = distinct_rows(table, keys, step)
        versions = rng.integers(1, step + 2, len(keys)).astype(np.uint64)
        verb = rng.choice(["insert", "insert", "update", "delete", "copy"])
        if verb == "insert":
            whole.write(keys, rows, versions)
            split.insert(keys, rows, versions)
        elif verb == "update":
            whole.write(keys, rows, versions, update=True)
            split.update(keys, rows, versions)
        elif verb == "delete":
            whole.write(keys, None, versions)
            split.delete(keys, versions)
        else:
            split.copy_rows(keys)
        asked = np.arange(-70, 70)
        expected = whole.fetch(asked)
        for home in range(devices):
            found = split.fetch(home, asked)
            states = [words & np.uint32(EMPTY | TOMBSTONE) for _, words, _ in (expected, found)]
            np.testing.assert_array_equal(*states)
            resident = states[0] == 0
            np.testing.assert_array_equal(found[0][resident], expected[0][resident])
            np.testing.assert_array_equal(found[2], expected[2])
    held = [set(each.resident().tolist()) for each in split.tables]
    assert set.union(*held) == set(whole.resident().tolist())
    assert all(len(keys) > 5 for keys in held)


def test_twins_rows_are_on_their_owner_until_they_are_copied():
    table = EmbeddingTable.make("t", 4)
    split = TwinSplit([TwinTable(plan_table_shape(table, 1000), 4) for _ in range(2)])
    keys, versions = np.arange(400), np.ones(400, np.uint64)
    split.insert(keys, distinct_rows(table, keys), versions)
    for device, each in enumerate(split.tables):
        np.testing.assert_array_equal(each.resident(), keys[owner_of(keys, 2) == device])
    split.copy_rows(keys[:50])
    for device, each in enumerate(split.tables):
        there = (owner_of(keys, 2) == device) | (keys < 50)
        np.testing.assert_array_equal(each.resident(), keys[there])
