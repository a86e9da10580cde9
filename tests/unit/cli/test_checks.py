"""The doctor's checks that no sound machine fails."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from hps import native
from hps.cli import checks
from hps.config import configuration_from
from hps.errors import ConfigError


def test_every_check_of_this_machine_has_a_mend_unless_it_is_well() -> None:
    found = list(checks.machine())
    assert len({check.name for check in found}) == len(found) >= 6
    for check in found:
        assert check.verdict == "OK" or check.mend


def test_few_open_files_are_warned_of() -> None:
    assert checks.open_files(1024).verdict == "WARN"
    assert "ulimit -n" in checks.open_files(1024).mend
    assert checks.open_files(4096).verdict == "OK"
    assert checks.open_files(resource.RLIM_INFINITY).verdict == "OK"


def test_small_shared_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(total: int):
        return lambda _path: SimpleNamespace(total=total, free=total)

    monkeypatch.setattr(checks.shutil, "disk_usage", usage(64 << 20))
    assert checks.shared_memory(tmp_path).verdict == "WARN"
    monkeypatch.setattr(checks.shutil, "disk_usage", usage(1 << 30))
    assert checks.shared_memory(tmp_path).verdict == "OK"
    assert checks.shared_memory(tmp_path / "none").verdict == "WARN"


def test_too_small_a_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(total=10_000, free=1_000)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _path: free)
    check = checks.database(tmp_path / "new", 501)
    assert check.verdict == "FAIL"
    assert "the tables need about 1.0 kB" in check.found
    assert checks.database(tmp_path / "new", 500).verdict == "OK"
    (tmp_path / "old").mkdir()
    assert checks.database(tmp_path / "old", 10_000).verdict == "OK", "its rows are there already"


def test_the_numpy_twins_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILED", False)
    assert checks.native_core().verdict == "WARN"
    monkeypatch.setattr(native, "COMPILED", True)
    assert checks.native_core().verdict == "OK"


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["no-such-package[x]>=3", "cupy-none; extra == 'gpu'"]
    monkeypatch.setattr(checks.metadata, "requires", lambda _name: wanted)
    check = checks.packages()
    assert check.verdict == "FAIL"
    assert check.mend == "pip install no-such-package"


@pytest.mark.parametrize(("lacks", "verdict"), [("there is no CuPy", "WARN"), (None, "OK")])
def test_a_gpu_that_cannot_be_used_is_warned_of(
    lacks: str | None, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.cuda.loader.lacking", lambda: lacks)
    monkeypatch.setattr(checks, "GPU", tmp_path)
    check = checks.gpu()
    assert check.verdict == verdict
    assert (lacks or "CuPy can use it") in check.found
    assert any(each.name == "networks" for each in checks.machine())
    monkeypatch.setattr(checks, "GPU", tmp_path / "none")
    assert "serves from the CPU" in checks.gpu().found
    assert not any(each.name == "networks" for each in checks.machine())


def test_a_gpu_that_networks_do_not_run_on_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    check = checks.networks()
    assert check.verdict == "WARN"
    assert "has only" in check.found
    assert "--no-deps onnxruntime-gpu" in check.mend


def test_a_gpu_that_networks_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.dense.onnx.OnnxModel", lambda path, _provider: path.read_bytes())
    assert checks.networks().verdict == "OK"


def test_an_error_is_split_into_what_was_found_and_the_mend() -> None:
    check = checks.failed("models", ConfigError("folder is missing; make one"))
    assert (check.found, check.mend) == ("folder is missing", "make one")


def test_the_processes_are_told_and_what_workers_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(workers: int, **cache: object) -> checks.Check:
        given = {"server": {"workers": workers}, "tiers": {"cpu_cache": cache}}
        return checks.processes(configuration_from(given, environ={}).settings)

    shared = {"shared": {"folder": str(tmp_path)}}
    monkeypatch.setattr("hps.native.COMPILED", True)
    assert found(0).found == "the node alone"
    assert found(2, **shared, capacity_bytes=1).verdict == "OK"
    assert "the node and 2 workers" in found(2, **shared, capacity_bytes=1).found
    small = found(2, **shared, capacity_bytes=1 << 50)
    assert (small.verdict, "--shm-size" in small.mend) == ("WARN", True)
    assert found(1, enabled=False).verdict == "WARN"
    monkeypatch.setattr("hps.native.COMPILED", False)
    assert found(1).verdict == "FAIL"
