"""Loader of ONNX Runtime: its import, its two packages, and why it does not use a GPU.

The packages onnxruntime, for the CPU, and onnxruntime-gpu fill the same folder, so an environment must have
one of them only; see docs/decisions/0079-choose-onnx-runtime-by-extra.md."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hps.cuda.loader import has_gpu
from hps.environment import disable_onnxruntime_telemetry
from hps.errors import ConfigError

log = logging.getLogger(__name__)

Provider = Literal["auto", "cpu", "cuda", "tensorrt"]
PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}

CPU_PACKAGE, GPU_PACKAGE = "onnxruntime", "onnxruntime-gpu"
CLEAN_INSTALL = (
    "run pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'hps-server[gpu]'"
)
_REQUIRED_LIBRARIES = {
    "cuda": "CUDA and cuDNN",
    "tensorrt": "libnvinfer and libnvonnxparser of TensorRT 10, and CUDA and cuDNN",
}
_FATAL, _WARNING = 4, 2


class PackageFault(NamedTuple):
    """A fault of the installed packages, and its remedy."""

    cause: str
    remedy: str


def import_onnxruntime() -> Any:
    """Import ONNX Runtime, without its telemetry.

    Raises ConfigError if neither of its packages is installed, or a removed one took the other's files."""
    disable_onnxruntime_telemetry()
    try:
        import onnxruntime

        onnxruntime.InferenceSession  # noqa: B018 missing in a folder that lost its files
    except (ImportError, AttributeError) as error:
        packages = installed_packages()
        if not packages:
            raise ConfigError(
                "networks need ONNX Runtime, which is not installed: pip install 'hps-server[cpu]', or "
                "'hps-server[gpu]' for a GPU"
            ) from error
        raise ConfigError(
            f"ONNX Runtime does not load ({error}); onnxruntime and onnxruntime-gpu share a folder, so "
            f"removing one breaks the other: pip install --force-reinstall --no-deps {packages[-1]}"
        ) from error
    return onnxruntime


@cache
def installed_packages() -> tuple[str, ...]:
    """Return which of ONNX Runtime's two packages are installed.

    Cached: it reads the folders of all packages, some milliseconds each time a network opens."""
    found = []
    for name in (CPU_PACKAGE, GPU_PACKAGE):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return tuple(found)


def package_fault(available: Sequence[str]) -> PackageFault | None:
    """Return what is wrong with the packages for a GPU, None if nothing; ``available`` are the providers."""
    has_cuda, packages = PROVIDERS["cuda"] in available, installed_packages()
    if len(packages) == 2:
        present = GPU_PACKAGE if has_cuda else CPU_PACKAGE
        cause = f"onnxruntime and onnxruntime-gpu are both installed; their folder has the files of {present}"
        return PackageFault(cause, CLEAN_INSTALL)
    if has_cuda:
        return None
    if packages == (CPU_PACKAGE,):
        return PackageFault(
            "the package onnxruntime is installed, which has no CUDA", CLEAN_INSTALL
        )
    return PackageFault(f"this ONNX Runtime has only {', '.join(available)}", CLEAN_INSTALL)


def choose_provider(ort: Any, provider: Provider) -> str | None:
    """Choose the provider to use besides the CPU's; None: the CPU's alone.

    Reports a GPU that stays unused, or will after an update. Raises ConfigError for a missing provider."""
    if provider == "cpu":
        return None
    available = ort.get_available_providers()
    fault = package_fault(available)
    wanted = PROVIDERS["cuda" if provider == "auto" else provider]
    if wanted in available:
        if fault is not None:
            report_once(logging.WARNING, f"{fault.cause}; {fault.remedy}")
        return wanted
    if provider == "auto":
        if fault is not None:
            report_unused_gpu(f"{fault.cause}; {fault.remedy}; or set dense.provider: cpu")
        return None
    cause, remedy = fault or (f"this ONNX Runtime has only {', '.join(available)}", CLEAN_INSTALL)
    raise ConfigError(
        f"dense.provider is {provider}, but {cause}; {remedy} (docs/gpu.md); or set dense.provider: auto"
    )


def load_failure(ort: Any, provider: Provider, otherwise: str) -> str:
    """Return which library ``provider``, a network's or ``auto``, misses; ``otherwise`` if none."""
    name = "tensorrt" if provider == "tensorrt" else "cuda"
    path = Path(ort.__file__).parent / f"capi/libonnxruntime_providers_{name}.so"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"its libraries do not load ({_REQUIRED_LIBRARIES[name]}: {error}); install them (docs/gpu.md)"
    return otherwise


def preload_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN from pip's folders, if present; ONNX Runtime searches only those of the system.

    Messages of libraries that fail to load are suppressed: `load_failure` reports them."""
    if hasattr(ort, "preload_dlls"):  # since version 1.21
        with redirect_stdout(StringIO()):
            ort.preload_dlls()


def report_unused_gpu(why: str) -> None:
    """Log why networks run on the CPU, once per reason: as a warning if this machine has a GPU."""
    report_once(
        logging.WARNING if has_gpu() else logging.DEBUG,
        f"networks run on the CPU, not on a GPU: {why}",
    )


@cache
def report_once(level: int, message: str) -> None:
    """Log ``message`` the first time only: each network of a server has the same cause."""
    log.log(level, "%s", message)


class _QuietLogger:
    """Silences ONNX Runtime's default logger while sessions are opened. Thread-safe.

    ONNX Runtime warns once per session that no plug-in provider is registered for a ``device_id``, and
    prints failures that `load_failure` and errors report. The logger is the process's, so its level is
    restored, to ONNX Runtime's default."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opening = 0

    @contextmanager
    def __call__(self, ort: Any) -> Iterator[None]:
        with self._lock:
            self._opening += 1
            ort.set_default_logger_severity(_FATAL)
        try:
            yield
        finally:
            with self._lock:
                self._opening -= 1
                if not self._opening:
                    ort.set_default_logger_severity(_WARNING)


quiet_logger = _QuietLogger()
