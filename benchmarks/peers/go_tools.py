"""Programs in Go that tests use, built from pinned modules into ``.peers/``: helm, kubeconform, a Kubernetes
API server, docker-compose.

``tools/go/<name>/go.mod`` names the version of the program and of all its dependencies, ``go.sum`` their
checksums: the build fails if the module proxy serves something else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import ROOT, PeerMissing

MODULES = Path(__file__).parents[2] / "tools/go"
_BUILD_S = 3600


@dataclass(frozen=True)
class GoTool:
    """A program: its Go ``package`` and linker ``flags``."""

    name: str
    package: str
    flags: str = ""

    @property
    def module(self) -> Path:
        return MODULES / self.name

    @property
    def program(self) -> Path:
        return ROOT / self.name / self.name

    def stamp(self) -> str:
        """Digest of the inputs of the build; the program is rebuilt when it changes."""
        parts = [(self.module / file).read_bytes() for file in ("go.mod", "go.sum")]
        return hashlib.sha256(b"\0".join([*parts, self.flags.encode()])).hexdigest()

    def ready(self) -> bool:
        done = self.program.with_name(".done")
        return done.exists() and done.read_text() == self.stamp()

    def build(self) -> None:
        """Fetch and compile it unless it is up to date. Raises PeerMissing with the remedy."""
        if self.ready():
            return
        if not shutil.which("go"):
            raise PeerMissing("install Go 1.24 or newer (https://go.dev/dl) and try again")
        shutil.rmtree(self.program.parent, ignore_errors=True)
        self.program.parent.mkdir(parents=True)
        command = ["go", "build", "-mod=readonly", "-trimpath", "-ldflags", f"-s -w {self.flags}"]
        try:
            # Without cgo no C compiler and headers are needed.
            done = subprocess.run(
                [*command, "-o", str(self.program), self.package],
                cwd=self.module,
                env={**os.environ, "CGO_ENABLED": "0"},
                capture_output=True, text=True, timeout=_BUILD_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            remedy = "try again, the build resumes"
            raise PeerMissing(f"{self.name} took longer than {_BUILD_S} s; {remedy}") from None
        if done.returncode:
            raise PeerMissing(f"go cannot build {self.name}: {done.stderr.strip()[-2000:]}")
        self.program.with_name(".done").write_text(self.stamp())


KUBERNETES = "1.34.1"
_VERSION = "k8s.io/component-base/version"
# The version of Kubernetes that charts are rendered for without a server.
_HELM = "helm.sh/helm/v3/pkg"
_MINOR = f"-X {_HELM}/chartutil.k8sVersionMinor=34 -X {_HELM}/lint/rules.k8sVersionMinor=34"
HELM = GoTool("helm", "helm.sh/helm/v3/cmd/helm", _MINOR)
KUBECONFORM = GoTool("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform")
API_SERVER = GoTool(
    "kube-apiserver",
    "k8s.io/kubernetes/cmd/kube-apiserver",
    f"-X {_VERSION}.gitVersion=v{KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=34",
)
COMPOSE = GoTool("docker-compose", "github.com/docker/compose/v2/cmd")
GO_TOOLS = {each.name: each for each in (HELM, KUBECONFORM, API_SERVER, COMPOSE)}
