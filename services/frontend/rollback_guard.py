"""Automatic rollback: watch new versions, and take the requests from one that leaves its bounds.

It runs in the node's process, over the counts of all its processes, so that there is one decision for the
node. A version with a share is compared with the current version at the same time; a version that has become
the current one with the requests of the version before, in the time before the switch. The counts of that
time are lost in a restart: then only its failures are judged."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hps.config.traffic_settings import RollbackBounds
from hps.errors import HpsError
from hps.node.served_versions import VersionNames
from hps.node.version_choice import RecentSwitch
from hps.periodic import PeriodicThread
from services.frontend.state import FrontendState
from services.frontend.version_bounds import violation
from services.frontend.version_watch import VersionCounts

log = logging.getLogger(__name__)
_EVERY_S = 1.0
# Counts are kept in so many slots of equal time, each of at most so many seconds.
_SLOTS, _MOST_SLOT_S = 60, 10.0

RollBack = Callable[[str, int, str, str], int | None]
"""Takes the requests from a version of a model, for a reason and with a sentence for the operator."""
SwitchBeforeStart = Callable[[str], RecentSwitch | None]


class _History:
    """Counts of one version of a name over the last time. Not thread-safe."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, VersionCounts]] = deque()

    def add(self, now: float, counts: VersionCounts, slot_s: float) -> None:
        if not self._slots or now - self._slots[-1][0] >= slot_s:
            self._slots.append((now, VersionCounts()))
        self._slots[-1][1].add(counts)

    def forget(self, before: float) -> None:
        while self._slots and self._slots[0][0] < before:
            self._slots.popleft()

    def between(self, begin: float, end: float) -> VersionCounts:
        total = VersionCounts()
        for at, counts in self._slots:
            if begin <= at <= end:
                total.add(counts)
        return total


@dataclass(slots=True)
class _Watched:
    """A version that is watched since an instant, and the version to compare it with.

    ``before``: the counts of that version until then, by name; None: both get requests at the same time."""

    since: float
    weight: float
    compared: int
    before: Mapping[str, VersionCounts] | None = None


@dataclass(slots=True)
class _WatchedModel:
    current: int
    versions: dict[int, _Watched] = field(default_factory=dict)


class RollbackGuard:
    """Rolls back new versions of the models whose traffic rule has bounds."""

    def __init__(
        self,
        state: FrontendState,
        roll_back: RollBack,
        switch_before_start: SwitchBeforeStart = lambda _name: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``switch_before_start``: of a model, by name, as `TrafficControl.switch_before_start`."""
        self._state, self._roll_back, self._now = state, roll_back, now
        self._switch_before_start = switch_before_start
        self._history: dict[tuple[str, int], _History] = {}
        self._models: dict[str, _WatchedModel] = {}
        self._lock = threading.Lock()
        self._thread = PeriodicThread(self.round, _EVERY_S, "hps-rollback-guard", idle_rounds=2)

    def start(self) -> None:
        """Start watching if a model has bounds. Cheap; call it after each change of the models."""
        bounded = dict(self._bounded())
        with self._lock:  # a switch may follow before the first round
            for name, (names, _) in bounded.items():
                self._model(name, names)
        if bounded:
            self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def round(self) -> bool:
        """Take the counts of all processes and judge the watched versions; False: none is watched."""
        now, bounded = self._now(), dict(self._bounded())
        with self._lock:
            self._models = {n: each for n, each in self._models.items() if n in bounded}
        self._collect(now, bounded)
        for name, (names, bounds) in bounded.items():
            model = self._follow(name, names, bounds, now)
            for version, watched in [*model.versions.items()]:
                if now - watched.since > bounds.watch_s:
                    continue
                found = self._violation(name, version, watched, bounds, now)
                current = None if found is None else self._ends(name, version, *found)
                if current is not None:
                    del model.versions[version]
                    # Another switch may follow before the next round.
                    model.current = current
        return bool(bounded)

    def _bounded(self) -> Iterator[tuple[str, tuple[VersionNames, RollbackBounds]]]:
        """The models with bounds, with the names of their versions."""
        for name, names in self._state.names.items():
            if names.traffic is not None and names.traffic.rollback is not None:
                yield name, (names, names.traffic.rollback)

    def _collect(self, now: float, bounded: Mapping[str, Any]) -> None:
        served = {(each.name, each.served.version) for each in self._state.all_entries}
        longest = max((bounds.watch_s for _, bounds in bounded.values()), default=0.0)
        slot_s = min(longest / _SLOTS, _MOST_SLOT_S)
        for found in (self._state.take_watched(), *self._state.ask_workers("watched")):
            for key, numbers in found.items():
                name, _, version = key.rpartition("/")
                history = self._history.setdefault((name, int(version)), _History())
                history.add(now, VersionCounts.from_json(numbers), slot_s)
        for of, history in [*self._history.items()]:
            history.forget(now - longest - slot_s)
            if of not in served:
                del self._history[of]

    def _follow(
        self, name: str, names: VersionNames, bounds: RollbackBounds, now: float
    ) -> _WatchedModel:
        """Begin to watch versions that have got a share or have become current, and end for others."""
        with self._lock:
            model = self._model(name, names)
        versions = {}
        if names.current != model.current:
            if not _goes_back(model, names):
                before = self._before(name, model.current, now - bounds.watch_s, now)
                versions[names.current] = _Watched(now, 100.0, model.current, before)
            model.current = names.current
        elif names.current in model.versions:
            versions[names.current] = model.versions[names.current]
        weights = names.weights()
        assert names.traffic is not None
        matched = {names.number(each.version) for each in names.traffic.matches}
        for version in {*weights, *matched} - {None, names.current}:
            assert version is not None
            weight, known = weights.get(version, 0.0), model.versions.get(version)
            is_known = known is not None and (known.weight, known.compared) == (
                weight,
                names.current,
            )
            versions[version] = (
                known if is_known and known else _Watched(now, weight, names.current)
            )
        model.versions = versions
        return model

    def _model(self, name: str, names: VersionNames) -> _WatchedModel:
        if name not in self._models:
            model = self._models[name] = _WatchedModel(names.current)
            if (switch := self._switch_before_start(name)) is not None:
                since = self._now() - switch.ago_s
                model.versions[names.current] = _Watched(since, 100.0, switch.previous, {})
        return self._models[name]

    def _before(
        self, model: str, version: int, begin: float, end: float
    ) -> dict[str, VersionCounts]:
        """The counts of a version by its names."""
        return {
            name: history.between(begin, end)
            for (name, each), history in self._history.items()
            if each == version and name.removesuffix(".lookup") == model
        }

    def _violation(
        self, model: str, version: int, watched: _Watched, bounds: RollbackBounds, now: float
    ) -> tuple[str, str] | None:
        """The reason if the version leaves its bounds under one of its names."""
        for name in (model, f"{model}.lookup"):
            new = self._counted(name, version, watched.since, now)
            if watched.before is not None:
                compared = watched.before.get(name)
            else:
                compared = self._counted(name, watched.compared, watched.since, now)
            if (found := violation(new, compared, bounds)) is not None:
                return found
        return None

    def _counted(self, name: str, version: int, begin: float, end: float) -> VersionCounts:
        history = self._history.get((name, version))
        return VersionCounts() if history is None else history.between(begin, end)

    def _ends(self, name: str, version: int, reason: str, detail: str) -> int | None:
        """Roll back; returns the current version then, None if nothing has changed."""
        try:
            return self._roll_back(name, version, reason, detail)
        except HpsError as error:
            log.warning(
                "model %s: automatic rollback of version %d failed, retrying: %s; it is needed because %s",
                name,
                version,
                error,
                detail,
            )
            return None


def _goes_back(model: _WatchedModel, names: VersionNames) -> bool:
    """True if the current version is replaced by the one before it, which is no new version."""
    replaced = model.versions.get(model.current)
    was_compared = replaced is not None and replaced.before is not None
    return model.current in names.rolled_back or (
        was_compared and replaced is not None and replaced.compared == names.current
    )
