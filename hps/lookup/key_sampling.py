"""Samples of a key trace, by a hash of the key, in bounded memory (SHARDS with a fixed size)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native import partition_hash
from hps.types import IndexArray, KeyArray

MAX_KEYS = 1 << 18
"""Different keys that a sample keeps of a table; a trace with fewer is kept as a whole."""
MAX_ACCESSES = 1 << 22
_BLOCK = 1 << 20
TRACE_ENTRY = ".trace"  # no table has such a name
# The sample is not thinned below this: hit rates would be guesses.
_FEWEST_KEYS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class TableSample:
    """The sampled accesses to one table, in order.

    ``keys (n,)``; ``requests (n,)``: the number of each access's request; ``positions (n,)``: the number of
    the access among ``accesses``, all of the trace. ``rate``: the share of the keys that is sampled.
    Accesses that follow one to the same key may be absent: a cache always has their row."""

    keys: KeyArray
    requests: IndexArray
    positions: IndexArray
    accesses: int
    rate: float

    def select(self, keep: NDArray[np.bool_]) -> TableSample:
        """Return the sample without the accesses for which ``keep (n,)`` is False."""
        return TableSample(
            self.keys[keep], self.requests[keep], self.positions[keep], self.accesses, self.rate
        )


def sampled(keys: KeyArray, rate: float) -> NDArray[np.bool_]:
    """Return a mask ``(n,)`` of the keys that a sample of ``rate`` has: the same for every trace."""
    if rate >= 1:
        return np.ones(len(keys), bool)
    return partition_hash(keys) <= np.uint64(rate * 2.0**64)


class KeySampler:
    """Collects the accesses to one table; keeps all accesses to a share of its keys.

    Starts with all keys; halves the share whenever the sample has more than ``max_keys`` different keys or
    ``max_accesses`` accesses. Memory: about 24 bytes an access kept. Not thread-safe."""

    def __init__(self, max_keys: int = MAX_KEYS, max_accesses: int = MAX_ACCESSES) -> None:
        self._max_keys, self._max_accesses = max_keys, max_accesses
        self._rate = 1.0
        self._accesses = self._kept = 0
        self._blocks: list[tuple[KeyArray, IndexArray, IndexArray]] = []
        self._distinct = np.empty(0, np.int64)

    def add(self, keys: KeyArray, requests: IndexArray) -> None:
        """Add accesses to ``keys (n,)`` of the ``requests (n,)``, which ascend over all calls."""
        for start in range(0, len(keys), _BLOCK):
            self._add(keys[start : start + _BLOCK], requests[start : start + _BLOCK])

    def _add(self, keys: KeyArray, requests: IndexArray) -> None:
        keys = np.ascontiguousarray(keys)
        keep = sampled(keys, self._rate)
        positions = np.flatnonzero(keep) + self._accesses
        self._accesses += len(keys)
        block = keys[keep], requests[keep].astype(np.int64), positions
        self._blocks.append(block)
        self._kept += len(positions)
        self._distinct = np.union1d(self._distinct, block[0])
        if self._kept > self._max_accesses:
            self._drop_repeats()
        while self._is_too_large():
            self._halve()

    def _is_too_large(self) -> bool:
        distinct = len(self._distinct)
        return distinct > self._max_keys or (
            self._kept > self._max_accesses and distinct > _FEWEST_KEYS
        )

    def _drop_repeats(self) -> None:
        keys, requests, positions = self._joined()
        keep = np.ones(len(keys), bool)
        keep[1:] = keys[1:] != keys[:-1]
        self._replace(keys[keep], requests[keep], positions[keep])

    def _halve(self) -> None:
        self._rate /= 2
        keys, requests, positions = self._joined()
        keep = sampled(keys, self._rate)
        self._replace(keys[keep], requests[keep], positions[keep])
        self._distinct = self._distinct[sampled(self._distinct, self._rate)]
        self._drop_repeats()

    def _joined(self) -> tuple[KeyArray, IndexArray, IndexArray]:
        if not self._blocks:
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        keys, requests, positions = (
            np.concatenate(each) for each in zip(*self._blocks, strict=True)
        )
        return keys, requests, positions

    def _replace(self, keys: KeyArray, requests: IndexArray, positions: IndexArray) -> None:
        self._blocks = [(keys, requests, positions)]
        self._kept = len(keys)

    def sample(self) -> TableSample:
        """Return the sample of all accesses so far."""
        return TableSample(*self._joined(), self._accesses, self._rate)


def pack_samples(samples: Mapping[str, TableSample], requests: int, batch: float) -> bytes:
    """Pack the samples of a model's tables as an ``.npz``, a trace that `hps plan` reads.

    ``requests``: their number; ``batch``: samples per request, on average."""
    arrays: dict[str, Any] = {TRACE_ENTRY: np.array([requests, batch])}
    for name, sample in samples.items():
        arrays[f"{name}/keys"], arrays[f"{name}/requests"] = sample.keys, sample.requests
        arrays[f"{name}/positions"] = sample.positions
        arrays[f"{name}/about"] = np.array([sample.accesses, sample.rate])
    packed = BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


def unpack_samples(arrays: Any) -> tuple[dict[str, TableSample], int, float]:
    """Return samples by table, requests and batch from the opened archive of `pack_samples`.

    Raises KeyError or ValueError for any other archive."""
    requests, batch = arrays[TRACE_ENTRY].tolist()
    samples = {}
    for name in (each.removesuffix("/about") for each in arrays.files if each.endswith("/about")):
        accesses, rate = arrays[f"{name}/about"].tolist()
        keys, numbers, positions = (
            arrays[f"{name}/{part}"] for part in ("keys", "requests", "positions")
        )
        samples[name] = TableSample(keys, numbers, positions, int(accesses), rate)
    return samples, int(requests), batch


def merge_traces(packed: Sequence[bytes]) -> bytes:
    """Merge traces that processes of one server have recorded at the same time; see `pack_samples`.

    Each process's requests are taken as evenly spread over the time. A table gets the smallest of the
    sampling rates."""
    if len(packed) == 1:
        return packed[0]
    opened = []
    for each in packed:
        with np.load(BytesIO(each)) as arrays:
            opened.append(unpack_samples(arrays))
    opened = [each for each in opened if each[1]]
    counts = [requests for _, requests, _ in opened]
    total = sum(counts)
    when = np.concatenate([(np.arange(n) + 0.5) / n for n in counts] or [np.empty(0)])
    ranks = np.empty(total, np.int64)
    ranks[np.argsort(when, kind="stable")] = np.arange(total)
    numbers = np.split(ranks, np.cumsum(counts)[:-1])
    merged = {
        name: _merged(
            [(s[name], n) for (s, _, _), n in zip(opened, numbers, strict=True) if name in s]
        )
        for name in dict.fromkeys(name for samples, _, _ in opened for name in samples)
    }
    batch = sum(n * b for _, n, b in opened) / total if total else 1.0
    return pack_samples(merged, total, batch)


def _merged(parts: Sequence[tuple[TableSample, IndexArray]]) -> TableSample:
    """Merge samples of one table, each with the new numbers of its requests."""
    rate = min(sample.rate for sample, _ in parts)
    total = sum(sample.accesses for sample, _ in parts)
    kept = [(s.select(sampled(s.keys, rate)), numbers) for s, numbers in parts]
    requests = np.concatenate([numbers[s.requests] for s, numbers in kept])
    when = np.concatenate([s.positions / s.accesses for s, _ in kept])
    order = np.lexsort((when, requests))
    keys = np.concatenate([s.keys for s, _ in kept])[order]
    positions = np.maximum.accumulate((when[order] * total).astype(np.int64))
    return TableSample(keys, requests[order], positions, total, rate)
