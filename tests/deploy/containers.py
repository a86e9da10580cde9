"""Images and containers without a Docker daemon: buildah, podman and docker-compose over podman's socket.

Where no registry is reached, a base made by debootstrap takes the place of the official Python image, and
stand-ins built on it bear the official names of others' images. All of it is kept in ``build/containers``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import TRITON
from benchmarks.peers.go_tools import COMPOSE
from benchmarks.peers.kafka_broker import KAFKA
from tests.deploy.compose_file import ROOT, example
from tests.support.waiting import until

STORE = ROOT / "build/containers"
FOLDER = Path(__file__).parent / "stand_ins"
STAND_INS: dict[str, dict[str, Path]] = {
    "redis": {},
    "kafka": {"jars": KAFKA.folder},
    "triton": {"packages": TRITON.site, "model": ROOT / "hps/triton/files"},
    "prometheus": {},
    "grafana": {},
}
"""Each with what its Dockerfile copies from elsewhere."""
BASE = "localhost/hps-test-base:bookworm-1"
PROGRAMS = ("buildah", "podman", "runc", "debootstrap")


def full_name(image: str) -> str:
    """The image's full name: podman accepts no short ones."""
    folders = image.split("/")[:-1]
    if folders and "." in folders[0]:
        return image
    return f"docker.io/{image}" if folders else f"docker.io/library/{image}"


IMAGES = {name: full_name(image) for name, image in example().items() if name.endswith("_IMAGE")}
"""Full names of images, by the variables of ``.env.example``."""

_ENGINE = """
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
[network]
network_backend = "netavark"
"""
_STORAGE = """
[storage]
driver = "{driver}"
graphroot = "{store}/images"
runroot = "{store}/run"
"""


def missing_requirement() -> str:
    """Return the remedy for a missing requirement; empty if there is none."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [] if COMPOSE.ready() else ["docker-compose"]
    if missing:
        return f"{', '.join(missing)} missing: run `make test-compose`"
    if sys.version_info[:2] != (3, 11):
        return "Triton's stand-in wants the Python of its base: make test-compose PYTHON=python3.11"
    return "" if os.geteuid() == 0 else "containers are run as root here: sudo make test-compose"


class Engine:
    """buildah and podman on a store of their own."""

    def __init__(self, store: Path = STORE) -> None:
        store.mkdir(parents=True, exist_ok=True)
        (store / "containers.conf").write_text(_ENGINE)
        driver = "overlay" if _overlays(store) else "vfs"
        (store / "storage.conf").write_text(_STORAGE.format(store=store, driver=driver))
        # Of mirrors whose lists are older than the clock says they may be.
        (store / "apt.conf").write_text(
            'Acquire::Check-Valid-Until "false"; Acquire::Check-Date "false";'
        )
        (store / "uv.toml").write_text("system-certs = true\n")
        self.store = store
        self.env = {
            **os.environ,
            "CONTAINERS_CONF": str(store / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(store / "storage.conf"),
            "TMPDIR": str(store),
        }

    def run(self, *command: str | Path, timeout: float = 1200, check: bool = True) -> str:
        """Standard output of a command; AssertionError with all it said when it fails."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.env, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        said = f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        assert done.returncode == 0 or not check, said
        return done.stdout

    def podman(self, *words: str | Path, timeout: float = 300, check: bool = True) -> str:
        return self.run("podman", *words, timeout=timeout, check=check)

    def has(self, image: str) -> bool:
        return subprocess.run(["podman", "image", "exists", image], env=self.env).returncode == 0

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.podman("inspect", "--type", kind, name))[0]
        return found

    def build(self, tag: str, context: Path, file: Path, *options: str) -> None:
        """An image on `BASE`, with what this machine needs to reach package registries lent to the build."""
        lent: dict[str | Path, str] = {self.store / "apt.conf": "/etc/apt/apt.conf.d/99-lent"}
        if file.parent == ROOT:  # Debian's Java wants to write its certificates there
            lent["/etc/ssl/certs"] = "/etc/ssl/certs"
            lent["/etc/pip.conf"] = "/etc/pip.conf"
            lent[self.store / "uv.toml"] = "/etc/uv/uv.toml"
        mounts = [f"--volume={a}:{b}:ro" for a, b in lent.items() if Path(a).exists()]
        self.run(
            "buildah", "bud", "--isolation", "chroot", "--network", "host", "--format", "docker", "--layers",
            "--build-arg", f"BASE={BASE}", *mounts, *options, "--tag", tag, "--file", file, context,
        )  # fmt: skip

    def make_base(self) -> None:
        """Debian with Python, unless it is there."""
        if self.has(BASE):
            return
        packages = "ca-certificates,python3,python3-venv,python3-dev"
        with tempfile.TemporaryDirectory(dir=self.store) as folder:
            root = Path(folder) / "root"
            self.run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root)
            shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
            archive = Path(folder) / "base.tar"
            self.run("tar", "-C", root, "-cf", archive, ".")
            self.podman("import", archive, BASE)

    def make_images(self) -> None:
        """Our image, built anew, and stand-ins for those of others that the compose file names."""
        self.podman("image", "prune", "--force", "--filter", "until=24h")  # layers of former builds
        self.make_base()
        self.build(IMAGES["HPS_IMAGE"], ROOT, ROOT / "Dockerfile", "--target=cpu")
        for name, contexts in STAND_INS.items():
            tag, folder = IMAGES[f"{name.upper()}_IMAGE"], FOLDER / name
            if not self.has(tag):
                given = (f"--build-context={key}={path}" for key, path in contexts.items())
                self.build(tag, folder, folder / "Dockerfile", *given)

    def make_gpu_image(self) -> None:
        self.build(IMAGES["HPS_GPU_IMAGE"], ROOT, ROOT / "Dockerfile", "--target=gpu")

    @contextmanager
    def socket(self) -> Iterator[str]:
        """Docker's interface on a Unix socket: the URL."""
        with tempfile.TemporaryDirectory(prefix="hps-") as folder:
            path = Path(folder) / "podman.sock"
            with (
                (self.store / "service.log").open("wb") as log,
                subprocess.Popen(
                    ["podman", "system", "service", "--time=0", f"unix://{path}"],
                    env=self.env, stdout=log, stderr=log,
                ) as service,
            ):  # fmt: skip
                try:
                    until(path.exists)
                    yield f"unix://{path}"
                finally:
                    service.terminate()


class Project:
    """One deployment by the repository's file."""

    def __init__(self, engine: Engine, url: str, name: str, settings: Mapping[str, str]) -> None:
        self.engine, self.name = engine, name
        self._file = engine.store / f"{name}.env"
        self._file.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
        self._env = {**engine.env, "DOCKER_HOST": url}
        files = ("--file", ROOT / "docker-compose.yml", "--file", ROOT / "tests/deploy/podman.yaml")
        self._compose = (
            COMPOSE.program, "--project-name", name, "--project-directory", ROOT,
            "--env-file", self._file, *files,
        )  # fmt: skip

    def __call__(self, *words: str, timeout: float = 240) -> str:
        """``docker-compose WORDS``: its output; AssertionError when it fails."""
        command = [*self._compose, "--progress", "plain", *words]
        try:
            done = subprocess.run(
                command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            said = bytes(late.stdout or b"").decode()
            raise AssertionError(f"{words} takes too long:\n{said}\n{self.logs(20)}") from None
        assert done.returncode == 0, f"{words}:\n{done.stdout[-8000:]}\n{self.logs(20)}"
        return done.stdout

    def once(self, *words: str) -> str:
        """``docker-compose run WORDS`` to its end: its output; AssertionError when it fails. Without
        ``--rm``, with which Podman tells Compose 0 whatever the container ended with."""
        name = f"{self.name}-once"
        try:
            return self("run", "--no-deps", "-T", "--name", name, *words)
        finally:
            self.engine.podman("rm", "--force", name, check=False)

    def down(self) -> None:
        """Ended, its volumes removed; what was said is in ``compose.log``."""
        (self.engine.store / "compose.log").write_text(self.logs())
        self("--profile", "*", "down", "--volumes", "--timeout", "10")
        self._file.unlink()

    def logs(self, lines: int | None = None) -> str:
        """Return the last ``lines`` of each service's log."""
        tail = () if lines is None else ("--tail", str(lines))
        done = subprocess.run(
            [*self._compose, "--profile", "*", "logs", *tail],
            env=self._env, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done.stdout

    def container(self, service: str) -> str:
        """The id of a service's container."""
        found = self.engine.podman(
            "ps", "--all", "--quiet", "--no-trunc",
            "--filter", f"label=com.docker.compose.project={self.name}",
            "--filter", f"label=com.docker.compose.service={service}",
            "--filter", "label=com.docker.compose.oneoff=False",
        ).split()  # fmt: skip
        assert len(found) == 1, f"{service}: {found}"
        return found[0]


def _overlays(folder: Path) -> bool:
    """Return True if overlay file systems can be mounted in ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        parts = {name: Path(place) / name for name in ("lower", "upper", "work", "whole")}
        for part in parts.values():
            part.mkdir()
        layers = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
        mounted = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", layers, str(parts["whole"])],
            capture_output=True, check=False,
        )  # fmt: skip
        if mounted.returncode == 0:
            subprocess.run(["umount", str(parts["whole"])], check=True)
        return mounted.returncode == 0
