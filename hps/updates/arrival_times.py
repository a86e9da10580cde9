"""Since when rows wait in a stream: how old what is served may be.

Asked of the stream's own end, not of its reader: a reader that is paused, stuck at a store or cut off from
its broker does not know what it lacks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from hps.tiers.positions import Place

LOOK_EVERY_S = 1.0
_MOST_LOOKS = 256


class PendingUpdates(Protocol):
    """What waits in the places of one stream."""

    def look(self) -> None:
        """See what is there now; may wait for seconds. Called by one thread, every `LOOK_EVERY_S` at
        least. Raises what went wrong; what was seen last counts then, and ages."""
        ...

    def ages_s(self) -> Mapping[Place, float | None]:
        """Of each place, how long ago the first of what is not applied came, 0 when everything is; None:
        some of it was there before the first look, or nothing could be seen yet. Any thread may call it,
        and it never waits."""
        ...


class ArrivalTimes:
    """Where a stream's partitions ended at several instants, as told by a monotonic clock. Thread-safe."""

    def __init__(self) -> None:
        self._looks: dict[Place, deque[tuple[float, int]]] = {}
        self._complete_s: dict[Place, float] = {}
        self._lock = threading.Lock()

    def saw(self, ends: Mapping[Place, int], at_s: float) -> None:
        """Each partition ended at the offset ``ends[place]``, at the instant ``at_s`` or after it."""
        with self._lock:
            for place, end in ends.items():
                looks = self._looks.setdefault(place, deque())
                if looks and looks[-1][1] > end:  # the topic was created again
                    looks.clear()
                if looks and looks[-1][1] == end:
                    looks.pop()
                elif len(looks) >= _MOST_LOOKS:  # stuck for long
                    looks = self._looks[place] = _thinned(looks, at_s)
                looks.append((at_s, end))

    def age_s(self, place: Place, applied: int, now_s: float) -> float | None:
        """How long ago the first message came that is not below ``applied``; None as
        `PendingUpdates.ages_s`."""
        with self._lock:
            looks = self._looks.get(place, deque())
            while looks and looks[0][1] <= applied:
                self._complete_s[place] = looks.popleft()[0]
            complete_s = self._complete_s.get(place)
            if complete_s is None:
                return None
            age_s = now_s - complete_s
            return age_s if looks or age_s > 3 * LOOK_EVERY_S else 0.0


def _thinned(looks: deque[tuple[float, int]], now_s: float) -> deque[tuple[float, int]]:
    """The looks without some between which little time went by: ages then seem at most an eighth higher."""
    first, *rest = looks
    kept = deque([first])
    for look, following in pairwise(rest):
        if following[0] - kept[-1][0] >= (now_s - following[0]) / 8:
            kept.append(look)
    kept.append(rest[-1])
    return kept
