"""Checks of the clock skew between other machines and this one.

Row versions are times, freshness is counted from them, and certificates and keys expire by the clock: a
wrong clock causes faults whose messages do not mention it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hps.tools.doctor.check import DoctorCheck, Verdict

WARN_S, FAIL_S = 1.0, 60.0
_PAUSE_S = 0.7
_REMEDY = "have both machines' clocks set by NTP (chronyd, systemd-timesyncd): updates' versions are times"


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """Seconds by which another clock is ahead, and the uncertainty of that from the round trip."""

    ahead_s: float
    unsure_s: float


def skew(ask: Callable[[], float], resolution_s: float = 0.0) -> ClockSkew:
    """Measure the skew; ``ask`` returns the other clock's Unix seconds, truncated to ``resolution_s``."""
    before = time.time()
    reported = ask()
    after = time.time()
    middle = reported + resolution_s / 2 - (before + after) / 2
    return ClockSkew(middle, (after - before + resolution_s) / 2)


def least_skew(ask: Callable[[], float], resolution_s: float = 0.0, looks: int = 4) -> ClockSkew:
    """Smallest skew of up to ``looks`` measurements; stops at the first one within the tolerance.

    A busy server reports a time that has passed."""
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
    """Compare a skew with its uncertainty."""
    off = abs(found.ahead_s) - found.unsure_s
    if is_same(found):
        return DoctorCheck(name, "OK", f"the same as here, to {max(WARN_S, found.unsure_s):.0f} s")
    word = "ahead of" if found.ahead_s > 0 else "behind"
    verdict: Verdict = "WARN" if off < FAIL_S else "FAIL"
    return DoctorCheck(name, verdict, f"{abs(found.ahead_s):.1f} s {word} this machine's", _REMEDY)
