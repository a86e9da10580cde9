"""What pip and uv install for each extra, in a clean environment: exactly one ONNX Runtime.

onnxruntime and onnxruntime-gpu fill the same folder. With both, the last one written stays, which no resolver
lets a package choose; see docs/decisions/0079-choose-onnx-runtime-by-extra.md."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.stand_in_wheels import write_stand_ins, write_wheel

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
# Bounds on both sides: the latest version, 999, is too new.
BOUNDED = {
    "grpcio": "1.80",
    "hpack": "4.2",
    "httptools": "0.7",
    "tritonclient": "2.80",
    "uvicorn": "0.50",
}
RUNTIMES = {
    name: {"onnxruntime/__init__.py": f"package = {name!r}\n"}
    for name in ("onnxruntime", "onnxruntime-gpu")
}


@pytest.fixture(scope="module")
def metadata():
    """The package's metadata, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    for extra, required in project["optional-dependencies"].items():
        assert not any(";" in each for each in required), "join the marker"
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {each}; extra == "{extra}"' for each in required]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, metadata):
    folder = tmp_path_factory.mktemp("wheels")
    write_stand_ins(folder, metadata, BOUNDED, RUNTIMES)
    return folder


def pip(venv, *arguments):
    run(sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), *arguments)


def uv(venv, *arguments):
    run(UV, "pip", arguments[0], "--python", str(venv / "bin/python"), "--offline", *arguments[1:])


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=[pip, uv])
def install(request, tmp_path, wheels):
    """Installs requirements into a new environment; returns the runtimes there, and the one imported."""
    venv = tmp_path / "venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, str(venv))

    def installed(*requirements):
        request.param(venv, "install", "--no-index", f"--find-links={wheels}", *requirements)
        code = (
            "from importlib.metadata import distributions as d\n"
            "print(*sorted({x.name for x in d()} & {'onnxruntime', 'onnxruntime-gpu'}))\n"
            "import onnxruntime; print(onnxruntime.package)"
        )
        python = [venv / "bin/python", "-I", "-c", code]
        said = subprocess.run(python, capture_output=True, text=True).stdout.splitlines()
        return said[0].split(), said[1] if len(said) > 1 else None

    return installed


@pytest.mark.parametrize(
    ("extras", "runtime"),
    [
        ("", None),
        ("[otel]", None),
        ("[cpu]", "onnxruntime"),
        ("[cpu,otel]", "onnxruntime"),
        ("[gpu]", "onnxruntime-gpu"),
        ("[gpu,otel]", "onnxruntime-gpu"),
    ],
)
def test_each_extra_installs_exactly_one_onnx_runtime(install, extras, runtime):
    assert install(f"hps-server{extras}") == ([runtime] if runtime else [], runtime)


def test_gpu_extra_brings_cuda_and_cupy(metadata):
    lines = re.findall(r"Requires-Dist: (.*); extra == \"gpu\"", metadata)
    assert any(line.startswith("onnxruntime-gpu[cuda,cudnn]") for line in lines)
    assert any(re.match(r"cupy-cuda\d+x\[ctk\]", line) for line in lines)


def test_stand_ins_show_the_fault_of_a_required_cpu_package(tmp_path, install, wheels):
    """As the package was: onnxruntime for all, onnxruntime-gpu as an extra; both are installed."""
    required = "Requires-Dist: onnxruntime\nRequires-Dist: onnxruntime-gpu; extra == 'gpu'\n"
    write_wheel(wheels, "former", "1", {}, required + "Provides-Extra: gpu\n")
    names, _ = install("former[gpu]")
    assert names == ["onnxruntime", "onnxruntime-gpu"]


@pytest.mark.parametrize(
    ("lock", "runtime"),
    [("runtime", "onnxruntime"), ("otel", "onnxruntime"), ("gpu", "onnxruntime-gpu")],
)
def test_each_lock_holds_exactly_one_onnx_runtime(lock, runtime):
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    assert re.findall(r"^(onnxruntime[a-z-]*)==", text, re.MULTILINE) == [runtime]


def test_uv_projects_refuse_both_extras():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["conflicts"]
    assert declared == [[{"extra": "cpu"}, {"extra": "gpu"}]]
