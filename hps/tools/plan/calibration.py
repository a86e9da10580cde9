"""Measure latencies of lookups on this machine, by small nodes with generated rows."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config import configuration_from
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.config.store_settings import RedisSettings
from hps.cuda.loader import device_count, missing_device, missing_requirement
from hps.errors import GpuUnavailable, Unavailable
from hps.models.version_writer import write_version
from hps.node.build import open_node
from hps.node.node import Node
from hps.observability.metric_names import LOOKUP_KEYS
from hps.tiers.redis import RedisTier
from hps.tools.plan.calibration_requests import CACHED, MissingRequests, TableLoad, scaled_loads
from hps.tools.plan.latency import Calibration
from hps.types import JaggedKeys, KeyArray, LookupResult, Source, VectorArray

MODEL = "hps-plan"
"""Name of the generated model; in Redis followed by a random number."""
_MOST_BYTES = 256 << 20
# Of vectors. A server with a few thousand rows has them in its processor's caches and is a third faster.
_MOST_BYTES_IN_REDIS, _FEWEST_ROWS_IN_REDIS = 32 << 20, 1 << 12
_BLOCK_ROWS = 1 << 16
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
"""Shares of a request's keys that the cache does not have."""
_TURNS = 8  # the first warms up
_AT_ONCE = 8  # requests made before they are sent
_FEWER = 4
_TOUCHED_KEYS = 1 << 11  # of more misses, a GPU cache takes a sample
_MOST_TOUCHES, _PROMOTED_AFTER_S = 5, 0.05
_QUANTILES = np.linspace(0, 1, 101)
# No read may be skipped: that would be measured as a fast one.
_GUARD = {"deadline_ms": 20_000.0}


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
    made = scaled_loads(loads, _MOST_BYTES)
    with _models(made, MODEL, seed, mapped or in_memory) as models:
        # Bytes of 0: else no key would miss.
        caches = models.open({"mapped": {"enabled": mapped, "memory_bytes": 0}})
        direct = models.open({"mapped": {"memory_bytes": 1 << 62}}) if in_memory else None
        return _measure(made, caches, direct, seconds, seed)


def calibrate_redis(
    loads: Sequence[TableLoad], redis: RedisSettings, *, seconds: float = 6.0, seed: int = 1
) -> Calibration:
    """Measure lookups of all ``loads`` at a node whose CPU cache reads its misses from ``redis``.

    Writes a generated model `hps-plan-…` to Redis, 32 MB of vectors or 4,096 rows a table, and removes it at
    the end. Raises TierError if Redis is unavailable or rejects the rows."""
    made = scaled_loads(loads, _MOST_BYTES_IN_REDIS, _FEWEST_ROWS_IN_REDIS)
    name = f"{MODEL}-{secrets.token_hex(4)}"
    # All rows must be there and answered, however slow the server is.
    kept: dict[str, Any] = {
        "initial_cache_rate": 1.0,
        "overflow_margin": None,
        "ttl_s": None,
        "table_ttl_s": {},
    }
    chosen = redis.model_dump(exclude_unset=True) | kept
    chosen["guard"] = _GUARD
    with closing(RedisTier(redis)) as tier, _models(made, name, seed, False) as models:
        tier.find_tables(name)  # a node would open without an unavailable server
        models.resources.callback(tier.erase, name)
        node = models.open({"redis": chosen, "rocksdb": {"enabled": False}})
        return _measure(made, node, None, seconds, seed)


def calibrate_gpu(
    loads: Sequence[TableLoad], *, device: int = 0, seconds: float = 6.0, seed: int = 1
) -> Calibration:
    """Measure lookups of all ``loads`` whose vectors stay on a GPU, and whose misses are in the CPU cache.

    ``misses`` are those that were counted: rows that have left the GPU cache come back to it later. The
    first lookups compile kernels. Raises GpuUnavailable if there is no GPU, or too little memory on it."""
    why = missing_requirement() or missing_device([device], device_count())
    if why is not None:
        raise GpuUnavailable(why)
    made = scaled_loads(loads, _MOST_BYTES)
    tiers = {
        "cpu_cache": {"share": 1.0},
        "mapped": {"enabled": False},
        "gpu": {"use": "required", "devices": [device], "share": CACHED},
    }
    with _models(made, MODEL, seed, False) as models:
        return _measure(made, models.open(tiers, on_gpu=True), None, seconds, seed)


def _measure(
    loads: Sequence[TableLoad],
    caches: _CalibrationNode,
    direct: _CalibrationNode | None,
    seconds: float,
    seed: int,
) -> Calibration:
    """Measure lookups at ``caches`` with growing shares of misses, and at ``direct`` without any."""
    small = [load.part(_FEWER) for load in loads]
    random = np.random.default_rng(seed)
    series = [_Series(caches, MissingRequests(loads, share, random)) for share in _SHARES]
    fewer = _Series(caches, MissingRequests(small, 0.0, random))
    mapped = None if direct is None else _Series(direct, MissingRequests(loads, 0.0, random))
    every = [*series, fewer, *([mapped] if mapped else [])]
    # In turn, so that a disturbance of the machine meets all of them alike.
    for turn in range(_TURNS):
        for each in every:
            each.node.touch(loads)
            each.run(seconds / _TURNS / len(every), kept=turn > 0)
    keys, few = (sum(load.count for load in each) for each in (loads, small))
    medians = np.maximum.accumulate([each.median_us for each in series])
    key_us = (medians[0] - fewer.median_us) / (keys - few) if keys > few else 0.0
    misses = [each.misses for each in series]
    misses[0] = 0.0
    kept = [i for i in range(len(misses)) if i == 0 or misses[i] > max(misses[:i])]
    return Calibration(
        float(keys),
        tuple(misses[i] for i in kept),
        tuple(round(float(medians[i]), 2) for i in kept),
        max(0.0, round(float(key_us), 5)),
        tuple(_spread(np.array(series[i].times)) for i in kept),
        f"{len(loads)} tables, {keys:,} keys a request, on this machine",
        None if mapped is None else round(mapped.median_us, 2),
    )


def _spread(times: NDArray[np.float64]) -> tuple[float, ...]:
    quantiles: list[float] = np.quantile(times / np.median(times), _QUANTILES).round(4).tolist()
    return tuple(quantiles)


@dataclass(slots=True)
class _Series:
    """Latencies of requests with the same share of misses, in microseconds."""

    node: _CalibrationNode
    requests: MissingRequests
    times: list[float] = field(default_factory=list)
    missed: float = 0.0

    @property
    def misses(self) -> float:
        """Rows of a request that the cache does not have: counted on a GPU, else as generated."""
        if self.node.on_gpu:
            return round(self.missed / len(self.times), 2)
        return float(self.requests.misses)

    @property
    def median_us(self) -> float:
        return float(np.median(self.times))

    def run(self, seconds: float, *, kept: bool) -> None:
        """Send requests one after the other; ``kept``: record their latencies."""
        times: list[float] = []
        before = self.node.missed_keys()
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            for keys in [self.requests.one() for _ in range(_AT_ONCE)]:
                start = time.perf_counter()
                self.node.lookup(keys)
                times.append(1e6 * (time.perf_counter() - start))
        if kept:
            self.times += times
            self.missed += self.node.missed_keys() - before


@dataclass(frozen=True, slots=True)
class _CalibrationNode:
    """An open node that serves the generated model ``name``; ``on_gpu``: its vectors stay on the GPU."""

    node: Node
    name: str
    on_gpu: bool

    def lookup(self, features: Mapping[str, JaggedKeys]) -> None:
        """Raises Unavailable if a store did not answer."""
        if self._lookup(self.name, features).degraded:
            raise Unavailable("a store stopped answering during the calibration")

    def touch(self, loads: Sequence[TableLoad]) -> None:
        """Bring every hot row into the cache; on a GPU, wait for the copies of those that were not there."""
        for _ in range(_MOST_TOUCHES):
            before = self.missed_keys()
            self._touch(loads)
            if self.missed_keys() == before:
                return
            time.sleep(_PROMOTED_AFTER_S)

    def _touch(self, loads: Sequence[TableLoad]) -> None:
        for load in loads:
            for start in range(0, load.hot_rows, _TOUCHED_KEYS):
                keys = np.arange(start, min(start + _TOUCHED_KEYS, load.hot_rows))
                self._lookup(self.name, {load.name: keys}, by_table=True)

    def missed_keys(self) -> float:
        """Return the number of keys that other tiers than the GPU have answered so far."""
        if not self.on_gpu:
            return 0.0
        answered = self.node.metrics.values(LOOKUP_KEYS)
        return sum(n for (*_, tier), n in answered.items() if tier != Source.GPU.name.lower())

    @property
    def _lookup(self) -> Callable[..., LookupResult]:
        return self.node.lookup_on_device if self.on_gpu else self.node.lookup


@dataclass(frozen=True, slots=True)
class _Models:
    """A repository in ``folder`` with the generated model ``name``; ``resources`` closes its nodes."""

    folder: Path
    name: str
    resources: ExitStack

    def open(self, tiers: Mapping[str, Any], *, on_gpu: bool = False) -> _CalibrationNode:
        """Open a node with ``tiers`` beside its defaults."""
        number = sum(1 for _ in self.folder.iterdir())
        settings: dict[str, Any] = {
            "models": {"repository": str(self.folder / "models")},
            "tiers": {
                "cpu_cache": {"share": CACHED, "warm": False},
                "rocksdb": {"path": str(self.folder / f"rocksdb{number}"), "guard": _GUARD},
                "gpu": {"use": "off"},
                **tiers,
            },
        }
        node = open_node(configuration_from(settings, environ={}))
        return _CalibrationNode(self.resources.enter_context(closing(node)), self.name, on_gpu)


@contextmanager
def _models(loads: Sequence[TableLoad], name: str, seed: int, mapped: bool) -> Iterator[_Models]:
    """Write a model with the tables of ``loads``, and close the nodes that serve it."""
    spec = ModelSpec(
        name=name,
        tables=[TableSpec(name=t.name, dim=t.dim, dtype=t.dtype) for t in loads],
        features=[FeatureSpec(name=t.name, table=t.name, pooling=t.pooling) for t in loads],
    )
    with tempfile.TemporaryDirectory(prefix="hps-plan-") as folder, ExitStack() as resources:
        rows = {load.name: _rows(load, seed) for load in loads}
        write_version(Path(folder) / "models", spec, 1, rows, mapped=mapped)
        yield _Models(Path(folder), name, resources)


def _rows(load: TableLoad, seed: int) -> Iterator[tuple[KeyArray, VectorArray]]:
    random = np.random.default_rng(seed)
    for start in range(0, load.rows, _BLOCK_ROWS):
        keys = np.arange(start, min(start + _BLOCK_ROWS, load.rows))
        yield keys, random.random((len(keys), load.dim), dtype=np.float32)
