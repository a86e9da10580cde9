"""The check that the compiled core was built from the present sources, and its error."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hps import native
from hps.errors import ConfigError
from hps.native import source

STALE = """
import sys, types
core = types.ModuleType("hps.native._core")
core.__file__ = "/somewhere/_core.so"
sys.modules["hps.native._core"] = core
from hps.cli.main import main
sys.argv = ["hps", *sys.argv[1:]]
main()
"""


@pytest.fixture
def sources(tmp_path):
    """A copy of hps/native, with the C++ sources."""
    return shutil.copytree(source.FOLDER, tmp_path / "native")


def test_compiled_core_carries_the_digest_of_its_sources():
    if native.COMPILED:
        from hps.native import _core

        assert _core.SOURCES == source.digest() != ""


@pytest.mark.parametrize(
    "name", ["bindings.cpp", "src/dedup.cpp", "include/hps/dedup.hpp", "CMakeLists.txt"]
)
def test_core_is_rejected_after_a_change_of_any_source(sources, name):
    core = SimpleNamespace(__file__="_core.so", SOURCES=source.digest(sources))
    source.check(core, sources)
    with (sources / name).open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match=r"_core.so was built from other sources .* `make setup`"):
        source.check(core, sources)


def test_digest_ignores_files_that_are_not_compiled_into_the_core(sources):
    before = source.digest(sources)
    for name in ("stress/stress.cpp", "twin.py"):
        (sources / name).unlink()
    assert source.digest(sources) == before


def test_core_is_accepted_if_no_sources_are_installed(tmp_path):
    assert source.digest(tmp_path) == ""
    source.check(SimpleNamespace(__file__="_core.so"), tmp_path)


@pytest.mark.parametrize(
    "command", [["serve", "--set", "models.repository=."], ["doctor"], ["version"]]
)
def test_commands_with_a_stale_core_name_it_and_the_remedy(tmp_path, command):
    done = subprocess.run(
        [sys.executable, "-c", STALE, *command],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    output = " ".join((done.stdout + done.stderr).split())
    assert "make setup" in output
    assert "/somewhere/_core.so" in output
    assert "bug in hps" not in output
