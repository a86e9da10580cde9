"""Version vote: each model is served in the version that most lookup nodes serve.

Nodes change versions one after the other. A client changes once most of them have, so that there are always
enough nodes; it keeps the other versions ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

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
        served = dict(map(_of, report["serves"]))
        serving = [target for target in self._nodes.all if target.may_serve]
        votes: dict[str, Counter[int]] = {}
        for target in serving:
            for (model, version), node_version in target.models.items():
                if not node_version.former:
                    votes.setdefault(model, Counter())[version] += 1
        serve: list[tuple[str, int, str]] = []
        others: list[tuple[str, int, str]] = []
        for model in sorted({*votes, *served}) if self._chosen is None else self._chosen:
            stated = (self._chosen or {}).get(model)
            if stated is not None:
                serve.append(_entry(model, stated))
                continue
            wanted = served.get(model)
            if serving:  # while no node answers, the last version is served
                wanted = _most(votes.get(model), wanted)
            if wanted is not None:
                serve.append(_entry(model, wanted))
            others += [_entry(model, n) for n in votes.get(model, ()) if n != wanted]
        return {"serve": serve, "open": others}

    def close(self) -> None:
        pass


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
