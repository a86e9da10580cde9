"""The CPU cache in shared memory: owner, readers, and the files left when either is killed."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hps.errors import ConfigError, TierError
from hps.native import COMPILED
from hps.tiers.base import Bags, FetchContext, Part
from hps.tiers.cpu import segments as cpu_segments
from hps.tiers.cpu.attached_cache import AttachedCache
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.segments import CacheReaderLock, Segments
from hps.types import EmbeddingTable

pytestmark = pytest.mark.skipif(not COMPILED, reason="the twins share no memory")
TABLE = EmbeddingTable.make("items", 4)
SCRIPT = Path(__file__).parents[2] / "support" / "killed_cache.py"


def owned(folder, rows=100, **options):
    return CpuCache({TABLE: rows}, memory=CacheMemory(Segments("c", folder, **options)))


def attached(folder, promote=lambda table, keys: None, table=TABLE):
    return AttachedCache("c", [table], promote, folder=folder)


def insert(cache, keys, version=1):
    keys = np.asarray(keys, np.int64)
    rows = (keys[:, None] + np.arange(4)).astype(np.float32)
    cache.insert(TABLE, keys, rows, np.full(len(keys), version, np.uint64))


def held(cache, keys):
    part = Part.make(TABLE, np.asarray(keys, np.int64))
    cache.fetch([part], FetchContext())
    found = part.source > 0
    assert (part.out[found, 0] == part.keys[found]).all()
    return part.keys[found].tolist()


def abandon(cache):
    """Leave the files as a killed owner does, with the lock released."""
    cache._memory.shared._lock.release()


KILLED_OWNER = """
import os, signal, sys, time
from pathlib import Path
from hps.tiers.cpu.segments import Segments

segments = Segments("c", Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.close(1)  # which the test reads to its end
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
OWNER = """
import sys
from pathlib import Path
from hps.tiers.cpu.segments import Segments

segments = Segments("c", Path(sys.argv[1]))
print("owns it", flush=True)
sys.stdin.read()
"""
UNSHARED = ["unshare", "--pid", "--fork"]


@functools.cache
def needs_pid_namespaces():
    done = subprocess.run([*UNSHARED, "true"], capture_output=True, check=False)
    return pytest.mark.skipif(done.returncode != 0, reason="unshare --pid is not allowed here")


def test_killed_writers_and_readers_leave_cache_usable():
    done = subprocess.run(
        [sys.executable, SCRIPT, "100"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_reader_sees_owners_writes_and_its_uses_keep_rows(tmp_path):
    cache, reader = owned(tmp_path, rows=64), attached(tmp_path)
    insert(cache, range(10))
    assert held(reader, range(20)) == list(range(10))
    out = np.empty((2, 4), np.float32)
    assert reader.gather([(TABLE, np.array([3, 4]), out)])
    assert out[:, 0].tolist() == [3, 4]
    bags = Bags(TABLE, np.array([3, 4, 5, 99]), out)
    assert reader.gather([], [bags])
    assert bags.missing.tolist() == [3]
    assert reader.complete(bags, np.full((1, 4), 20, np.float32))
    assert out[:, 0].tolist() == [7, 25]
    for n in range(1000, 1400):
        assert held(reader, [7]) == [7]
        insert(cache, [n])
    assert (held(cache, [7]), held(cache, [8])) == ([7], [])
    assert reader.size(TABLE) == cache.size(TABLE) == 64
    reader.close()
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_attached_cache_passes_inserts_to_owner_and_rejects_other_writes(tmp_path):
    promoted = []
    cache = owned(tmp_path)
    reader = attached(tmp_path, lambda table, keys: promoted.append((table, keys.tolist())))
    insert(reader, [1, 2])
    assert (promoted, held(reader, [1])) == ([(TABLE, [1, 2])], [])
    keys, versions = np.array([1]), np.ones(1, np.uint64)
    for refused in (
        lambda: reader.update(TABLE, keys, np.ones((1, 4), np.float32), versions),
        lambda: reader.delete(TABLE, keys, versions),
        lambda: reader.evict(TABLE, keys),
    ):
        with pytest.raises(TierError, match="only the owner"):
            refused()
    cache.close()


def test_reader_follows_added_and_removed_tables_and_owners(tmp_path, monkeypatch):
    monkeypatch.setattr("hps.tiers.cpu.attached_cache.POLL_S", 0)
    reader = attached(tmp_path)
    assert held(reader, [1]) == []
    cache = owned(tmp_path)
    insert(cache, [1])
    assert held(reader, [1]) == [1]
    cache.drop_table(TABLE)
    assert held(reader, [1]) == []
    cache.add_table(TABLE, 50)
    insert(cache, [2])
    assert (held(reader, [2]), reader.capacity(TABLE)) == ([2], 50)
    cache.close()
    assert held(reader, [2]) == []


def test_closed_reader_does_not_attach_again(tmp_path, monkeypatch):
    monkeypatch.setattr("hps.tiers.cpu.attached_cache.POLL_S", 0)
    cache, reader = owned(tmp_path), attached(tmp_path)
    reader.close()
    cache.add_table(TABLE, 50)  # which readers notice
    insert(cache, [1])
    assert held(reader, [1]) == []
    assert cache.status()["shared_memory"]["readers"] == 0
    cache.close()


def test_tables_can_be_dropped_while_others_are_added(tmp_path):
    """A separate thread frees a version while the next one may be loaded."""
    cache = CpuCache({}, memory=CacheMemory(Segments("c", tmp_path)))
    stay, failed = set(), []

    def come_and_go(name):
        try:
            for number in range(30):
                table = EmbeddingTable.make(f"{name}{number}", 2)
                cache.add_table(table, 1)
                if number % 3:
                    cache.drop_table(table)
                else:
                    stay.add(table.id)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=come_and_go, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert cpu_segments.catalog(tmp_path / "hps.c").keys() == stay
    cache.close()


def test_table_of_another_shape_is_not_read(tmp_path, caplog):
    cache = owned(tmp_path)
    attached(tmp_path, table=EmbeddingTable.make("items", 5))
    assert "dim 4" in caplog.text
    cache.close()


def test_shared_cache_has_one_owner(tmp_path):
    cache = owned(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {os.getpid()}.*shared\.name"):
        owned(tmp_path)
    insert(cache, [1])
    assert held(attached(tmp_path), [1]) == [1]  # the second one left it alone
    cache.close()
    owned(tmp_path).close()


def test_killed_owner_is_replaced_while_its_fork_lives(tmp_path):
    script = [sys.executable, "-c", KILLED_OWNER, tmp_path]
    done = subprocess.run(script, stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    try:
        owned(tmp_path).close()
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def test_owner_killed_in_another_pid_namespace_is_replaced(tmp_path):
    """A container that is killed and started again: /dev/shm stays, process numbers begin anew."""
    (tmp_path / "hps.c").mkdir(mode=0o700)
    left = {"pid": 1, "start": 1, "space": 1, "claim": "former"}  # as another container's
    (tmp_path / "hps.c" / "owner.json").write_text(json.dumps(left))
    owned(tmp_path).close()


@needs_pid_namespaces()
def test_owner_alive_in_another_pid_namespace_is_kept(tmp_path):
    script = [*UNSHARED, sys.executable, "-c", OWNER, tmp_path]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other_process:
        assert other_process.stdout.readline() == b"owns it\n"
        with pytest.raises(ConfigError, match=r"process 1 .*runs.*shared\.name"):
            owned(tmp_path)
        other_process.communicate(timeout=60)
    owned(tmp_path).close()


def test_killed_reader_is_not_counted(tmp_path):
    cache = owned(tmp_path)
    script = f"""
import os, signal
from pathlib import Path
from hps.tiers.cpu.segments import CacheReaderLock
reader = CacheReaderLock(Path({str(tmp_path / "hps.c")!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    reader_lock = CacheReaderLock(tmp_path / "hps.c")
    assert len(list(tmp_path.glob("hps.c/readers/*"))) == 2
    assert cache.status()["shared_memory"]["readers"] == 1
    assert len(list(tmp_path.glob("hps.c/readers/*"))) == 1
    reader_lock.close()
    assert cache.status()["shared_memory"]["readers"] == 0
    cache.close()


@pytest.mark.parametrize("take_over", [False, True])
def test_files_of_dead_owner_are_removed_or_taken_over(tmp_path, take_over, monkeypatch):
    monkeypatch.setattr("hps.tiers.cpu.attached_cache.POLL_S", 0)
    dead, reader = owned(tmp_path), attached(tmp_path)
    insert(dead, [1])
    abandon(dead)
    assert held(reader, [1]) == [1]  # still
    cache = owned(tmp_path, take_over=take_over)
    assert len(list(tmp_path.glob("hps.c/*.table"))) == 1
    assert held(cache, [1]) == held(reader, [1]) == ([1] if take_over else [])
    insert(cache, [2])
    assert held(reader, [2]) == [2]
    dead.close()  # it is no longer its own
    assert len(list(tmp_path.glob("hps.c/*.table"))) == 1
    cache.close()


def test_table_of_another_capacity_is_not_taken_over(tmp_path):
    dead = owned(tmp_path)
    insert(dead, [1])
    abandon(dead)
    cache = owned(tmp_path, rows=200, take_over=True)
    assert (held(cache, [1]), cache.capacity(TABLE)) == ([], 200)
    assert len(list(tmp_path.glob("hps.c/*.table"))) == 1
    cache.close()


GROWING_ROWS = 400_000
STEP_ROWS = (2 << 20) // (TABLE.dim * 4)


def growing(folder, **options):
    cache = CpuCache({}, memory=CacheMemory(Segments("c", folder, **options)))
    cache.add_table(TABLE, GROWING_ROWS, on_demand=True)
    return cache


def test_memory_on_demand_grows_with_the_rows(tmp_path):
    cache, reader = growing(tmp_path), attached(tmp_path)
    (file,) = tmp_path.glob("hps.c/*.table")
    whole, sizes = file.stat().st_size, []
    for keys in np.split(np.arange(GROWING_ROWS), 10):
        stats = cache.stats(TABLE)
        assert 0 <= file.stat().st_blocks * 512 - stats.bytes < 4 << 20  # disks round up
        sizes.append(stats.bytes)
        insert(cache, keys)
    assert sizes[0] < 0.6 * whole  # of rows of 16 bytes: only the buckets
    assert len(set(sizes)) > 3
    assert cache.stats(TABLE).bytes == whole
    for reading in (cache, reader):
        assert held(reading, np.arange(GROWING_ROWS)) == list(range(GROWING_ROWS))
    reader.close()
    cache.close()


def test_table_that_was_taken_over_grows_on(tmp_path):
    dead = growing(tmp_path)
    insert(dead, [1])
    abandon(dead)
    cache = growing(tmp_path, take_over=True)
    keys = np.arange(2, 2 * STEP_ROWS)
    insert(cache, keys)
    assert held(cache, [1, *keys]) == [1, *keys]
    dead.close()
    cache.close()


FULL_MEMORY = """
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

sys.path.insert(0, sys.argv[2])
from tests.unit.tiers.test_shared_cache import STEP_ROWS, TABLE, growing, held, insert

folder = Path(sys.argv[1])
cache = growing(folder)
insert(cache, [1])
with open(folder / "rest", "wb", buffering=0) as rest, suppress(OSError):
    while True:
        rest.write(bytes(4096))
keys = np.arange(2, 2 * STEP_ROWS)
insert(cache, keys)
assert cache.size(TABLE) == STEP_ROWS, cache.size(TABLE)
assert len(held(cache, keys)) >= STEP_ROWS - 1
cache.delete(TABLE, np.arange(10**6, 10**6 + 100), np.full(100, 2, np.uint64))
assert cache.stats(TABLE).tombstones > 0
cache.close()
"""


@functools.cache
def needs_mounts():
    done = subprocess.run([*MOUNTING, "mount -t tmpfs none /mnt"], capture_output=True, check=False)
    return pytest.mark.skipif(done.returncode != 0, reason="mounting is not allowed here")


MOUNTING = ["unshare", "--mount", "sh", "-c"]


@needs_mounts()
def test_rows_are_evicted_if_there_is_no_memory_to_grow(tmp_path):
    mount = 'mount -t tmpfs -o size=24m none "$1" && shift && exec "$@"'
    run = [sys.executable, "-c", FULL_MEMORY, str(tmp_path), str(SCRIPT.parents[2])]
    done = subprocess.run(
        [*MOUNTING, mount, "sh", str(tmp_path), *run], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_on_demand_needs_no_space_for_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cpu_segments.os, "statvfs", lambda _: type("Disk", (), {"f_bavail": 4, "f_frsize": 4096})
    )
    growing(tmp_path).close()


def test_status_reports_size_owner_and_readers(tmp_path):
    cache, reader = owned(tmp_path), attached(tmp_path)
    facts = cache.status()["shared_memory"]
    assert facts["path"] == str(tmp_path / "hps.c")
    assert 0 <= facts["bytes"] - cache.stats(TABLE).bytes < 4096  # of whole pages
    assert (facts["owner"], facts["readers"]) == (os.getpid(), 1)
    (tmp_path / "hps.c" / "readers" / "dead").touch()
    assert cache.status()["shared_memory"]["readers"] == 1
    reader.close()
    assert cache.status()["shared_memory"]["readers"] == 0
    cache.close()


def test_status_works_while_tables_and_readers_change(tmp_path):
    cache, reader = owned(tmp_path), attached(tmp_path)
    before = cache.status()
    # Removed between listing and checking; and the file of a reader that is being written.
    (tmp_path / "hps.c" / "gone.table").symlink_to("removed")
    (tmp_path / "hps.c" / "readers" / f".1-2-3.{os.getpid()}").touch()
    assert cache.status() == before
    reader.close()
    cache.close()


def test_too_little_space_is_rejected_with_both_sizes_before_any_file(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cpu_segments.os, "statvfs", lambda _: type("Disk", (), {"f_bavail": 4, "f_frsize": 4096})
    )
    with pytest.raises(ConfigError, match=r"takes [\d,]+ bytes, and .* has 16,384 bytes free"):
        owned(tmp_path, rows=10_000)
    assert list(tmp_path.iterdir()) == []


def test_unavailable_memory_options_are_rejected():
    with pytest.raises(ConfigError, match="NUMA node 1000"):
        CpuCache({TABLE: 10}, memory=CacheMemory(numa_node=1000))
    reserved = int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    if reserved == 0:
        with pytest.raises(ConfigError, match=r"vm\.nr_hugepages"):
            CpuCache({TABLE: 10}, memory=CacheMemory(huge_pages="reserved"))
