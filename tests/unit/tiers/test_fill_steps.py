"""Fetches that the batch scheduler runs and fills from host memory.

With NumPy in place of kernels and device, and on a device."""

import os
import threading

import numpy as np
import pytest

pytest.importorskip("hps.native._core")
from hps.cuda import fetch_chunk
from hps.native import COMPILED
from hps.native.scheduler import BatchScheduler, MissFill, SizeClass, Step
from hps.tiers.cpu.cache import CpuCache
from hps.types import Source
from tests.support.native_scheduler import DONE, Channel
from tests.support.rows import distinct_rows
from tests.unit.tiers.test_vector_fetch import (  # noqa: F401 # fixtures
    HELD,
    CudaDevice,
    device,
    tables,
)

pytestmark = pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
BATCH, SAMPLES = 16, 11
UNKNOWN = HELD + 1


def hotness_of(i):
    return 1 + i % 3


class Lane:
    """A lane whose batches fetch the rows of one feature per table to a block on the device."""

    def __init__(self, device, tables, codes, monkeypatch, slice_rows):  # noqa: F811
        self.device, self.tables = device, tables
        self.sizes = [BATCH * hotness_of(i) for i in range(len(tables))]
        widths = [n * t.row_bytes for n, t in zip(self.sizes, tables, strict=True)]
        self.offsets = np.cumsum([0, *(-(-width // 256) * 256 for width in widths)]).tolist()
        self.block = device.put(np.zeros(self.offsets[-1], np.uint8))
        self.codes = device.put(np.zeros(sum(self.sizes), np.uint8)) if codes else None
        self.cpu = CpuCache(dict.fromkeys(tables, 2 * HELD))
        odd = np.arange(1, HELD, 2)
        for table in tables:
            versions = np.ones(len(odd), np.uint64)
            self.cpu.insert(table, odd, distinct_rows(table, odd), versions)
        self.context = self.stream = 0
        if isinstance(device, CudaDevice):
            with device.cache.space.device:
                self.context, self.stream = device.cache.space.context, device.stream.ptr
        else:
            monkeypatch.setattr(fetch_chunk, "_kernel_step", called_step)
        self.keys = [self.pinned(8 * n).view(np.int64) for n in self.sizes]
        self.output, self.missing = np.zeros(BATCH, np.int64), np.ones(1, np.uint32)
        self.fill = self.make_fill(slice_rows)

    def pinned(self, size):
        if not isinstance(self.device, CudaDevice):
            return np.zeros(size, np.uint8)
        return self.device.cache.space.pinned(size)

    def make_fill(self, slice_rows):
        at = self.block.data.ptr
        self.fetch = self.device.prepare(
            list(zip(self.tables, self.sizes, strict=True)),
            [at + offset for offset in self.offsets[:-1]],
            [True] * len(self.tables),
            self.codes,
        )
        hotness = [hotness_of(i) for i in range(len(self.tables))]
        self.held = self.cpu.native_tables(self.tables)
        steps, chunks = self.fetch.fill_steps(
            [keys.ctypes.data for keys in self.keys], hotness, self.held
        )
        assert len(chunks) > 1
        stride = -(-max(table.row_bytes for table in self.tables) // 16) * 16
        self.memory = self.pinned(2 * (16 + slice_rows * (stride + 1)))
        at, size = self.memory.ctypes.data, len(self.memory)
        return MissFill.make(steps, chunks, [], at, size, stride, int(Source.CPU))

    def size_class(self):
        return SizeClass.make(
            batch=BATCH,
            inputs=[keys.ctypes.data for keys in self.keys],
            outputs=[self.output.ctypes.data],
            missing_keys=[self.missing.ctypes.data],
            steps=[Step.call(lambda: True)],
            fill=self.fill,
        )

    def check(self, keys):
        """All rows of ``keys`` are on the device."""
        rows = self.device.host(self.block)
        for i, (table, own) in enumerate(zip(self.tables, keys, strict=True)):
            size = len(own) * table.row_bytes
            got = rows[self.offsets[i] : self.offsets[i] + size].view(table.dtype)
            expected = distinct_rows(table, own)
            np.testing.assert_array_equal(got.reshape(len(own), -1), expected)
        if self.codes is None:
            return
        codes = np.split(self.device.host(self.codes), np.cumsum(self.sizes)[:-1])
        for code, own in zip(codes, keys, strict=True):
            expected = np.where(own % 2 == 0, Source.GPU, Source.CPU)
            np.testing.assert_array_equal(code[: len(own)], expected)


def called_step(run, blocks, args, fresh=()):
    """The step that calls a kernel's twin; place_kernel's blocks are those of its rows."""

    def call():
        if isinstance(run, fetch_chunk.FetchKernels):
            args.array["part"]["now"] = 7
            run.launch(blocks, args, None, 1, None)
        else:
            n = int(args.array["n"]) if "n" in args.array.dtype.names else 0
            run.launch(-(-n // (256 // getattr(run, "tile", 256))), args, None)
        return True

    return Step.call(call)


class Served:
    """A scheduler with one lane and one client."""

    def __init__(self, lane):
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.native = BatchScheduler(os.dup(self.wake), 20)
        widths = [8 * hotness_of(i) for i in range(len(lane.tables))]
        self.model = self.native.add_model(widths, [8])
        self.native.add_lane(self.model, [lane.size_class()], lane.context, lane.stream)
        self.channel = Channel(self)
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self.native.run, self.native.fill_batches)
        ]
        for each in self._threads:
            each.start()

    def send(self, keys, samples):
        size = 8 * samples
        columns = [np.ascontiguousarray(own) for own in keys]
        assert self.channel.client.submit(1, self.model, samples, 0, columns, size, size)

    def close(self):
        self.native.stop()
        for each in self._threads:
            each.join(20)
        os.close(self.wake)


@pytest.fixture(params=[False, True], ids=["without codes", "codes"])
def lane(request, device, tables, monkeypatch):  # noqa: F811
    return Lane(device, tables, request.param, monkeypatch, 1000)


def keys_for(tables, samples, seed):  # noqa: F811
    rng = np.random.default_rng(seed)
    return [rng.integers(0, HELD, samples * hotness_of(i)) for i in range(len(tables))]


@pytest.mark.parametrize("slice_rows", [1, 40, 5000])
def test_rows_of_device_and_host_reach_their_places(device, tables, monkeypatch, slice_rows):  # noqa: F811
    lane = Lane(device, tables, True, monkeypatch, slice_rows)
    served = Served(lane)
    for seed, samples in enumerate((SAMPLES, BATCH, 1, SAMPLES)):
        keys = keys_for(tables, samples, seed)
        served.send(keys, samples)
        assert [each.status for each in served.channel.receive()] == [DONE]
        lane.check(keys)
    served.close()


def test_misses_are_reported_and_unknown_keys_leave_the_batch(lane, tables):  # noqa: F811
    served = Served(lane)
    keys = keys_for(tables, 4, 9)
    keys[5][:] = [1, 3, 5, *[0] * (len(keys[5]) - 3)]
    served.send(keys, 4)
    assert [each.status for each in served.channel.receive()] == [DONE]
    lane.check(keys)
    report = served.native.take_report(5_000)
    missed = [int((own % 2 == 1).sum()) for own in keys]
    for name in ("missed", "found", "filled"):
        assert report[name].tolist() == missed
    promoted = list(zip(report["features"].tolist(), report["keys"].tolist(), strict=True))
    assert sorted(promoted) == sorted(
        (i, key) for i, own in enumerate(keys) for key in own.tolist() if key % 2
    )
    keys[7][-1] = UNKNOWN
    served.send(keys, 4)
    number, *_ = served.native.take_slow(5_000)
    served.native.answer_slow(number, 2, 0)
    served.channel.receive()
    assert served.native.take_report(5_000)["answered"] == 0
    served.close()
