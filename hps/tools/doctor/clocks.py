"""Other machines' clocks beside this one's.

Versions of rows are times, freshness is counted from them, and certificates and keys end by the clock: a
machine whose clock is wrong does harm that nobody looks for there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hps.tools.doctor.check import DoctorCheck, Verdict

WARN_S, FAIL_S = 1.0, 60.0
_PAUSE_S = 0.7
_MEND = "have both machines' clocks set by NTP (chronyd, systemd-timesyncd): updates' versions are times"


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """How far another clock is ahead, and how much of that may come of the asking; seconds."""

    ahead_s: float
    unsure_s: float


def skew(ask: Callable[[], float], resolution_s: float = 0.0) -> ClockSkew:
    """``ask`` returns the other clock's Unix seconds, cut to ``resolution_s``."""
    before = time.time()
    told = ask()
    after = time.time()
    middle = told + resolution_s / 2 - (before + after) / 2
    return ClockSkew(middle, (after - before + resolution_s) / 2)


def least_skew(ask: Callable[[], float], resolution_s: float = 0.0, looks: int = 4) -> ClockSkew:
    """Of so many looks the one in which the clocks differ least, since a busy server tells a time that has
    passed; the first one that finds them alike is enough."""
    found = skew(ask, resolution_s)
    for _ in range(looks - 1):
        if is_same(found):
            break
        time.sleep(_PAUSE_S)
        found = min(found, skew(ask, resolution_s), key=lambda each: abs(each.ahead_s))
    return found


def is_same(found: ClockSkew) -> bool:
    return abs(found.ahead_s) - found.unsure_s <= WARN_S


def clock(name: str, found: ClockSkew) -> DoctorCheck:
    """Whether it is the same clock, as far as one can tell."""
    off = abs(found.ahead_s) - found.unsure_s
    if is_same(found):
        return DoctorCheck(name, "OK", f"the same as here, to {max(WARN_S, found.unsure_s):.0f} s")
    word = "ahead of" if found.ahead_s > 0 else "behind"
    verdict: Verdict = "WARN" if off < FAIL_S else "FAIL"
    return DoctorCheck(name, verdict, f"{abs(found.ahead_s):.1f} s {word} this machine's", _MEND)
