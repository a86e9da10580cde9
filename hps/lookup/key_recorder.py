"""Records the keys of a model's lookups for a while: a sample of the keys, by their hash."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hps.lookup.base import Feature
from hps.lookup.key_sampling import KeySampler, pack_samples
from hps.types import EmbeddingTable, IndexArray, KeyArray, LookupRequest

MOST_SECONDS = 3600.0
_DRAIN_EVERY_S = 0.1
# Keys that wait for the thread, which takes 10 million a second; further ones are not recorded.
_MOST_WAITING = 1 << 22
# Sampled accesses of all tables together; 24 bytes each.
_MOST_ACCESSES = 1 << 23
_MERGED_KEYS = 1 << 18


class RequestShape(NamedTuple):
    """The names of a request's keys, its samples, and whether the names are tables."""

    names: tuple[str, ...]
    batch: int
    by_table: bool

    @staticmethod
    def of(request: LookupRequest) -> RequestShape:
        batch = next((keys.batch for keys in request.features.values()), 0)
        return RequestShape(tuple(request.features), batch, request.by_table)


_Waiting = tuple[RequestShape, KeyArray, list[int]]
# The keys of all names of a request, and how many there are of each.


class KeyRecorder:
    """Records lookups of a model with ``features`` and ``tables`` until `stop`, or for ``seconds``.

    A lookup only copies its keys, some 10 ns each; a thread samples them. At most ``max_keys`` different
    keys are kept of each table. ``dropped``: requests not recorded, because too many keys waited. Call
    `add` from any thread."""

    def __init__(
        self,
        features: Mapping[str, Feature],
        tables: Mapping[str, EmbeddingTable],
        seconds: float,
        max_keys: int,
    ) -> None:
        self._features, self._tables = features, tables
        most = max(1 << 14, _MOST_ACCESSES // max(1, len(tables)))
        self._samplers = {name: KeySampler(max_keys, most) for name in tables}
        self._waiting: deque[_Waiting] = deque()
        self._waiting_keys = self._requests = self._samples = self.dropped = 0
        self._parts: dict[str, list[tuple[KeyArray, IndexArray]]] = {name: [] for name in tables}
        self._merged_at = _MERGED_KEYS
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._end = time.monotonic() + seconds
        self._thread = threading.Thread(target=self._run, name="hps-key-recorder", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._stopped.is_set()

    def add(self, request: LookupRequest) -> None:
        """Record a request's keys."""
        arrays = [each.keys for each in request.features.values()]
        self.add_flat(RequestShape.of(request), arrays)

    def add_flat(self, shape: RequestShape, keys: Sequence[KeyArray]) -> None:
        """Record the ``keys (n,)`` of each of the names of ``shape``; they may change when this returns."""
        if self._stopped.is_set():
            return
        if self._waiting_keys > _MOST_WAITING:
            self.dropped += 1
            return
        if not keys:
            return
        joined = np.concatenate(keys)
        self._waiting_keys += len(joined)
        self._waiting.append((shape, joined, [*map(len, keys)]))

    def stop(self) -> None:
        """Stop recording; idempotent. What is recorded stays."""
        self._stopped.set()

    def packed(self) -> bytes:
        """Return the trace so far; see `pack_samples`."""
        with self._lock:
            self._drain()
            self._merge()
            samples = {name: each.sample() for name, each in self._samplers.items()}
            used = {name: sample for name, sample in samples.items() if sample.accesses}
            batch = self._samples / self._requests if self._requests else 1.0
            return pack_samples(used, self._requests, batch)

    def _run(self) -> None:
        while not self._stopped.wait(_DRAIN_EVERY_S):
            with self._lock:
                self._drain()
            if time.monotonic() > self._end:
                self._stopped.set()

    def _drain(self) -> None:
        """Sort the waiting requests by table. Needs the lock."""
        self._waiting_keys = 0
        alike: dict[tuple[tuple[str, ...], bool], list[tuple[int, KeyArray, list[int]]]] = {}
        while self._waiting:
            shape, keys, lengths = self._waiting.popleft()
            alike.setdefault((shape.names, shape.by_table), []).append(
                (self._requests, keys, lengths)
            )
            self._requests += 1
            self._samples += shape.batch
        for (names, by_table), requests in alike.items():
            self._sort(names, by_table, requests)
        if self._merged_at <= 0:
            self._merge()

    def _sort(
        self,
        names: Sequence[str],
        by_table: bool,
        requests: Sequence[tuple[int, KeyArray, list[int]]],
    ) -> None:
        """Add the keys of ``requests`` with the same ``names`` to their tables'."""
        lengths = np.array([each for _, _, each in requests])
        keys = np.concatenate([each for _, each, _ in requests])
        numbers = np.repeat([number for number, _, _ in requests], lengths.sum(axis=1))
        self._merged_at -= len(keys)
        if len(names) > 1:
            of_name = np.tile(np.arange(len(names), dtype=np.int16), len(requests))
            order = np.argsort(np.repeat(of_name, lengths.ravel()), kind="stable")
            keys, numbers = keys[order], numbers[order]
        ends = np.cumsum(lengths.sum(axis=0)).tolist()
        for name, start, end in zip(names, [0, *ends], ends, strict=False):
            self._add_part(name, by_table, keys[start:end], numbers[start:end])

    def _add_part(self, name: str, by_table: bool, keys: KeyArray, numbers: IndexArray) -> None:
        """Add keys to their table's; unknown names are those of requests that were rejected."""
        feature = None if by_table else self._features.get(name)
        if feature is not None:
            self._parts[feature.table.name].append((feature.shift(keys), numbers))
        elif by_table and name in self._tables:
            self._parts[name].append((self._tables[name].narrow(keys), numbers))

    def _merge(self) -> None:
        """Sample what `_drain` has sorted: in large parts, since each costs a sort of all sampled keys."""
        self._merged_at = _MERGED_KEYS
        for name, parts in self._parts.items():
            if not parts:
                continue
            keys, requests = (np.concatenate(each) for each in zip(*parts, strict=True))
            if len(parts) > 1:
                order = np.argsort(requests, kind="stable")
                keys, requests = keys[order], requests[order]
            self._samplers[name].add(keys, requests)
            parts.clear()
