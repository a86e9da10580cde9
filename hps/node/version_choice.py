"""Choice of the served versions of a model, and the file in which a node keeps the choices.

Requests to load, switch, label and unload change the choice; the next start serves it again, also after
``kill -9`` at any moment: the file is replaced by one rename, before the change becomes visible."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hps.config import Settings
from hps.config.schema import VersionPolicy
from hps.config.traffic_settings import TrafficRule
from hps.errors import ConfigError, Unavailable
from hps.models.staging import fsync_path
from hps.node.served_versions import VersionNames

log = logging.getLogger(__name__)
FILE_NAME = "hps-served-versions.json"
_FORMAT = 1


class RecentSwitch(NamedTuple):
    """The version that the current one of a model has replaced, and the seconds since then."""

    previous: int
    ago_s: float


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """Versions of one model to serve.

    ``current`` answers requests without a version, and ``follows``: it is replaced by newer versions of a
    watched repository. ``by_policy`` are versions that the settings' policy chose, ``pinned`` those
    that a request loaded beside the current one. ``previous`` is the version that `rollback` goes back to.
    ``traffic``: which versions answer requests without a version. ``rolled_back``: why the node itself took
    requests from a version, by number, until it gets some again. ``switched_at``: Unix time at which the
    current version replaced the previous one, 0 if it was the first one or by a rollback."""

    current: int
    follows: bool = True
    by_policy: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    labels: Mapping[str, int] = field(default_factory=dict)
    previous: int | None = None
    traffic: TrafficRule | None = None
    rolled_back: Mapping[int, str] = field(default_factory=dict)
    switched_at: float = field(default=0.0, compare=False)

    @property
    def versions(self) -> set[int]:
        """The versions to serve, without a previous one that is kept for a while."""
        named = set() if self.traffic is None else self.traffic.references
        numbers = {int(each) for each in named if each.isdigit()}
        return {self.current, *self.by_policy, *self.pinned, *self.labels.values(), *numbers}

    def names(self) -> VersionNames:
        return VersionNames(self.current, self.labels, self.traffic, self.rolled_back)

    def switched(self, version: int, *, follows: bool) -> VersionChoice:
        """With another current version, which has no share of the traffic rule any more: it gets the rest."""
        if version == self.current:
            return replace(self, follows=follows)
        changed = replace(
            self,
            current=version,
            follows=follows,
            previous=self.current,
            switched_at=time.time(),
        )
        return changed.without_share({version})

    def references_to(self, versions: set[int]) -> set[str]:
        """The numbers and labels that name one of ``versions``."""
        labels = {label for label, number in self.labels.items() if number in versions}
        return {*map(str, versions), *labels}

    def without_share(
        self, versions: set[int], reason: str = "", *, matches: bool = False
    ) -> VersionChoice:
        """Without the shares of ``versions`` in the traffic rule, with ``matches`` also without those.

        ``reason``: why the node took them away. The versions stay served."""
        rule = self.traffic
        if rule is not None:
            rule = rule.without(self.references_to(versions), matches=matches)
        others = {each: text for each, text in self.rolled_back.items() if each not in versions}
        noted = dict.fromkeys(versions, reason) if reason else {}
        pinned = self.pinned | ((versions & self.versions) - {self.current} if reason else set())
        return replace(self, traffic=rule, rolled_back=others | noted, pinned=pinned)

    def with_traffic(self, rule: TrafficRule | None) -> VersionChoice:
        """With another traffic rule; versions of the former one stay served until they are unloaded."""
        pinned = self.pinned | (self.versions - {self.current})
        named = set() if rule is None else rule.references
        again = {self.names().number(each) for each in named}
        left = {n: text for n, text in self.rolled_back.items() if n not in again}
        return replace(self, traffic=rule, rolled_back=left, pinned=pinned)

    def without(self, versions: set[int]) -> VersionChoice:
        """Without these versions, none of which is the current one."""
        rule = self.traffic
        return replace(
            self,
            traffic=None if rule is None else rule.without(self.references_to(versions)),
            rolled_back={n: text for n, text in self.rolled_back.items() if n not in versions},
            by_policy=self.by_policy - versions,
            pinned=self.pinned - versions,
            labels={label: n for label, n in self.labels.items() if n not in versions},
            previous=None if self.previous in versions else self.previous,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "current": self.current,
            "follows": self.follows,
            "by_policy": sorted(self.by_policy),
            "pinned": sorted(self.pinned),
            "labels": dict(self.labels),
            "previous": self.previous,
            "traffic": None if self.traffic is None else self.traffic.as_json(),
            "rolled_back": {str(number): text for number, text in self.rolled_back.items()},
            "switched_at": self.switched_at,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> VersionChoice:
        """Raises KeyError, TypeError or ValueError for something else."""
        return cls(
            int(found["current"]),
            bool(found["follows"]),
            frozenset(map(int, found["by_policy"])),
            frozenset(map(int, found["pinned"])),
            {str(label): int(n) for label, n in found["labels"].items()},
            None if found["previous"] is None else int(found["previous"]),
            None if found.get("traffic") is None else TrafficRule.from_json(found["traffic"]),
            {int(n): str(text) for n, text in found.get("rolled_back", {}).items()},
            float(found.get("switched_at", 0.0)),
        )


def is_switch(former: VersionChoice | None, choice: VersionChoice | None) -> bool:
    """True if another version becomes the current one."""
    return choice is not None and (former is None or former.current != choice.current)


def policy_of(settings: Settings, name: str) -> VersionPolicy:
    """The version policy of a model."""
    override = (settings.models.serve or {}).get(name)
    chosen = None if override is None else override.versions
    return settings.models.versions if chosen is None else chosen


def stated_version(settings: Settings, name: str) -> int | None:
    """The version that the settings state as a model's current one."""
    override = (settings.models.serve or {}).get(name)
    return None if override is None else override.version


def stated_traffic(settings: Settings, name: str) -> TrafficRule | None:
    """The traffic rule of a model in the settings."""
    override = (settings.models.serve or {}).get(name)
    return None if override is None else override.traffic


def chosen_by_settings(settings: Settings, name: str, available: list[int]) -> VersionChoice:
    """The choice of the settings; ``available`` versions, ascending, at least one.

    Raises ConfigError for a traffic rule that names labels, which exist at run time only."""
    rule = stated_traffic(settings, name)
    if rule is not None and (labels := sorted(n for n in rule.references if not n.isdigit())):
        raise ConfigError(
            f"models.serve.{name}.traffic names the label '{labels[0]}', which a version gets at run "
            "time: give the version's number"
        )
    choice = _chosen_versions(settings, name, available)
    return choice if rule is None else replace(choice, traffic=rule)


def first_choice(settings: Settings, name: str, version: int) -> VersionChoice:
    """The choice of a model of which nothing was served. A rule of the settings that names versions needs
    a start with them."""
    rule = stated_traffic(settings, name)
    rule = None if rule is None else rule.without(rule.references)
    return VersionChoice(version, by_policy=frozenset({version}), traffic=rule)


def loaded_choice(
    settings: Settings,
    name: str,
    version: int,
    former: VersionChoice | None,
    *,
    follows: bool,
    switch: bool,
) -> VersionChoice:
    """The choice of a model once a version is loaded, with ``switch`` in place of the current one."""
    if former is None:
        return replace(first_choice(settings, name, version), follows=follows)
    if not switch:
        return replace(former, pinned=former.pinned | {version})
    choice = former.switched(version, follows=follows)
    policy = policy_of(settings, name)
    if policy.latest > 1 and not (policy.all or policy.specific):
        highest = sorted(former.by_policy | {version})[-policy.latest :]
        return replace(choice, by_policy=frozenset(highest))
    return in_policy(settings, name, choice)


def in_policy(settings: Settings, name: str, choice: VersionChoice) -> VersionChoice:
    """With the current version in place of the previous one, where the policy is the highest version."""
    policy = policy_of(settings, name)
    if policy.all or policy.specific or policy.latest > 1:
        return choice
    return replace(choice, by_policy=frozenset({choice.current}))


def follows_published(settings: Settings, name: str, choice: VersionChoice) -> bool:
    """Whether versions that are published are served."""
    policy = policy_of(settings, name)
    return bool(choice.follows or policy.all or policy.specific)


def _chosen_versions(settings: Settings, name: str, available: list[int]) -> VersionChoice:
    stated = stated_version(settings, name)
    override = (settings.models.serve or {}).get(name)
    if stated is not None:
        alone = override is None or override.versions is None
        policy = frozenset() if alone else frozenset(policy_of(settings, name).select(available))
        return VersionChoice(stated, follows=False, by_policy=policy | {stated})
    found = policy_of(settings, name).select(available)
    return VersionChoice(max(found, default=available[-1]), by_policy=frozenset(found))


def chosen_beside(
    settings: Settings, name: str, available: list[int], current: int
) -> VersionChoice:
    """As `chosen_by_settings`, for a model of a `ps.json`, which has version ``current``."""
    chosen = chosen_by_settings(settings, name, available)
    if stated_version(settings, name) is not None:
        return chosen
    policy = policy_of(settings, name)
    several = policy.all or policy.specific or policy.latest > 1
    return VersionChoice(
        current, by_policy=chosen.by_policy | {current} if several else frozenset({current})
    )


class ChoiceFile:
    """The choices of one node, by model, in a file that only this node writes. Not thread-safe.

    A model's choice ends when its settings change: then these apply. None: the model was unloaded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.path = choice_path(settings)
        self._found: dict[str, dict[str, Any]] = {}
        if self.path is not None:
            self._found = _read(self.path)

    def choices(self) -> dict[str, VersionChoice | None]:
        """The recorded choices of models whose settings are as they were."""
        choices: dict[str, VersionChoice | None] = {}
        for name, entry in self._found.items():
            if entry.get("settings") != self._settings_of(name):
                log.warning(
                    "model %s: its settings have changed, so the versions chosen at run time are dropped",
                    name,
                )
                continue
            choice = entry.get("choice")
            choices[name] = None if choice is None else VersionChoice.from_json(choice)
        return choices

    def write(self, name: str, choice: VersionChoice | None) -> None:
        """Record a model's choice. Raises Unavailable if the file cannot be written."""
        if self.path is None:
            return
        entry = {
            "settings": self._settings_of(name),
            "choice": None if choice is None else choice.as_json(),
        }
        found = self._found | {name: entry}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            hidden = self.path.with_name(self.path.name + ".new")
            hidden.write_text(json.dumps({"format": _FORMAT, "models": found}, indent=1))
            fsync_path(hidden)
            hidden.replace(self.path)
            fsync_path(self.path.parent)
        except OSError as error:
            raise Unavailable(
                f"{self.path}: writing the served versions failed: {error.strerror}; nothing was changed; "
                "free the disk, or set models.state to a writable file"
            ) from error
        self._found = found

    def _settings_of(self, name: str) -> dict[str, Any]:
        rule = stated_traffic(self._settings, name)
        return {
            "version": stated_version(self._settings, name),
            "versions": policy_of(self._settings, name).model_dump(mode="json"),
            **({} if rule is None else {"traffic": rule.as_json()}),
        }


def choice_path(settings: Settings) -> Path | None:
    """File of a node's choices: `models.state`, else in its RocksDB's folder; None: kept in memory."""
    rocksdb = settings.tiers.rocksdb
    if settings.models.state is not None:
        return settings.models.state
    if rocksdb.enabled and rocksdb.access == "primary":
        return rocksdb.path / FILE_NAME
    return None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The file's entries; of a file that cannot be read none, with a warning."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except OSError as error:
        log.warning(
            "%s: reading the served versions failed: %s; using the settings", path, error.strerror
        )
        return {}
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']}")
        models: dict[str, dict[str, Any]] = found["models"]
        for entry in models.values():
            if entry["choice"] is not None:
                VersionChoice.from_json(entry["choice"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s: invalid list of served versions (%s); using the settings", path, error)
        return {}
    return models
