"""Checks of ONNX Runtime: its package, and networks on the configured device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hps.errors import HpsError
from hps.tools.doctor.check import DoctorCheck

if TYPE_CHECKING:
    from hps.config.schema import Settings

NETWORK = Path(__file__).parents[2] / "cli/demo_model/ctr/1/dense.onnx"


def onnx_runtime() -> DoctorCheck:
    """Check that one of ONNX Runtime's two packages is installed, not both, and that it loads."""
    from hps.dense.onnxruntime_loader import (
        CLEAN_INSTALL,
        import_onnxruntime,
        installed_packages,
        package_fault,
    )

    name, packages = "ONNX Runtime", installed_packages()
    if not packages:
        found = "not installed, so networks cannot run in this process"
        remedy = "pip install 'hps-server[cpu]', or 'hps-server[gpu]' for a GPU"
        return DoctorCheck(name, "WARN", found, remedy)
    try:
        ort = import_onnxruntime()
    except HpsError as error:
        found, _, remedy = str(error).rpartition(": ")
        return DoctorCheck(name, "FAIL", found, remedy)
    if len(packages) > 1:
        fault = package_fault(ort.get_available_providers())
        found = fault.cause if fault else "both packages are installed"
        return DoctorCheck(name, "WARN", found, CLEAN_INSTALL)
    return DoctorCheck(name, "OK", f"{packages[0]} {ort.__version__}")


def networks_on_gpu() -> DoctorCheck:
    """Check that ONNX Runtime runs networks on the GPU that this machine has."""
    from hps.dense.onnx import OnnxModel
    from hps.dense.onnxruntime_loader import import_onnxruntime, package_fault

    try:
        fault = package_fault(import_onnxruntime().get_available_providers())
        OnnxModel(NETWORK, "cuda")
    except HpsError as error:
        why = str(error).partition("; ")[0].removeprefix("dense.provider is cuda, but ")
        found = f"run on the CPU: {why}"
        remedy = fault.remedy if fault else "install what is missing: docs/gpu.md"
        return DoctorCheck("networks", "WARN", found, remedy)
    return DoctorCheck("networks", "OK", "ONNX Runtime runs them on the GPU")


def configured_networks(settings: Settings) -> DoctorCheck:
    """Check that networks run where ``dense.provider`` requires. Raises ConfigError."""
    from hps.dense.onnx import GpuOptions, OnnxModel

    provider, device = settings.dense.provider, settings.tiers.gpu.devices[0]
    OnnxModel(NETWORK, provider, gpu=GpuOptions(device))
    return DoctorCheck("dense.provider", "OK", f"{provider}: ONNX Runtime runs networks on it")
