"""Short slices of a core's time, for processes whose requests take less than a millisecond.

Who wakes up while all cores are busy waits until somebody's slice is over: up to 4 ms, several times what a
request takes. Since Linux 6.12 a thread may ask for shorter slices of its own (``sched_setattr``,
``sched_runtime`` of the ordinary policy), and is then let in before those with longer ones. Its share of the
cores stays the same, so nobody loses by it.
"""

from __future__ import annotations

import ctypes
import os
import sys

SLICE_NS = 100_000
_NUMBERS = {"x86_64": (315, 314), "aarch64": (275, 274)}


class _SchedAttr(ctypes.Structure):
    """The kernel's ``struct sched_attr``, as of its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def slice_ns() -> int:
    """The calling thread's slice; 0 where the kernel tells none, or the thread has another policy."""
    held = _held()
    return 0 if held is None else int(held.runtime_ns)


def request_short_slices() -> None:
    """For the calling thread and all that it starts from now on. Nothing happens where there is no such
    thing."""
    held = _held()
    if held is not None and held.runtime_ns > SLICE_NS:
        held.runtime_ns = SLICE_NS
        _call(1, ctypes.byref(held), 0)


def _held() -> _SchedAttr | None:
    held = _SchedAttr()
    if _call(0, ctypes.byref(held), ctypes.sizeof(held), 0) or held.policy != os.SCHED_OTHER:
        return None
    return held


def _call(which: int, *arguments: object) -> int:
    """sched_getattr or sched_setattr of the calling thread; not 0 where it failed."""
    numbers = _NUMBERS.get(os.uname().machine)
    if sys.platform != "linux" or numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(numbers[which], 0, *arguments))
