"""The doctor's checks that fail only on a faulty machine."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hps import native
from hps.client.admin import MetricSample
from hps.config import configuration_from
from hps.errors import ConfigError
from hps.models.mapped_file import MAPPED_FILE
from hps.observability import metric_names as m
from hps.tiers.gpu.plan import device_bytes
from hps.tools.doctor import (
    certificate_validity as validity,
)
from hps.tools.doctor import (
    clocks,
    machine,
    memory,
    networks,
    ports,
    servers,
    stores,
    streams,
)
from hps.tools.doctor import (
    server_status as states,
)
from hps.tools.doctor.check import DoctorCheck, catch_errors, failed
from hps.types import EmbeddingTable
from hps.updates.kafka.overview import GroupView


def test_checks_have_a_remedy_unless_ok() -> None:
    checks = list(machine.machine())
    assert len({check.name for check in checks}) == len(checks) >= 6
    for check in checks:
        assert check.verdict == "OK" or check.remedy


def test_low_limit_of_open_files_is_a_warning() -> None:
    assert machine.open_files(1024).verdict == "WARN"
    assert "ulimit -n" in machine.open_files(1024).remedy
    assert machine.open_files(4096).verdict == "OK"
    assert machine.open_files(resource.RLIM_INFINITY).verdict == "OK"


def test_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(total: int):
        return lambda _path: SimpleNamespace(total=total, free=total)

    monkeypatch.setattr(machine.shutil, "disk_usage", usage(64 << 20))
    assert machine.shared_memory(tmp_path).verdict == "WARN"
    monkeypatch.setattr(machine.shutil, "disk_usage", usage(1 << 30))
    assert machine.shared_memory(tmp_path).verdict == "OK"
    assert machine.shared_memory(tmp_path / "none").verdict == "WARN"


def test_too_small_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(total=10_000, free=1_000)
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _path: free)
    check = stores.database(tmp_path / "new", 501)
    assert check.verdict == "FAIL"
    assert "the tables need about 1.0 kB" in check.found
    assert stores.database(tmp_path / "new", 500).verdict == "OK"
    (tmp_path / "old").mkdir()
    assert stores.database(tmp_path / "old", 10_000).verdict == "OK", "its rows are there already"


def test_numpy_twins_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILED", False)
    assert machine.native_core().verdict == "WARN"
    monkeypatch.setattr(native, "COMPILED", True)
    assert machine.native_core().verdict == "OK"


def test_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["no-such-package[x]>=3", "cupy-none; extra == 'gpu'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda _name: wanted)
    check = machine.packages()
    assert check.verdict == "FAIL"
    assert check.remedy == "pip install no-such-package"


@pytest.mark.parametrize(("missing", "verdict"), [("there is no CuPy", "WARN"), (None, "OK")])
def test_unusable_gpu_is_a_warning(
    missing: str | None, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.cuda.loader.missing_requirement", lambda: missing)
    (tmp_path / "nvidia3").touch()  # what a container has that is given one of four
    monkeypatch.setattr("hps.cuda.loader.DEVICES", tmp_path)
    check = machine.gpu()
    assert check.verdict == verdict
    assert (missing or "CuPy can use it") in check.found
    assert any(each.name == "networks" for each in machine.machine())
    monkeypatch.setattr("hps.cuda.loader.DEVICES", tmp_path / "none")
    assert "serves from the CPU" in machine.gpu().found
    assert not any(each.name == "networks" for each in machine.machine())


PACKAGES = "hps.dense.onnxruntime_loader.installed_packages"


def test_missing_cuda_provider_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(PACKAGES, lambda: ("onnxruntime",))
    check = networks.networks_on_gpu()
    assert check.verdict == "WARN"
    assert check.found == "run on the CPU: the package onnxruntime is installed, which has no CUDA"
    assert "pip uninstall -y onnxruntime onnxruntime-gpu, then" in check.remedy
    assert "pip install 'hps-server[gpu]'" in check.remedy


def test_network_that_runs_on_the_gpu_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.dense.onnx.OnnxModel", lambda path, _provider: path.read_bytes())
    assert networks.networks_on_gpu().verdict == "OK"


@pytest.mark.parametrize(
    ("packages", "verdict", "found", "remedy"),
    [
        (("onnxruntime",), "OK", "onnxruntime 1.", ""),
        (("onnxruntime-gpu",), "OK", "onnxruntime-gpu 1.", ""),
        ((), "WARN", "not installed", "'hps-server[cpu]', or 'hps-server[gpu]'"),
        (("onnxruntime", "onnxruntime-gpu"), "WARN", "are both installed", "pip uninstall -y"),
    ],
)
def test_onnx_runtime_is_one_package(
    packages: tuple[str, ...],
    verdict: str,
    found: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PACKAGES, lambda: packages)
    check = networks.onnx_runtime()
    assert check.verdict == verdict
    assert found in check.found
    assert remedy in check.remedy


def test_onnx_runtime_that_lost_its_files_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACKAGES, lambda: ("onnxruntime-gpu",))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    check = networks.onnx_runtime()
    assert (check.verdict, "does not load" in check.found) == ("FAIL", True)
    assert check.remedy == "pip install --force-reinstall --no-deps onnxruntime-gpu"


def test_configured_provider_that_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(PACKAGES, lambda: ("onnxruntime",))
    settings = configuration_from({"dense": {"provider": "cuda"}}, environ={}).settings
    with pytest.raises(
        ConfigError, match=r"dense\.provider is cuda, but the package onnxruntime is"
    ):
        networks.configured_networks(settings)


def test_error_is_shown_in_full() -> None:
    text = "key holds 3 rows; the bytes would fit dim 16: is dim 8 wrong?"
    check = failed("models", ConfigError(text), "hps model verify m")
    assert (check.found, check.remedy) == (text, "hps model verify m")


def test_processes_are_listed_with_missing_requirements_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared_memory_check(workers: int, **cache: object) -> DoctorCheck:
        given = {"server": {"workers": workers}, "tiers": {"cpu_cache": cache}}
        return memory.processes(configuration_from(given, environ={}).settings)

    shared = {"shared": {"folder": str(tmp_path)}}
    monkeypatch.setattr("hps.native.COMPILED", True)
    assert shared_memory_check(0).found == "the node alone"
    assert shared_memory_check(2, **shared, capacity_bytes=1).verdict == "OK"
    assert "the node and 2 workers" in shared_memory_check(2, **shared, capacity_bytes=1).found
    small = shared_memory_check(2, **shared, capacity_bytes=1 << 50)
    assert (small.verdict, "--shm-size" in small.remedy) == ("WARN", True)
    wanted = shutil.disk_usage(tmp_path).free + (1 << 32)
    assert shared_memory_check(2, **shared, capacity_bytes=wanted).verdict == "WARN"
    held = tmp_path / "hps.node-7" / "a.table"
    held.parent.mkdir()
    with held.open("wb") as file:
        file.truncate(1 << 33)  # files of the running node do not count
    assert shared_memory_check(2, **shared, capacity_bytes=wanted).verdict == "OK"
    held.unlink()
    assert shared_memory_check(1, enabled=False).verdict == "WARN"
    monkeypatch.setattr("hps.native.COMPILED", False)
    assert shared_memory_check(1).verdict == "FAIL"


@pytest.mark.parametrize(
    ("ahead_s", "unsure_s", "verdict"),
    [
        (0.4, 0.0, "OK"),
        (-1.4, 0.5, "OK"),
        (3.0, 0.5, "WARN"),
        (-3.0, 0.5, "WARN"),
        (90.0, 0.5, "FAIL"),
    ],
)
def test_clock_skew_is_compared_with_its_uncertainty(
    ahead_s: float, unsure_s: float, verdict: str
) -> None:
    check = clocks.clock("x", clocks.ClockSkew(ahead_s, unsure_s))
    assert check.verdict == verdict
    if verdict != "OK":
        assert ("ahead of" if ahead_s > 0 else "behind") in check.found
        assert "NTP" in check.remedy


def test_clock_truncated_to_seconds_is_no_skew() -> None:
    skew = clocks.skew(lambda: float(int(time.time())), resolution_s=1.0)
    assert abs(skew.ahead_s) <= skew.unsure_s
    assert skew.unsure_s >= 0.5


def test_delayed_time_is_no_skew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy server reports its time late now and then; one whose clock is wrong does so each time."""
    monkeypatch.setattr(clocks, "_PAUSE_S", 0.0)
    late = iter([5.0, 4.0, 0.0, 9.0])
    skew = clocks.least_skew(lambda: time.time() - next(late))
    assert clocks.clock("x", skew).verdict == "OK"
    assert next(late) == 9.0, "one that is alike is enough"
    wrong = clocks.least_skew(lambda: time.time() + 30)
    assert clocks.clock("x", wrong).verdict == "WARN"


def test_memory_check_compares_caches_with_the_limit() -> None:
    settings = configuration_from(
        {"tiers": {"cpu_cache": {"capacity_bytes": 1 << 30}}}, environ={}
    ).settings
    assert memory.cache_bytes(settings, 0) == 1 << 30
    assert memory.cache_bytes(settings, 1000) == 1000, "there are no more rows"
    assert memory.enough(800, 1000).verdict == "OK"
    assert memory.enough(801, 1000).verdict == "WARN"
    assert memory.enough(1001, 1000).verdict == "FAIL"
    assert memory.limit() > 0


def test_memory_limit_of_a_container_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, limit in (("1000\n", 1000), ("max\n", memory._of_machine())):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory, "_CGROUPS", (tmp_path / "none", tmp_path / "memory.max"))
        assert memory.limit() == limit


def test_low_memlock_limit_is_a_warning_for_pinned_memory() -> None:
    assert memory.locked(100, resource.RLIM_INFINITY).verdict == "OK"
    assert memory.locked(100, 100).verdict == "OK"
    few = memory.locked(101, 100)
    assert (few.verdict, "memlock=-1" in few.remedy) == ("WARN", True)


def test_full_disk_of_database_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(free: int) -> str:
        monkeypatch.setattr(
            stores.shutil, "disk_usage", lambda _path: SimpleNamespace(total=10_000, free=free)
        )
        given = {"tiers": {"rocksdb": {"path": str(tmp_path), "min_free_bytes": 100}}}
        settings = configuration_from(given, environ={}).settings.tiers.rocksdb
        return stores.rocksdb(settings, 0).verdict

    assert [verdict(200), verdict(150), verdict(99)] == ["OK", "WARN", "FAIL"]


def test_updates_folder_must_exist_and_be_writable(tmp_path: Path) -> None:
    assert streams.folder("updates", tmp_path, "updates.directory.path").verdict == "OK"
    missing = streams.folder("updates", tmp_path / "none", "updates.directory.path")
    assert (missing.verdict, "updates.directory.path" in missing.remedy) == ("FAIL", True)


def test_unexpected_error_of_one_part_keeps_other_checks() -> None:
    def odd() -> Iterator[DoctorCheck]:
        yield DoctorCheck("a", "OK", "fine")
        raise KeyError("version")

    first, second = catch_errors("part", odd())
    assert (first.name, second.name, second.verdict) == ("a", "part", "FAIL")
    assert "KeyError: 'version'" in second.found
    assert second.remedy


def test_certificate_that_expires_soon_is_a_warning() -> None:
    now = datetime.now(UTC)
    assert validity.validity("x", now + timedelta(days=20), "x.crt").verdict == "OK"
    soon = validity.validity("x", now + timedelta(days=3, hours=1), "x.crt")
    assert (soon.verdict, soon.found.rpartition(": ")[2]) == ("WARN", "3 days")
    assert "renew" in soon.remedy


def test_servers_of_several_versions_are_a_warning() -> None:
    def findings(url: str, version: str, models: dict[str, int] | None) -> servers.ServerFindings:
        return servers.ServerFindings(url, version=version, models=models)

    same = [findings("a", "1", {"m": 1}), findings("b", "1", {"m": 1}), findings("c", "1", None)]
    (good,) = servers.check_same_versions(same)
    assert (good.verdict, good.found.startswith("2 serve the same")) == ("OK", True)
    assert list(servers.check_same_versions(same[:1])) == []
    versions, models = servers.check_same_versions(
        [findings("a", "1", {"m": 1}), findings("b", "2", {"m": 2, "n": 1})]
    )
    assert (versions.verdict, versions.found) == ("WARN", "of several versions: a 1, b 2")
    assert models.found == "do not serve the same: m: a 1, b 2; n: a not, b 1"


def test_nearly_full_disk_of_a_remote_server_is_a_warning() -> None:
    def disk_verdict(free: int, taken: int, least: int) -> str:
        bytes_ = {"free_bytes": free, "table_bytes": taken, "min_free_bytes": least}
        (check,) = states._tier("server", {"name": "rocksdb", **bytes_})
        assert (check.verdict == "OK") == (not check.remedy)
        return check.verdict

    assert disk_verdict(1 << 30, 1 << 30, 1 << 28) == "OK"
    assert disk_verdict(1 << 30, 1 << 33, 1 << 28) == "WARN"
    assert disk_verdict(1 << 30, 0, (1 << 29) + 1) == "WARN"
    assert disk_verdict((1 << 30) - 1, 0, 1 << 30) == "FAIL"
    assert disk_verdict(1 << 20, 0, 0) == "OK"


def test_messages_deleted_before_they_were_read_are_a_warning() -> None:
    def sample(topic: str, value: float) -> MetricSample:
        return MetricSample(m.UPDATE_LOST, {"group": "hps.node.a", "topic": topic}, value)

    (check,) = states._lost("server", [sample("hps_updates.b", 0.0), sample("hps_updates.c", 7.0)])
    assert (check.name, check.verdict) == ("server: updates of hps.node.a", "WARN")
    assert "7 messages of hps_updates.c" in check.found
    labels = {"group": "hps.node.a", "topic": "t"}
    (check,) = states._lost("server", [MetricSample(m.UPDATE_RESTARTED, labels, 2.0)])
    assert "2 partitions of t did not continue what was applied" in check.found


def test_different_versions_of_lookup_nodes_are_reported() -> None:
    nodes = [
        {"address": "a:1", "state": "ready", "models": {"m": 1}},
        {"address": "b:1", "state": "ready", "models": {"m": 2}},
    ]
    (check,) = states._nodes("server", nodes)
    assert (check.verdict, "a:1: m 1; b:1: m 2" in check.found) == ("WARN", True)
    nodes[1]["models"] = {"m": 1}
    (check,) = states._nodes("server", nodes)
    assert (check.verdict, check.found) == ("OK", "2 nodes ready")


def test_lag_counts_kept_messages_and_reports_lost_ones() -> None:
    place = ("t", 0)

    def lag(committed: dict[tuple[str, int], int], begin: int) -> DoctorCheck:
        return streams._lag("g", GroupView(1, "", committed), {place: begin}, {place: 100})

    assert lag({place: 95}, 0).found == "1 member, 5 messages behind"
    lost = lag({place: 10}, 60)
    assert (lost.verdict, "50 messages were deleted before they were read" in lost.found) == (
        "FAIL",
        True,
    )
    assert "40 messages behind" in lost.found
    assert "1 partition ended before what was applied" in lag({place: 101}, 0).found
    own = streams._lag("hps.node.a", GroupView(0, "", {place: 95}), {place: 0}, {place: 100})
    assert (own.verdict, own.found) == ("OK", "5 messages behind"), "no member reads there"
    never = streams._lag("g", GroupView(0, "", {}), {place: 100}, {place: 100})
    assert never.verdict == "OK", "deleted messages do not wait"


def test_missing_gpus_fail_if_required_and_are_a_warning_if_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verdicts(use: str, missing: str | None, devices: list[int]) -> list[tuple[str, str]]:
        device = SimpleNamespace(mem_info=(10, 1000))
        count = SimpleNamespace(getDeviceCount=lambda: 1)
        cuda = SimpleNamespace(Device=lambda _n: device, runtime=count)
        monkeypatch.setattr("hps.cuda.loader.missing_requirement", lambda: missing)
        monkeypatch.setattr("hps.cuda.loader.cupy", lambda: SimpleNamespace(cuda=cuda))
        gpu = {"use": use, "devices": devices, "capacity_bytes": 1000}
        settings = configuration_from({"tiers": {"gpu": gpu}}, environ={}).settings
        return [(check.verdict, check.found) for check in memory.gpus(settings, {})]

    assert verdicts("required", "there is no CuPy", [0]) == [
        ("FAIL", "use is required, but there is no CuPy")
    ]
    assert verdicts("auto", "there is no CuPy", [0]) == [
        ("WARN", "rows are served from the CPU cache: there is no CuPy")
    ]
    monkeypatch.setattr("hps.node.gpu_caches.has_gpu", lambda: False)
    assert list(memory.gpus(configuration_from({}, environ={}).settings, {})) == []
    assert verdicts("off", None, [0]) == []
    gpu_verdicts = verdicts("auto", None, [0, 1])
    assert [verdict for verdict, _ in gpu_verdicts] == ["OK", "WARN"]
    assert [verdict for verdict, _ in verdicts("required", None, [0, 1])] == ["OK", "FAIL"]
    assert gpu_verdicts[1][1] == "device 1 of 1 (from 0 on)"


def files_of(base: str, folder: Path = Path("nowhere")) -> Any:
    """Files of 100,000 rows with this base."""
    return SimpleNamespace(rows=100_000, pairs=[SimpleNamespace(folder=folder, digest=base)])


def test_rows_that_versions_share_are_counted_once(tmp_path: Path) -> None:
    settings = configuration_from({"tiers": {"gpu": {"share": 1.0}}}, environ={}).settings
    (tmp_path / MAPPED_FILE).touch()
    one, two = (EmbeddingTable.make("t", 32, model="m", version=n) for n in (1, 2))

    def needed(*bases: str) -> int:
        files = {t: files_of(base, tmp_path) for t, base in zip((one, two), bases, strict=False)}
        return device_bytes(memory.planned(settings, files))

    assert needed("a", "a") == needed("a")
    assert needed("a", "b") == 2 * needed("a")


@pytest.mark.parametrize(
    ("use", "gpu", "verdict"),
    [
        ("required", {"capacity_bytes": 1 << 50}, "OK"),  # only what the rows need counts
        ("required", {"capacity_bytes": 1 << 20}, "OK"),
        ("required", {"share": 1.0, "static": True}, "OK"),
        ("required", {"capacity_bytes": 1 << 50, "devices": [1]}, "FAIL"),
        ("auto", {"capacity_bytes": 1 << 50, "devices": [1]}, "WARN"),
        # A start takes fewer slots where all of them would not fit.
        ("required", {"capacity_bytes": 1 << 50, "devices": [2]}, "OK"),
    ],
)
def test_gpu_check_compares_the_planned_bytes_with_the_gpu(
    monkeypatch: pytest.MonkeyPatch, use: str, gpu: dict[str, object], verdict: str
) -> None:
    sizes = {0: (10, 30_000_000), 1: (10, 3_000_000), 2: (10, 17_500_000)}
    count = SimpleNamespace(getDeviceCount=lambda: 3)
    cuda = SimpleNamespace(Device=lambda n: SimpleNamespace(mem_info=sizes[n]), runtime=count)
    monkeypatch.setattr("hps.cuda.loader.missing_requirement", lambda: None)
    monkeypatch.setattr("hps.cuda.loader.cupy", lambda: SimpleNamespace(cuda=cuda))
    settings = configuration_from({"tiers": {"gpu": {"use": use, **gpu}}}, environ={}).settings
    (check,) = memory.gpus(settings, {EmbeddingTable.make("t", 32): files_of("a")})
    assert check.verdict == verdict
    assert bool(check.remedy) == (verdict != "OK")


def test_pinned_rows_of_the_plan_are_counted_not_the_setting() -> None:
    files = {EmbeddingTable.make("t", 32): files_of("a")}

    def pinned(host_bytes: int, **gpu: object) -> int:
        gpu = {"host_bytes": host_bytes, "devices": [0, 1], "share": 1.0, **gpu}
        settings = configuration_from({"tiers": {"gpu": gpu}}, environ={}).settings
        return memory.pinned_bytes(settings, files)

    assert pinned(1 << 40) == 2 * 128 * 100_000
    assert pinned(128 * 50_000) == 2 * 128 * 50_000
    assert pinned(1 << 40, use="off") == pinned(0) == 0


def test_access_check_reports_the_authentication_mode() -> None:
    def access(**given: object) -> str:
        return ports.exposure(configuration_from(given, environ={}).settings).found

    everywhere = {"http": {"host": "0.0.0.0"}}
    assert access() == "auth.mode off, loopback only"
    assert "any client that reaches" in access(server=everywhere, auth={"mode": "off"})
