"""A compiled core of other sources is refused, and what is to be done is said."""

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
    """A copy of the folder, sources and all."""
    return shutil.copytree(source.FOLDER, tmp_path / "native")


def test_the_core_is_of_the_sources_beside_it():
    if native.COMPILED:
        from hps.native import _core

        assert _core.SOURCES == source.digest() != ""


@pytest.mark.parametrize(
    "name", ["bindings.cpp", "src/dedup.cpp", "include/hps/dedup.hpp", "CMakeLists.txt"]
)
def test_every_source_counts(sources, name):
    core = SimpleNamespace(__file__="_core.so", SOURCES=source.digest(sources))
    source.check(core, sources)
    with (sources / name).open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match=r"_core.so was built from other sources .* `make setup`"):
        source.check(core, sources)


def test_what_is_not_built_in_does_not_count(sources):
    before = source.digest(sources)
    for name in ("stress/stress.cpp", "twin.py"):
        (sources / name).unlink()
    assert source.digest(sources) == before


def test_an_installation_without_sources_has_nothing_to_compare(tmp_path):
    assert source.digest(tmp_path) == ""
    source.check(SimpleNamespace(__file__="_core.so"), tmp_path)


@pytest.mark.parametrize(
    "command", [["serve", "--set", "models.repository=."], ["doctor"], ["version"]]
)
def test_commands_say_how_to_mend_it(tmp_path, command):
    done = subprocess.run(
        [sys.executable, "-c", STALE, *command],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    told = " ".join((done.stdout + done.stderr).split())
    assert "make setup" in told
    assert "/somewhere/_core.so" in told
    assert "bug in hps" not in told
