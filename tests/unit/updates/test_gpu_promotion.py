"""GPU promotion: the writer's thread copies rows from the CPU cache into the GPU caches."""

import threading

import numpy as np
import pytest

from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, Source
from hps.updates import gpu_promotion as gpu_promotion_module
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.gpu_promotion import GpuPromotion
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

TABLE = EmbeddingTable.make("t", 2)


class Watched(MemoryTier):
    def __init__(self):
        super().__init__(TierInfo("gpu", Source.GPU, cache=True))
        self.threads, self.writes = set(), []

    def insert(self, table, keys, vectors, versions):
        self.threads.add(threading.current_thread().name)
        self.writes.append(keys.tolist())
        super().insert(table, keys, vectors, versions)


@pytest.fixture
def world():
    cpu, gpu, counted = MemoryTier(), Watched(), {}
    keys = np.arange(100)
    cpu.insert(
        TABLE, keys, np.repeat(np.float32(keys)[:, None], 2, axis=1), np.full(100, 7, np.uint64)
    )
    cpu.delete(TABLE, keys[:5], np.full(5, 8, np.uint64))
    writer = CacheWriter(TierChain([cpu, gpu]), PromotionSources([]), 1000)
    count = lambda result, n: counted.update({result: counted.get(result, 0) + n})  # noqa: E731
    promotion = GpuPromotion(writer, cpu, gpu, 50, count)
    yield cpu, gpu, writer, promotion, counted
    promotion.close()
    writer.close()


def running():
    return [each for each in threading.enumerate() if each.name == "hps-gpu-promote"]


def test_rows_are_copied_once_on_the_writer_thread(world):
    _, gpu, _, promotion, counted = world
    promotion.promote(TABLE, np.array([50, 3, 51]))
    promotion.promote(TABLE, np.array([51, 200]))
    until(lambda: gpu.size(TABLE) == 2)
    # Neither the deleted one nor the unknown one.
    assert sorted(key for keys in gpu.writes for key in keys) == [50, 51]
    assert gpu.threads == {"hps-cache-writer"}
    assert counted == {"inserted": 2}


def test_promotion_does_not_overwrite_a_newer_row(world):
    _, gpu, writer, promotion, _ = world
    keys, newer = np.array([60]), np.full(1, 9, np.uint64)
    promotion.promote(TABLE, keys)
    writer.insert(TABLE, keys, np.zeros((1, 2), np.float32), newer).result()
    until(lambda: gpu.writes)
    promotion.flush()
    part = Part.make(TABLE, keys)
    gpu.fetch([part], FetchContext())
    assert part.versions.tolist() == [9]


def test_row_deleted_before_its_copy_is_not_promoted(world):
    _, gpu, writer, promotion, counted = world
    free = threading.Event()
    writer.run(free.wait)
    writer.delete(TABLE, np.array([70]), np.full(1, 9, np.uint64))
    promotion.promote(TABLE, np.array([70, 71]))
    free.set()
    until(lambda: counted)
    assert gpu.writes == [[71]]
    assert counted == {"inserted": 1}


def test_promote_drops_keys_when_the_queue_is_full(world):
    _, _, writer, promotion, counted = world
    free = threading.Event()
    blocked = writer.run(free.wait)
    promotion.promote(TABLE, np.arange(40))
    promotion.promote(TABLE, np.arange(40, 60))
    assert counted == {"dropped": 20}
    free.set()
    blocked.result()


def test_promote_now_copies_the_first_keys_last(world, monkeypatch):
    _, gpu, _, promotion, _ = world
    monkeypatch.setattr(gpu_promotion_module, "_CHUNK_ROWS", 2)
    promotion.promote_now(TABLE, np.array([90, 91, 92, 93, 94]))
    assert gpu.writes == [[93, 94], [91, 92], [90]]


def test_closed_writer_ends_the_promotion_thread(world):
    _, gpu, writer, promotion, _ = world
    writer.close()
    promotion.promote(TABLE, np.array([50]))
    until(lambda: not running())
    assert gpu.writes == []


class ClosedAfterCheck(threading.Event):
    """Event of `PeriodicThread.close`; closes when the thread has just seen that it is not set."""

    def __init__(self, promotion):
        super().__init__()
        self.closer = threading.Thread(target=promotion.close, daemon=True)

    def is_set(self):
        found = super().is_set()
        if not found and not self.closer.is_alive():
            self.closer.start()
            self.wait(60)
            self.closer.join(0.05)  # until it waits for the thread
        return found


def test_close_ends_the_thread_just_before_a_copy(world):
    _, _, _, promotion, _ = world
    promotion._thread._closed = closed = ClosedAfterCheck(promotion)
    promotion.promote(TABLE, np.array([1]))
    assert closed.wait(10)
    closed.closer.join(10)
    assert not closed.closer.is_alive()
    assert not running()
