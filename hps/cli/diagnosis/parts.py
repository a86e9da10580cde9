"""The parts that answer for a server: lookup nodes and Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hps.cli.diagnosis.check import Check, Verdict, attempt, failed
from hps.cli.output import plural
from hps.errors import HpsError, NotFound

if TYPE_CHECKING:
    from hps.client import Client
    from hps.config.dense_settings import TritonSettings
    from hps.config.lookup_settings import LookupSettings
    from hps.lookup.remote import Target

_PATIENCE_S = 2.0


def lookup_nodes(settings: LookupSettings) -> Iterator[Check]:
    """Whether each of a front end's nodes takes lookups, and whether all serve the same."""
    from hps.config.secrets import Secret
    from hps.connected import certificates
    from hps.lookup.remote import Nodes
    from hps.lookup.remote.addresses import Addresses

    try:
        key = Secret(None, settings.api_key_file, "lookup.api_key_file")
        nodes = Nodes(settings.nodes, certificates(settings), key)
    except HpsError as error:
        yield failed("lookup nodes", error)
        return
    try:
        addresses = Addresses(settings.nodes)
        if not addresses.now() and not addresses.problems:
            yield Check("lookup nodes", "FAIL", nodes.problem, "correct lookup.nodes")
        for node, problem in addresses.problems.items():
            mend = "correct lookup.nodes, or start the nodes that the name stands for"
            yield Check(f"lookup nodes {node}", "FAIL", problem, mend)
        for target in nodes.all:
            yield _node(target)
        yield from _alike(nodes.all)
    finally:
        nodes.close()


def _node(target: Target) -> Check:
    name = f"lookup node {target.address}"
    if target.standing == "ready":
        served = ", ".join(
            f"{model} {version}" for (model, version), at in target.models.items() if not at.former
        )
        return Check(name, "OK", f"serves {served}" if served else "ready, without a model")
    if target.standing == "not ready":
        return Check(name, "WARN", target.problem, "wait, or see its log and hps status --admin")
    mend = "start it, or correct lookup.nodes, lookup.tls, lookup.api_key_file"
    return Check(name, "FAIL", target.problem, mend)


def _alike(targets: Sequence[Target]) -> Iterator[Check]:
    """Whether those that are ready serve the same versions, with the same tables."""
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
        mend = "load the version at the others: POST /v2/repository/models/NAME/load on their admin ports"
        yield Check("lookup nodes", "WARN", found, mend)
    elif len(ready) > 1:
        yield Check("lookup nodes", "OK", f"{plural(len(ready), 'node')} serve the same")


def triton(settings: TritonSettings, models: Sequence[str]) -> Iterator[Check]:
    """Whether Triton is there, which version it is, and whether it has the networks of ``models``."""
    from hps.client import Client, Tls

    tls = None
    if settings.tls is not None:
        at = settings.tls
        tls = Tls(at.ca_file, at.certificate_file, at.key_file)
    scheme = settings.protocol + ("s" if tls is not None else "")
    weight: Verdict = "WARN" if settings.fallback else "FAIL"
    mend = f"start it, or correct dense.triton.url ({settings.url}, {settings.protocol})"
    if settings.fallback:
        mend += "; until then networks run in the server (dense.triton.fallback)"
    try:
        client = Client(f"{scheme}://{settings.url}", timeout_s=_PATIENCE_S, retries=0, tls=tls)
    except HpsError as error:
        yield failed("Triton", error)
        return
    with client:
        try:
            told = client.about()
        except HpsError as error:
            yield Check("Triton", weight, str(error).partition("; ")[0], mend)
            return
        found = f"{told.get('name', '')} {told.get('version', '')} at {settings.url}"
        yield Check("Triton", "OK", found)
        for model in models:
            yield attempt(f"Triton: {model}", partial(_network, client, settings, model))


def _network(client: Client, settings: TritonSettings, model: str) -> Check:
    name = f"Triton: {model}"
    target = settings.models.get(model)
    if settings.models and target is None:
        return Check(name, "OK", "runs in the server itself")
    known_as = f"{model}.dense" if target is None else target.name
    try:
        told = client.metadata(known_as)
    except NotFound:
        mend = f"write it with hps triton export {model}, have Triton load it, or set dense.triton.models"
        return Check(name, "WARN" if settings.fallback else "FAIL", f"it has no {known_as!r}", mend)
    versions = ", ".join(told.get("versions", ())) or "no versions told"
    return Check(name, "OK", f"{known_as}, version {versions}")
