"""The image, built and run: who it is, what is in it, and that it serves on a file system it cannot write."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.process import free_ports
from hps.cli.demo_data import load_demo
from hps.client import Client
from tests.deploy.compose_file import ROOT
from tests.deploy.containers import BASE, IMAGES, Engine
from tests.support.waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE, GPU_IMAGE = IMAGES["HPS_IMAGE"], IMAGES["HPS_GPU_IMAGE"]
CONFIG = {
    "models": {"repository": "/var/lib/hps/models"},
    "tiers": {"rocksdb": {"path": "/var/lib/hps/rocksdb/rows"}},
    "server": {name: {"host": "0.0.0.0"} for name in ("http", "grpc", "admin")},
    "auth": {"mode": "off"},
}
HARDENED = (
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--tmpfs=/tmp:size=64m",
)


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def target(engine: Engine, request: pytest.FixtureRequest) -> tuple[str, str]:
    """A target of the Dockerfile, and its image."""
    if request.param == "gpu":
        engine.make_gpu_image()
    return request.param, GPU_IMAGE if request.param == "gpu" else IMAGE


def test_image_has_user_and_labels(engine: Engine, target: tuple[str, str]) -> None:
    _, image = target
    config = engine.inspect("image", image)["Config"]
    assert config["User"] == "10001:0"
    assert (config["Entrypoint"], config["Cmd"]) == (["hps"], ["serve"])
    assert config["ExposedPorts"].keys() == {"8000/tcp", "8001/tcp", "8002/tcp"}
    assert config["Labels"]["org.opencontainers.image.title"] == "hps"
    version = engine.podman("run", "--rm", *HARDENED, image, "version", "--output", "json")
    assert json.loads(version)["hps"] == config["Labels"]["org.opencontainers.image.version"]


def test_image_has_compiled_core_no_compiler_and_documented_size(
    engine: Engine, target: tuple[str, str]
) -> None:
    name, image = target
    look = "for each in cc gcc g++ c++ cmake ninja pip uv; do command -v $each; done; true"
    found = engine.podman("run", "--rm", *HARDENED, "--entrypoint=sh", image, "-c", look)
    assert found == ""
    doctor = engine.podman("run", "--rm", *HARDENED, image, "doctor", check=False)
    assert "compiled" in doctor
    size = engine.inspect("image", image)["Size"] - engine.inspect("image", BASE)["Size"]
    print(f"target {name}: {size / 1e6:.0f} MB above its base")
    page = (ROOT / "docs/containers.md").read_text()
    stated = re.search(rf"^\| target `{name}` \| ([\d,]+) MB", page, re.MULTILINE)
    assert stated is not None
    assert size == pytest.approx(float(stated[1].replace(",", "")) * 1e6, rel=0.1)


def test_new_version_is_a_small_layer(engine: Engine, target: tuple[str, str]) -> None:
    layers = json.loads(engine.podman("history", "--format", "json", target[1]))
    assert layers[0]["size"] < 50e6, "hps itself"


def test_gpu_image_has_gpu_packages(engine: Engine, target: tuple[str, str]) -> None:
    """Check that one of the two onnxruntime packages is installed; without a driver it cannot run."""
    look = (
        "import onnxruntime as o; print(*o.get_available_providers())\n"
        "from hps.dense.onnxruntime_loader import installed_packages; print(installed_packages())\n"
    )
    if target[0] == "gpu":
        look += "import cupy; print(cupy.cuda.nvrtc.getVersion())"
    python = ("--entrypoint=python", target[1], "-I", "-c", look)
    said = engine.podman("run", "--rm", *HARDENED, *python)
    assert ("CUDAExecutionProvider" in said) == (target[0] == "gpu")
    package = "onnxruntime-gpu" if target[0] == "gpu" else "onnxruntime"
    assert f"({package!r},)" in said


def test_missing_configuration_is_one_line_error(engine: Engine) -> None:
    printed = engine.podman(
        "run", "--rm", *HARDENED, "--entrypoint=sh", IMAGE, "-c", "hps serve 2>&1; echo code $?"
    )
    assert printed.splitlines()[-1] == "code 2"
    assert "/etc/hps/config.yaml" in printed
    assert len(printed.splitlines()) == 2


@pytest.fixture(scope="module", params=["10001:0", "1234567:0"])
def running(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[str, int]]:
    """``hps serve`` on the demo's model, as the image's user and as any other of group 0: container, port."""
    folder: Path = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    (port,) = free_ports(1)
    name = f"hps-test-{port}"
    volume = f"{name}-models"
    models = ("--volume", f"{volume}:/var/lib/hps/models", "--user", request.param)
    data = f"{name}-rocksdb"
    try:
        engine.podman(
            "run", "--rm", *HARDENED, *models, IMAGE, "demo", "--write", "/var/lib/hps/models"
        )
        engine.podman(
            "run", "--detach", "--name", name, *HARDENED, *models,
            "--volume", f"{data}:/var/lib/hps/rocksdb",
            "--volume", f"{folder / 'config.yaml'}:/etc/hps/config.yaml:ro",
            "--publish", f"127.0.0.1:{port}:8000", IMAGE,
        )  # fmt: skip
        yield name, port
    finally:
        print(engine.podman("logs", name, check=False))
        engine.podman("rm", "--force", "--time", "5", name, check=False)
        engine.podman("volume", "rm", "--force", volume, data, check=False)


def test_container_serves_is_healthy_and_stops(engine: Engine, running: tuple[str, int]) -> None:
    name, port = running

    def healthy() -> bool:
        engine.podman("healthcheck", "run", name, check=False)
        return engine.inspect("container", name)["State"]["Health"]["Status"] == "healthy"

    until(healthy)
    demo = load_demo()
    with Client(f"http://127.0.0.1:{port}") as client:
        scores = client.infer(demo.model, demo.tensors(slice(0, 64))).outputs
    for output, trained in demo.scores.items():
        np.testing.assert_allclose(scores[output].ravel(), trained[:64], rtol=0, atol=1e-5)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live") as answer:
        assert answer.status == 200
    engine.podman("stop", "--time", "30", name)
    assert engine.inspect("container", name)["State"]["ExitCode"] == 0
