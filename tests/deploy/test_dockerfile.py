"""``Dockerfile``: clean for hadolint, and nothing in the build context but what it copies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.deploy.compose_file import ROOT, example

FILE = ROOT / "Dockerfile"


def test_hadolint_passes() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), str(FILE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_copied_paths_exist_and_are_in_the_context() -> None:
    copied = {
        word.partition("/")[0]
        for line in FILE.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    assert "*" in lines
    assert all((ROOT / name).exists() for name in copied)


def test_base_images_are_pinned_and_version_equals_package() -> None:
    text = FILE.read_text()
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base[1])
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    assert {base for base, _ in stages} <= {"${BASE}", *(name for _, name in stages)}
    assert [name for _, name in stages][-2:] == ["gpu", "cpu"], "the last one is the default"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in text
    assert example()["HPS_IMAGE"] == f"hps-server:{version}"
    assert example()["HPS_GPU_IMAGE"] == f"hps-server:{version}-gpu"
