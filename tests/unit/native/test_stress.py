"""Readers beside a writer, without Python: the stress driver, for some seconds. `make check-native` runs it
longer and under sanitizers."""

import subprocess
import sys
from pathlib import Path

import pytest

from hps.native import _core as native

SOURCE = Path(__file__).parents[3] / "hps" / "native"
TOOLS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    """The driver, built as the module is."""
    folder = tmp_path_factory.mktemp("stress")
    configure = [TOOLS / "cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja"]
    options = [f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", "-DHPS_PYTHON=OFF", "-DHPS_STRESS=ON"]
    for command in ([*configure, *options], [TOOLS / "cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "stress"


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_no_torn_row_no_older_version_no_lost_count(stress, eviction):
    done = subprocess.run([stress, "2", "2", eviction], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" evicted") == 6 * len(native.cache_kernels())


def test_what_it_needs_is_said(stress):
    done = subprocess.run([stress], capture_output=True, text=True, timeout=240)
    assert (done.returncode, "usage" in done.stdout) == (2, True)


def test_fetches_in_single_flights_table(stress):
    driver = stress.parent / "stress_in_flight"
    done = subprocess.run([driver, "1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "left to other fetches" in done.stdout) == (0, True), done.stdout


def test_messages_that_may_be_anything(stress):
    fuzz = stress.parent / "fuzz_codec"
    done = subprocess.run([fuzz, "1"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, "of them decoded" in done.stdout) == (0, True), done.stdout
