"""Candidate nodes: those that serve a model version with the same description as here."""

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
        # A description is compared once and recognized by its digest from then on. Every answer has the
        # digest, since a node may restart with another model.yaml.
        self._same: frozenset[int] = frozenset()
        self._different: dict[int, str] = {}
        self.ready: tuple[LookupNode, ...] = ()
        """Ready nodes, among which the picker chooses."""
        self.others: tuple[LookupNode, ...] = ()
        """Nodes to try, in this order, when none is ready: first those that start or shut down, then
        unreachable ones, since this process may be the slow one."""
        self.compare()
        if self._different and not self._same:
            raise ModelError(next(iter(self._different.values())))
        nodes.watch(self.compare)
        nodes.poll_soon(notify=True)  # for changes since the first comparison

    def close(self) -> None:
        """Unsubscribe from the nodes."""
        self.nodes.unwatch(self.compare)

    def means_the_same(self, digest: int) -> bool:
        """True if ``digest``, from a node's answer, belongs to the description that this process has."""
        return digest in self._same

    def mark_not_served(self, target: LookupNode) -> None:
        """Record that ``target`` does not serve the version, or serves it with another description."""
        target.mark_not_served(*self._of)
        self._sort()
        self.nodes.poll_soon()

    def compare(self) -> None:
        """Update the candidates; nodes with an unknown digest are asked for their description."""
        for target in self.nodes.all:
            served = target.models.get(self._of)
            if served is not None and not self._is_known(served.digest):
                self._compare_description(target)
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

    def _compare_description(self, target: LookupNode) -> None:
        try:
            described = target.describe(*self._of, _DESCRIBE_S)
            check_same_description(target.address, described, self.model)
        except grpc.RpcError:
            self.nodes.poll_soon(notify=True)  # try again soon
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
