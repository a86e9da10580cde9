"""The device's search for expired rows, on NumPy instead of CuPy: it finds those that its twin evicts."""

from contextlib import nullcontext

import numpy as np
import pytest

from hps.cuda import table as table_module
from hps.cuda.layout import EMPTY, TOMBSTONE, plan_table_shape
from hps.cuda.table import GpuTable
from hps.cuda.twin import TwinTable
from hps.types import EmbeddingTable
from tests.support.rows import constant_rows


class Stream(nullcontext):
    def synchronize(self):
        pass


def on_host(twin, piece=7):
    """A `GpuTable` without a device that has the rows of ``twin``."""
    held = GpuTable.__new__(GpuTable)
    held.versions = twin.versions

    def pieces(_stream):
        at = np.argwhere((twin.words & np.uint32(EMPTY | TOMBSTONE)) == 0)
        for some in np.array_split(at, max(1, len(at) // piece)):
            places = [tuple(place) for place in some.tolist()]
            keys = np.array([twin.keys[place] for place in places], np.int64)
            numbers = np.array([twin._number(place) for place in places], np.uint32)
            yield keys, numbers, np.zeros(len(keys), np.uint64)

    held._pieces = pieces
    return held


@pytest.mark.parametrize("oldest", [0, 15, 1000])
def test_keys_of_expired_rows_are_those_that_the_twin_evicts(monkeypatch, oldest):
    monkeypatch.setattr(table_module, "cupy", lambda: np)
    twin = TwinTable(plan_table_shape(EmbeddingTable.make("t", 4), 60), 4)
    keys = np.arange(50)
    twin.write(keys, constant_rows(keys, 4), (keys % 30).astype(np.uint64))
    twin.write(keys[:5], None, np.full(5, 40, np.uint64))
    before = twin.resident()
    found = on_host(twin).expired(Stream(), oldest)
    twin.expire(oldest)
    np.testing.assert_array_equal(np.sort(found), np.setdiff1d(before, twin.resident()))
    if oldest == 15:
        assert 0 < len(found) < len(before)


def test_an_empty_table_has_no_expired_rows(monkeypatch):
    monkeypatch.setattr(table_module, "cupy", lambda: np)
    twin = TwinTable(plan_table_shape(EmbeddingTable.make("t", 4), 60), 4)
    assert len(on_host(twin).expired(Stream(), 5)) == 0
