"""Setting of the C library's allocator for a server of large requests."""

from __future__ import annotations

import ctypes

from hps.environment import sets_allocator

# Numbers in glibc's malloc.h, and the values: what stays allocated per arena, and the smallest block that is
# mapped from the system and returned to it each time.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 << 20, 4 << 20


def keep_freed_memory() -> bool:
    """Make glibc's ``malloc`` keep the memory of a request for the next one; return False if it does not.

    By default ``free`` returns memory to the system above a threshold that may be as low as 256 KiB. The next
    request of 266 KB then takes 65 page faults, which cost more than all other work of its reception.

    The environment's own settings of the allocator take precedence. Other C libraries have no such setting.
    """
    if sets_allocator():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
