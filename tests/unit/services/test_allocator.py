"""Freed memory stays in the process, so a large request takes no page faults for it."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Frees memory at the top of the heap again and again, as a server does with the bytes of its requests.
_CODE = """
import ctypes, resource
from services.allocator import keep_freed_memory
print(keep_freed_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(300_000) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 300_000)
    for block in blocks:
        libc.free(block)
for _ in range(5):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def run(**variables: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", _CODE], env=variables, capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


@pytest.mark.skipif(not _GLIBC, reason="glibc's allocator")
def test_large_blocks_reuse_their_pages():
    kept, faults = run()
    assert kept == "True"
    assert int(faults) < 1_000  # of 58,000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_in_the_environment_take_precedence(name):
    value = "262144" if name.startswith("M") else "glibc.malloc.trim_threshold=262144"
    kept, faults = run(**{name: value})
    assert kept == "False"
    assert int(faults) > 10_000
