"""Processes attached to a node, and the model versions that each may be using.

Several times a second each process reports, over one connection of its own, the versions that it has open,
those that it serves, and those that it could not open. The answer names the versions to serve, and
those to open in addition. A process may be using a version from the answer that names it until a later
report omits it or the connection ends; a connection ends with its process at the latest. The answer also
has the names by which requests choose a version, and the number of the last change."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hps.errors import Unavailable, Unsupported

log = logging.getLogger(__name__)
# The longest time that a process may take to open a version, and then to serve it.
_OPEN_S, _SERVE_S = 120.0, 10.0
# The time in which a killed process is expected to be replaced.
_REPLACED_S = 10.0
# Interval of the checks while waiting for processes.
_CHECK_S = 0.05

Report = Mapping[str, Any]
"""An attached process's report.

``process``: its ID. ``holds``, ``serves``: tokens of its open and its served versions. ``failed``: by token
of a version that it could not open, whether it rejected the version, and the reason. ``revision``: the
last change that it serves. ``leaves``: whether it is shutting down."""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """One load of a model version; loading the version again gives another token."""

    model: str
    version: int
    token: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(slots=True)
class _AttachedProcess:
    process: int = 0
    may_hold: set[str] = field(default_factory=set)
    holds: set[str] = field(default_factory=set)
    serves: set[str] = field(default_factory=set)
    failed: dict[str, tuple[bool, str]] = field(default_factory=dict)
    revision: int = 0
    leaves: bool = False


class AttachedProcesses:
    """The processes attached to one node, and the versions that they must serve.

    ``served``: the versions at the start, as (model, version); ``names``: what processes need to resolve
    versions of requests, by model, as JSON. One thread at a time may `open` a version, and one
    `serve` others; the other methods are thread-safe."""

    def __init__(
        self, served: Iterable[tuple[str, int]], names: Mapping[str, Any] | None = None
    ) -> None:
        self._served = {of: LoadedVersion(*of) for of in served}
        self._names = dict(names or {})
        self._revision = 1
        self.fingerprints: dict[str, str] = {}
        """Fingerprint by `ModelVersion.key`, of the versions that processes may open."""
        self._next: LoadedVersion | None = None
        self._attached: dict[Hashable, _AttachedProcess] = {}
        # Processes killed before they opened the next version, with the time.
        self._deaths: list[tuple[float, _AttachedProcess]] = []
        self._replaced = False
        self._changed = threading.Condition()

    # -- called for a process ------------------------------------------------------------------------

    def report(self, connection: Hashable, report: Report) -> dict[str, Any]:
        """Record a process's report; return the versions that it must serve and open.

        ``connection``: that of the process."""
        with self._changed:
            wanted = [*self._served.values(), *([self._next] if self._next else [])]
            self._replaced |= bool(self._deaths) and connection not in self._attached
            self._attached[connection] = _AttachedProcess(
                report["process"],
                {*report["holds"], *(each.token for each in wanted)},
                set(report["holds"]),
                set(report["serves"]),
                dict(report["failed"]),
                report["revision"],
                report["leaves"],
            )
            self._changed.notify_all()
            return {
                "serve": _as_json(self._served.values()),
                "open": _as_json([self._next] if self._next else []),
                "names": self._names,
                "revision": self._revision,
            }

    def disconnected(self, connection: Hashable) -> None:
        """Record that the ``connection`` has ended, if it is an attached process."""
        with self._changed:
            process = self._attached.pop(connection, None)
            if process is not None and not process.leaves and self._has_not_opened(process):
                self._deaths.append((time.monotonic(), process))
            self._changed.notify_all()

    @property
    def processes(self) -> list[int]:
        """Process IDs of the attached processes, ascending."""
        with self._changed:
            return sorted(each.process for each in self._attached.values())

    # -- called by the node --------------------------------------------------------------------------

    def open(self, model: str, version: int, check: Callable[[], None]) -> None:
        """Make all processes, including new ones, open ``version`` in addition to what they serve.

        Returns when all have opened it. Waits once for the replacement of a process that was killed
        meanwhile; a second death is an error, since the version may be what kills processes. Raises
        Unsupported if a process rejects the version, Unavailable if one fails, and the errors of
        ``check``, which is called repeatedly."""
        until = time.monotonic() + _OPEN_S
        with self._changed:
            self._next = LoadedVersion(model, version)
            self._deaths, self._replaced = [], False
            while True:
                check()
                waiting = [each for each in self._attached.values() if self._has_not_opened(each)]
                self._check_waiting(waiting, time.monotonic() > until)
                if not waiting and not self._may_be_replaced():
                    return
                self._changed.wait(_CHECK_S)

    def withdraw(self) -> None:
        """Make the processes close the version that they opened. Idempotent."""
        with self._changed:
            self._next = None

    def serve(
        self, versions: Collection[tuple[str, int]], names: Mapping[str, Any]
    ) -> list[LoadedVersion]:
        """Make the processes serve exactly ``versions`` by ``names``; return those served until now.

        ``versions`` may have the one that they opened, which stays open otherwise; all others were served
        before."""
        with self._changed:
            known, opened = dict(self._served), self._next
            if opened is not None and (of := (opened.model, opened.version)) in versions:
                known[of], self._next = opened, None
            former, self._served = self._served, {of: known[of] for of in versions}
            self._names = dict(names)
            self._revision += 1
            return [each for each in former.values() if each not in self._served.values()]

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until every process that has opened versions serves them; log those that take too long.

        Raises the errors of ``check``."""
        until = time.monotonic() + _SERVE_S
        with self._changed:
            while True:
                check()
                late = [
                    f for f in self._attached.values() if f.holds and f.revision != self._revision
                ]
                if not late:
                    return
                if time.monotonic() > until:
                    numbers = ", ".join(str(each.process) for each in late)
                    log.warning(
                        "attached processes still serve their previous versions: %s", numbers
                    )
                    return
                self._changed.wait(_CHECK_S)

    def uses(self, loaded: LoadedVersion) -> bool:
        """Return whether any process may be using the version."""
        with self._changed:
            return any(loaded.token in each.may_hold for each in self._attached.values())

    def _has_not_opened(self, process: _AttachedProcess) -> bool:
        return self._next is not None and self._next.token not in process.holds

    def _may_be_replaced(self) -> bool:
        """Return whether a replacement for a process killed recently is still expected."""
        if not self._deaths or self._replaced:
            return False
        return time.monotonic() < self._deaths[0][0] + _REPLACED_S

    def _check_waiting(self, waiting: Iterable[_AttachedProcess], late: bool) -> None:
        """Raise if a process in ``waiting`` failed, two were killed, or the wait is too long (``late``)."""
        next_version = self._next
        assert next_version is not None
        version = f"version {next_version.version} of model '{next_version.model}'"
        if len(self._deaths) > 1:
            killed = " and ".join(str(each.process) for _, each in self._deaths)
            raise Unavailable(
                f"attached processes {killed} ended before they opened {version}, which may be the cause; "
                "the previous version is still served"
            )
        for each in waiting:
            if next_version.token in each.failed:
                is_rejected, reason = each.failed[next_version.token]
                raise (Unsupported if is_rejected else Unavailable)(
                    f"attached process {each.process} failed to open {version}: {reason}"
                )
            if late:
                raise Unavailable(
                    f"attached process {each.process} has not opened {version} within {_OPEN_S:g} s; "
                    "end or resume the process, then load the version again"
                )


def _as_json(versions: Iterable[LoadedVersion]) -> list[tuple[str, int, str]]:
    return [(each.model, each.version, each.token) for each in versions]
