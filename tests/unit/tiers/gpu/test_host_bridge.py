"""HostBridge: rows of host tiers brought to the device."""

import threading
import time

import numpy as np
import pytest

from hps.cuda.loader import cupy
from hps.errors import BadRequest, TierTimeout
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.host_bridge import HostBridge
from hps.types import EmbeddingTable, Source, make_version
from tests.support.memory_tier import MemoryTier
from tests.support.rows import distinct_rows

pytestmark = pytest.mark.gpu
NOW = make_version(time.time_ns() // 1_000_000)


def store():
    return MemoryTier(TierInfo("memory", Source.ROCKSDB))


def fill(tier, table, keys):
    tier.insert(table, keys, distinct_rows(table, keys), np.full(len(keys), NOW, np.uint64))


def part_of(table, keys, *, on_device=False):
    cp = cupy()
    n = len(keys)
    return Part(
        table,
        cp.asarray(keys) if on_device else keys,
        cp.full((n, table.dim), -1, table.dtype),
        cp.zeros(n, np.uint64),
        cp.zeros(n, np.uint8),
        np.arange(n),
    )


class Counting:
    """Counts the keys fetched from the lower tier."""

    def __init__(self, inner):
        self.inner = inner
        self.calls = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def fetch(self, parts, ctx):
        self.calls.append([part.keys.tolist() for part in parts])
        self.inner.fetch(parts, ctx)


@pytest.mark.parametrize("n", [7, 3000, 60_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_misses_are_fetched_from_lower_tier_in_one_call(n, dtype):
    """Also when it is too much for kernels to read in place."""
    tables = [EmbeddingTable.make(f"t{d}", d, dtype=dtype) for d in (3, 16, 100)]
    below = Counting(store())
    bridge = HostBridge(below)
    keys = np.arange(n)
    parts = []
    for i, table in enumerate(tables):
        fill(below, table, keys[::2].copy())
        part = part_of(table, keys, on_device=i == 1)
        part.missing = part.missing[i:].copy()
        parts.append(part)
    bridge.fetch(parts, FetchContext())
    assert below.calls == [[keys[i:].tolist() for i in range(3)]]
    for i, part in enumerate(parts):
        out, source = part.out.get(), part.source.get()
        found = np.flatnonzero((keys % 2 == 0) & (keys >= i))
        np.testing.assert_array_equal(out[found], distinct_rows(part.table, keys[found]))
        np.testing.assert_array_equal(part.missing, np.flatnonzero((keys % 2 == 1) & (keys >= i)))
        assert (source[found] == Source.ROCKSDB).all()
        assert (part.versions.get()[found] == NOW).all()
        others = np.setdiff1d(np.arange(n), found)
        assert (out[others] == -1).all()
        assert (source[others] == 0).all()


def test_many_tables_are_fetched_together():
    tables = [EmbeddingTable.make(f"t{i}", 1 + i % 5) for i in range(70)]
    below = store()
    keys = np.arange(20)
    for table in tables:
        fill(below, table, keys)
    parts = [part_of(table, keys) for table in tables]
    HostBridge(below).fetch(parts, FetchContext())
    for part in parts:
        np.testing.assert_array_equal(part.out.get(), distinct_rows(part.table, keys))


def test_no_fetch_when_nothing_is_missing():
    table = EmbeddingTable.make("t", 4)
    below = Counting(store())
    part = part_of(table, np.arange(5))
    part.missing = part.missing[:0]
    HostBridge(below).fetch([part], FetchContext())
    assert below.calls == []


def test_deleted_key_ends_search():
    table = EmbeddingTable.make("t", 4)
    below = store()
    keys = np.arange(4)
    fill(below, table, keys)
    below.delete(table, keys[:1], np.full(1, NOW + 5, np.uint64))
    part = part_of(table, keys)
    HostBridge(below).fetch([part], FetchContext())
    assert len(part.missing) == 0
    assert part.source.get().tolist() == [0, 4, 4, 4]
    assert part.versions.get().tolist() == [NOW + 5, NOW, NOW, NOW]
    assert (part.out.get()[0] == -1).all()


def test_cache_above_bridge_keeps_chain_on_device():
    table = EmbeddingTable.make("t", 8)
    below = Counting(store())
    chain = TierChain([GpuCache({table: 1000}), HostBridge(below)])
    assert chain.info.memory == "cuda"
    keys = np.arange(100)
    fill(below, table, keys)
    fill(chain.tiers[0], table, keys[:60].copy())
    part = part_of(table, keys)
    chain.fetch([part], FetchContext())
    assert below.calls == [[list(range(60, 100))]]
    np.testing.assert_array_equal(part.out.get(), distinct_rows(table, keys))
    np.testing.assert_array_equal(part.source.get(), [1] * 60 + [4] * 40)


def test_device_writes_reach_host_tier():
    table = EmbeddingTable.make("t", 4)
    below = store()
    bridge = HostBridge(below)
    cp, keys = cupy(), np.arange(10)
    fill(bridge, table, cp.asarray(keys).get())
    newer = cp.full(10, NOW + 1, np.uint64)
    bridge.update(table, cp.asarray(keys), cp.ones((10, 4), np.float32), newer)
    bridge.delete(table, cp.asarray(keys[:3]), newer[:3].copy())
    bridge.evict(table, cp.asarray(keys[3:5]))
    part = Part.make(table, keys)
    below.fetch([part], FetchContext())
    assert part.source.tolist() == [0] * 5 + [4] * 5
    assert part.missing.tolist() == [3, 4]
    assert (part.out[5:] == 1).all()


def test_many_threads_share_few_workspaces():
    table = EmbeddingTable.make("t", 16)
    below = store()
    keys = np.arange(4000)
    fill(below, table, keys)
    bridge = HostBridge(below, workspaces=2)
    wrong = []

    def ask(seed):
        rng = np.random.default_rng(seed)
        with cupy().cuda.Stream(non_blocking=True) as stream:
            for _ in range(30):
                some = rng.permutation(keys)[: rng.integers(1, 4000)]
                part = part_of(table, some)
                bridge.fetch([part], FetchContext())
                stream.synchronize()
                if not np.array_equal(part.out.get(stream=stream), distinct_rows(table, some)):
                    wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_fetch_waits_for_workspace_until_deadline():
    table = EmbeddingTable.make("t", 4)
    bridge = HostBridge(store(), workspaces=0)
    with pytest.raises(TierTimeout):
        bridge.fetch([part_of(table, np.arange(3))], FetchContext(time.monotonic() + 0.05))


def test_failed_fetch_returns_its_workspace():
    class Broken(Counting):
        def fetch(self, parts, ctx):
            raise RuntimeError("broken")

    table = EmbeddingTable.make("t", 4)
    bridge = HostBridge(Broken(store()), workspaces=1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="broken"):
            bridge.fetch([part_of(table, np.arange(3))], FetchContext(time.monotonic() + 5))


def test_outputs_on_host_are_rejected():
    table = EmbeddingTable.make("t", 4)
    part = part_of(table, np.arange(3))
    part.out = part.out.get()
    with pytest.raises(BadRequest, match="out must be on device"):
        HostBridge(store()).fetch([part], FetchContext())
