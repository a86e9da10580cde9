"""Opens a model's network as configured: in this process, in Triton, or in Triton with a fallback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.certificates import client_context
from hps.config.dense_settings import DenseSettings, TritonSettings, TritonTarget
from hps.cuda.loader import missing_requirement
from hps.dense.base import DenseModel, NetworkTensor
from hps.dense.fallback import FallbackModel
from hps.dense.onnx import GpuOptions, OnnxModel
from hps.errors import ConfigError, ModelError, Unavailable
from hps.threads import rest

if TYPE_CHECKING:
    from hps.dense.triton.shared_regions import ThreadRegions
    from hps.dense.triton.transport import TritonTransport


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The network of model ``name`` as ``model.yaml`` describes it.

    ``path`` is its file, if local, to be opened within ``verified``; ``fed`` and ``served`` are its inputs
    and outputs. ``check`` raises ModelError for a network that differs; ``verified`` raises it for a file
    that differs from the published one.
    """

    name: str
    path: Path | None
    fed: Mapping[str, NetworkTensor]
    served: Sequence[NetworkTensor]
    check: Callable[[DenseModel], object]
    verified: Callable[[], AbstractContextManager[object]] = nullcontext


def open_network(network: NetworkSpec, settings: DenseSettings, device: int) -> DenseModel:
    """Open the network that the settings choose. Raises ModelError."""
    triton = settings.triton
    target = None if triton is None else triton_target(network.name, triton)
    if triton is None or target is None:
        return _in_process(network, settings, device)
    remote = _in_triton(target, triton, network, device)
    if not triton.fallback:
        return remote
    return FallbackModel(network.name, remote, _in_process(network, settings, device))


def check_local_network(network: NetworkSpec, settings: DenseSettings) -> None:
    """Open and close a local network as a check; on the CPU, so that no GPU is needed. Raises ModelError."""
    triton = settings.triton
    if (
        triton is not None
        and not triton.fallback
        and triton_target(network.name, triton) is not None
    ):
        return
    on_cpu = settings.model_copy(update={"provider": "cpu", "precision": "float32"})
    _in_process(network, on_cpu, 0).close()


def triton_target(name: str, triton: TritonSettings) -> TritonTarget | None:
    """Return the Triton model that runs the network of model ``name``; None if it runs in this process."""
    return triton.models.get(name) if triton.models else TritonTarget(name=f"{name}.dense")


def transport_to(target: TritonTarget, triton: TritonSettings) -> TritonTransport:
    """Make the transport to Triton. Raises ConfigError for certificates that cannot be used."""
    # Imported late: Triton's clients take a tenth of a second.
    from hps.client.address import Tls
    from hps.dense.triton.grpc import GrpcTransport
    from hps.dense.triton.http import HttpTransport

    tls = None
    if triton.tls is not None:
        files = triton.tls.ca_file, triton.tls.certificate_file, triton.tls.key_file
        client_context("dense.triton.tls", *files)  # gRPC reports no error for unusable files
        tls = Tls(*files)
    if triton.protocol == "grpc":
        return GrpcTransport(
            triton.url, target.name, target.version, channels=triton.channels, tls=tls
        )
    return HttpTransport(triton.url, target.name, target.version, tls)


def _in_process(described: NetworkSpec, settings: DenseSettings, device: int) -> OnnxModel:
    if described.path is None:
        raise ModelError(
            f"{described.name}: dense.onnx is missing, but model.yaml describes a dense part; add the file, "
            "or let Triton run the network (dense.triton, without fallback)"
        )
    gpu = GpuOptions(device, settings.precision, settings.tf32, settings.graphs)
    with described.verified():
        network = OnnxModel(
            described.path, settings.provider, settings.threads, settings.inline_us, gpu
        )
    described.check(network)
    rest()
    network.warm_up(described.fed)
    return network


def _in_triton(
    target: TritonTarget,
    triton: TritonSettings,
    described: NetworkSpec,
    device: int,
) -> DenseModel:
    from hps.dense.triton import TritonModel, TritonRunOptions

    transport = transport_to(target, triton)
    return TritonModel(
        target.name,
        triton.url,
        transport,
        (tuple(described.fed.values()), described.served),
        TritonRunOptions(triton.timeout_ms / 1e3, triton.retries, _regions(triton, device)),
        described.check,
    )


def _regions(triton: TritonSettings, device: int) -> ThreadRegions | None:
    from hps.dense.triton.host_memory import remove_stale_regions
    from hps.dense.triton.shared_regions import SMALLEST, ThreadRegions

    if triton.shared_memory == "none":
        return None
    if triton.shared_memory == "system":
        remove_stale_regions()
        return ThreadRegions()
    if (why := missing_requirement()) is not None:
        raise ConfigError(
            f"dense.triton.shared_memory is cuda, but {why}. Set it to system, or to none"
        )
    from hps.dense.triton.device_memory import DeviceRegion

    try:
        DeviceRegion(device, SMALLEST).release()
    except Unavailable as error:
        raise ConfigError(f"dense.triton.shared_memory is cuda, but {error}") from None
    return ThreadRegions(partial(DeviceRegion, device), on_device=True)
