"""Fetches of rows whose misses the host fills: with NumPy in place of kernels and device, and on a device."""

import ctypes
import queue
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hps.cuda import fetch_chunk, launch, miss_fill, vector_fetch
from hps.cuda.launch import PARTS, UNANSWERED
from hps.cuda.layout import EMPTY
from hps.cuda.loader import BLOCK
from hps.tiers.gpu.cache import GpuCache
from hps.types import EmbeddingTable, Source, make_version
from tests.support.rows import distinct_rows

MIXED = [(32, np.float32), (3, np.float16), (100, np.float32), (1, np.float16), (7, np.float32)]
WIDTHS = {"mixed": MIXED, "alike": [(32, np.float32)], "of four bytes": [(7, np.float32)]}
HELD = 400
"""The device has the rows of the even keys below this, the host those of the odd ones below it."""
COUNT = PARTS + 5


class Array(np.ndarray):
    """A device's array, on the host."""

    @property
    def ptr(self):
        return self.ctypes.data

    @property
    def data(self):
        return self

    def memset_async(self, value, size, stream):
        np.ndarray.view(self, np.uint8).reshape(-1)[:size] = value


def as_device_array(array):
    return np.ascontiguousarray(array).view(Array)


def at(address, n, dtype):
    size = n * np.dtype(dtype).itemsize
    if not n:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), dtype)


class Event:
    def __init__(self, **_):
        pass

    def record(self, stream):
        pass

    def synchronize(self):
        pass


class FetchTwin:
    """fetch.cu's form VECTORS in NumPy."""

    launched = 0

    def __init__(self, tile, unit, moves, form, *, stamp):
        assert form == launch.VECTORS
        self.tile, self.unit = tile, unit

    def one(self):
        return self

    def launch(self, blocks, args, stream, windows, later):
        FetchTwin.launched += 1
        args, first, missing, keys_missing = args.array, 0, [], []
        for part in args["part"][: int(args["parts"])]:
            assert part["first_block"] == first
            assert not part["row_bytes"] % self.unit
            assert not part["out"] % self.unit
            n, table = int(part["n"]), TABLES[int(part["lines"])]
            first += -(-n // (BLOCK // self.tile))
            keys = at(part["keys"], n, np.int64)
            found = (keys % 2 == 0) & (keys >= 0) & (keys < HELD)
            rows = distinct_rows(table, keys)
            at(part["out"], n * table.dim, table.dtype).reshape(n, -1)[found] = rows[found]
            if part["source"]:
                at(part["source"], n, np.uint8)[found] = part["code"] & 255
            assert part["now"] == 7
            missing.append(np.flatnonzero(~found) + int(part["base"]))
            keys_missing.append(keys[~found])
        assert first == blocks
        missing, keys_missing = np.concatenate(missing), np.concatenate(keys_missing)
        order = np.random.default_rng(len(missing)).permutation(len(missing))
        at(args["misses"], len(missing), np.uint32)[:] = missing[order]
        if args["miss_keys"]:
            at(args["miss_keys"], len(missing), np.int64)[:] = keys_missing[order]
        at(args["result"] or args["miss_count"], 1, np.uint32)[:] = len(missing)


class PlaceTwin:
    """place_kernel, and count_kernel, in NumPy."""

    def __init__(self, name):
        self.launch = self.count if name == "count_kernel" else self.place
        if name == "count_kernel":
            return
        assert name.startswith("place_kernel<")
        self.tile, self.unit = (int(x) for x in name[name.index("<") + 1 : -1].split(","))

    def count(self, blocks, args, stream):
        missed = at(args["miss_count"], 1, np.uint32)
        at(args["result"], 1, np.uint32)[:] = missed
        missed[:] = 0

    def place(self, blocks, args, stream):
        args = args.array
        n, stride, parts = int(args["n"]), int(args["stride"]), args["part"][: int(args["parts"])]
        assert blocks == -(-n // (BLOCK // self.tile))
        assert not stride % self.unit
        rows = at(args["rows"], n * stride, np.uint8).reshape(n, stride)
        sources, positions = at(args["sources"], n, np.uint8), at(args["positions"], n, np.uint32)
        for position, row, source in zip(positions.tolist(), rows, sources, strict=True):
            if source == UNANSWERED:
                continue
            part = parts[np.searchsorted(parts["base"], position, side="right") - 1]
            own, width = position - int(part["base"]), int(part["row_bytes"])
            at(part["out"] + own * width, width, np.uint8)[:] = row[:width]
            if part["source"]:
                at(part["source"] + own, 1, np.uint8)[:] = source


TABLES = {}


class HostDevice:
    """NumPy in the device's place."""

    def __init__(self, monkeypatch):
        self.stream = SimpleNamespace(synchronize=lambda: None, ptr=0)
        copy = SimpleNamespace(memcpyAsync=lambda to, source, n, *_: ctypes.memmove(to, source, n))
        module = SimpleNamespace(
            empty=lambda n, dtype: as_device_array(np.empty(n, dtype)),
            zeros=lambda n, dtype: as_device_array(np.zeros(n, dtype)),
            cuda=SimpleNamespace(
                alloc_pinned_memory=lambda n: as_device_array(np.full(n, 0xA5, np.uint8)),
                get_current_stream=lambda: self.stream,
                runtime=copy,
                Event=Event,
            ),
        )
        for each in (vector_fetch, fetch_chunk, miss_fill):
            monkeypatch.setattr(each, "cupy", lambda: module)
        monkeypatch.setattr(fetch_chunk, "kernel", PlaceTwin)
        monkeypatch.setattr(fetch_chunk, "FetchKernels", FetchTwin)
        monkeypatch.setattr(fetch_chunk, "COMPILED", False)
        self._readers = SimpleNamespace(run=lambda stream, start: start())
        self._cache = SimpleNamespace(_miss_rows=queue.SimpleQueue())

    def prepare(self, requests, offsets, on_device, sources):
        held = []
        for table, n in requests:
            TABLES[len(TABLES)] = table
            sizes = (1, 32, table.row_bytes, 0)
            shape = SimpleNamespace(host_bytes=0)
            clock = SimpleNamespace(
                stamping=0, now=7, cell=np.array([7], np.uint32), is_timed=False
            )
            pointers = (len(TABLES) - 1, 0, 0, 0)
            fake = SimpleNamespace(
                table=table,
                pointers=pointers,
                sizes=sizes,
                clock=clock,
                code=launch.GPU_CODE | EMPTY,
                shape=shape,
            )
            held.append((fake, n))
        codes = 0 if sources is None else sources.ptr
        return vector_fetch.VectorFetch(self._readers, held, offsets, on_device, codes)

    def fill(self, fetch, gather):
        return GpuCache.fill_misses(self._cache, fetch, self.stream, gather)

    put = staticmethod(as_device_array)
    host = staticmethod(np.array)


class CudaDevice:
    def __init__(self, tables):
        import cupy

        self.cache, self.stream = GpuCache(dict.fromkeys(tables, 2 * HELD)), cupy.cuda.Stream()
        keys, now = np.arange(0, HELD, 2), make_version(time.time_ns() // 1_000_000)
        for table in tables:
            self.cache.insert(
                table, keys, distinct_rows(table, keys), np.full(len(keys), now, np.uint64)
            )
        self.prepare, self.put = self.cache.prepare_vectors, cupy.asarray

    def fill(self, fetch, gather):
        report = self.cache.fill_misses(fetch, self.stream, gather)
        self.stream.synchronize()
        return report

    def host(self, array):
        return array.get()


@pytest.fixture(params=WIDTHS)
def tables(request):
    widths = WIDTHS[request.param]
    each = [widths[i % len(widths)] for i in range(COUNT)]
    return [EmbeddingTable.make(f"t{i}", dim, dtype=dtype) for i, (dim, dtype) in enumerate(each)]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch, tables):
    if request.param == "host":
        yield HostDevice(monkeypatch)
        return
    device = CudaDevice(tables)
    yield device
    device.cache.close()


def gather_odd(batch):
    """A host that has the rows of the odd keys below HELD."""
    keys = batch.keys if batch.listed else batch.keys[batch.positions]
    parts = np.searchsorted(batch.bases, batch.positions, side="right") - 1
    found = (keys % 2 == 1) & (keys > 0) & (keys < HELD)
    for part, table in enumerate(batch.tables):
        mine = np.flatnonzero(found & (parts == part))
        rows = distinct_rows(table, keys[mine]).view(np.uint8).reshape(len(mine), table.row_bytes)
        batch.rows[mine, : table.row_bytes] = rows
        missed = np.count_nonzero(parts == part)
        batch.counts[part] += np.array([missed, len(mine)], np.uint32)
    batch.sources[:] = np.where(found, Source.CPU, UNANSWERED)
    return int(np.count_nonzero(~found))


SIZES = {
    "equal": lambda i: 60,
    "different": lambda i: [300, 1, 17, 90][i % 4],
    "one large": lambda i: 3000 if i == 3 else 2,
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("where", ["host", "device", "both"])
@pytest.mark.parametrize("large", [False, True])
def test_rows_of_device_and_host_reach_their_places(
    device, tables, sizes, where, large, monkeypatch
):
    """``large``: with several chunks, copies of counts, and slices of rows."""
    if large:
        monkeypatch.setattr(fetch_chunk, "chunk_keys", lambda _keys: 500)
        monkeypatch.setattr(fetch_chunk, "COUNTED_BEHIND", 0)
        monkeypatch.setattr(vector_fetch, "COPIED_IN_CHUNKS", 0)
        monkeypatch.setattr(miss_fill, "SLICE_BYTES", 15_000)
    numbers = [SIZES[sizes](i) for i in range(COUNT)]
    there = [where == "device" or (where == "both" and i % 3 == 0) for i in range(COUNT)]
    widths = [n * t.row_bytes for n, t in zip(numbers, tables, strict=True)]
    offsets = np.cumsum([0, *(-(-width // 256) * 256 for width in widths)]).tolist()
    block = device.put(np.zeros(offsets[-1], np.uint8))
    codes = device.put(np.zeros(sum(numbers), np.uint8))
    requests = list(zip(tables, numbers, strict=True))
    fetch = device.prepare(requests, offsets[:-1], there, codes)
    rng = np.random.default_rng(3)
    for turn in range(3):
        keys = [rng.integers(-5, HELD + 5, n) for n in numbers]
        if turn == 1:
            keys = [own // 2 * 2 % HELD for own in keys]
        arrays = [device.put(own) if on else own for own, on in zip(keys, there, strict=True)]
        codes[...] = 0
        fetch.launch(device.stream, block.data.ptr, arrays)
        report = device.fill(fetch, gather_odd)
        check(device, report, tables, keys, offsets, block, codes)
    assert len(fetch.chunks) > 1


def check(device, report, tables, keys, offsets, block, codes):
    rows, sources, start = device.host(block), device.host(codes), 0
    missed = [(own < 0) | (own >= HELD) | (own % 2 == 1) for own in keys]
    assert (report is None) != np.concatenate(missed).any()
    counts = np.zeros((len(tables), 2), int) if report is None else report.counts
    left = None if report is None else report.left
    for i, (table, own) in enumerate(zip(tables, keys, strict=True)):
        n, held = len(own), (own >= 0) & (own < HELD)
        got = rows[offsets[i] : offsets[i] + n * table.row_bytes].view(table.dtype).reshape(n, -1)
        np.testing.assert_array_equal(got[held], distinct_rows(table, own)[held])
        expected = np.where(own % 2 == 0, Source.GPU, Source.CPU) * held
        np.testing.assert_array_equal(sources[start : start + n], expected)
        assert counts[i].tolist() == [missed[i].sum(), (missed[i] & held).sum()]
        own_left = [] if left is None else left[i].tolist()
        assert own_left == np.flatnonzero(~held).tolist()
        start += n


def test_keys_written_to_pinned_memory_are_fetched(device, tables):
    block = device.put(np.zeros(512 * 10, np.uint8))
    fetch = device.prepare([(tables[0], 10)], [0], [False], None)
    fetch.keys[0][:] = np.arange(10) * 2
    fetch.launch(device.stream, block.data.ptr)
    report = device.fill(fetch, gather_odd)
    assert report is None
    size = 10 * tables[0].row_bytes
    got = device.host(block)[:size].view(tables[0].dtype).reshape(10, -1)
    np.testing.assert_array_equal(got, distinct_rows(tables[0], np.arange(10) * 2))


def test_a_host_without_rows_leaves_every_miss(device, tables):
    block = device.put(np.zeros(512 * 10, np.uint8))
    fetch = device.prepare([(tables[0], 6), (tables[1], 4)], [0, 2560], [False, False], None)
    fetch.launch(device.stream, block.data.ptr, [np.arange(6), np.arange(4)])
    report = device.fill(fetch, miss_fill.no_rows)
    assert [own.tolist() for own in report.left] == [[1, 3, 5], [1, 3]]
    assert report.counts.tolist() == [[3, 0], [2, 0]]
