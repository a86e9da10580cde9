"""Checks of the lookup nodes of a front end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hps.errors import HpsError
from hps.tools.doctor.check import DoctorCheck, failed
from hps.tools.output import plural

if TYPE_CHECKING:
    from hps.config.schema import Settings
    from hps.lookup.remote import LookupNode


def lookup_nodes(configured: Settings) -> Iterator[DoctorCheck]:
    """Check that each node takes lookups, that all serve the same, and that their networks are here."""
    settings = configured.lookup
    from hps.config.secrets import Secret
    from hps.lookup.remote import NodeRegistry
    from hps.lookup.remote.addresses import NodeResolver
    from hps.node.connected import certificates

    try:
        key = Secret(None, settings.api_key_file, "lookup.api_key_file")
        nodes = NodeRegistry(settings.nodes, certificates(settings), key)
    except HpsError as error:
        yield failed("lookup nodes", error)
        return
    try:
        addresses = NodeResolver(settings.nodes)
        if not addresses.now() and not addresses.problems:
            yield DoctorCheck("lookup nodes", "FAIL", nodes.problem, "correct lookup.nodes")
        for node, problem in addresses.problems.items():
            remedy = "correct lookup.nodes, or start the nodes that the name stands for"
            yield DoctorCheck(f"lookup nodes {node}", "FAIL", problem, remedy)
        for target in nodes.all:
            yield _node(target)
        yield from _alike(nodes.all)
        yield from _described(nodes.all, configured)
    finally:
        nodes.close()


def _node(target: LookupNode) -> DoctorCheck:
    name = f"lookup node {target.address}"
    if target.standing == "ready":
        served = ", ".join(
            f"{model} {version}" for (model, version), at in target.models.items() if not at.former
        )
        return DoctorCheck(name, "OK", f"serves {served}" if served else "ready, without a model")
    if target.standing == "not ready":
        return DoctorCheck(name, "WARN", target.problem, "wait, or see its log and hps status")
    remedy = "start it, or correct lookup.nodes, lookup.tls, lookup.api_key_file"
    return DoctorCheck(name, "FAIL", target.problem, remedy)


def _alike(targets: Sequence[LookupNode]) -> Iterator[DoctorCheck]:
    """Check that the ready nodes serve the same versions, with the same tables."""
    ready = [target for target in targets if target.standing == "ready"]
    served = [
        {
            model: (version, at.digest)
            for (model, version), at in each.models.items()
            if not at.former
        }
        for each in ready
    ]
    differing = sorted(
        model
        for model in {name for each in served for name in each}
        if len({each.get(model) for each in served}) > 1
    )
    if differing:
        found = f"not all nodes serve the same of {', '.join(differing)}"
        remedy = "load the version at the others: POST /v2/repository/models/NAME/load on their admin ports"
        yield DoctorCheck("lookup nodes", "WARN", found, remedy)
    elif len(ready) > 1:
        yield DoctorCheck("lookup nodes", "OK", f"{plural(len(ready), 'node')} serve the same")


def _described(targets: Sequence[LookupNode], settings: Settings) -> Iterator[DoctorCheck]:
    """Check that the repository here has the networks of the versions that nodes serve."""
    from hps.models.remote import repository_of

    repository = repository_of(settings.models)
    serve = settings.models.serve
    served = {of for each in targets for of, at in each.models.items() if not at.former}
    for model, version in sorted(served):
        if serve is not None and model not in serve:
            continue
        name = f"version {version} of {model}"
        remedy = f"put its model.yaml and {version}/dense.onnx into {repository.location}"
        try:
            found = repository.without_rows(model, version, (serve or {}).get(model))
        except HpsError as error:
            yield DoctorCheck(name, "WARN", f"is served by nodes, not here: {error}", remedy)
            continue
        if found.spec.dense is not None and found.dense is None and settings.dense.triton is None:
            text = f"is served by nodes, but its network is not in {repository.location}"
            yield DoctorCheck(name, "FAIL", text, remedy)
