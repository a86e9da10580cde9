"""Checks of this machine: Python, packages, native core, GPU, limits."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hps.errors import HpsError
from hps.tools.doctor.check import DoctorCheck
from hps.tools.doctor.networks import networks_on_gpu, onnx_runtime
from hps.tools.output import size

OPEN_FILES = 4096
SHM_BYTES = 256 << 20


def machine(*, alone: bool = True) -> Iterator[DoctorCheck]:
    """Check this machine.

    ``alone``: without a configuration, so it is unknown whether memory is shared."""
    yield python()
    yield version()
    yield packages()
    yield onnx_runtime()
    yield native_core()
    yield gpu()
    if has_gpu():
        yield networks_on_gpu()
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if alone:
        yield shared_memory(Path("/dev/shm"))


def python() -> DoctorCheck:
    return DoctorCheck("Python", "OK", ".".join(map(str, sys.version_info[:3])))


def version() -> DoctorCheck:
    from hps import __version__

    return DoctorCheck("hps", "OK", __version__)


def packages() -> DoctorCheck:
    """Check the packages that hps's own metadata requires; extras are optional."""
    try:
        required = metadata.requires("hps-server") or []
    except metadata.PackageNotFoundError:
        return DoctorCheck(
            "packages", "FAIL", "hps-server is not installed", "pip install -e '.[cpu]'"
        )
    needed = [_distribution(text) for text in required if "extra ==" not in text]
    missing = []
    for name in needed:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        found = f"not installed: {', '.join(missing)}"
        return DoctorCheck("packages", "FAIL", found, f"pip install {' '.join(missing)}")
    return DoctorCheck("packages", "OK", f"all {len(needed)} are there")


def _distribution(requirement: str) -> str:
    """``tritonclient[http]>=2`` -> ``tritonclient``."""
    for i, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:i]
    return requirement


def native_core() -> DoctorCheck:
    try:
        from hps.native import COMPILED
    except HpsError as error:  # no compiled core
        found, _, remedy = str(error).partition(": ")
        return DoctorCheck("native core", "FAIL", found, remedy)
    if COMPILED:
        return DoctorCheck("native core", "OK", "compiled")
    remedy = "install a C++ compiler and python3-dev, then reinstall hps (and unset HPS_NATIVE=off)"
    return DoctorCheck("native core", "WARN", "slower NumPy twins are in use", remedy)


def has_gpu() -> bool:
    """Look for any GPU device, usable or not."""
    from hps.cuda.loader import has_gpu as find

    return find()


def gpu() -> DoctorCheck:
    """Check for a GPU, and that its packages work."""
    if not has_gpu():
        return DoctorCheck("GPU", "OK", "none; hps serves from the CPU")
    from hps.cuda.loader import missing_requirement

    if why := missing_requirement():
        return DoctorCheck(
            "GPU", "WARN", f"there is one, but {why}", "pip install 'hps-server[gpu]'"
        )
    return DoctorCheck("GPU", "OK", "there is one, and CuPy can use it")


def open_files(limit: int) -> DoctorCheck:
    """Check the limit of open files: RocksDB keeps its table files open; each connection is one more."""
    if limit == resource.RLIM_INFINITY or limit >= OPEN_FILES:
        return DoctorCheck("open files", "OK", "unlimited" if limit < 0 else f"up to {limit}")
    remedy = "raise the limit: ulimit -n 65536, or LimitNOFILE= of the service"
    return DoctorCheck("open files", "WARN", f"up to {limit}, {OPEN_FILES} wanted", remedy)


def shared_memory(path: Path) -> DoctorCheck:
    if not path.is_dir():
        return DoctorCheck("shared memory", "WARN", f"there is no {path}", "mount a tmpfs there")
    total = shutil.disk_usage(path).total
    if total >= SHM_BYTES:
        return DoctorCheck("shared memory", "OK", f"{path} has {size(total)}")
    remedy = "in a container: --shm-size 2g (Docker), an emptyDir of medium Memory (Kubernetes)"
    return DoctorCheck("shared memory", "WARN", f"{path} has {size(total)} only", remedy)
