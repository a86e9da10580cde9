"""SchedulerHost: the batch scheduler of a node, its thread, and what it leaves to Python."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.errors import Unavailable
from hps.predict.scheduler.client import ChannelFiles, SchedulerClient, Status
from hps.predict.scheduler.columns import ModelColumns
from hps.predict.scheduler.replies import decode_request, encode_reply
from hps.types import PredictRequest, PredictResult

log = logging.getLogger(__name__)
CHANNEL_BYTES = 1 << 27
"""Size of a channel's memory; its pages exist once they were used."""
_SPIN_US = 20
_WAIT_MS = 500
_REPORT_EVERY_S = 0.02
"""Between two reports, requests get the processor."""

Report = Callable[[Mapping[str, Any]], None]
"""Takes a report of batches that were completed from host memory; see `FillReporter`."""

Answer = Callable[[PredictRequest], "Future[PredictResult]"]
"""Runs a prediction that the lanes cannot run. Never blocks."""


class Lane(Protocol):
    """A lane's work; see `hps.predict.scheduler.lane_programs.LanePrograms`."""

    context: int
    stream: int

    def size_classes(self) -> Sequence[Any]:
        """Return the native size classes, by ascending batch."""
        ...


class SchedulerHost:
    """Runs a native `BatchScheduler`. Thread-safe.

    Requests whose rows are not all in memory, and those without columns, go to the model's ``answer``."""

    def __init__(self) -> None:
        from hps.native.scheduler import BatchScheduler

        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        native = BatchScheduler(os.dup(self._wake), _SPIN_US)
        self._native: Any = native  # None once closed
        self._models: dict[int, tuple[ModelColumns, Answer, Report]] = {}
        self._lanes: dict[int, Lane] = {}
        self._lanes_of: dict[int, list[int]] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"hps-scheduler-{name}", daemon=True)
            for name, target in (
                ("batches", native.run),
                ("reports", partial(self._take_reports, native)),
                ("slow", partial(self._answer_slow, native)),
            )
        ]
        for thread in self._threads:
            thread.start()
        self._fill_threads = 0

    # -- models ------------------------------------------------------------------------------------

    def add_model(
        self, columns: ModelColumns, answer: Answer, report: Report = lambda _report: None
    ) -> int:
        """Add a model without lanes; return its number."""
        number: int = self._native.add_model(columns.input_widths, columns.output_widths)
        self._models[number] = columns, answer, report
        return number

    def add_lane(self, model: int, lane: Lane) -> None:
        """Add a lane of ``model``; on the thread whose current device is the lane's."""
        classes = lane.size_classes()
        number = self._native.add_lane(model, classes, lane.context, lane.stream)
        self._lanes[number] = lane
        self._lanes_of.setdefault(model, []).append(number)

    def gather_with(self, threads: int) -> None:
        """Let ``threads`` native threads gather missing rows, besides the scheduler's. Idempotent."""
        with self._lock:
            while not self._closed and self._fill_threads < threads:
                self._fill_threads += 1
                name = f"hps-scheduler-fill-{self._fill_threads}"
                thread = threading.Thread(target=self._native.fill_batches, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def remove_model(self, model: int) -> None:
        """Remove a model and its lanes once its batches have ended. Blocks.

        Its waiting requests are unavailable; those outside the lanes are still answered."""
        if (native := self._native) is not None:
            native.remove_model(model)
        self._models.pop(model, None)
        for lane in self._lanes_of.pop(model, ()):
            self._lanes.pop(lane, None)

    def counts(self, model: int) -> dict[str, int]:
        """Return the model's counts: requests, samples, batches and others. Never waits for a batch.

        Zeros after the model's removal; empty after `close`."""
        native = self._native
        return {} if native is None else native.counts(model)

    def hold_back(self, stream: int) -> None:
        """Make later work on ``stream`` wait for the lanes' kernels that read tables.

        Raises RuntimeError, since a writer that does not wait would tear rows."""
        native = self._native
        if native is not None and (code := native.hold_back(stream)):
            raise RuntimeError(f"a writer cannot wait for the lanes of the GPU: CUDA error {code}")

    # -- channels ----------------------------------------------------------------------------------

    def open_channel(self) -> tuple[int, ChannelFiles]:
        """Make a channel; return its number and the client's files, which are the caller's.

        Raises Unavailable after `close`."""
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            native, wake = self._native, os.dup(self._wake)
        memory = os.memfd_create("hps-scheduler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        files = ChannelFiles(memory, wake, woken)
        try:
            os.ftruncate(memory, CHANNEL_BYTES)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            number: int = native.add_channel(memory, os.dup(woken))
        except BaseException:
            files.close()
            raise
        return number, files

    def close_channel(self, number: int) -> None:
        """Drop a channel whose client has ended; nothing of it stays."""
        if (native := self._native) is not None:
            native.remove_channel(number)

    def connect(self) -> SchedulerClient:
        """Return a client in this process."""
        _, files = self.open_channel()
        return SchedulerClient(files)

    def close(self) -> None:
        """Stop, once the running batches have ended. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._native.stop()
        for thread in self._threads:
            thread.join()
        self._lanes.clear()
        self._lanes_of.clear()
        self._models.clear()
        self._native = None
        os.close(self._wake)

    # -- what the lanes leave ----------------------------------------------------------------------

    def _take_reports(self, native: Any) -> None:
        while not self._closed:
            report = native.take_report(_WAIT_MS)
            if report is not None:
                self._take_report(report)
                time.sleep(_REPORT_EVERY_S)

    def _take_report(self, report: Mapping[str, Any]) -> None:
        """Count batches. A call of its own: the thread must not hold a model while it waits."""
        found = self._models.get(report["model"])
        if found is not None:
            try:
                found[2](report)
            except Exception:
                log.exception("batches with missing rows were not counted")

    def _answer_slow(self, native: Any) -> None:
        while not self._closed:
            entry = native.take_slow(_WAIT_MS)
            if entry is not None:
                self._begin_slow(*entry)
                del entry

    def _begin_slow(
        self,
        number: int,
        model: int,
        batch: int,
        deadline_ns: int,
        inputs: NDArray[np.uint8],
        outputs: NDArray[np.uint8],
    ) -> None:
        """Start a prediction outside the lanes. A call of its own, like `_take_report`."""
        reply = partial(self._reply, number, outputs)
        try:
            columns, answer, _ = self._served(model)
            request = _request(columns, batch, deadline_ns, inputs)
            future = answer(request)
        except Exception as error:
            reply(error)
        else:
            future.add_done_callback(partial(_reply_with_result, reply))

    def _served(self, model: int) -> tuple[ModelColumns, Answer, Report]:
        found = self._models.get(model)
        if found is None:
            raise Unavailable("the model is being closed")
        return found

    def _reply(
        self, number: int, outputs: NDArray[np.uint8], reply: PredictResult | BaseException
    ) -> None:
        encoded = encode_reply(reply)
        status = Status.REPLIED
        if len(encoded) > len(outputs):
            encoded = b"the answer is larger than the request's space for it"[: len(outputs)]
            status = Status.FAILED
        with self._lock:  # the memory of `outputs` exists until the scheduler is closed
            if not self._closed:
                outputs[: len(encoded)] = np.frombuffer(encoded, np.uint8)
                self._native.answer_slow(number, int(status), len(encoded))


def _request(
    columns: ModelColumns, batch: int, deadline_ns: int, inputs: NDArray[np.uint8]
) -> PredictRequest:
    """Decode a request; its arrays are its own."""
    deadline = deadline_ns * 1e-9 if deadline_ns else None
    if not batch:
        request = decode_request(inputs.tobytes())
        request.deadline = deadline
        return request
    features, dense = columns.decode_inputs(inputs.copy(), batch)
    return PredictRequest(features, dense, deadline=deadline)


def _reply_with_result(
    reply: Callable[[PredictResult | BaseException], None], future: Future[PredictResult]
) -> None:
    error = future.exception()
    reply(future.result() if error is None else error)
