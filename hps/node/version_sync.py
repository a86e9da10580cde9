"""Version sync: keep a process's models equal to those of its node or its lookup nodes.

When another version is to be served, the process opens it on a thread, in parallel to the served one; when
the node says so, it switches, rows and network together. Requests in flight finish on the version on which
they started. It is freed when nothing refers to its lookups any more, and the node is notified."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hps.errors import TierError, Unavailable, Unsupported
from hps.node.served_models import OpenModels
from hps.node.served_versions import ServedModel, ServedModels, VersionNames
from hps.node.version_retirement import LastRequest
from hps.node.warm_up import beside_requests

log = logging.getLogger(__name__)
SYNC_EVERY_S = 0.1
"""Interval between reports to the node."""
# The node answers immediately, or it is stuck.
_ANSWER_S = 10.0
# Retry interval for a version that could not be opened.
_TRY_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """A version of a model, ready. ``close`` frees its resources."""

    served: ServedModel
    close: Callable[[], None]


class VersionSource(Protocol):
    """Decides which versions are served."""

    def report_versions(self, report: Any, deadline: float) -> Any:
        """Report this process's versions (`hps.tiers.node.AttachedProcesses`); returns what to serve.

        The answer has ``(model, version, token)``: ``serve`` these, and have those of ``open`` ready;
        ``names`` by model (`VersionNames.as_json`); and ``revision``, the number of the last change.
        Raises TierError or Unavailable."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _ServedTokens:
    """What is served of one model: its versions' tokens, and their names."""

    tokens: tuple[str, ...]
    names: VersionNames


class VersionSync:
    """Keeps one process's models in sync. One thread must call `sync` periodically.

    ``open_version`` opens a version of a model, and may raise anything; one thread at a time calls it, or
    frees a version. ``connections`` are used for this alone: when they end, the node knows that the
    process has ended."""

    def __init__(
        self, connections: VersionSource, open_version: Callable[[str, int], OpenedVersion]
    ) -> None:
        self.checks: list[Callable[[ServedModel], None]] = []
        """Called with each opened version; raise an error to reject it."""
        self.use: Callable[[ServedModels], None] = lambda _models: None
        """Called with the versions to serve."""
        self._connections = connections
        self._open_version = open_version
        self._opened: dict[str, OpenedVersion] = {}  # by token, as the dictionaries below
        self._served: dict[str, _ServedTokens] = {}  # by model
        self._revision = 0
        self._retiring: dict[str, tuple[LastRequest, Callable[[], None]]] = {}
        self._failed: dict[str, tuple[Exception, float]] = {}
        self._opening: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def models(self) -> ServedModels:
        """The served versions."""
        return self._models_of(self._served)

    def _models_of(self, served: Mapping[str, _ServedTokens]) -> ServedModels:
        return ServedModels(
            [self._opened[token].served for each in served.values() for token in each.tokens],
            {name: each.names for name, each in served.items()},
        )

    @property
    def _served_tokens(self) -> list[str]:
        return [token for each in self._served.values() for token in each.tokens]

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why versions could not be opened, by token."""
        return {token: str(error) for token, (error, _) in self._failed.items()}

    def start(self) -> None:
        """Sync for the first time; raises TierError without a node, and a version's error if no version of
        a model can be served."""
        answer = self._sync()
        names = {token: name for name, _, token in (*answer["serve"], *answer["open"])}
        for token, (error, _) in self._failed.items():
            if names[token] not in self._served:
                raise error

    def sync(self) -> None:
        """Sync with the node, if it responds."""
        with suppress(TierError, Unavailable):
            self._sync()

    def close(self) -> None:
        """Sign off at the node and free everything. Callers must not make lookups any more."""
        with self._lock:
            self._wait_until_opened()
            with suppress(TierError, Unavailable):
                self._report(leaves=True)
            self._connections.close()
            for each in self._opened.values():
                each.close()
            for _, close in self._retiring.values():
                close()
            self._opened, self._served, self._retiring = {}, {}, {}

    def _sync(self) -> Any:
        with self._lock:
            answer = self._report()
            wanted = {token: (name, n) for name, n, token in (*answer["serve"], *answer["open"])}
            self._failed = {t: each for t, each in self._failed.items() if t in wanted}
            for name, version, token in answer["serve"]:
                if token not in self._opened:
                    self._wait_until_opened()
                if token not in self._opened:
                    self._open(token, name, version)
            self._serve(answer)
            if self._opening is None or not self._opening.is_alive():
                self._free(keep={*wanted, *self._served_tokens})
                self._open_later(answer["open"])
            return answer

    def _open_later(self, versions: Sequence[tuple[str, int, str]]) -> None:
        """Open versions that are not served yet, on a thread: meanwhile, others may be switched to."""
        missing = [each for each in versions if each[2] not in self._opened]
        if missing:
            self._opening = threading.Thread(
                target=self._open_all, args=(missing,), name="hps-open-version", daemon=True
            )
            self._opening.start()

    def _open_all(self, versions: Sequence[tuple[str, int, str]]) -> None:
        for name, version, token in versions:
            self._open(token, name, version)

    def _wait_until_opened(self) -> None:
        if self._opening is not None:
            self._opening.join()

    def _report(self, *, leaves: bool = False) -> Any:
        return self._connections.report_versions(
            {
                "process": os.getpid(),
                "holds": [*self._opened, *self._retiring],
                "serves": self._served_tokens,
                "names": {name: each.names.as_json() for name, each in self._served.items()},
                "revision": self._revision,
                "failed": {
                    token: (isinstance(error, Unsupported), str(error))
                    for token, (error, _) in self._failed.items()
                },
                "leaves": leaves,
            },
            time.monotonic() + _ANSWER_S,
        )

    def _open(self, token: str, name: str, version: int) -> None:
        if token in self._failed and time.monotonic() < self._failed[token][1]:
            return
        try:
            with beside_requests(self.models):
                opened = self._open_version(name, version)
            try:
                for check in self.checks:
                    check(opened.served)
            except BaseException:
                opened.close()
                raise
        except Exception as error:  # any error must reach the node
            before = self._failed.get(token)
            if before is None or str(before[0]) != str(error):
                log.warning("model %s: opening version %d failed: %s", name, version, error)
            self._failed = {**self._failed, token: (error, time.monotonic() + _TRY_AGAIN_S)}
        else:
            self._failed = {t: each for t, each in self._failed.items() if t != token}
            self._opened[token] = opened

    def _serve(self, answer: Mapping[str, Any]) -> None:
        """Serve those versions of the answer that could be opened.

        Of a model whose current version could not be opened, serve the former versions."""
        wanted: dict[str, dict[int, str]] = {}
        for name, version, token in answer["serve"]:
            wanted.setdefault(name, {})[version] = token
        serve: dict[str, _ServedTokens] = {}
        for name, tokens in wanted.items():
            names = VersionNames.from_json(answer["names"][name])
            if tokens[names.current] in self._opened:
                opened = [token for token in tokens.values() if token in self._opened]
                serve[name] = _ServedTokens(tuple(opened), names)
            elif name in self._served:
                serve[name] = self._served[name]
        if serve != self._served:
            self.use(self._models_of(serve))
            for name, each in serve.items():
                current = each.names.current
                if name not in self._served or current != self._served[name].names.current:
                    log.info("model %s: version %d is served", name, current)
            self._served = serve
        if all(token in self._opened for _, _, token in answer["serve"]):
            self._revision = answer["revision"]

    def _free(self, keep: set[str]) -> None:
        """Free versions that are not in ``keep``, once nothing refers to their lookups."""
        for token in self._opened.keys() - keep:
            last_request = LastRequest(self._opened[token].served.engine)
            self._retiring[token] = last_request, self._opened.pop(token).close
        for token, (last_request, close) in [*self._retiring.items()]:
            if last_request.has_finished():
                close()
                del self._retiring[token]


class SyncedModels(OpenModels):
    """Open models that change when those of the node or the lookup nodes do."""

    __slots__ = ("_sync", "_watchers")

    def __init__(self, sync: VersionSync, **options: Any) -> None:
        OpenModels.__init__(self, models=sync.models, **options)
        self._sync = sync
        self._watchers: list[Callable[[], None]] = []
        sync.use = self._use

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` on a separate thread when ``models`` has changed."""
        self._watchers.append(changed)

    def require(self, check: Callable[[ServedModel], None]) -> None:
        """Run ``check`` on versions before they are served here; an error fails their load."""
        self._sync.checks.append(check)

    def _use(self, models: ServedModels) -> None:
        self.models = models
        for changed in self._watchers:
            changed()
