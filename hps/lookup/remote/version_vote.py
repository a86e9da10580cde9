"""Version vote: each model is served in the version that most lookup nodes serve.

Nodes change versions one after the other. A client changes once most of them have, so that there are always
enough nodes; it keeps the other versions ready. Versions that nodes serve beside the current one are served
here, too, by their numbers and labels. Traffic rules are those of most nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hps.lookup.remote.lookup_node import LookupNode
from hps.lookup.remote.node_registry import NodeRegistry


class VersionVote:
    """A `VersionSource` (`hps.node.version_sync`) that follows most lookup nodes.

    For one thread at a time."""

    def __init__(self, nodes: NodeRegistry, chosen: Mapping[str, int | None] | None) -> None:
        """``chosen``: the models to serve, with the version of each if one is configured; None: all."""
        self._nodes = nodes
        self._chosen = chosen

    def report_versions(self, report: Mapping[str, Any], _deadline: float) -> dict[str, Any]:
        """Return, as ``(model, version, token)``, the versions to ``serve`` and those to keep ``open``."""
        former: Mapping[str, Any] = report["names"]
        served = {model: each["current"] for model, each in former.items()}
        serving = [target for target in self._nodes.all if target.may_serve]
        current, beside, labels = _reported(serving)
        rules = _reported_rules(serving)
        serve: list[tuple[str, int, str]] = []
        others: list[tuple[str, int, str]] = []
        names: dict[str, dict[str, Any]] = {}
        for model in sorted({*current, *served}) if self._chosen is None else self._chosen:
            votes = current.get(model, Counter())
            stated = wanted = (self._chosen or {}).get(model)
            if stated is None:
                wanted = served.get(model)
                if serving:  # while no node answers, the last versions are served
                    wanted = _most(votes, wanted)
            if wanted is None:
                continue
            along = set() if stated is not None else beside.get(model, set()) - {wanted}
            if not serving and model in former:
                labels[model] = {
                    label: Counter([n]) for label, n in former[model]["labels"].items()
                }
                along = {n for each, n in map(_of, report["serves"]) if each == model} - {wanted}
            serve += [_entry(model, n) for n in (wanted, *sorted(along))]
            if stated is None:
                others += [_entry(model, n) for n in votes if n not in {wanted, *along}]
            names[model] = {
                "current": wanted,
                "labels": {
                    label: voted
                    for label, counted in labels.get(model, {}).items()
                    if (voted := max(counted, key=lambda n: (counted[n], n))) in {wanted, *along}
                },
                "traffic": None if stated is not None else rules.get(model),
            }
            if not serving and model in former:
                names[model]["traffic"] = former[model].get("traffic")
        return {"serve": serve, "open": others, "names": names, "revision": 0}

    def close(self) -> None:
        pass


def _reported(
    serving: Iterable[LookupNode],
) -> tuple[dict[str, Counter[int]], dict[str, set[int]], dict[str, dict[str, Counter[int]]]]:
    """By model: votes for its current version, versions served beside it, and votes by label."""
    current: dict[str, Counter[int]] = {}
    beside: dict[str, set[int]] = {}
    labels: dict[str, dict[str, Counter[int]]] = {}
    for target in serving:
        for (model, version), node_version in target.models.items():
            if node_version.former:
                continue
            if node_version.beside:
                beside.setdefault(model, set()).add(version)
            else:
                current.setdefault(model, Counter())[version] += 1
            for label in node_version.labels:
                labels.setdefault(model, {}).setdefault(label, Counter())[version] += 1
    return current, beside, labels


def _reported_rules(serving: Iterable[LookupNode]) -> dict[str, Any]:
    """By model: the traffic rule of most nodes, as JSON; models without are left out."""
    votes: dict[str, Counter[str]] = {}
    for target in serving:
        for (model, _), node_version in target.models.items():
            if not (node_version.former or node_version.beside):
                votes.setdefault(model, Counter())[node_version.traffic] += 1
    voted = {model: max(each, key=lambda rule: (each[rule], rule)) for model, each in votes.items()}
    return {model: json.loads(rule) for model, rule in voted.items() if rule}


def _most(votes: Counter[int] | None, served: int | None) -> int | None:
    """Return the version with the most votes; of equals the served one, else the newest."""
    if not votes:
        return None
    most = max(votes.values())
    tied = [version for version, count in votes.items() if count == most]
    return served if served in tied else max(tied)


def _entry(model: str, version: int) -> tuple[str, int, str]:
    return model, version, f"{model}/{version}"


def _of(token: str) -> tuple[str, int]:
    model, _, version = token.rpartition("/")
    return model, int(version)
