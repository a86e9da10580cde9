"""The native batch scheduler with lanes that are Python functions, and raw clients of its channels."""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from hps.native._core import CacheTable
from hps.native.scheduler import (
    BatchScheduler,
    ChannelClient,
    FillChunk,
    MissFill,
    SizeClass,
    Step,
)
from tests.support.waiting import until

DONE, REPLIED, EXPIRED, FAILED, UNAVAILABLE = range(1, 6)
CHANNEL_BYTES = 1 << 20
FACTOR = 3
"""The output of a lane is its key times this."""
_HELD, _UNKNOWN = 0, 1
"""Keys with and without a row in host memory."""


@dataclass
class Answer:
    ticket: int
    status: int
    data: np.ndarray
    direct: int
    launched_ns: int
    ended_ns: int

    @property
    def values(self):
        return self.data.view(np.int64).tolist()

    @property
    def text(self):
        return self.data.tobytes().decode()


class Channel:
    """A client's end, with its memory mapped a second time, as a client could change it."""

    def __init__(self, scheduler, size=CHANNEL_BYTES):
        memory = os.memfd_create("test-channel", os.MFD_CLOEXEC)
        os.ftruncate(memory, size)
        woken = os.eventfd(0, os.EFD_NONBLOCK)
        self.number = scheduler.native.add_channel(memory, os.dup(woken))
        self.raw = np.frombuffer(mmap.mmap(memory, size), np.uint8)
        self.client = ChannelClient(memory, os.dup(scheduler.wake), woken)

    def submit(self, model, keys, *, ticket=1, deadline_s=None, batch=None, space=None, width=8):
        """Send ``keys``; False if the channel is full. ``space``: bytes for the answer."""
        column = np.asarray(keys, np.int64)
        n = len(column) if batch is None else batch
        deadline = 0 if deadline_s is None else int((time.monotonic() + deadline_s) * 1e9)
        out = width * n
        return self.client.submit(
            ticket, model, n, deadline, [column], out, out + 64 if space is None else space
        )

    def receive(self, count=1, timeout_s=10.0):
        """Return ``count`` answers, in the order in which they arrive; fewer after ``timeout_s``."""
        answers, until = [], time.monotonic() + timeout_s
        while len(answers) < count and (left := until - time.monotonic()) > 0:
            answers += [Answer(*each) for each in self.client.receive(max(1, int(left * 1e3)))]
        return answers

    def predict(self, model, keys, **options):
        assert self.submit(model, keys, **options)
        (answer,) = self.receive()
        return answer


class Lane:
    """A lane of one int64 key and one int64 output per sample.

    ``log`` gets the keys of each size class's run, padding included. ``before`` is called in each run;
    it returns False to let it fail. ``missing``: the count of missing keys that runs leave. A fill then
    finds the row of the first sample in host memory, but none for the samples ``unresolved``; it calls
    ``filling`` with itself, the size class and samples before its outputs are ready."""

    def __init__(self, batches, log, before=lambda: True, filling=lambda *_batch: True):
        self.log = log
        self.before = before
        self.filling = filling
        self.unresolved = []
        self.table = CacheTable(64, np.empty((0, 4), np.float32), "lru", 2)
        self.table.write(
            np.array([_HELD]), np.ones((1, 4), np.float32), np.ones(1, np.uint64), 0, False
        )
        self._memory = np.zeros(4096, np.uint8)
        self._kept = []
        self.missing = np.zeros(1, np.uint32)
        self.keys = [np.zeros(batch, np.int64) for batch in batches]
        self.outputs = [np.zeros(batch, np.int64) for batch in batches]

    def size_classes(self):
        """Return the native size classes. Not kept here: they refer to this lane, unseen by gc."""
        return [
            SizeClass.make(
                batch=len(keys),
                inputs=[keys.ctypes.data],
                outputs=[outputs.ctypes.data],
                missing_keys=[self.missing.ctypes.data],
                steps=[Step.call(lambda k=keys, o=outputs: self.run(k, o))],
                fill=self.fill(i),
            )
            for i, (keys, outputs) in enumerate(zip(self.keys, self.outputs, strict=True))
        ]

    def fill(self, size_class):
        """Return the native `MissFill` of a size class."""
        n = len(self.keys[size_class]) + 1
        used, missing, positions = (np.zeros(size, np.uint32) for size in (1, 1, n))
        keys, arguments = np.zeros(n, np.int64), np.zeros(4, np.uint64)
        self._kept += [used, missing, positions, keys, arguments]

        def fetch():
            some = [0] if self.missing[0] else []
            missing[0] = len(some) + len(self.unresolved)
            positions[: missing[0]] = some + self.unresolved
            keys[: missing[0]] = [_HELD] * len(some) + [_UNKNOWN] * len(self.unresolved)
            return True

        def rest():
            self.outputs[size_class][:] = self.keys[size_class] * FACTOR
            return self.filling(self, size_class, int(used[0]))

        at = [each.ctypes.data for each in (missing, positions, keys)]
        part = self.table, 0, 0, n - 1, 1, 0, used.ctypes.data
        places = tuple(arguments[i:].ctypes.data for i in range(4))
        chunk = FillChunk.make([part], *at, Step.call(lambda: True), 64, places)
        return MissFill.make(
            [Step.call(fetch)], [chunk], [Step.call(rest)], self._memory.ctypes.data, 4096, 16, 2
        )

    def run(self, keys, outputs):
        self.log.append(keys.tolist())
        outputs[:] = keys * FACTOR
        return self.before()


class Filling:
    """A batch that is being filled; `finish` ends it."""

    def __init__(self, lane, size_class, samples):
        self.lane, self.size_class, self.samples = lane, size_class, samples
        self._finished = threading.Event()

    def finish(self):
        self._finished.set()

    def wait(self):
        return self._finished.wait(10)


class Scheduler:
    """A scheduler that runs from `start` on. Threads fill its batches, each once `take` returned it."""

    def __init__(self):
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.native = BatchScheduler(os.dup(self.wake), 20, 0)
        self.lanes = {}
        self._filling = queue.SimpleQueue()
        self._thread = threading.Thread(target=self.native.run, daemon=True)
        self._fills = []

    def model(self, batches=(1, 4), *, lanes=1, log=None, before=lambda: True):
        """Add a model with lanes; return its number and its lanes' log."""
        log = [] if log is None else log
        number = self.native.add_model([8], [8])
        for _ in range(lanes):
            lane = Lane(batches, log, before)
            lane.filling = self._fill
            self.lanes[self.native.add_lane(number, lane.size_classes(), 0, 0)] = lane
            self._fills.append(threading.Thread(target=self.native.fill_batches, daemon=True))
        return number, log

    def set_missing(self, count, unresolved=()):
        for lane in self.lanes.values():
            lane.missing[0] = count
            lane.unresolved = list(unresolved)

    def _fill(self, lane, size_class, samples):
        filling = Filling(lane, size_class, samples)
        self._filling.put(filling)
        return filling.wait()

    def take(self, timeout_s=5.0):
        """Return the next `Filling`; None after ``timeout_s``."""
        with suppress(queue.Empty):
            return self._filling.get(timeout=timeout_s)
        return None

    def start(self):
        for each in self._fills:
            each.start()
        until(lambda: self.native.filling_threads == len(self._fills))
        self._thread.start()

    def stop(self):
        self.native.stop()
        for each in (self._thread, *self._fills):
            if each.ident is not None:
                each.join(10)
                assert not each.is_alive()

    def counts(self, model):
        return {name: n for name, n in self.native.counts(model).items() if name != "device_ns"}


@contextmanager
def opened_scheduler():
    scheduler = Scheduler()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        with suppress(OSError):
            os.close(scheduler.wake)
