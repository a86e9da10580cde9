"""Waiting for a condition without a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0

# The guard of a store that must answer however late, so that no pause of the machine degrades an answer.
PATIENT_GUARD = {"deadline_ms": PATIENCE_S * 1e3}


def until(holds: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Return once ``holds()`` is true; fail when it is not within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"timed out after {timeout_s:g} s"
        time.sleep(0.005)
