"""A GPU of NumPy arrays: what a node puts on a device, run on the host."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from hps.cuda.launch import UNANSWERED
from hps.cuda.miss_fill import MissBatch, MissReport
from hps.cuda.pool import RowBags
from hps.lookup.pooling import pool
from hps.native import decode_rows, dedup
from hps.node import gpu_caches as devices
from hps.node import gpu_models as models
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.gpu import memory as gpu_memory
from hps.tiers.gpu.device_space import DeviceParts
from hps.tiers.gpu.memory import GpuMemoryUsage
from hps.tiers.stored_rows import to_vectors
from hps.tiers.wrappers import TierWrapper
from hps.types import JaggedKeys, Source
from tests.support.memory_tier import MemoryTier


class Array(np.ndarray):
    """A device's array."""

    def get(self, stream: Any = None) -> Any:
        return np.array(self)


def there(array: Any) -> Any:
    return np.ascontiguousarray(array).view(Array)


class Stream:
    ptr = 0

    def synchronize(self) -> None:
        pass


class Current:
    """The device that the threads inside work on."""

    inside = 0

    def entered(self) -> Current:
        return self

    def __enter__(self) -> None:
        Current.inside += 1

    def __exit__(self, *_: Any) -> None:
        Current.inside -= 1


def call_step(work: Any) -> Any:
    def call() -> bool:
        work()
        return True

    from hps.native.scheduler import Step

    return Step.call(call)


class Space:
    kind = "cpu"

    def __init__(self) -> None:
        self.device = Current()
        self.lent = 0
        self.recorded = 0
        self.waited = 0
        self.shared = 0
        self.number = 0

    def take_stream(self) -> Stream:
        self.lent += 1
        return Stream()

    def current_stream(self) -> Stream:
        self.shared += 1
        return Stream()

    def give_back(self, stream: Stream) -> None:
        self.lent -= 1

    def bytes(self, size: int) -> Any:
        return np.full(size, 0xA5, np.uint8)

    pinned = bytes

    def at(self, address: int, n: int, dtype: Any) -> Any:
        """The array of ``n`` values at ``address``."""
        raw = (ctypes.c_uint8 * (n * np.dtype(dtype).itemsize)).from_address(address)
        return np.frombuffer(raw, dtype)

    def array(self, block: Any, offset: int, shape: Any, dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return block[offset : offset + size].view(dtype).reshape(shape).view(Array)

    def address(self, block: Any) -> int:
        return int(block.ctypes.data)

    def clear(self, array: Any, stream: Any) -> None:
        array[...] = 0

    def to_host(self, array: Any, stream: Any) -> Any:
        return np.array(array)

    def fill_rows(self, out: Any, positions: Any, row: Any, stream: Any) -> None:
        out[positions] = row

    def allocate(self, size: int) -> Any:
        return self.bytes(size)

    def array_address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def event(self) -> None:
        pass

    def after_current(self, stream: Any, event: Any) -> None:
        self.waited += 1

    def holds(self, array: Any) -> bool:
        return isinstance(array, Array)

    def device_keys(self, name: str, keys: Any) -> Any:
        return keys if isinstance(keys, Array) else None

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(to, source, nbytes)

    def record(self, stream: Any, work: Any) -> Any:
        self.recorded += 1
        return SimpleNamespace(launch=lambda stream: work())

    # Steps of the batch scheduler: on this device all are calls.
    context = 0

    def copy_step(self, device: int, host: int, nbytes: int, *, inwards: bool) -> Any:
        to, source = (device, host) if inwards else (host, device)
        return call_step(lambda: ctypes.memmove(to, source, nbytes))

    def clear_step(self, array: Any) -> Any:
        return call_step(lambda: self.clear(array, None))

    def graph_step(self, graph: Any) -> Any:
        return call_step(lambda: graph.launch(None))

    def call_step(self, work: Any, stream: Any) -> Any:
        return call_step(work)

    def copy_to_host(self, to: Any, array: Any, stream: Any) -> None:
        to[:] = array

    def assign(self, to: Any, source: Any, stream: Any) -> None:
        to[...] = source

    def upload(self, array: Any) -> Any:
        return there(array)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Any) -> Any:
        return there(np.full(shape, 77, dtype))

    def parts(self, table_keys: Any, stream: Any) -> DeviceParts:
        total = sum(len(keys) for _, keys in table_keys)
        block = there(np.zeros(9 * total, np.uint8))
        parts, first = [], 0
        for table, keys in table_keys:
            n = len(keys)
            versions = block[8 * first : 8 * (first + n)].view(np.uint64)
            source = block[8 * total + first : 8 * total + first + n]
            out = self.empty((n, table.row_width), table.row_dtype, stream)
            parts.append(Part(table, keys, out, versions, source, np.arange(n)))
            first += n
        return DeviceParts(parts, block, total)


class Cache(MemoryTier):
    """`GpuCache` as far as a node uses it; the row written longest ago makes room."""

    def __init__(self, device: int) -> None:
        super().__init__(TierInfo("gpu", Source.GPU, memory="cuda", cache=True))
        self.number = device
        self.space = Space()
        self.places: dict[Any, dict[str, Any]] = {}
        self.beside: dict[Any, list[Any]] = {}
        self.common: dict[Any, int] = {}
        self._sealed: set[Any] = set()
        self.fetched: list[int] = []
        self.scored: list[tuple[Any, Any]] = []
        self.pooled = 0
        self.closed = False
        self.other_readers: list[Any] = []

    def add_table(self, table: Any, rows: int, **how: Any) -> None:
        self.places[table] = {"rows": rows, **how}

    def share_table(self, table: Any, base: Any, common_rows: Any) -> bool:
        """``table`` gets the rows of the tables beside it that are common, and the other way round."""
        group = self.beside.setdefault(base, [base])
        group.append(table)
        self.beside[table] = group
        self.common_rows = common_rows
        self.places[table] = self.places[base]
        return True

    def rows_held(self, tables: Any) -> int:
        """The number of rows of all ``tables``; common ones count once."""
        held = [dict(self._tables.get(table, {})) for table in list(tables)]
        keys = {key for rows in held for key in rows}
        return sum(len({rows[key].row.tobytes() for rows in held if key in rows}) for key in keys)

    def drop_table(self, table: Any) -> None:
        if table in self.beside:
            self.beside.pop(table).remove(table)
        self.places.pop(table, None)
        self._tables.pop(table, None)

    def capacity(self, table: Any) -> int:
        return int(self.places[table]["rows"]) if table in self.places else 0

    def sealed(self, table: Any) -> bool:
        return table in self._sealed

    def seal(self, table: Any) -> int:
        self._sealed.add(table)
        return 0

    def size(self, table: Any) -> int:
        return len(self.keys_of(table))

    def keys_of(self, table: Any) -> list[int]:
        return sorted(
            k for k, entry in list(self._tables.get(table, {}).items()) if entry.row is not None
        )

    def insert(
        self, table: Any, keys: Any, vectors: Any, versions: Any, scores: Any = None
    ) -> None:
        assert not self.sealed(table)
        self.scored.append((table, scores))
        if self.capacity(table):
            super().insert(table, keys, vectors, versions)
            for other in set(self.beside.get(table, ())) - {table}:
                own = self.common_rows(table, keys)[0] & self.common_rows(other, keys)[0]
                self.common[table, other] = self.common.get((table, other), 0) + own.sum()
                super().insert(other, keys[own], vectors[own], versions[own])
            held = self._tables[table]
            for key in keys.tolist():
                held[key] = held.pop(key)
            for key in list(held)[: max(0, len(held) - self.capacity(table))]:
                del held[key]

    def update(
        self, table: Any, keys: Any, vectors: Any, versions: Any, scores: Any = None
    ) -> None:
        self.scored.append((table, scores))
        super().update(table, keys, vectors, versions)

    def expire(self, table: Any, oldest: int) -> int:
        entries = self._tables.get(table, {})
        old = [k for k, e in [*entries.items()] if e.row is not None and e.version < oldest]
        for key in old:
            del entries[key]
        return len(old)

    def top_k(self, table: Any, n: int) -> Any:
        held = [
            k for k, entry in self._tables.get(table, {}).copy().items() if entry.row is not None
        ]
        keys = np.array(held[::-1][:n], np.int64)
        return keys, np.full(len(keys), 255, np.uint8)

    def fetch(self, parts: Any, ctx: Any) -> None:
        self.fetched.append(sum(len(part.missing) for part in parts))
        super().fetch(parts, ctx)

    def pool_rows(self, asks: Any, stream: Any) -> None:
        for ask in asks:
            rows = np.asarray(ask.rows)
            vectors = np.empty((len(rows), len(ask.fallback)), np.float32)
            decode_rows(rows, None, vectors, ask.row_format.code)
            vectors[np.asarray(ask.source) == 0] = ask.fallback
            keys = JaggedKeys(np.zeros(len(rows), np.int64), len(ask.out), ask.offsets, ask.weights)
            ask.out[...] = pool(vectors, keys, ask.pooling, dtype=ask.fallback.dtype)

    def prepare(self, asks: Any) -> Prepared:
        return Prepared(self, asks)

    def prepare_vectors(
        self, asks: Any, offsets: Any, on_device: Any, sources: Any = None
    ) -> VectorFetch:
        return VectorFetch(self, asks, offsets, on_device, sources)

    def fill_misses(self, fetch: VectorFetch, stream: Any, gather: Any) -> MissReport | None:
        return fetch.fill(gather)

    def prepare_rows(self, asks: Any) -> PreparedRows:
        return PreparedRows(self, asks)

    def add_readers(self, hold_back: Any) -> None:
        self.other_readers.append(hold_back)

    def publish_now(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class VectorFetch:
    """`hps.cuda.vector_fetch.VectorFetch` in one chunk; its misses come in an order of their own."""

    def __init__(self, cache: Cache, asks: Any, offsets: Any, on_device: Any, sources: Any) -> None:
        self._cache, self.requests, self._offsets, self._sources = cache, asks, offsets, sources
        self._on_device = on_device
        sizes = [n for _, n in asks]
        ends = np.cumsum(sizes)
        self.tables = [table for table, _ in asks]
        self.bases = (ends - sizes).astype(np.uint32)
        self.flat = np.zeros(sum(sizes), np.int64)
        self.keys = np.split(self.flat, ends[:-1])
        self.stride = max(table.row_bytes for table in self.tables) + 16

    def launch(
        self,
        stream: Any,
        block: int,
        arrays: Any = None,
        pool: Any = None,
        used: Any = None,
    ) -> None:
        sizes = [n for _, n in self.requests] if used is None else used.tolist()
        for own, there, array in zip(self.keys, self._on_device, arrays or self.keys, strict=True):
            assert isinstance(array, Array) == bool(there)
            own[:] = np.asarray(array)
        self._outs, missing = [], []
        self._cache.fetched.append(len(self.flat))
        for (table, _), n, at, own, base in zip(
            self.requests, sizes, self._offsets, self.keys, self.bases.tolist(), strict=True
        ):
            keys = own[:n]
            part = Part.make(table, keys)
            MemoryTier.fetch(self._cache, [part], FetchContext())
            raw = (ctypes.c_uint8 * (n * table.row_bytes)).from_address(block + at)
            out = np.frombuffer(raw, table.row_dtype).reshape(n, table.row_width)
            found = part.source != 0
            out[found] = part.out[found]
            self._outs.append(out)
            if self._sources is not None:
                self._sources[base : base + n][found] = int(Source.GPU)
            missing.append(np.flatnonzero(~found) + base)
        self.missing = np.random.default_rng(1).permutation(np.concatenate(missing))

    def fill_steps(self, keys_at: Any, hotness: Any, tables: Any) -> Any:
        """The steps, whose misses and rows are in host memory."""
        from hps.native.scheduler import FillChunk

        space, n = self._cache.space, len(self.flat)
        used = np.zeros(len(self.requests), np.uint32)
        missing, positions = np.zeros(1, np.uint32), np.zeros(n, np.uint32)
        keys, arguments = np.zeros(n, np.int64), np.zeros(4, np.uint64)

        def fetch() -> None:
            arrays = [
                there(space.at(at, size, np.int64))
                for at, (_, size) in zip(keys_at, self.requests, strict=True)
            ]
            self.launch(None, 0, arrays, used=used)
            count = len(self.missing)
            missing[0], positions[:count] = count, self.missing
            keys[:count] = self.flat[self.missing]

        def place() -> None:
            count = int(arguments[3])
            self.missing = space.at(int(arguments[0]), count, np.uint32)
            rows = space.at(int(arguments[1]), count * stride, np.uint8).reshape(count, stride)
            self._place(rows, space.at(int(arguments[2]), count, np.uint8))

        stride = -(-max(table.row_bytes for table in self.tables) // 16) * 16
        parts = [
            (table, int(base), 0, size, h, i, used[i:].ctypes.data)
            for i, (table, base, (_, size), h) in enumerate(
                zip(tables, self.bases, self.requests, hotness, strict=True)
            )
        ]
        fields = tuple(arguments[i:].ctypes.data for i in range(4))
        self._kept = used, missing, positions, keys, arguments
        addresses = missing.ctypes.data, positions.ctypes.data, keys.ctypes.data
        return [call_step(fetch)], [FillChunk.make(parts, *addresses, call_step(place), 64, fields)]

    def fill(self, gather: Any) -> MissReport | None:
        n, counts = len(self.missing), np.zeros((len(self.tables), 2), np.uint32)
        listed = any(self._on_device)
        keys = self.flat[self.missing] if listed else self.flat
        rows, sources = np.full((n, self.stride), 9, np.uint8), np.zeros(n, np.uint8)
        positions = self.missing.astype(np.uint32)
        left = None
        if n:
            batch = MissBatch(
                self.tables, self.bases, keys, positions, listed, rows, sources, counts, n
            )
            if gather(batch):
                left = self._left(positions[sources == UNANSWERED])
            self._place(rows, sources)
        return MissReport(counts.astype(np.int64), left) if n else None

    def _place(self, rows: Any, sources: Any) -> None:
        parts = np.searchsorted(self.bases, self.missing, side="right") - 1
        for at, part, row, source in zip(self.missing, parts, rows, sources, strict=True):
            if source != UNANSWERED:
                table = self.tables[part]
                self._outs[part][at - self.bases[part]] = row[: table.row_bytes].view(
                    table.row_dtype
                )
                if self._sources is not None:
                    self._sources[at] = source

    def _left(self, positions: Any) -> Any:
        parts = np.searchsorted(self.bases, positions, side="right") - 1
        return [
            np.sort(positions[parts == i].astype(np.int64) - int(base))
            for i, base in enumerate(self.bases)
        ]


class PreparedRows:
    def __init__(self, cache: Cache, asks: Any) -> None:
        self._cache, self._asks = cache, asks

    def steps(self) -> Any:
        return [call_step(lambda: self.launch(None))]

    def launch(self, stream: Any) -> None:
        for ask in self._asks:
            plain = RowBags(
                ask.rows,
                ask.source,
                ask.fallback,
                None,
                None,
                ask.out,
                ask.hotness,
                ask.pooling,
                ask.row_format,
            )
            self._cache.pool_rows([plain], stream)


class Prepared:
    def __init__(self, cache: Cache, asks: Any) -> None:
        self._cache, self._asks = cache, asks
        ends = np.cumsum([n for _, n, *_ in asks])
        self.flat = np.empty(ends[-1], np.int64)
        self.keys = np.split(self.flat, ends[:-1])
        self._count = np.zeros(1, np.uint32)

    def launch(self, stream: Any, on_device: Any = MappingProxyType({})) -> None:
        missing = 0
        self._cache.pooled += 1
        for number, address in on_device.items():
            self.keys[number][:] = self._cache.space.at(address, len(self.keys[number]), np.int64)
        for keys, (table, n, hotness, pooling, out) in zip(self.keys, self._asks, strict=True):
            part = Part.make(table, keys)
            MemoryTier.fetch(self._cache, [part], FetchContext())
            missing += int((part.source == 0).sum())
            bags = JaggedKeys(keys, n // hotness)
            vectors = to_vectors(table, part.out, dtype=np.float32)
            out[...] = pool(vectors, bags, pooling, dtype=table.dtype)
        self._count[0] = missing

    def missing(self) -> int:
        return int(self._count[0])

    def steps(self, stream: Any) -> tuple[list[Any], list[int]]:
        return [call_step(lambda: self.launch(stream))], [self._count.ctypes.data]


class Bridge(TierWrapper):
    """`HostBridge`: asks once for a key that is missing several times."""

    def __init__(self, inner: Any, device: int, workspaces: int) -> None:
        super().__init__(inner)
        self.info = replace(inner.info, memory="cuda")
        self.released = False

    def release(self) -> None:
        self.released = True

    def fetch(self, parts: Any, ctx: Any) -> None:
        parts = [part for part in parts if len(part.missing)]
        picked = [dedup(np.asarray(part.keys)[part.missing]) for part in parts]
        misses = [Part.make(p.table, keys) for p, (keys, _) in zip(parts, picked, strict=True)]
        self.inner.fetch(misses, FetchContext(ctx.deadline, None, ctx.degraded))
        for part, below, (_, picks) in zip(parts, misses, picked, strict=True):
            answered = np.ones(len(below.keys), bool)
            answered[below.missing] = False
            mine = answered[picks]
            at, of = part.missing[mine], picks[mine]
            part.source[at] = below.source[of]
            if part.versions is not None:
                part.versions[at] = below.versions[of]
            rows = below.source[of] != 0
            part.out[at[rows]] = below.out[of[rows]]
            part.missing = part.missing[~mine]


def install(monkeypatch: Any, count: int = 1, free: int = 1 << 34) -> list[Cache]:
    """Give this process ``count`` such GPUs; the caches that a node opens on them."""
    caches: list[Cache] = []

    def open_cache(device: int, workspaces: int, threads: Any) -> Cache:
        caches.append(Cache(device))
        return caches[-1]

    monkeypatch.setattr(devices, "missing_requirement", lambda: None)
    monkeypatch.setattr(devices, "device_count", lambda: count)
    monkeypatch.setattr(devices, "free_bytes_on", lambda device: free)
    monkeypatch.setattr(devices, "open_cache", open_cache)
    monkeypatch.setattr(
        gpu_memory, "read_memory", lambda device: GpuMemoryUsage(device, f"GPU-{device}", 1, free)
    )
    monkeypatch.setattr(models, "bridge_to_device", Bridge)
    for module in (devices, models):
        monkeypatch.setattr(module, "release_unused", lambda devices: None)
    monkeypatch.setattr(models, "runs_on_gpu", lambda network: True)
    return caches
