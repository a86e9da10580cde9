"""Counts and times per model, in the form of Triton's statistics extension.

perf_analyzer reads every field here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

# Limit on batch sizes that are counted separately; others count only in the totals.
MAX_BATCH_SIZES = 64
_TOTALS = (
    "success_count",
    "success_ns",
    "fail_count",
    "fail_ns",
    "inferences",
    "executions",
    "queue_ns",
    "input_ns",
    "infer_ns",
    "output_ns",
)


Stages = tuple[int, int, int, int]
"""Instants (``perf_counter_ns``) of a request: received, decoded, result ready, answer encoded."""


def queued_ns(answer: Future[Any]) -> int:
    """Time that the request of ``answer`` was queued."""
    return getattr(answer, "queued_ns", 0)


def execution_samples(answer: Future[Any]) -> Iterator[int] | None:
    """The shared execution of a batched request; None if the request was not batched.

    The iterator yields the number of samples of the whole batch, once, to its first request."""
    return getattr(answer, "execution", None)


class Statistics:
    """One model version's totals; times are nanoseconds. Thread-safe."""

    __slots__ = ("_batches", "_lock", "last_ns", *_TOTALS)

    def __init__(self) -> None:
        self.success_count = self.success_ns = 0
        self.fail_count = self.fail_ns = 0
        self.inferences = self.executions = 0
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0
        self.last_ns = 0  # end of the last request, by perf_counter_ns
        self._batches: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def succeeded(
        self, batch: int, stages: Stages, queued: int = 0, execution: Iterator[int] | None = None
    ) -> None:
        """Count a request of ``batch`` samples.

        It was ``queued`` (ns) for a part of the time between decoding and result. Of the requests that share
        an ``execution_samples``, the first counts the execution, with the samples that it yields and its own
        times; a request without one was executed alone."""
        started, parsed, inferred, done = stages
        inferring = inferred - parsed - queued
        with self._lock:
            self.queue_ns += queued
            self.success_count += 1
            self.success_ns += done - started
            self.inferences += batch
            self.input_ns += parsed - started
            self.infer_ns += inferring
            self.output_ns += done - inferred
            self.last_ns = done
            if execution is not None:
                # Atomic, one step of the interpreter: a batch may serve both names of a model, which share
                # no lock.
                batch = next(execution, -1)
                if batch < 0:
                    return
            self.executions += 1
            entry = self._batches.get(batch)
            if entry is None:
                if len(self._batches) >= MAX_BATCH_SIZES:
                    return
                entry = self._batches[batch] = [0, 0, 0, 0]
            entry[0] += 1
            entry[1] += parsed - started
            entry[2] += inferring
            entry[3] += done - inferred

    def failed(self, started: int, done: int) -> None:
        """Count a request that was answered with an error."""
        with self._lock:
            self.fail_count += 1
            self.fail_ns += done - started
            self.last_ns = done

    def numbers(self) -> dict[str, Any]:
        """All values, for another process to `add`."""
        with self._lock:
            found: dict[str, Any] = {name: getattr(self, name) for name in _TOTALS}
            batches = [[batch, *entry] for batch, entry in self._batches.items()]
            return found | {"last_ns": self.last_ns, "batches": batches}

    def add(self, numbers: dict[str, Any]) -> None:
        """Add the values of another process. It has the same clock, since it is on the same machine."""
        with self._lock:
            for name in _TOTALS:
                setattr(self, name, getattr(self, name) + numbers[name])
            self.last_ns = max(self.last_ns, numbers["last_ns"])
            for batch, *entry in numbers["batches"]:
                mine = self._batches.get(batch, (0, 0, 0, 0))
                self._batches[batch] = [a + b for a, b in zip(mine, entry, strict=True)]

    def as_json(self, name: str, version: str) -> dict[str, Any]:
        """One element of ``model_stats``."""
        with self._lock:
            count = self.success_count
            return {
                "name": name,
                "version": version,
                "last_inference": self._last_inference_ms(),
                "inference_count": self.inferences,
                "execution_count": self.executions,
                "inference_stats": {
                    "success": _duration(count, self.success_ns),
                    "fail": _duration(self.fail_count, self.fail_ns),
                    "queue": _duration(count, self.queue_ns),
                    "compute_input": _duration(count, self.input_ns),
                    "compute_infer": _duration(count, self.infer_ns),
                    "compute_output": _duration(count, self.output_ns),
                    "cache_hit": _duration(0, 0),
                    "cache_miss": _duration(0, 0),
                },
                "response_stats": {},
                "batch_stats": [
                    {
                        "batch_size": batch,
                        "compute_input": _duration(entry[0], entry[1]),
                        "compute_infer": _duration(entry[0], entry[2]),
                        "compute_output": _duration(entry[0], entry[3]),
                    }
                    for batch, entry in sorted(self._batches.items())
                ],
                "memory_usage": [],
            }

    def _last_inference_ms(self) -> int:
        if not self.last_ns:
            return 0
        ago = time.perf_counter_ns() - self.last_ns
        return (time.time_ns() - ago) // 1_000_000


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
