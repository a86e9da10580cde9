"""Short scheduler slices, for processes whose requests take less than a millisecond.

A thread that wakes while all cores are busy waits for the end of another's slice: up to 4 ms, several times
what a request takes. Since Linux 6.12 a thread may request shorter slices (``sched_setattr``,
``sched_runtime`` of the default policy), and then runs before those with longer ones. Its share of the
cores stays the same, so other threads lose nothing."""

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
    """The calling thread's slice; 0 if the kernel does not report it, or the policy is another one."""
    held = _held()
    return 0 if held is None else int(held.runtime_ns)


def request_short_slices() -> None:
    """Request short slices for the calling thread and all that it starts later, if supported."""
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
    """Call sched_getattr or sched_setattr for the calling thread; not 0 if it failed."""
    numbers = _NUMBERS.get(os.uname().machine)
    if sys.platform != "linux" or numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(numbers[which], 0, *arguments))
