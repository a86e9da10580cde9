"""Custom resource definitions that the chart uses, from their projects' Go modules with pinned checksums.

They are written to ``.peers/kube_crds/``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import ROOT, PeerMissing

_FETCH_S = 600
_OPERATOR = "example/prometheus-operator-crd/monitoring.coreos.com_"


@dataclass(frozen=True)
class Module:
    """A version of a Go module, the checksum of all its files, and the files to copy."""

    version: str
    checksum: str
    files: tuple[str, ...]


MODULES = (
    Module(
        "github.com/kedacore/keda/v2@v2.21.0",
        "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=",
        ("config/crd/bases/keda.sh_scaledobjects.yaml",),
    ),
    Module(
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        (f"{_OPERATOR}servicemonitors.yaml", f"{_OPERATOR}prometheusrules.yaml"),
    ),
    Module(
        "sigs.k8s.io/gateway-api@v1.4.0",
        "h1:ZwlNM6zOHq0h3WUX2gfByPs2yAEsy/EenYJB78jpQfQ=",
        (
            "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
            "config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml",
        ),
    ),
)


class KubeCrds:
    """The CustomResourceDefinitions of ``MODULES``, each a YAML file in ``folder``."""

    name = "kube_crds"

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    def stamp(self) -> str:
        return hashlib.sha256(repr(MODULES).encode()).hexdigest()

    def ready(self) -> bool:
        done = self.folder / ".done"
        return done.exists() and done.read_text() == self.stamp()

    def build(self) -> None:
        """Fetch the files if they are missing. Raises PeerMissing with the remedy."""
        if self.ready():
            return
        if not shutil.which("go"):
            raise PeerMissing("install Go 1.24 or newer (https://go.dev/dl) and try again")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for module in MODULES:
            source = self._fetch(module)
            for file in module.files:
                shutil.copyfile(source / file, self.folder / Path(file).name)
        (self.folder / ".done").write_text(self.stamp())

    def _fetch(self, module: Module) -> Path:
        try:
            done = subprocess.run(
                ["go", "mod", "download", "-json", module.version],
                # Independent of a Go module or workspace around this folder; versions are pinned here.
                cwd=self.folder, env={**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"},
                capture_output=True, text=True, timeout=_FETCH_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise PeerMissing(
                f"{module.version} took longer than {_FETCH_S} s; try again"
            ) from None
        reply = json.loads(done.stdout) if done.stdout.strip() else {}
        if done.returncode:
            why = reply.get("Error") or done.stderr.strip()[-500:]
            raise PeerMissing(f"go cannot fetch {module.version}: {why}")
        if reply["Sum"] != module.checksum:
            raise PeerMissing(f"{module.version} has another checksum than pinned: {reply['Sum']}")
        return Path(reply["Dir"])


KUBE_CRDS = KubeCrds()
