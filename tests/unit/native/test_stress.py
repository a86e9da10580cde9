"""The C++ stress drivers and the codec fuzzer, run for some seconds.

`make check-native` runs them longer and under sanitizers."""

import subprocess
import sys
from pathlib import Path

import pytest

from hps.native import _core as native

SOURCE = Path(__file__).parents[3] / "hps" / "native"
TOOLS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    """The stress driver, built with the flags of the module; the other drivers lie in its folder."""
    folder = tmp_path_factory.mktemp("stress")
    configure = [TOOLS / "cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja"]
    options = [f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", "-DHPS_PYTHON=OFF", "-DHPS_STRESS=ON"]
    for command in ([*configure, *options], [TOOLS / "cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "stress"


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_concurrent_readers_get_no_torn_rows_or_older_versions(stress, eviction):
    done = subprocess.run([stress, "2", "2", eviction], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" evicted") == 6 * len(native.cache_kernels())


def test_stress_without_arguments_prints_its_usage(stress):
    done = subprocess.run([stress], capture_output=True, text=True, timeout=240)
    assert (done.returncode, "usage" in done.stdout) == (2, True)


def test_concurrent_fetches_keep_the_in_flight_table_consistent(stress):
    driver = stress.parent / "stress_in_flight"
    done = subprocess.run([driver, "1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "left to other fetches" in done.stdout) == (0, True), done.stdout


def test_every_client_of_the_batch_scheduler_gets_its_own_answers(stress):
    driver = stress.parent / "stress_scheduler"
    done = subprocess.run([driver, "2"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "models removed" in done.stdout) == (0, True), done.stdout


def test_readers_and_writers_of_the_scored_table_see_whole_rows(stress):
    driver = stress.parent / "stress_scored"
    done = subprocess.run([driver, "2"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "evicted" in done.stdout) == (0, True), done.stdout


def test_codec_fuzzer_passes(stress):
    fuzz = stress.parent / "fuzz_codec"
    done = subprocess.run([fuzz, "1"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, "of them decoded" in done.stdout) == (0, True), done.stdout
