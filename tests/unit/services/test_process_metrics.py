"""Metrics of a server process, and memory of machines and containers as the kernel reports it."""

from functools import partial
from pathlib import Path

import pytest

import services.process_metrics
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.process_metrics import (
    ContainerMemory,
    publish_memory,
    publish_process,
    read_memory_limits,
    resident_bytes,
)

GB = 1 << 30


def written(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 16 GB, 6 of which are used."""
    kilobytes = {"MemTotal": 16 << 20, "MemFree": 1 << 20, "MemAvailable": 10 << 20}
    lines = "\n".join(f"{name}:  {n} kB" for name, n in kilobytes.items())
    written(tmp_path / "proc", meminfo=lines)
    return tmp_path


def reported(machine: Path, groups: str) -> ContainerMemory:
    written(machine / "proc/self", cgroup=groups)
    return read_memory_limits(machine / "proc", machine / "groups")


def test_memory_of_a_machine(machine):
    assert reported(machine, "0::/") == (6 * GB, 16 * GB)
    written(machine / "groups", memory__max="max", memory__current=GB, memory__stat="anon 1")
    assert reported(machine, "0::/") == (6 * GB, 16 * GB)


def test_memory_of_a_container_excludes_file_cache(machine):
    stat = f"anon {2 * GB}\ninactive_file {GB}\nactive_file {GB // 2}"
    written(machine / "groups", memory__max=4 * GB, memory__current=3 * GB, memory__stat=stat)
    assert reported(machine, "0::/") == (3 * GB - GB - GB // 2, 4 * GB)
    # The name that is seen from outside the container.
    assert reported(machine, "0::/../../pods/one") == (3 * GB - GB - GB // 2, 4 * GB)


def test_memory_of_the_fullest_group_counts(machine):
    pod = machine / "groups/pod"
    written(pod, memory__max=2 * GB, memory__current=GB, memory__stat="anon 1")
    written(pod / "hps", memory__max=8 * GB, memory__current=GB // 2, memory__stat="anon 1")
    assert reported(machine, "0::/pod/hps") == (GB, 2 * GB)


def test_memory_by_control_groups_version_1(machine):
    files = {"memory__stat": f"total_inactive_file {GB}", "memory__usage_in_bytes": 3 * GB}
    group = machine / "groups/memory/hps"
    written(group, memory__limit_in_bytes=4 * GB, **files)
    written(machine / "groups/memory", memory__limit_in_bytes=2**63 - 4096, **files)
    lines = "4:memory:/hps\n3:cpu,cpuacct:/hps\n0::/"
    assert reported(machine, lines) == (2 * GB, 4 * GB)


def test_memory_of_this_machine_is_plausible():
    found = read_memory_limits()
    assert 1 << 20 < found.used < found.limit


def test_metrics_omit_memory_that_the_system_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other metrics are exported."""
    metrics = Metrics()
    publish_memory(metrics)
    assert len(metrics.numbers()[m.MEMORY_LIMIT]) == 1
    monkeypatch.setattr(
        services.process_metrics,
        "read_memory_limits",
        partial(read_memory_limits, Path("/nowhere")),
    )
    assert metrics.numbers()[m.MEMORY_LIMIT] == metrics.numbers()[m.MEMORY_USED] == {}


STATUS = """Name:\tpython
VmRSS:\t  100 kB
RssAnon:\t   60 kB
RssFile:\t   30 kB
RssShmem:\t   10 kB
"""


def test_resident_memory_by_kind():
    reported = {"anonymous": 60 << 10, "file": 30 << 10, "shared": 10 << 10}
    assert dict(resident_bytes(STATUS)) == reported


def test_process_exports_cpu_time_and_memory():
    metrics = Metrics()
    publish_process(metrics, "lookup")
    numbers = metrics.numbers()
    assert numbers[m.PROCESS_CPU][("lookup",)] > 0
    assert numbers[m.PROCESS_MEMORY]["lookup", "anonymous"] > 1 << 20
