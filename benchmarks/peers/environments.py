"""Python environments of the peers: pinned packages under ``.peers/``, nothing system-wide.

``python -m benchmarks.peers`` (``make bench-peers``) builds them, in seconds and without root; the
tests and benchmarks get one from ``require``. Shared libraries that no wheel contains come from the
distribution's package, which is unpacked under ``.peers/`` and not installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("HPS_PEERS", HERE.parents[1] / ".peers"))

RECIPE = b"2"  # raise it when the build steps change


class PeerMissing(Exception):
    """A peer is not set up; the message has the remedy, or the reason why it cannot be set up."""


@dataclass(frozen=True)
class Environment:
    """One peer's environment: ``finish`` completes it and raises PeerMissing with the remedy."""

    name: str
    finish: Callable[[Path], None]

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def site(self) -> Path:
        """The environment's site-packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    @property
    def requirements(self) -> Path:
        return HERE / f"{self.name}.txt"

    def stamp(self) -> str:
        """Digest of the inputs of the build; the environment is rebuilt when it changes."""
        parts = [self.requirements.read_bytes(), RECIPE, sys.version.encode()]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def ready(self) -> bool:
        done = self.folder / ".done"
        return done.exists() and done.read_text() == self.stamp()

    def build(self) -> None:
        """Create it again unless it is up to date. Raises PeerMissing."""
        if self.ready():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        uv = str(Path(sys.executable).with_name("uv"))
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(self.folder)])
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        _run([*install, "--python", str(self.python), "-r", str(self.requirements)])
        self.finish(self.folder)
        (self.folder / ".done").write_text(self.stamp())


def require(name: str) -> Environment:
    """The peer's environment, ready for use. Raises PeerMissing when it was not set up."""
    environment = ENVIRONMENTS[name]
    if not environment.ready():
        raise PeerMissing(f"{name} is not set up: run `make bench-peers`")
    return environment


def _run(command: list[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"`{' '.join(command)}`: {error}") from error
    if done.returncode:
        raise PeerMissing(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


def _debian_library(package: str, folder: Path) -> None:
    """Unpack the package's shared libraries into ``folder/lib``; needs no root."""
    download = folder / "deb"
    download.mkdir(exist_ok=True)
    if not shutil.which("apt-get"):
        raise PeerMissing(f"install {package} (its Debian name) and run `make bench-peers` again")
    try:
        _run(["apt-get", "-q", "download", package], cwd=download)
    except PeerMissing:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "-q", "update"])
        _run(["apt-get", "-q", "download", package], cwd=download)
    for archive in download.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(archive), str(download)])
    (folder / "lib").mkdir(exist_ok=True)
    for library in download.rglob("*.so*"):
        if library.is_file():
            shutil.copy(library, folder / "lib" / library.name, follow_symlinks=True)
    shutil.rmtree(download)


def _finish_triton(folder: Path) -> None:
    """Put the stub of this Python, and its libpython, into the python backend's folder."""
    server = TRITON.site / "pytriton/tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists() or sys.version_info >= (3, 13):
        raise PeerMissing(
            f"this Triton runs Python 3.11 and 3.12, not {version}: make PYTHON=python3.12"
        )
    shutil.copy(stub, server / "backends/python")
    # Models that use hps import further packages from our environment.
    ours = sysconfig.get_path("purelib")
    (TRITON.site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    name = f"libpython{version}.so.1.0"
    places = [Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")]
    places += [places[0] / str(sysconfig.get_config_var("MULTIARCH"))]
    found = next((place / name for place in places if (place / name).exists()), None)
    if found is None:
        _debian_library(f"libpython{version}", folder)
    else:
        (folder / "lib" / name).symlink_to(found)


def _finish_perf_analyzer(folder: Path) -> None:
    _debian_library("libb64-0d", folder)


def _finish_kubernetes_schemas(folder: Path) -> None:
    """Write the schemas that reject unknown fields, by version, with relative references instead of web
    addresses."""
    from_package = KUBERNETES_SCHEMAS.site / "kubernetes_validate/kubernetes-json-schema"
    for strict in from_package.glob("v*-local-strict"):
        target = folder / "schemas" / strict.name.removesuffix("-local-strict")
        target.mkdir(parents=True)
        for file in strict.glob("*.json"):
            text = file.read_text().replace('"/api/_definitions.json#', '"_definitions.json#')
            schema = _undescribed(json.loads(text))
            schema.pop("$id", None)
            (target / file.name).write_text(json.dumps(schema))


def _undescribed(node: Any) -> Any:
    """A schema without its descriptions, which are most of it."""
    if isinstance(node, list):
        return [_undescribed(each) for each in node]
    if not isinstance(node, dict):
        return node
    prose = isinstance(node.get("description"), str)
    return {k: _undescribed(v) for k, v in node.items() if not (prose and k == "description")}


TRITON = Environment("triton", _finish_triton)
PERF_ANALYZER = Environment("perf_analyzer", _finish_perf_analyzer)
FEAST = Environment("feast", lambda _folder: None)
FBGEMM = Environment("fbgemm", lambda _folder: None)
TFRA = Environment("tfra", lambda _folder: None)
KERAS = Environment("keras", lambda _folder: None)
KSERVE = Environment("kserve", lambda _folder: None)
MLSERVER = Environment("mlserver", lambda _folder: None)
KUBERNETES_SCHEMAS = Environment("kubernetes_schemas", _finish_kubernetes_schemas)
ENVIRONMENTS = {
    each.name: each
    for each in (
        TRITON,
        PERF_ANALYZER,
        FEAST,
        FBGEMM,
        TFRA,
        KERAS,
        KSERVE,
        MLSERVER,
        KUBERNETES_SCHEMAS,
    )
}
