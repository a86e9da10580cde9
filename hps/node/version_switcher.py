"""Version switcher: make a node serve a choice of versions, in all its processes.

Everything that may fail comes first: the version is loaded, fed and opened by attached processes. Then the
choice is written to the node's file, and requests are sent to it. A failure changes nothing. Loads run one at
a time; other changes, as a rollback to a version that is ready, do not wait for them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from hps.errors import Unavailable
from hps.models.repository import ModelVersion
from hps.node.model_opening import OpenedModel, tables_of
from hps.node.node import Node
from hps.node.phase_times import PhaseTimes
from hps.node.served_versions import ServedModel, ServedModels
from hps.node.version_choice import ChoiceFile, VersionChoice, is_switch
from hps.node.version_loader import LoadedModel, NodeParts, VersionLoader
from hps.node.version_reports import VersionReports
from hps.node.version_retirement import LastRequest, ReplacedVersion, VersionRetirement
from hps.periodic import PeriodicThread
from hps.threads import SWITCH_S
from hps.tiers.node import AttachedProcesses, LoadedVersion
from hps.types import EmbeddingTable, Progress

log = logging.getLogger(__name__)
_EXPIRE_EVERY_S = 0.5

Key = tuple[str, int]
"""A model's name and one of its versions."""
Decide = Callable[[VersionChoice | None], VersionChoice | None]
"""Makes the choice of a model's versions from the present one; None: nothing is served. It is called again
during and after waits, in which others may have changed the choice."""


class VersionSwitcher:
    """Changes the served versions of one open node. Any thread may call it.

    ``loads``: callers that load a version must hold it, from before they open its files. A version that is
    replaced during a load is freed after it."""

    def __init__(
        self,
        parts: NodeParts,
        node: Node,
        attached: AttachedProcesses,
        resources: ExitStack,
        file: ChoiceFile,
        choices: Mapping[str, VersionChoice],
    ) -> None:
        """``resources`` close the networks of versions loaded later; after all threads of the node.

        ``choices``: what is served of each model; ``file`` records changes."""
        self.loads = threading.Lock()
        self._turn = threading.Condition(threading.Lock())  # taken after `loads`; for moments
        self._running: Counter[str] = Counter()  # changes by model
        self.closed = threading.Event()
        self.loader = VersionLoader(parts, node, self.closed)
        self.choices: Mapping[str, VersionChoice] = choices
        """What is served of each model; replaced by changes."""
        self.loading: Mapping[str, int] = {}
        """Versions being loaded, by model."""
        self.reports = VersionReports(node.metrics, lambda: node.models)
        self.on_change: list[Callable[[], None]] = []
        """Called, on any thread, after the served versions have changed."""
        self._rollback_s = parts.settings.models.rollback_s
        self._opened, self._tables = parts.opened, parts.tables
        self._node, self._attached, self._file = node, attached, file
        self._to_close = resources
        self._resources: dict[Key, ExitStack] = {}  # of versions loaded later
        self._entering: list[OpenedModel] = []  # fed already, but not served yet
        self._warm: dict[str, tuple[int, float]] = {}  # kept for a rollback, until when
        self._expiry = PeriodicThread(self._expire, _EXPIRE_EVERY_S, "hps-rollback", idle_rounds=1)
        self.retirement = VersionRetirement(
            parts.stores, self.loader.free, self._needed, self.loads
        )

    def close(self) -> None:
        """Wait for running changes, and reject others; does not wait for requests."""
        self.closed.set()
        with self.loads, self._turn:
            self._turn.wait_for(lambda: not self._running.total())
        self._expiry.close(timeout_s=None)
        self.retirement.close()

    def served(self, name: str, version: int) -> ServedModel | None:
        return next((s for s in self._node.models.of(name) if s.version == version), None)

    def opened(self) -> list[OpenedModel]:
        """The served versions with their files."""
        return [*self._opened]

    def _find(self, name: str, version: int) -> OpenedModel | None:
        """A served version with its files."""
        return next((each for each in self.opened() if _key_of(each) == (name, version)), None)

    def _needed(self, name: str) -> set[int]:
        choice = self.choices.get(name)
        previous = None if choice is None else choice.previous
        served = {each.version for each in self._node.models.of(name)}
        return served if previous is None else served | {previous}

    def apply(
        self,
        name: str,
        decide: Decide,
        reason: str,
        found: ModelVersion | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Serve what ``decide`` says of a model; ``found`` is loaded first, unless it is served.

        If it raises, nothing has changed. Raises the errors of ``decide``, and Unavailable if a version that
        it chooses was freed meanwhile."""
        with self._turn:
            self.loader.require_open()
            self._running[name] += 1
        try:
            self._apply(name, decide, reason, found, progress)
        finally:
            with self._turn:
                self._running[name] -= 1
                self._turn.notify_all()

    def _apply(
        self,
        name: str,
        decide: Decide,
        reason: str,
        found: ModelVersion | None,
        progress: Progress | None,
    ) -> None:
        with self._turn:
            before, former = self._node.models, self.choices.get(name)
            opened = [*self._opened]
        choice, current = decide(former), before.get(name)
        switches = is_switch(former, choice)
        if switches and current is not None:
            self.loader.require_kept_updates(name)
        if found is not None and self.served(name, found.version) is not None:
            found = None
        if found is None and choice == former:
            return
        times, is_load = PhaseTimes(), found is not None
        if found is not None:
            self.loading = {**self.loading, name: found.version}
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        try:
            with ExitStack() as undo:
                loaded = None
                old = None if current is None else self._find(name, current.version)
                if choice is not None:
                    if found is not None:
                        loaded = self._load(found, choice, old, opened, undo, times, progress)
                    if switches:
                        self._warm_up(name, choice.current, reason, loaded)
                        times.end("warm-up")
                    if switches or loaded is not None:
                        self._catch_up(name, decide, choice.current, loaded, undo)
                    if loaded is not None:
                        self._open_attached(loaded, undo)
                with self._turn:
                    self.loader.require_open()
                    former, choice = self._commit(name, decide, loaded)
                times.end("switch")
                undo.pop_all()
        finally:
            if is_load:
                self.loading = {n: v for n, v in self.loading.items() if n != name}
        del before, current  # a version is freed once nothing refers to it
        if choice is None:
            self.reports.unloaded(name)
        elif loaded is not None:
            self.reports.loaded(name, loaded.served.version, loaded.warning, times)
        if choice is not None and is_switch(former, choice):
            self.reports.switched(name, choice.current, reason)
        self.reports.labels_changed(name, former, choice, reason)
        with suppress(Unavailable):  # the change was made, and the node is being closed
            self._attached.settle(self.loader.require_open)
        for changed in self.on_change:
            changed()

    def _warm_up(self, name: str, version: int, reason: str, loaded: LoadedModel | None) -> None:
        """Warm up the version that becomes the current one, except in a rollback to a served one."""
        if loaded is not None and loaded.served.version == version:
            self.loader.warm_up.run(loaded.served)
        elif reason != "rollback" and (served := self.served(name, version)) is not None:
            self.loader.warm_up.run(served)

    def _load(
        self,
        found: ModelVersion,
        choice: VersionChoice,
        old: OpenedModel | None,
        opened: list[OpenedModel],
        undo: ExitStack,
        times: PhaseTimes,
        progress: Progress | None,
    ) -> LoadedModel:
        kept = [
            each
            for each in opened
            if each.version.name != found.name or each.version.version in choice.versions
        ]
        return self.loader.load(found, old, (opened, kept), undo, times, progress)

    def _catch_up(
        self,
        name: str,
        decide: Decide,
        number: int,
        loaded: LoadedModel | None,
        undo: ExitStack,
    ) -> None:
        """Wait until the loaded version, or ``number`` to switch to, has the updates of the current one.

        Raises the errors of ``decide``: others have made a choice that ends the change."""
        if loaded is None:
            model = self._find(name, number)
        else:
            model = loaded.opened
            undo.callback(self._enter, None)
            self._enter(model)

        def current_tables() -> Collection[EmbeddingTable]:
            decide(choice := self.choices.get(name))
            current = None if choice is None else self._find(name, choice.current)
            return () if current is None else current.tables.values()

        if model is not None:
            self.loader.catch_up(model, current_tables)

    def _enter(self, model: OpenedModel | None) -> None:
        """Let the update streams feed a version before it is served; None: no more."""
        with self._turn:
            self._entering = [] if model is None else [model]
            self.loader.feed(self._fed)

    @property
    def _fed(self) -> list[OpenedModel]:
        """The versions that the update streams feed."""
        return [*self._opened, *self._entering]

    def _open_attached(self, loaded: LoadedModel, undo: ExitStack) -> None:
        """Make attached processes open a version."""
        undo.callback(self._attached.withdraw)
        version = loaded.opened.version
        self._attached.fingerprints[version.key] = version.fingerprint
        self._attached.open(version.name, version.version, self.loader.require_open)

    def _commit(
        self, name: str, decide: Decide, loaded: LoadedModel | None
    ) -> tuple[VersionChoice | None, VersionChoice | None]:
        """Serve what ``decide`` says, for which everything is ready; the caller holds the turn.

        Returns the former choice and the new one."""
        former = self.choices.get(name)
        choice = decide(former)
        self._require_ready(name, former, choice, loaded)
        choices = {n: each for n, each in self.choices.items() if n != name}
        if choice is not None:
            choices[name] = choice
        warm = self._warm_after(name, choice)
        models = self._models_after(name, choices, warm, loaded)
        if choice is None or choice != former:
            self._file.write(name, choice)
        # Nothing fails from here on.
        self.choices = choices
        self._warm.pop(name, None)
        if warm is not None:
            self._warm[name] = warm
            self._expiry.start()
        if loaded is not None:
            of = name, loaded.served.version
            self._resources[of] = self._to_close.enter_context(loaded.resources.pop_all())
            self._entering = []
            self._opened.append(loaded.opened)
        self._publish(models)
        return former, choice

    def _require_ready(
        self,
        name: str,
        former: VersionChoice | None,
        choice: VersionChoice | None,
        loaded: LoadedModel | None,
    ) -> None:
        """Raise Unavailable if a newly chosen version is not served any more."""
        if choice is None:
            return
        ready = {each.version for each in self._node.models.of(name)}
        if loaded is not None:
            ready.add(loaded.served.version)
        chosen = choice.versions - (set() if former is None else former.versions)
        if missing := ({choice.current} | chosen) - ready:
            raise Unavailable(
                f"version {min(missing)} of model '{name}' was unloaded meanwhile; nothing was changed; "
                "retry, or load it"
            )

    def _models_after(
        self,
        name: str,
        choices: Mapping[str, VersionChoice],
        warm: tuple[int, float] | None,
        loaded: LoadedModel | None,
    ) -> ServedModels:
        """The served versions once ``choices`` are served and a ``warm`` one is kept for a rollback."""
        keep = {*choices[name].versions} if name in choices else set()
        keep |= {warm[0]} if warm is not None else set()
        served = [
            each
            for each in (*self._node.models.versions, *([loaded.served] if loaded else []))
            if each.name != name or each.version in keep
        ]
        order = {each: i for i, each in enumerate(self._node.models)}
        served.sort(key=lambda each: (order.get(each.name, len(order)), each.version))
        return ServedModels(served, {n: each.names() for n, each in choices.items()})

    def _publish(self, models: ServedModels) -> None:
        """Send requests to ``models``, in all processes, and free versions that are not among them."""
        former, self._node.models = self._node.models, models
        versions = [(each.name, each.version) for each in models.versions]
        names = {n: each.as_json() for n, each in models.names.items()}
        dropped = self._attached.serve(versions, names)
        self.loader.limit_networks(self._fed)
        still = {id(each) for each in models.versions}
        gone = [each for each in former.versions if id(each) not in still]
        self._retire_all(gone, {(each.model, each.version): each for each in dropped})

    def _warm_after(self, name: str, choice: VersionChoice | None) -> tuple[int, float] | None:
        """The version to keep ready for a rollback once ``choice`` is served, and until when."""
        if choice is None or (former := self.choices.get(name)) is None:
            return None
        if former.current == choice.current:
            warm = self._warm.get(name)
            return warm if warm is not None and warm[0] == choice.previous else None
        if choice.previous != former.current:  # it was removed from the repository
            return None
        seconds = self._rollback_s
        return (former.current, time.monotonic() + seconds) if seconds else None

    def _expire(self) -> bool:
        """Free versions that were kept for a rollback long enough."""
        for name, (_, until) in [*self._warm.items()]:
            # During a change of the model, which may go back to it, a later round tries again.
            if time.monotonic() < until or self._running[name]:
                continue
            if not self._turn.acquire(blocking=False):
                continue
            try:
                warm = self._warm.get(name)
                is_due = warm is not None and time.monotonic() >= warm[1]
                if is_due and not self._running[name] and not self.closed.is_set():
                    del self._warm[name]
                    self._commit(name, lambda choice: choice, None)
            finally:
                self._turn.release()
            for changed in self.on_change:
                changed()
        return bool(self._warm)

    def _retire_all(
        self, gone: Iterable[ServedModel], dropped: Mapping[Key, LoadedVersion]
    ) -> None:
        """Free ``gone`` versions once no request uses them, in this process or a remote one."""
        by_key = {_key_of(each): each for each in self._opened}
        retired = [(served, by_key[served.name, served.version]) for served in gone]
        old_ids = {id(old) for _, old in retired}
        self._opened[:] = [each for each in self._opened if id(each) not in old_ids]
        if retired:
            self.loader.feed(self._fed)  # before the stores drop the tables
        for served, old in retired:
            of = served.name, served.version
            is_used = partial(self._attached.uses, dropped[of])
            last, resources = (
                LastRequest(served.engine, *served.on_devices),
                self._resources.pop(of, None),
            )
            self.retirement.retire(ReplacedVersion(old, resources, last, is_used))
        self._tables[:] = tables_of(self._opened)


def _key_of(model: OpenedModel) -> Key:
    return model.version.name, model.version.version
