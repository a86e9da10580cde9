"""Memory of the CPU cache: the kernel's report of its pages and their NUMA node."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hps.errors import ConfigError
from hps.native import COMPILED
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.segments import Segments
from hps.types import EmbeddingTable

pytestmark = pytest.mark.skipif(not COMPILED, reason="the twins take whatever NumPy gives them")
TABLE = EmbeddingTable.make("items", 64)
ROWS, STEP = 20_000, 1_000  # 6 MiB; so few at a time that NumPy asks for no huge pages
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def full(memory):
    cache = CpuCache({TABLE: ROWS}, memory=memory)
    for start in range(0, ROWS, STEP):
        keys = np.arange(start, start + STEP)
        cache.insert(TABLE, keys, np.ones((STEP, 64), np.float32), np.ones(STEP, np.uint64))
    return cache


def huge_kib(what):
    """KiB of this process's memory that lie in huge pages of a kind."""
    return sum(map(int, re.findall(rf"{what}:\s+(\d+)", Path("/proc/self/smaps").read_text())))


def advised_kib():
    """KiB of this process's memory for which huge pages were asked: whether any is free is the machine's."""
    maps = re.findall(
        r"^Size:\s+(\d+)(?:(?!^Size:).)*?^VmFlags:([^\n]*)",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return sum(int(size) for size, flags in maps if "hg" in flags.split())


def bound_pages():
    """The number of pages on node 0 of memory bound to it."""
    maps = [
        line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "bind:0" in line
    ]
    return sum(int(pages) for line in maps for pages in re.findall(r"N0=(\d+)", line))


@pytest.mark.parametrize("shared", [False, True])
def test_cache_memory_is_on_its_numa_node(tmp_path, shared):
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no nodes")
    assert bound_pages() == 0
    segments = Segments("c", tmp_path) if shared else None
    cache = full(CacheMemory(segments, huge_pages="off", numa_node=0))
    assert bound_pages() * 4096 >= 0.95 * cache.stats(TABLE).bytes


def test_transparent_huge_pages_are_used():
    before = advised_kib()
    if "[never]" in TRANSPARENT.read_text():
        with pytest.raises(ConfigError, match="transparent huge pages are disabled"):
            full(CacheMemory(huge_pages="transparent"))
        return
    plain = full(CacheMemory(huge_pages="off"))
    assert advised_kib() == before
    cache = full(CacheMemory(huge_pages="transparent"))
    assert advised_kib() >= before + 4096
    assert huge_kib("AnonHugePages") > 0
    assert plain.size(TABLE) == cache.size(TABLE) == ROWS


def test_reserved_huge_pages_are_used():
    free = int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    if free < 4:
        with pytest.raises(ConfigError, match=r"vm\.nr_hugepages"):
            full(CacheMemory(huge_pages="reserved"))
        return
    cache = full(CacheMemory(huge_pages="reserved"))
    assert huge_kib("Private_Hugetlb") >= cache.stats(TABLE).bytes / 1024


@pytest.mark.parametrize("huge", ["never", "advise"])
def test_huge_pages_of_files_depend_on_file_system(tmp_path, huge):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_cache_memory import *\n"
        f"cache = full(CacheMemory(Segments('c', Path({str(tmp_path)!r})), huge_pages='transparent'))\n"
        "assert huge_kib('ShmemPmdMapped') >= 4096"
    )
    # A mount that ends with its process.
    space = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o huge={huge} none {tmp_path}"
    if subprocess.run([*space, mount], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    done = subprocess.run(
        [*space, f'{mount} && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if huge == "advise":
        assert done.returncode == 0, done.stderr
    else:
        assert "huge=advise" in done.stderr
