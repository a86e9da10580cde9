"""Cores that a process may use, as the kernel tells it of machines and containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hps.cgroups import available_cores, free_host_bytes, memory_left, own_groups
from hps.config.dense_settings import DenseSettings
from hps.node.serving_context import dense_concurrency


@pytest.fixture
def cores(tmp_path, monkeypatch):
    """``cores(groups, **files)``: those of a process with 8 in its affinity, in these groups; files of groups
    by path."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def tell(groups: str, files: dict[str, str]) -> int:
        proc = tmp_path / "proc"
        (proc / "self").mkdir(parents=True)
        (proc / "self/cgroup").write_text(groups)
        for path, text in files.items():
            at = tmp_path / "groups" / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
        return available_cores(proc, tmp_path / "groups")

    return tell


def test_without_a_limit_cores_are_those_of_the_affinity(cores):
    assert cores("0::/\n", {"cpu.max": "max 100000\n"}) == 8


def test_a_containers_limit_is_rounded_up(cores):
    assert cores("0::/\n", {"cpu.max": "150000 100000\n"}) == 2


def test_the_smallest_limit_of_all_groups_counts(cores):
    files = {"pod/cpu.max": "300000 100000\n", "pod/hps/cpu.max": "600000 100000\n"}
    assert cores("0::/pod/hps\n", files) == 3


@pytest.mark.parametrize(("quota", "expected"), [("50000\n", 1), ("-1\n", 8)])
def test_groups_of_version_1_have_limits_too(cores, quota, expected):
    files = {"cpu/hps/cpu.cfs_quota_us": quota, "cpu/hps/cpu.cfs_period_us": "100000\n"}
    assert cores("4:cpu,cpuacct:/hps\n0::/\n", files) == expected


def test_a_process_that_sees_no_groups_has_its_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert available_cores(tmp_path, tmp_path) == 2


def test_groups_go_from_the_own_one_up(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/a/b\n")
    found = own_groups("", tmp_path, Path("/groups"))
    assert [*found] == [Path("/groups/a/b"), Path("/groups/a"), Path("/groups")]


@pytest.mark.parametrize(
    ("there", "dense", "expected"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (64, {}, 4),
        (1, {"runs": 7}, 7),
        (1, {"triton": {"url": "localhost:9001"}}, 4),
    ],
)
def test_networks_in_the_process_run_on_no_more_threads_than_cores(
    monkeypatch, there, dense, expected
):
    monkeypatch.setattr("hps.node.serving_context.available_cores", lambda: there)
    assert dense_concurrency(DenseSettings.model_validate(dense)) == expected


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/hps\n", {"hps/memory.max": "1000\n", "hps/memory.current": "900\n"}, 140),
        ("0::/hps\n", {"hps/memory.max": "max\n", "hps/memory.current": "900\n"}, None),
        ("0::/hps\n", {"hps/memory.max": "100\n", "hps/memory.current": "900\n"}, 0),
        (
            "4:memory:/hps\n0::/\n",
            {
                "memory/hps/memory.limit_in_bytes": "1000\n",
                "memory/hps/memory.usage_in_bytes": "900\n",
                "memory/memory.limit_in_bytes": "800\n",
                "memory/memory.usage_in_bytes": "750\n",
            },
            110,
        ),
    ],
)
def test_memory_left_counts_limits_and_file_cache_that_can_be_dropped(
    tmp_path, groups, files, left
):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(groups)
    for path, text in files.items():
        at = tmp_path / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
        stat = "anon 5\ninactive_file 40\ntotal_inactive_file 60\n"
        (at.parent / "memory.stat").write_text(stat)
    assert memory_left(tmp_path, tmp_path) == left


def test_memory_left_is_unknown_without_groups(tmp_path):
    assert memory_left(tmp_path, tmp_path) is None


@pytest.mark.parametrize(("limit", "free"), [("max\n", 7 << 20), ("1000\n", 100)])
def test_free_host_bytes_are_those_of_the_machine_or_the_container(tmp_path, limit, free):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/hps\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9216 kB\nMemAvailable: 7168 kB\n")
    (tmp_path / "hps").mkdir()
    (tmp_path / "hps/memory.max").write_text(limit)
    (tmp_path / "hps/memory.current").write_text("900\n")
    (tmp_path / "hps/memory.stat").write_text("anon 5\n")
    assert free_host_bytes(tmp_path, tmp_path) == free
