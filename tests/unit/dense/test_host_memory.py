"""Removal of shared-memory regions: those of killed processes go, those of live ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hps.config.dense_settings import TritonSettings
from hps.dense.network_factory import _regions
from hps.dense.triton.host_memory import HostRegion, remove_stale_regions
from hps.dense.triton.shared_regions import SMALLEST
from hps.errors import Unavailable

SHARED = Path("/dev/shm")
OWNER = f"""
import sys
from hps.dense.triton.host_memory import HostRegion
print(HostRegion({SMALLEST}).name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_owner() -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Start processes with one region each, under a command such as `unshare`; kill them at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [*command, sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, SHARED / process.stdout.readline().strip()

    yield start
    for process in started:
        kill(process)
    remove_stale_regions()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill it and its children, as the kernel ends a container: no resource tracker can clean up."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_start_removes_regions_of_killed_processes_only(start_owner):
    live, live_region = start_owner()
    killed, killed_region = start_owner()
    region = HostRegion(SMALLEST)
    kill(killed)
    assert killed_region.stat().st_size == SMALLEST
    assert _regions(TritonSettings(url="there:1", shared_memory="system"), 0) is not None
    assert not killed_region.exists()
    assert live_region.exists()
    region.put([(64, np.arange(4))])
    assert region.get(64, (4,), np.dtype(np.int64)).tolist() == [0, 1, 2, 3]
    assert (SHARED / region.name).exists()
    region.drop()
    assert not (SHARED / region.name).exists()
    kill(live)
    remove_stale_regions()
    assert not live_region.exists()


def test_region_of_another_pid_namespace_is_kept_while_its_process_lives(start_owner):
    command = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespace can be made; run as root")
    process, region = start_owner(*command)
    remove_stale_regions()
    assert region.exists()
    kill(process)
    remove_stale_regions()
    assert not region.exists()


def test_region_larger_than_shared_memory_is_unavailable_and_leaves_no_file():
    with pytest.raises(Unavailable, match=r"/dev/shm has no 35,184,372,088,832 bytes to share"):
        HostRegion(1 << 45)
    assert not list(SHARED.glob(f"*hps-dense-{os.getpid()}-*"))
