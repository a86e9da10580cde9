"""Served versions of a process's models, and the names by which requests choose one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hps.array_inputs import DeviceKeys, Features, jagged_keys
from hps.config.model_schema import ModelSpec
from hps.config.traffic_settings import TrafficRule
from hps.errors import BadRequest, NotFound
from hps.lookup.base import Lookup, keys_by_feature
from hps.lookup.gpu.device_lookup import DeviceLookup
from hps.lookup.request_sample import NO_SAMPLE, RequestSample
from hps.node.traffic_split import TrafficSplit, ValueOf
from hps.predict.pipeline import InferencePipeline
from hps.types import EmbeddingTable, JaggedKeys
from hps.updates.freshness import FRESH, Freshness

CURRENT, LATEST = "", "latest"
"""In place of a version in requests: the model's current version, and its highest served one."""
LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_.\-]{0,63}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model, ready. ``pipeline`` is None for a model without a network."""

    name: str
    version: int
    spec: ModelSpec
    tables: Mapping[str, EmbeddingTable]
    engine: Lookup
    pipeline: InferencePipeline | None = None
    on_devices: tuple[DeviceLookup, ...] = ()
    """Lookups whose vectors stay on a GPU, one per GPU."""
    freshness: Freshness = FRESH
    sample: RequestSample = NO_SAMPLE
    """Sampled requests of the model, to warm up its next version."""

    def keys(
        self,
        features: Features,
        by_table: bool = False,
        device_keys: DeviceKeys | None = None,
    ) -> Mapping[str, JaggedKeys]:
        """Convert a caller's keys; ``device_keys`` those on a device. Raises ``BadRequest`` for keys that are
        not integers."""
        keys = jagged_keys(features, device_keys)
        return keys if by_table else keys_by_feature(keys, self.engine.features)


@dataclass(frozen=True, slots=True)
class VersionNames:
    """Names of one model's served versions: the ``current`` one, which requests without a version get unless
    the ``traffic`` rule says another one, and versions by label."""

    current: int
    labels: Mapping[str, int] = field(default_factory=dict)
    traffic: TrafficRule | None = None
    rolled_back: Mapping[int, str] = field(default_factory=dict)
    """Why the node itself took requests from a version, by number."""

    def as_json(self) -> dict[str, Any]:
        """For other processes; see `from_json`."""
        return {
            "current": self.current,
            "labels": dict(self.labels),
            "traffic": None if self.traffic is None else self.traffic.as_json(),
            "rolled_back": {str(number): text for number, text in self.rolled_back.items()},
        }

    @classmethod
    def from_json(cls, names: Mapping[str, Any]) -> VersionNames:
        rule = names.get("traffic")
        return cls(
            names["current"],
            dict(names["labels"]),
            None if rule is None else TrafficRule.from_json(rule),
            {int(number): text for number, text in names.get("rolled_back", {}).items()},
        )

    def number(self, reference: str) -> int | None:
        """The version with this number or label in text; None if no version has the label."""
        return int(reference) if reference.isdigit() else self.labels.get(reference)

    def weights(self) -> dict[int, float]:
        """Percentages of the requests without a version, by the versions that get some by weight."""
        found: dict[int, float] = {}
        for reference, share in ({} if self.traffic is None else self.traffic.weights).items():
            number = self.number(reference)
            number = self.current if number is None else number
            found[number] = found.get(number, 0.0) + share
        rest = 100 - sum(found.values())
        return found | {self.current: found.get(self.current, 0.0) + max(0.0, rest)}

    def labels_of(self, version: int) -> list[str]:
        """The labels of a version, in alphabetical order."""
        return sorted(label for label, n in self.labels.items() if n == version)


class ServedModels(Mapping[str, ServedModel]):
    """The served versions of all models, as a mapping of each model's name to its current version.

    Immutable: a change makes another object. ``versions`` lists every served version."""

    def __init__(
        self,
        versions: Iterable[ServedModel] = (),
        names: Mapping[str, VersionNames] | None = None,
    ) -> None:
        """``names``: by model; default: the highest version is the current one."""
        self.versions = tuple(versions)
        numbers: dict[str, list[int]] = {}
        for each in self.versions:
            numbers.setdefault(each.name, []).append(each.version)
        self.names = {
            name: (names or {}).get(name) or VersionNames(max(found))
            for name, found in numbers.items()
        }
        self._addresses: dict[str, dict[str, ServedModel]] = {
            name: addresses({each.version: each for each in self.versions if each.name == name}, of)
            for name, of in self.names.items()
        }
        self.splits = {
            name: TrafficSplit(name, of.traffic)
            for name, of in self.names.items()
            if of.traffic is not None and of.traffic.splits
        }
        """By model: chooses the version of requests that name none; without: the current one."""

    def __getitem__(self, name: str) -> ServedModel:
        return self._addresses[name][CURRENT]

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def of(self, name: str) -> list[ServedModel]:
        """The served versions of a model."""
        return [each for each in self.versions if each.name == name]

    def find(self, name: str, version: str | int | None = None) -> ServedModel:
        """The version of a model by its number or a label; None or "": the current one. Raises NotFound."""
        return find_version(self._addresses, name, version)

    def choose(self, name: str, version: str | int | None, value_of: ValueOf) -> ServedModel:
        """As `find`, but without a version by the model's traffic rule, if it has one."""
        if version in (None, CURRENT) and name in self.splits:
            found = self._addresses[name]
            return found.get(self.splits[name].choose(value_of), found[CURRENT])
        return self.find(name, version)


def addresses(versions: Mapping[int, T], names: VersionNames) -> dict[str, T]:
    """``versions`` by what requests may name: "" (the current one), numbers, "latest" and labels."""
    labels = {label: versions[n] for label, n in names.labels.items() if n in versions}
    return {
        CURRENT: versions[names.current],
        LATEST: versions[max(versions)],
        **labels,
        **{str(number): each for number, each in sorted(versions.items())},
    }


def find_version(known: Mapping[str, Mapping[str, T]], name: str, version: str | int | None) -> T:
    """Look up ``version`` of ``name`` in the `addresses` of each name. Raises NotFound."""
    found = known.get(name)
    if found is None:
        raise NotFound(f"Request for unknown model: '{name}' is not found")
    wanted = CURRENT if version is None else str(version)
    if wanted not in found:
        raise NotFound(
            f"Request for unknown model: '{name}' version {wanted[:80]} is not found; "
            f"{described_versions(found)}"
        )
    return found[wanted]


def described_versions(found: Mapping[str, T]) -> str:
    """Text that lists the served versions and labels of one name's `addresses`."""
    numbers = sorted((each for each in found if each.isdigit()), key=int)
    of = {id(found[number]): number for number in numbers}
    labels = [
        f"{each} ({of[id(found[each])]})"
        for each in sorted(found)
        if each not in (CURRENT, LATEST) and not each.isdigit()
    ]
    text = (
        f"version {numbers[0]} is served"
        if len(numbers) == 1
        else f"versions {', '.join(numbers)} are served"
    )
    return text + (f"; labels: {', '.join(labels)}" if labels else "")


def check_label(label: str) -> str:
    """Return ``label`` if it is a valid name. Raises BadRequest."""
    if label == LATEST or not LABEL.fullmatch(label):
        raise BadRequest(
            f"'{label[:80]}' cannot be a label: use a letter, then up to 63 letters, digits, '_', '-' "
            f"or '.', and not '{LATEST}', which is the highest served version"
        )
    return label
