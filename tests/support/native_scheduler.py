"""The native batch scheduler with lanes that are Python functions, and raw clients of its channels."""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from hps.native.scheduler import BatchScheduler, ChannelClient, SizeClass, Step

DONE, REPLIED, EXPIRED, FAILED, UNAVAILABLE = range(1, 6)
CHANNEL_BYTES = 1 << 20
FACTOR = 3
RESOLVED, UNRESOLVED = np.zeros(4096, np.uint8), np.empty(0, np.uint8)
"""The output of a lane is its key times this."""


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
    it returns False to let it fail. ``missing``: the count of missing keys that runs leave."""

    def __init__(self, batches, log, before=lambda: True):
        self.log = log
        self.before = before
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
            )
            for keys, outputs in zip(self.keys, self.outputs, strict=True)
        ]

    def run(self, keys, outputs):
        self.log.append(keys.tolist())
        outputs[:] = keys * FACTOR
        return self.before()

    def complete(self, size_class):
        self.outputs[size_class][:] = self.keys[size_class] * FACTOR


class Scheduler:
    """A scheduler that runs from `start` on."""

    def __init__(self):
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.native = BatchScheduler(os.dup(self.wake), 20)
        self.lanes = {}
        self._thread = threading.Thread(target=self.native.run, daemon=True)

    def model(self, batches=(1, 4), *, lanes=1, log=None, before=lambda: True):
        """Add a model with lanes; return its number and its lanes' log."""
        log = [] if log is None else log
        number = self.native.add_model([8], [8])
        for _ in range(lanes):
            lane = Lane(batches, log, before)
            self.lanes[self.native.add_lane(number, lane.size_classes(), 0, 0)] = lane
        return number, log

    def set_missing(self, count):
        for lane in self.lanes.values():
            lane.missing[0] = count

    def start(self):
        self._thread.start()

    def stop(self):
        self.native.stop()
        if self._thread.ident is not None:
            self._thread.join(10)
            assert not self._thread.is_alive()

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
