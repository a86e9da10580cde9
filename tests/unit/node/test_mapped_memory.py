"""Memory for mapped files on the fast path: a budget that tables take and release, from several threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.models.mapped_file import MAPPED_FILE
from hps.models.version_writer import write_version
from hps.node.mapped_memory import MappedMemory
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.mapped.overlaid_table import OverlaidTable
from hps.types import EmbeddingTable
from tests.support.waiting import until

TABLES = [EmbeddingTable.make(name, 4, model="m", version=1) for name in "abc"]
A, B, C = TABLES


@pytest.fixture
def files(tmp_path):
    """Mapped files of one length."""
    spec = {"name": "m", "tables": [{"name": t.name, "dim": 4} for t in TABLES]}
    rows = np.arange(2_000), np.zeros((2_000, 4), np.float32)
    folder = write_version(
        tmp_path, ModelSpec.model_validate(spec), 1, {t.name: rows for t in TABLES}
    )
    return {t: OverlaidTable(folder / "tables" / t.name / MAPPED_FILE, 1) for t in TABLES}


@pytest.fixture
def cache():
    cache = CpuCache(dict.fromkeys(TABLES, 100))
    yield cache
    cache.close()


@pytest.fixture
def make_memory(cache, files):
    """Memory for some of the files."""
    made = []

    def find(table):
        time.sleep(1e-3)  # other threads run meanwhile
        return files[table]

    def make(n):
        memory = MappedMemory(cache, find, n * files[A].file.header.bytes)
        made.append(memory)
        return memory

    yield make
    for memory in made:
        memory.close()


def test_released_memory_goes_to_the_tables_that_wait_for_it(make_memory, cache):
    memory = make_memory(1)
    assert [memory.admit(table) for table in TABLES] == [True, False, False]
    assert memory.waiting(TABLES) == [B, C]
    memory.release([A, B])
    until(lambda: cache.is_mapped(C))
    assert not memory.waiting(TABLES)
    assert not cache.is_mapped(B)
    assert not memory.admit(B)


def test_table_that_never_fits_does_not_wait(make_memory):
    memory = make_memory(0)
    assert not memory.admit(A)
    assert not memory.waiting(TABLES)


def test_released_table_is_not_mapped(make_memory, cache):
    """A thread that reads its file ends later than the table."""
    memory = make_memory(1)
    assert memory.admit(A)
    memory.release([A])
    memory.map(A)
    assert not cache.is_mapped(A)


def test_closed_memory_starts_no_thread(make_memory, cache):
    memory = make_memory(1)
    memory.admit(A)
    memory.admit(B)
    memory.close()
    before = threading.active_count()
    memory.release([A])
    assert threading.active_count() == before
    assert not cache.is_mapped(B)


def test_table_that_two_threads_admit_is_counted_once(make_memory):
    """A version's table waits, and is asked for again while another version is freed."""
    memory = make_memory(2)
    memory.close()  # so that releases start no threads
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            assert [memory.admit(table) for table in (A, C, B)] == [True, True, False]
            freed, asked = pool.submit(memory.release, [A, C]), pool.submit(memory.admit, B)
            freed.result()
            asked.result()
            assert memory.admit(B)
            memory.release([B])


def test_pages_of_hot_keys_are_read_first(make_memory, files, monkeypatch):
    memory, steps = make_memory(1), []
    for name in ("populate", "load"):
        real = getattr(OverlaidTable, name)

        def step(mapped, *args, real=real, name=name):
            steps.append((name, args))
            return real(mapped, *args)

        monkeypatch.setattr(OverlaidTable, name, step)
    memory.admit(A)
    hot = np.array([700, 3, 1999])
    memory.load(A, hot)
    assert [name for name, _ in steps][:2] == ["populate", "load"]
    np.testing.assert_array_equal(steps[0][1][0], hot)
    assert {name for name, _ in steps[1:]} == {"load"}
    assert memory.is_resident(A)
