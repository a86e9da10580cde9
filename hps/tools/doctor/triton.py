"""Checks of the Triton server that runs networks, against ``model.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hps.errors import DeadlineExceeded, HpsError, NotFound
from hps.tools.doctor.check import DoctorCheck, Verdict, failed

if TYPE_CHECKING:
    from hps.config.dense_settings import TritonSettings
    from hps.dense.base import NetworkTensor
    from hps.dense.triton.transport import TritonModelInfo
    from hps.models.repository import ModelVersion

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _CheckedNetwork:
    """A network to check."""

    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[NetworkTensor, ...]


def triton(settings: TritonSettings, models: Sequence[ModelVersion]) -> Iterator[DoctorCheck]:
    """``models``: those that have a network."""
    from hps.client import Client, Tls

    tls = None
    if settings.tls is not None:
        at = settings.tls
        tls = Tls(at.ca_file, at.certificate_file, at.key_file)
    scheme = settings.protocol + ("s" if tls is not None else "")
    # With a fallback, networks run in this server while Triton is unavailable.
    weight: Verdict = "WARN" if settings.fallback else "FAIL"
    remedy = f"start it, or correct dense.triton.url ({settings.url}, {settings.protocol})"
    if settings.fallback:
        remedy += "; until then networks run in the server (dense.triton.fallback)"
    try:
        client = Client(f"{scheme}://{settings.url}", timeout_s=_TIMEOUT_S, retries=0, tls=tls)
    except HpsError as error:
        yield failed("Triton", error)
        return
    with client:
        try:
            about = client.about()
            ready = client.ready()
        except HpsError as error:
            yield DoctorCheck("Triton", weight, str(error), remedy)
            return
    found = f"{about.get('name', '')} {about.get('version', '')} at {settings.url}"
    if ready:
        yield DoctorCheck("Triton", "OK", found)
    else:
        yield DoctorCheck(
            "Triton", weight, f"{found} is not ready", "wait while it loads; see its log"
        )
    for version in models:
        yield _network(settings, version, weight)


def _network(settings: TritonSettings, version: ModelVersion, weight: Verdict) -> DoctorCheck:
    """Check that Triton has the network, with the tensors of ``model.yaml``."""
    from hps.dense.network_factory import transport_to, triton_target
    from hps.dense.triton.transport import TritonUnavailable

    model = version.name
    name = f"Triton: {model}"
    target = triton_target(model, settings)
    if target is None:
        return DoctorCheck(name, "OK", "runs in the server itself")
    known_as = f"{target.name} version {target.version}" if target.version else target.name
    try:
        transport = transport_to(target, settings)
    except HpsError as error:
        return failed(name, error)
    try:
        described = transport.describe(_TIMEOUT_S)
        _compare(version, described)
    except NotFound as error:
        remedy = f"write it with hps triton export {model}, have Triton load it, or set dense.triton.models"
        return DoctorCheck(name, weight, f"it does not serve {known_as!r}: {error}", remedy)
    except (DeadlineExceeded, TritonUnavailable) as error:
        return DoctorCheck(name, weight, f"it does not say what it has: {error}", "see its log")
    except HpsError as error:
        # Always a failure: the server refuses to start, with a fallback too.
        remedy = f"have Triton serve this version's network: hps triton export {model}"
        return DoctorCheck(
            name, "FAIL", str(error).replace("the network", "Triton's model"), remedy
        )
    finally:
        transport.close()
    found = f"{known_as} is what model.yaml describes"
    most = version.spec.max_batch_size
    if 0 < described.max_batch < most:
        found += f"; batches beyond {described.max_batch} go in parts (model.yaml: {most})"
    return DoctorCheck(name, "OK", found)


def _compare(version: ModelVersion, described: TritonModelInfo) -> None:
    """Compare tensors and batch. Raises ModelError."""
    from hps.node.model_opening import features_of
    from hps.predict.network_inputs import check_wiring

    dense = version.spec.dense
    assert dense is not None
    features = features_of(version.spec, version.embedding_tables())
    network: Any = _CheckedNetwork(described.inputs, described.outputs)
    check_wiring(version.name, dense, features, network)
