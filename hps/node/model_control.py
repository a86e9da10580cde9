"""Load, switch, label and unload versions of models while a node serves.

A version is made ready in parallel to the served ones (`hps.node.version_loader`), so that no request sees
a part of it and a failure changes nothing. Then:

1. Attached processes open it.
2. The choice of versions is written to the node's file (`hps.node.version_choice`).
3. Requests are sent to it, in all processes.

Requests in flight finish on the version on which they started. When nothing refers to a version's lookups
any more, in any process, its caches and network are freed. A replaced version stays ready for a rollback
for `models.rollback_s`. Its rows stay in RocksDB, so that going back needs no load, until the next version
replaces it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from hps.errors import BadRequest, HpsError, ModelError, NotFound, Unavailable
from hps.models.repository import ModelVersion, Repository, check_unchanged
from hps.node.node import Node
from hps.node.served_versions import LATEST, check_label
from hps.node.traffic_control import TrafficControl, require_unnamed
from hps.node.version_choice import (
    VersionChoice,
    first_choice,
    follows_published,
    in_policy,
    loaded_choice,
    policy_of,
)
from hps.node.version_loader import NodeParts
from hps.node.version_problems import VersionProblems
from hps.node.version_switcher import Decide, VersionSwitcher
from hps.node.warm_up import beside_requests
from hps.observability import metric_names as m
from hps.threads import rest
from hps.types import Progress

log = logging.getLogger(__name__)


class _NotFollowedError(Exception):
    """Another version was chosen while a published one was loaded."""


class ModelControl:
    """Changes the served versions of one open node.

    Any thread may call it. Loads run one at a time; other changes do not wait for them."""

    def __init__(
        self,
        parts: NodeParts,
        node: Node,
        switcher: VersionSwitcher,
        repository: Repository,
        left_out: Mapping[str, Mapping[int, str]],
    ) -> None:
        """``left_out``: see `VersionProblems`."""
        self._settings = parts.settings
        self._node = node
        self._switcher = switcher
        self.repository = repository
        self.traffic = TrafficControl(node, switcher, self._change, self.rollback)
        self._listed: dict[str, list[int]] = {}
        self._problems = VersionProblems(left_out)

    @property
    def problems(self) -> Mapping[str, str]:
        """Why versions are not served that should be, by model."""
        return self._problems.texts()

    def problem(self, name: str, version: int) -> str:
        """Why a version is not served that should be, or ""."""
        return self._problems.of(name, version)

    @property
    def loading(self) -> Mapping[str, int]:
        """Versions being loaded, by model."""
        return self._switcher.loading

    @property
    def warnings(self) -> Mapping[str, str]:
        """Warnings about loaded versions, by model."""
        loads, problems = self._switcher.reports.warnings, self.problems
        return {
            name: "; ".join(filter(None, (loads.get(name), problems.get(name))))
            for name in {**loads, **problems}
        }

    @property
    def on_change(self) -> list[Callable[[], None]]:
        """Called, on any thread, after the served versions have changed."""
        return self._switcher.on_change

    def available(self) -> dict[str, list[int]]:
        """The versions in the repository, by model."""
        try:
            self._listed = {
                name: self.repository.versions(name) for name in self.repository.names()
            }
        except Unavailable as error:
            log.warning("listing the model repository failed, using the last list: %s", error)
        return self._listed

    def opened_version(self, name: str, version: int) -> ModelVersion:
        """A served version with its files. Raises ``NotFound``."""
        for each in self._switcher.opened():
            if (each.version.name, each.version.version) == (name, version):
                return each.version
        raise NotFound(f"version {version} of model '{name}' is not served here")

    # -- requests --------------------------------------------------------------------------------

    def load(
        self,
        name: str,
        version: int | None = None,
        progress: Progress | None = None,
        *,
        labels: Iterable[str] = (),
        switch: bool = True,
    ) -> int:
        """Serve ``version`` of a model, by default the configured one, else the highest; returns it.

        ``switch``: in place of the current version; else beside it, by its number and ``labels``. Does
        nothing if that version is served already, from the same files. Raises ``NotFound``,
        ``ModelError`` for files that are damaged, not complete or were changed after they were loaded,
        ``ConfigError``, ``TierError``, or ``Unavailable`` when the update streams do not catch up, here or
        in a Redis that other processes feed; nothing has changed then."""
        labelled = [check_label(each) for each in labels]
        with self._loading(), self._count_failures(name):
            found = self._open_version(name, version, is_complete=True)
            rest()
            for each in self._switcher.opened():
                if (each.version.name, each.version.version) == (name, found.version):
                    check_unchanged(each.version, found)
            follows = version is None or self._is_newest(found)

            def loaded(former: VersionChoice | None) -> VersionChoice:
                choice = loaded_choice(
                    self._settings, name, found.version, former, follows=follows, switch=switch
                )
                given = dict.fromkeys(labelled, found.version)
                return replace(choice, labels={**choice.labels, **given})

            self._switcher.apply(name, loaded, "load", found, progress)
            self._problems.clear(name, found.version)
            return found.version

    def _is_newest(self, found: ModelVersion) -> bool:
        with suppress(Unavailable):  # it was opened from the cache of downloads
            return found.version >= max(self.repository.complete(found.name), default=0)
        return True

    def unload(self, name: str, version: str | int | None = None) -> None:
        """Stop serving a model, or one version of it. Rows stay in the stores.

        Raises ``NotFound``, and ``BadRequest`` for the current version while others are served."""

        def unloaded(choice: VersionChoice) -> VersionChoice | None:
            found = self._node.models.find(name, version)
            others = [each for each in self._node.models.of(name) if each is not found]
            if version in (None, "") or not others:
                return None
            if found.version == choice.current:
                raise BadRequest(
                    f"version {found.version} is the current one of model '{name}'; switch to another one "
                    "first, or unload the model without a version"
                )
            if labels := choice.names().labels_of(found.version):
                raise BadRequest(
                    f"version {found.version} of model '{name}' has the label '{labels[0]}'; give it to "
                    "another version, or remove it first"
                )
            require_unnamed(name, choice, str(found.version))
            return choice.without({found.version})

        self._change(name, unloaded, "unload")
        if not self._node.models.of(name):
            self._problems.clear_left_out(name)

    def label(self, name: str, label: str, version: str | int | None) -> None:
        """Give a served version a label, in place of the version that has it; None: remove the label.

        Raises ``BadRequest`` for an invalid label, and ``NotFound``."""
        check_label(label)

        def labelled(choice: VersionChoice) -> VersionChoice:
            number = self._node.models.find(name, version).version
            labels = {each: n for each, n in choice.labels.items() if each != label}
            if version is None:
                if label not in choice.labels:
                    self._node.models.find(name, label)  # raises NotFound
                require_unnamed(name, choice, label)
            else:
                labels[label] = number
            # The version stays served without the label, until it is unloaded.
            kept = set(choice.labels.values()) - {choice.current}
            return replace(choice, labels=labels, pinned=choice.pinned | kept)

        self._change(name, labelled, "label")

    def switch(self, name: str, version: str | int) -> int:
        """Make a served version the current one, by its number or label; returns its number.

        ``latest``: the highest served one, and from then on newer ones of a watched repository. Raises
        ``NotFound``, or ``Unavailable`` as `load`."""
        number, follows = self._node.models.find(name, version).version, version == LATEST

        def switched(choice: VersionChoice) -> VersionChoice:
            return in_policy(self._settings, name, choice.switched(number, follows=follows))

        self._change(name, switched, "switch")
        return number

    def rollback_loads(self, name: str) -> bool:
        """True if `rollback` must load the previous version, which was freed."""
        choice = self._switcher.choices.get(name)
        previous = None if choice is None else choice.previous
        return previous is not None and self._switcher.served(name, previous) is None

    def rollback(
        self,
        name: str,
        progress: Progress | None = None,
        *,
        automatic: str = "",
        replaced: int | None = None,
    ) -> int:
        """Make the previous version the current one again; returns its number.

        It is ready for `models.rollback_s` after the switch, also while a version is loaded, and loaded
        again later. ``automatic``: why the node itself goes back, noted for the version that is replaced.
        ``replaced``: only if this is the current version. Raises ``NotFound`` if there is no previous
        version, ``Unavailable`` if another one has become current meanwhile, and as `load`."""
        self._node.models.find(name)
        present = self._switcher.choices.get(name)
        if present is None or (number := present.previous) is None:
            raise NotFound(f"model '{name}' has no previous version to roll back to")
        current = present.current if replaced is None else replaced

        def rolled_back(choice: VersionChoice) -> VersionChoice:
            if choice.current != current:
                raise Unavailable(
                    f"version {choice.current} of model '{name}' has become the current one meanwhile; "
                    "nothing was rolled back"
                )
            choice = in_policy(self._settings, name, choice.switched(number, follows=False))
            choice = replace(choice, switched_at=0.0)  # it is no new version
            if automatic:
                choice = choice.without_share({current}, automatic, matches=True)
            return choice

        reason = "automatic" if automatic else "rollback"
        with self._count_failures(name):
            if self._switcher.served(name, number) is not None:
                self._change(name, rolled_back, reason)
            else:
                with self._loading():
                    found = self._open_version(name, number)
                    decide = self._of_served(name, rolled_back)
                    self._switcher.apply(name, decide, reason, found, progress)
        self._problems.clear(name, number)
        return number

    # -- watched repository ----------------------------------------------------------------------

    def follow(self, name: str, published: Sequence[int]) -> None:
        """Serve what the policy chooses of ``published``, the complete versions, which ascend.

        Each version that could not be loaded is a problem of the model; the others are served. Versions
        whose folder was removed are unloaded, but never the last one. Raises the repository's errors."""
        with self._loading():
            policy = policy_of(self._settings, name)
            choice, found = self._switcher.choices.get(name), frozenset(policy.select(published))
            problems: dict[int, str] = {}
            if choice is not None and not follows_published(self._settings, name, choice):
                found = choice.by_policy
            served = {each.version for each in self._node.models.of(name)}
            for version in sorted(found - served, reverse=True):
                try:
                    with self._count_failures(name):
                        self._follow_version(name, version, found)
                except _NotFollowedError:
                    continue
                except HpsError as error:
                    problems[version] = str(error)
                else:
                    self._problems.clear(name, version)
            removed = self._drop_removed(name, found)
            self._problems.set_watched(name, problems, "; ".join(removed))

    def _follow_version(self, name: str, version: int, found: frozenset[int]) -> None:
        def followed(choice: VersionChoice | None) -> VersionChoice:
            if choice is None:
                return first_choice(self._settings, name, version)
            if (
                not follows_published(self._settings, name, choice)
                and version not in choice.by_policy
            ):
                raise _NotFollowedError
            choice = replace(choice, by_policy=choice.by_policy | {version})
            if choice.follows and version == max(found) and version > choice.current:
                choice = choice.switched(version, follows=True)
            return choice

        opened = self._open_version(name, version)
        self._switcher.apply(name, followed, "watch", opened)

    def _drop_removed(self, name: str, found: frozenset[int]) -> list[str]:
        """Stop serving versions that the policy does not choose, or that the repository has no more."""
        choice = self._switcher.choices.get(name)
        if choice is None:
            return []
        present = self.repository.versions(name)
        gone = {each.version for each in self._node.models.of(name)} - set(present)
        if {each.version for each in self._node.models.of(name)} <= gone:
            return [f"version {choice.current} was removed from the repository, and is served on"]

        def without_gone(choice: VersionChoice) -> VersionChoice:
            served = {each.version for each in self._node.models.of(name)}
            if served <= gone:
                return choice
            if choice.current in gone:
                choice = choice.switched(max(served - gone), follows=choice.follows)
            chosen = found if follows_published(self._settings, name, choice) else choice.by_policy
            by_policy = frozenset(chosen & served) or choice.by_policy
            if choice.current not in choice.pinned and not choice.follows:
                by_policy |= {choice.current}
            return replace(choice, by_policy=by_policy).without(gone)

        self._change(name, without_gone, "watch")
        if removed := sorted({*choice.labels.values()} & gone):
            return [f"version {removed} with labels was removed from the repository"]
        return []

    def set_problem(self, name: str, problem: str) -> None:
        """Record a problem of a watched model, in place of those of its versions, and log it once."""
        self._problems.set_watched(name, {}, problem)

    # -- checks ----------------------------------------------------------------------------------

    def _open_version(
        self, name: str, version: int | None, *, is_complete: bool = False
    ) -> ModelVersion:
        """The version in the repository; errors do not contain its folder.

        ``is_complete``: see `Repository.require_complete`; a served version is exempt."""
        override = (self._settings.models.serve or {}).get(name)
        try:
            if is_complete:
                served = {each.version for each in self._node.models.of(name)}
                self.repository.require_complete(name, version, override, exempt=served)
            return self.repository.open(name, version, override)
        except NotFound as error:
            root = str(self.repository.location)
            raise NotFound(str(error).replace(root, "the model repository")) from None
        except OSError as error:
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Wait for the turn to load versions."""
        with self._switcher.loads:
            self._switcher.loader.require_open()
            with beside_requests(self._node.models):
                yield

    def _change(
        self, name: str, decide: Callable[[VersionChoice], VersionChoice | None], reason: str
    ) -> None:
        """Serve what ``decide`` says of a served model, without a load. Raises NotFound."""
        self._switcher.apply(name, self._of_served(name, decide), reason)

    def _of_served(
        self, name: str, decide: Callable[[VersionChoice], VersionChoice | None]
    ) -> Decide:
        def decide_of_served(choice: VersionChoice | None) -> VersionChoice | None:
            self._node.models.find(name)
            if choice is None:
                raise NotFound(f"model '{name}' is not served yet")
            return decide(choice)

        return decide_of_served

    @contextmanager
    def _count_failures(self, name: str) -> Iterator[None]:
        """Count a failed load; not of unknown models, of which there could be any number."""
        try:
            yield
        except NotFound:
            raise
        except HpsError:
            self._node.metrics.counter(m.MODEL_LOADS, name, "failed").add()
            raise
