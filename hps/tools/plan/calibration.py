"""Measure latencies of lookups on this machine, by a small node with generated rows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config import configuration_from
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.node.build import open_node
from hps.node.node import Node
from hps.tools.plan.latency import Calibration
from hps.types import JaggedKeys, KeyArray, Pooling, VectorArray

_MODEL = "calibration"
_MOST_BYTES, _MOST_ROWS, _FEWEST_ROWS = 256 << 20, 1 << 20, 1 << 14
_BLOCK_ROWS = 1 << 16
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
"""Shares of a request's keys that are read from a store."""
# The share of a table that the cache has room for, and the share of that which requests ask for again.
_CACHED, _HOT = 0.3, 0.2
_TURNS = 8  # the first warms up
_AT_ONCE = 8  # requests made before they are sent
_FEWER = 4
_TOUCHED_KEYS = 1 << 14
_QUANTILES = np.linspace(0, 1, 101)


@dataclass(frozen=True, slots=True)
class TableLoad:
    """One table's part of a typical request: ``keys`` keys for ``samples`` samples, of ``rows`` rows."""

    name: str
    dim: int
    dtype: str
    rows: int
    keys: int
    samples: int = 1
    pooling: Pooling = "none"

    @property
    def hotness(self) -> int:
        return max(1, round(self.keys / self.samples))

    @property
    def batch(self) -> int:
        return max(1, round(self.keys / self.hotness))


def calibrate(
    loads: Sequence[TableLoad],
    *,
    mapped: bool = False,
    in_memory: bool = False,
    seconds: float = 6.0,
    seed: int = 1,
) -> Calibration:
    """Measure lookups of all ``loads`` together, for about ``seconds`` beyond the start of the node.

    ``mapped``: the tables have mapped files, which a node reads instead of RocksDB. ``in_memory``: also
    measure a node that reads mapped files from memory, without its CPU cache.

    The node has a CPU cache over the store that a node has by default, whose files are in the page cache: a
    table larger than the machine's memory takes longer. Writes up to 256 MB to the temporary folder."""
    made = [_scaled(load, loads) for load in loads if load.keys]
    small = [_part(load, _FEWER) for load in made]
    random = np.random.default_rng(seed)
    requests = {share: _Requests(made, share, random) for share in _SHARES}
    fewer = _Requests(small, 0.0, random)
    direct = _Requests(made, 0.0, random)
    times: dict[Any, list[float]] = {each: [] for each in (*requests.values(), fewer)}
    if in_memory:
        times[direct] = []
    with _nodes(made, seed, mapped, in_memory) as nodes:
        # In turn, so that a disturbance of the machine meets all of them alike.
        for turn in range(_TURNS):
            for each, found in times.items():
                node = nodes[each is direct]
                _touch_all(node, made)
                latencies = _run(node, each, seconds / _TURNS / len(times))
                found += latencies if turn else []
    measured = [np.array(times[each]) for each in requests.values()]
    keys, few = sum(map(_count, made)), sum(map(_count, small))
    medians = np.maximum.accumulate([np.median(each) for each in measured])
    key_us = (medians[0] - np.median(times[fewer])) / (keys - few) if keys > few else 0.0
    misses = [each.misses for each in requests.values()]
    kept = [i for i in range(len(misses)) if i == 0 or misses[i] > misses[i - 1]]
    return Calibration(
        float(keys),
        tuple(float(misses[i]) for i in kept),
        tuple(round(float(medians[i]), 2) for i in kept),
        max(0.0, round(float(key_us), 5)),
        tuple(_spread(measured[i]) for i in kept),
        f"{len(made)} tables, {keys:,} keys a request, on this machine",
        round(float(np.median(times[direct])), 2) if in_memory else None,
    )


def _spread(times: NDArray[np.float64]) -> tuple[float, ...]:
    quantiles: list[float] = np.quantile(times / np.median(times), _QUANTILES).round(4).tolist()
    return tuple(quantiles)


def _count(load: TableLoad) -> int:
    return load.batch * load.hotness


def _scaled(load: TableLoad, loads: Sequence[TableLoad]) -> TableLoad:
    """Reduce the rows so that all tables together stay within the limits."""
    row_bytes = load.dim * 4
    fair = min(_MOST_ROWS, _MOST_BYTES // len(loads) // row_bytes)
    enough = max(_FEWEST_ROWS, 8 * load.keys)
    rows = min(max(load.rows, enough), max(fair, enough))
    return TableLoad(load.name, load.dim, load.dtype, rows, load.keys, load.samples, load.pooling)


def _part(load: TableLoad, by: int) -> TableLoad:
    batch = max(1, load.batch // by)
    keys = batch * load.hotness
    return TableLoad(load.name, load.dim, load.dtype, load.rows, keys, batch, load.pooling)


@contextmanager
def _nodes(
    loads: Sequence[TableLoad], seed: int, mapped: bool, in_memory: bool
) -> Iterator[list[Node]]:
    """Open a node with caches and, for ``in_memory``, one that reads mapped files from memory."""
    spec = ModelSpec(
        name=_MODEL,
        tables=[TableSpec(name=t.name, dim=t.dim, dtype=t.dtype) for t in loads],
        features=[FeatureSpec(name=t.name, table=t.name, pooling=t.pooling) for t in loads],
    )
    with tempfile.TemporaryDirectory(prefix="hps-plan-") as folder:
        rows = {load.name: _rows(load, seed) for load in loads}
        write_version(Path(folder) / "models", spec, 1, rows, mapped=mapped or in_memory)
        # Bytes of 0: else no key would miss.
        kinds: list[dict[str, Any]] = [{"enabled": mapped, "memory_bytes": 0}]
        kinds += [{"memory_bytes": 1 << 62}] if in_memory else []
        with ExitStack() as nodes:
            yield [
                nodes.enter_context(closing(_open(folder, number, kind)))
                for number, kind in enumerate(kinds)
            ]


def _open(folder: str, number: int, mapped: Mapping[str, Any]) -> Node:
    settings: dict[str, Any] = {
        "models": {"repository": f"{folder}/models"},
        "tiers": {
            "cpu_cache": {"share": _CACHED, "warm": False},
            "mapped": mapped,
            "rocksdb": {"path": f"{folder}/rocksdb{number}"},
            "gpu": {"use": "off"},
        },
    }
    return open_node(configuration_from(settings, environ={}))


def _rows(load: TableLoad, seed: int) -> Iterator[tuple[KeyArray, VectorArray]]:
    random = np.random.default_rng(seed)
    for start in range(0, load.rows, _BLOCK_ROWS):
        keys = np.arange(start, min(start + _BLOCK_ROWS, load.rows))
        yield keys, random.random((len(keys), load.dim), dtype=np.float32)


class _Requests:
    """Requests of which ``share`` of the keys, of each table, have left the cache long ago."""

    def __init__(
        self, loads: Sequence[TableLoad], share: float, random: np.random.Generator
    ) -> None:
        self._loads, self._random = loads, random
        self._cold = {load.name: round(share * _count(load)) for load in loads}
        # In random order: neighbours would share blocks of the store's files.
        self._colds = {
            load.name: random.permutation(np.arange(_hot(load), load.rows)) for load in loads
        }
        self._next = dict.fromkeys(self._cold, 0)
        self.misses = sum(self._cold.values())

    def one(self) -> Mapping[str, JaggedKeys]:
        """Return the keys of the next request."""
        features = {}
        for load in self._loads:
            hot, cold = _hot(load), self._cold[load.name]
            keys = self._random.integers(0, hot, _count(load))
            if cold:
                start, order = self._next[load.name], self._colds[load.name]
                keys[:cold] = np.take(order, np.arange(start, start + cold), mode="wrap")
                self._next[load.name] = (start + cold) % len(order)
                self._random.shuffle(keys)
            features[load.name] = JaggedKeys(keys, load.batch)
        return features


def _hot(load: TableLoad) -> int:
    """Number of the rows that requests ask for again: the first ones of the table."""
    return max(1, int(_CACHED * _HOT * load.rows))


def _touch_all(node: Node, loads: Sequence[TableLoad]) -> None:
    """Bring every hot row into the cache."""
    for load in loads:
        for start in range(0, _hot(load), _TOUCHED_KEYS):
            keys = np.arange(start, min(start + _TOUCHED_KEYS, _hot(load)))
            node.lookup(_MODEL, {load.name: keys}, by_table=True)


def _run(node: Node, requests: _Requests, seconds: float) -> list[float]:
    """Send requests one after the other; returns their latencies in microseconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        for keys in [requests.one() for _ in range(_AT_ONCE)]:
            start = time.perf_counter()
            node.lookup(_MODEL, keys)
            times.append(1e6 * (time.perf_counter() - start))
    return times
