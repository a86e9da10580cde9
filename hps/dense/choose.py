"""Where a model's network runs, by the settings: in this process, in a Triton, or there with one here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.certificates import client_context
from hps.config.dense_settings import DenseSettings, TritonSettings, TritonTarget
from hps.cuda.loader import lacking
from hps.dense.base import DenseModel, TensorInfo
from hps.dense.fallback import Fallback
from hps.dense.onnx import OnGpu, OnnxModel
from hps.errors import ConfigError, ModelError, Unavailable

if TYPE_CHECKING:
    from hps.dense.triton.memory import Regions
    from hps.dense.triton.transport import Transport


def open_network(
    name: str,
    path: Path | None,
    fed: Mapping[str, TensorInfo],
    served: Sequence[TensorInfo],
    settings: DenseSettings,
    device: int,
    check: Callable[[DenseModel], object],
) -> DenseModel:
    """The network of model ``name``. ``fed`` and ``served``: what ``model.yaml`` says of its inputs and
    outputs. ``check`` raises ModelError for a network that is another. Raises ModelError."""
    triton = settings.triton
    target = None if triton is None else target_of(name, triton)
    if triton is None or target is None:
        return _here(name, path, fed, settings, device, check)
    there = _there(target, triton, (tuple(fed.values()), served), device, check)
    if not triton.fallback:
        return there
    return Fallback(name, there, _here(name, path, fed, settings, device, check))


def target_of(name: str, triton: TritonSettings) -> TritonTarget | None:
    """The model in Triton that runs the network of model ``name``; None: it runs in this process."""
    return triton.models.get(name) if triton.models else TritonTarget(name=f"{name}.dense")


def transport_to(target: TritonTarget, triton: TritonSettings) -> Transport:
    """How that is asked. Raises ConfigError for certificates that cannot be used."""
    # Imported when it is needed: Triton's clients take a tenth of a second.
    from hps.client.address import Tls
    from hps.dense.triton.grpc import GrpcTransport
    from hps.dense.triton.http import HttpTransport

    tls = None
    if triton.tls is not None:
        files = triton.tls.ca_file, triton.tls.certificate_file, triton.tls.key_file
        client_context("dense.triton.tls", *files)  # gRPC says nothing of files it can't use
        tls = Tls(*files)
    if triton.protocol == "grpc":
        return GrpcTransport(
            triton.url, target.name, target.version, channels=triton.channels, tls=tls
        )
    return HttpTransport(triton.url, target.name, target.version, tls)


def _here(
    name: str,
    path: Path | None,
    fed: Mapping[str, TensorInfo],
    settings: DenseSettings,
    device: int,
    check: Callable[[DenseModel], object],
) -> OnnxModel:
    if path is None:
        raise ModelError(
            f"{name}: dense.onnx is missing, but model.yaml describes a dense part; add the file, or have a "
            "Triton run the network (dense.triton, without fallback)"
        )
    gpu = OnGpu(device, settings.precision, settings.tf32, settings.graphs)
    network = OnnxModel(path, settings.provider, settings.threads, settings.inline_us, gpu)
    check(network)
    network.warm_up(fed)
    return network


def _there(
    target: TritonTarget,
    triton: TritonSettings,
    expected: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
    device: int,
    check: Callable[[DenseModel], object],
) -> DenseModel:
    from hps.dense.triton import TritonModel

    transport = transport_to(target, triton)
    timeout_s = triton.timeout_ms / 1e3
    return TritonModel(
        target.name,
        triton.url,
        transport,
        expected,
        timeout_s=timeout_s,
        retries=triton.retries,
        regions=_regions(triton, device),
        check=check,
    )


def _regions(triton: TritonSettings, device: int) -> Regions | None:
    from hps.dense.triton.memory import SMALLEST, Regions

    if triton.shared_memory == "none":
        return None
    if triton.shared_memory == "system":
        return Regions()
    if (why := lacking()) is not None:
        raise ConfigError(
            f"dense.triton.shared_memory is cuda, but {why}. Set it to system, or to none"
        )
    from hps.dense.triton.device_memory import DeviceRegion

    try:
        DeviceRegion(device, SMALLEST).release()
    except Unavailable as error:
        raise ConfigError(f"dense.triton.shared_memory is cuda, but {error}") from None
    return Regions(partial(DeviceRegion, device), on_device=True)
