"""Repository watch: serve new versions of a model repository, and free removed ones, while a node serves.

A version counts once its manifest, which is written last, is the same in two checks in a row: a version
that is being copied is not opened. What is served of a model is the settings' policy (`models.versions`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from hps.config import Settings
from hps.errors import HpsError, Unavailable
from hps.models.repository import Repository
from hps.periodic import PeriodicThread

log = logging.getLogger(__name__)
# A version that could not be served is tried again after so many checks.
_AGAIN_AFTER = 12

Stamps = dict[int, Hashable]
"""By version, something that changes when its manifest does."""


class Follower(Protocol):
    """What follows a repository: `ModelControl`, or `IngestVersions`."""

    @property
    def problems(self) -> Mapping[str, str]: ...

    def follow(self, name: str, published: Sequence[int]) -> None: ...

    def set_problem(self, name: str, problem: str) -> None: ...


class RepositoryWatch:
    """Checks a repository every `models.watch_s` seconds, on a thread, until ``resources`` are closed."""

    def __init__(
        self,
        settings: Settings,
        repository: Repository,
        control: Follower,
        resources: ExitStack,
        described: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """``described``: models that are followed whatever `models.serve` names."""
        self._chosen, self._described = settings.models.serve, described
        self._repository, self._control = repository, control
        self._seen: dict[str, Stamps] = {}
        self._followed: dict[str, Stamps] = {}
        self._rounds: dict[str, int] = {}
        self._problem = ""
        if settings.models.watch_s is not None:
            thread = PeriodicThread(self.check, settings.models.watch_s, "hps-repository-watch")
            thread.start()
            resources.callback(thread.close, None)

    def check(self) -> None:
        """Check all models once."""
        try:
            names = self._repository.names()
        except (HpsError, OSError) as error:
            self._report(f"the model repository cannot be checked: {error}")
            return
        self._report("")
        for name in names:
            if self._chosen is None or name in {*self._chosen, *self._described()}:
                self._check(name)

    def _check(self, name: str) -> None:
        try:
            stamps = self._repository.published(name)
            before, self._seen[name] = self._seen.get(name), stamps
            if before is None:
                return
            settled = {v: stamp for v, stamp in stamps.items() if before.get(v) == stamp}
            if not self._is_followed(name, settled):
                self._control.follow(name, sorted(settled))
                self._followed[name] = settled
        except Unavailable:
            return  # the node is being closed, or the repository does not answer
        except (HpsError, OSError) as error:
            self._control.set_problem(name, f"the watched repository: {error}")

    def _is_followed(self, name: str, settled: Stamps) -> bool:
        """Return whether nothing has changed; a version with a problem is tried again now and then."""
        if settled != self._followed.get(name):
            self._rounds[name] = 0
            return False
        self._rounds[name] = self._rounds.get(name, 0) + 1
        has_problem = name in self._control.problems
        return not (has_problem and self._rounds[name] % _AGAIN_AFTER == 0)

    def _report(self, problem: str) -> None:
        """Log a problem of the whole repository once."""
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem
