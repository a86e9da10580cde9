"""Host rows for the misses of a prepared fetch: with NumPy in place of kernel and device, and on a device."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from hps.cuda import miss_fill as refill
from hps.cuda import staging
from hps.cuda.launch import PARTS
from hps.cuda.loader import BLOCK
from hps.types import EmbeddingTable, Source

N = 300
MIXED = [(32, np.float32), (3, np.float16), (100, np.float32), (1, np.float16), (7, np.float32)]
WIDTHS = {"mixed": MIXED, "alike": [(32, np.float32)], "of four bytes": [(7, np.float32)]}
COUNT = PARTS + 5
SHARES = {
    "none": lambda i: 0.0,
    "few": lambda i: 0.1,
    "of some tables": lambda i: 0.3 * (i % 3 == 1),
    "of the last one": lambda i: 0.5 * (i == COUNT - 1),
    "all": lambda i: 1.0,
}


class Array(np.ndarray):
    """A device's array, on the host."""

    @property
    def ptr(self):
        return self.ctypes.data

    @property
    def data(self):
        return self

    def get(self):
        return np.array(self)


def as_device_array(array):
    return array.view(Array)


class Scatter:
    """scatter.cu in NumPy."""

    launched = 0

    def __init__(self, name):
        self.tile, self.unit = (int(x) for x in name[name.index("<") + 1 : -1].split(","))

    def launch(self, blocks, args, stream):
        Scatter.launched += 1
        first = 0
        for part in args["part"][: int(args["parts"])]:
            assert part["first_block"] == first
            self.write(part)
            first += -(-int(part["n"]) // (BLOCK // self.tile))
        assert first == blocks

    def write(self, part):
        n, width = int(part["n"]), int(part["row_bytes"])
        assert not part["picks"]
        assert not any(int(part[name]) % self.unit for name in ("rows", "out", "row_bytes"))
        positions = at(part["positions"], n, np.int64)
        out = at(part["out"], N * width, np.uint8).reshape(N, width)
        out[positions] = at(part["rows"], n * width, np.uint8).reshape(n, width)
        at(part["source"], N, np.uint8)[positions] = at(part["sources"], n, np.uint8)
        at(part["versions"], N, np.uint64)[positions] = at(part["row_versions"], n, np.uint64)


def at(address, n, dtype):
    if not n:
        return np.empty(0, dtype)
    size = n * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), dtype)


@pytest.fixture(params=WIDTHS)
def tables(request):
    widths = WIDTHS[request.param]
    each = [widths[i % len(widths)] for i in range(COUNT)]
    return [EmbeddingTable.make(f"t{i}", dim, dtype=dtype) for i, (dim, dtype) in enumerate(each)]


@pytest.fixture
def on_host(monkeypatch, tables):
    stream = SimpleNamespace(synchronize=lambda: None, ptr=0)
    copy = SimpleNamespace(memcpyAsync=lambda to, source, n, *_: ctypes.memmove(to, source, n))
    module = SimpleNamespace(
        empty=lambda n, dtype: as_device_array(np.empty(n, dtype)),
        zeros=lambda n, dtype: as_device_array(np.zeros(n, dtype)),
        full=lambda n, value, dtype: as_device_array(np.full(n, value, dtype)),
        cuda=SimpleNamespace(
            alloc_pinned_memory=lambda n: as_device_array(np.empty(n, np.uint8)),
            get_current_stream=lambda: stream,
            runtime=copy,
        ),
    )
    for each in (refill, staging):
        monkeypatch.setattr(each, "cupy", lambda: module)
    monkeypatch.setattr(refill, "kernel", Scatter)
    fetch = SimpleNamespace(
        rows=[as_device_array(np.zeros((N, t.dim), t.dtype)) for t in tables],
        versions=[as_device_array(np.full(N, 5, np.uint64)) for _ in tables],
        sources=[as_device_array(np.zeros(N, np.uint8)) for _ in tables],
    )
    return refill.PreparedMissFill(fetch, tables, Source.CPU), fetch, stream


@pytest.fixture
def on_device(tables):
    import cupy

    from hps.tiers.gpu.cache import GpuCache

    cache = GpuCache(dict.fromkeys(tables, 8))
    fetch = cache.prepare_fetch([(table, N) for table in tables])
    for rows in fetch.rows:
        rows.fill(0)
    yield cache.prepare_refill(fetch, tables, Source.CPU), fetch, cupy.cuda.get_current_stream()
    cache.close()


@pytest.fixture(params=["on_host", pytest.param("on_device", marks=pytest.mark.gpu)])
def made(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("staged", [False, True])
def test_rows_are_scattered_to_their_positions(made, tables, share, staged, monkeypatch):
    if staged:
        monkeypatch.setattr(staging, "IN_PLACE", 0)
    refilled, fetch, stream = made
    rng = np.random.default_rng(3)
    for _ in range(2):
        Scatter.launched = 0
        misses = [np.flatnonzero(rng.random(N) < SHARES[share](i)) for i in range(COUNT)]
        before = [
            (rows.get(), source.get())
            for rows, source in zip(fetch.rows, fetch.sources, strict=True)
        ]
        buffers = refilled.allocate(misses)
        for table, left, buffer in zip(tables, misses, buffers, strict=True):
            assert (buffer.shape, buffer.dtype) == ((len(left), table.dim), table.dtype)
            buffer[:] = rng.integers(1, 99, buffer.shape)
        refilled.launch(stream)
        stream.synchronize()
        for i, (left, buffer) in enumerate(zip(misses, buffers, strict=True)):
            rows, source = before[i]
            rows[left], source[left] = buffer, Source.CPU
            np.testing.assert_array_equal(fetch.rows[i].get(), rows)
            np.testing.assert_array_equal(fetch.sources[i].get(), source)
        assert Scatter.launched <= 2
