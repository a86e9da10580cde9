"""Samples of the requests of each served model, kept whole, to warm up its next version.

A thread arms each model's sample ten times a second; the next request is kept. So requests pay for one check
of an attribute."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import ExitStack
from dataclasses import replace

from hps.periodic import PeriodicThread
from hps.types import JaggedKeys, LookupRequest, PredictRequest

ARM_EVERY_S = 0.1
MOST_REQUESTS = 256
MOST_BYTES = 16 << 20
"""Of one model's kept requests together."""

Sampled = LookupRequest | PredictRequest


class RequestSample:
    """The last requests that were kept of one model, at most `MOST_REQUESTS`. Thread-safe.

    ``armed``: the next request is to be passed to `add`."""

    __slots__ = ("__weakref__", "_bytes", "_kept", "armed")

    def __init__(self) -> None:
        self.armed = False
        self._kept: deque[tuple[Sampled, int]] = deque()
        self._bytes = 0

    def add(self, request: Sampled) -> None:
        """Keep a copy of ``request``, and disarm. Does nothing for one that is too large."""
        if not self.armed:  # another thread was first
            return
        self.armed = False
        copy, size = _copied(request)
        if size > MOST_BYTES // 8:
            return
        self._kept.append((copy, size))
        self._bytes += size
        while len(self._kept) > MOST_REQUESTS or self._bytes > MOST_BYTES:
            self._bytes -= self._kept.popleft()[1]

    def requests(self) -> list[Sampled]:
        """The kept requests, oldest first, without deadlines."""
        return [request for request, _ in self._kept.copy()]


NO_SAMPLE = RequestSample()
"""Never armed."""


class RequestSamples:
    """The samples of a process's models. Each lives as long as a version of its model refers to it.

    ``arm_every_s`` None: nothing is sampled; ``resources`` stops the thread."""

    def __init__(self, resources: ExitStack, arm_every_s: float | None = ARM_EVERY_S) -> None:
        self._samples: weakref.WeakValueDictionary[str, RequestSample] = (
            weakref.WeakValueDictionary()
        )
        self._is_on = arm_every_s is not None
        if arm_every_s is not None:
            thread = PeriodicThread(self._arm, arm_every_s, "hps-request-sample")
            thread.start()
            resources.callback(thread.close)

    def of(self, model: str) -> RequestSample:
        """The sample of a model, which the caller must keep."""
        if not self._is_on:
            return NO_SAMPLE
        sample = self._samples.get(model)
        if sample is None:
            sample = self._samples[model] = RequestSample()
        return sample

    def _arm(self) -> None:
        for sample in [*self._samples.values()]:
            sample.armed = True


def _copied(request: Sampled) -> tuple[Sampled, int]:
    """A copy that shares no memory with the request, and its bytes."""
    features = {name: _copied_keys(keys) for name, keys in request.features.items()}
    size = sum(_bytes(keys) for keys in features.values())
    if isinstance(request, LookupRequest):
        return replace(request, features=features, deadline=None, origin=None, out=None), size
    dense = {name: array.copy() for name, array in request.dense.items()}
    size += sum(array.nbytes for array in dense.values())
    return replace(request, features=features, dense=dense, deadline=None, origin=None), size


def _copied_keys(keys: JaggedKeys) -> JaggedKeys:
    return JaggedKeys(
        keys.keys.copy(),
        keys.batch,
        None if keys.offsets is None else keys.offsets.copy(),
        None if keys.weights is None else keys.weights.copy(),
    )


def _bytes(keys: JaggedKeys) -> int:
    arrays = keys.keys, keys.offsets, keys.weights
    return sum(array.nbytes for array in arrays if array is not None)
