"""Nodes that serve one version of a model with the same description as here."""

from __future__ import annotations

import logging

import grpc

from hps.errors import ModelError
from hps.lookup.base import LookupModel
from hps.lookup.remote.lookup_node import LookupNode
from hps.lookup.remote.model_description import check_same_description
from hps.lookup.remote.node_registry import NodeRegistry

log = logging.getLogger(__name__)

_DESCRIBE_S = 1.0
_ORDER = {"ready": 0, "not ready": 1, "unreachable": 2}


class Candidates:
    """The candidate nodes of one model's version. Thread-safe, until ``close``."""

    def __init__(self, model: LookupModel, nodes: NodeRegistry) -> None:
        """Raises ``ModelError`` if nodes serve other descriptions under the model's name and version, and
        none serves this one."""
        self.model = model
        self.nodes = nodes
        self._of = model.name, model.version
        # A node's description is compared once, and known by its digest from then on: a node may restart
        # with another model.yaml, which only its answers show.
        self._same: frozenset[int] = frozenset()
        self._different: dict[int, str] = {}
        self.ready: tuple[LookupNode, ...] = ()
        """The nodes to choose among."""
        self.others: tuple[LookupNode, ...] = ()
        """Those to be asked when there is none of these, in this order: about to end, or without an answer of
        late, which may be this process's fault."""
        self.compare()
        if self._different and not self._same:
            raise ModelError(next(iter(self._different.values())))
        nodes.watch(self.compare)
        nodes.look(tell=True)  # changes since the first comparison

    def close(self) -> None:
        """Unsubscribe from the nodes."""
        self.nodes.unwatch(self.compare)

    def means_the_same(self, digest: int) -> bool:
        """True if an answer with this digest has the description that is expected here."""
        return digest in self._same

    def mark_not_served(self, target: LookupNode) -> None:
        """Record that ``target`` does not serve the version, or another description of it."""
        target.mark_not_served(*self._of)
        self._sort()
        self.nodes.look()

    def compare(self) -> None:
        """Update the candidates; describes are requested from nodes with a new digest."""
        for target in self.nodes.all:
            served = target.models.get(self._of)
            if served is not None and not self._is_known(served.digest):
                self._ask(target)
        self._sort()

    @property
    def problems(self) -> dict[str, str]:
        """The reasons why nodes are excluded, by address."""
        left_out = [target for target in self.nodes.all if target not in self.ready]
        return {target.address: self._problem(target) for target in left_out}

    def _problem(self, target: LookupNode) -> str:
        if target.standing != "ready":
            return target.problem
        served = target.models.get(self._of)
        if served is None:
            return "it serves " + (
                reported_versions(target, self.model.name) or "nothing of the model"
            )
        return self._different.get(served.digest, "comparing its model.yaml with the local one")

    def _is_known(self, digest: int) -> bool:
        return digest in self._same or digest in self._different

    def _ask(self, target: LookupNode) -> None:
        try:
            described = target.describe(*self._of, _DESCRIBE_S)
            check_same_description(target.address, described, self.model)
        except grpc.RpcError:
            self.nodes.look(tell=True)  # to try again
        except ModelError as error:
            log.warning("lookup node %s excluded: %s", target.address, error)
            self._different = {**self._different, described.digest: str(error)}
        else:
            self._same |= {described.digest}

    def _sort(self) -> None:
        usable = []
        for target in self.nodes.all:
            served = target.models.get(self._of)
            if served is not None and served.digest in self._same:
                usable.append(target)
        self.ready = tuple(target for target in usable if target.standing == "ready")
        others = [target for target in usable if target.standing != "ready"]
        self.others = tuple(sorted(others, key=lambda target: _ORDER[target.standing]))


def reported_versions(target: LookupNode, model: str) -> str:
    """List a model's versions that a node serves, for a message; empty if none."""
    versions = [version for name, version in target.models if name == model]
    return ", ".join(f"version {version}" for version in versions)
