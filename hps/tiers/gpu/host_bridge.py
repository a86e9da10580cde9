"""HostBridge: makes a tier in host memory usable as a tier on the device."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from hps.cuda.device import CudaDevice
from hps.cuda.launch import SCATTER_ARGS, UNANSWERED
from hps.cuda.loader import KernelStruct, cupy
from hps.cuda.scatter import ScatterInputs, scatter
from hps.cuda.staging import StagingBuffer
from hps.errors import TierTimeout, Unavailable
from hps.native import dedup
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.gpu.checks import array_length, check_array, check_part
from hps.types import EmbeddingTable, IndexArray, KeyArray


class HostBridge:
    """A tier on the device whose rows are those of ``inner``, a tier or chain in host memory.

    `fetch` takes parts like `GpuCache.fetch`. Keys may repeat; ``inner`` gets each once. One copy
    brings missing keys from the device to the host; ``inner`` writes its rows into pinned memory; one
    launch copies the rows of all tables to the device. The launch is on the context's stream, else on
    the thread's current one, and is not awaited: use the arrays on that stream only. As thread-safe as
    ``inner``.

    At most ``workspaces`` fetches run at a time; a further one waits for a free workspace, until its
    deadline. The mutating verbs take arrays on host or device."""

    def __init__(self, inner: Tier, *, device: int = 0, workspaces: int = 4) -> None:
        self.inner = inner
        self.info = replace(inner.info, memory="cuda")
        self._device = CudaDevice(device)
        self._spaces: queue.SimpleQueue[_BridgeBuffer | None] = queue.SimpleQueue()
        with self._device:
            for _ in range(workspaces):
                self._spaces.put(_BridgeBuffer())

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part, self._device.id)
        parts = [part for part in parts if len(part.missing)]
        if not parts:
            return
        with self._device:
            stream = ctx.stream or cupy().cuda.get_current_stream()
            requests = [_once(keys) for keys in _missing_keys(parts, stream)]
            space = self._space(ctx)
            try:
                answers = space.begin(parts, requests)
                host_parts = [
                    Part(a.table, k, a.rows, a.versions, a.sources, np.arange(len(k)))
                    for a, (k, _) in zip(answers, requests, strict=True)
                ]
                self.inner.fetch(
                    host_parts, FetchContext(ctx.deadline, None, ctx.degraded, ctx.origin)
                )
                for part, answer, host_part, (_, picks) in zip(
                    parts, answers, host_parts, requests, strict=True
                ):
                    answer.sources[host_part.missing] = UNANSWERED
                    left = host_part.missing
                    if picks is not None:
                        left = np.flatnonzero(answer.sources[picks] == UNANSWERED)
                    part.missing = part.missing[left]
                space.send(stream, answers, [(p.out, p.versions, p.source) for p in parts])
            finally:
                self._spaces.put(space)

    def _space(self, ctx: FetchContext) -> _BridgeBuffer:
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        try:
            space = self._spaces.get(timeout=wait)
        except queue.Empty:
            message = "no workspace came free before the deadline"
            raise TierTimeout(self.inner.info.name, message) from None
        if space is None:
            self._spaces.put(None)  # for the next fetch
            raise Unavailable("the GPU cache is closed")
        return space

    # -- writing ----------------------------------------------------------------------------------

    def insert(self, table: EmbeddingTable, keys: Any, vectors: Any, versions: Any) -> None:
        self.inner.insert(table, *self._down(table, keys=keys, vectors=vectors, versions=versions))

    def update(self, table: EmbeddingTable, keys: Any, vectors: Any, versions: Any) -> None:
        self.inner.update(table, *self._down(table, keys=keys, vectors=vectors, versions=versions))

    def delete(self, table: EmbeddingTable, keys: Any, versions: Any) -> None:
        self.inner.delete(table, *self._down(table, keys=keys, versions=versions))

    def evict(self, table: EmbeddingTable, keys: Any) -> None:
        self.inner.evict(table, *self._down(table, keys=keys))

    def _down(self, table: EmbeddingTable, **arrays: Any) -> list[Any]:
        n = array_length(arrays["keys"])
        with self._device:
            on_device = [
                check_array(table, name, a, n, self._device.id) for name, a in arrays.items()
            ]
            return [a if isinstance(a, np.ndarray) else a.get() for a in on_device]

    def close(self) -> None:
        """Wait for copies in flight, then close ``inner``."""
        self.release()
        self.inner.close()

    def release(self) -> None:
        """Free the buffers, after the copies in flight; later fetches of missing keys raise Unavailable."""
        self._device.synchronize()
        with suppress(queue.Empty):
            while self._spaces.get_nowait() is not None:
                pass
        self._spaces.put(None)


_DistinctKeys = tuple[KeyArray, IndexArray | None]
"""Distinct keys (u,), and for each missing key its index (n,) in them; None: they are the missing keys."""


def _once(keys: KeyArray) -> _DistinctKeys:
    if len(keys) < 2:
        return keys, None
    unique, picks = dedup(keys)
    return (keys, None) if len(unique) == len(keys) else (unique, picks)


class _BridgeBuffer:
    """Pinned memory for one fetch at a time; reusable once that fetch's launch has finished."""

    def __init__(self) -> None:
        cp = cupy()
        self._staging = StagingBuffer()
        self._args = KernelStruct(SCATTER_ARGS)
        self._sent = cp.cuda.Event(block=True, disable_timing=True)

    def begin(
        self, parts: Sequence[Part], requests: Sequence[_DistinctKeys]
    ) -> list[ScatterInputs]:
        """Reserve memory for the misses of ``parts``; every key starts as not found."""
        self._sent.synchronize()
        pairs = list(zip(parts, requests, strict=True))
        self._staging.begin(
            sum(ScatterInputs.bytes(p.table, len(keys), len(p.missing)) for p, (keys, _) in pairs)
        )
        answers = []
        for part, (keys, picks) in pairs:
            answer = ScatterInputs.make(self._staging, part.table, len(keys), part.missing, picks)
            answer.sources[:] = 0
            answer.versions[:] = 0
            answers.append(answer)
        return answers

    def send(
        self, stream: Any, answers: list[ScatterInputs], targets: list[tuple[Any, Any, Any]]
    ) -> None:
        self._staging.send(stream)
        scatter(self._args, stream, answers, targets)
        self._sent.record(stream)


def _missing_keys(parts: Sequence[Part], stream: Any) -> list[KeyArray]:
    """Return the missing keys of ``parts`` on the host, with one copy for all keys on the device.

    Also replaces ``missing`` on the device by a NumPy array."""
    cp = cupy()
    for part in parts:
        missing: Any = part.missing
        if not isinstance(missing, np.ndarray):
            part.missing = missing.get(stream=stream)
    on_device = [part for part in parts if not isinstance(part.keys, np.ndarray)]
    copied: dict[int, KeyArray] = {}
    if on_device:
        with stream:
            chosen = [part.keys[cp.asarray(part.missing)] for part in on_device]
            host = (chosen[0] if len(chosen) == 1 else cp.concatenate(chosen)).get(stream=stream)
        ends = np.cumsum([len(part.missing) for part in on_device])[:-1]
        copied = {id(p): k for p, k in zip(on_device, np.split(host, ends), strict=True)}
    return [copied[id(p)] if id(p) in copied else p.keys[p.missing] for p in parts]
