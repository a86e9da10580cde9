"""Versions whose tables differ in a few rows: answers, updates, and what the second one costs."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models.version_writer import write_version
from tests.support.waiting import PATIENT_GUARD

DIM, ROWS = 32, 60_000
SPEC = ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": DIM}]})
TYPES = [{}, {"dtype": "float16", "key_dtype": "uint32"}]
KEYS = np.arange(ROWS) * 7919
CHANGED = np.random.default_rng(3).choice(ROWS, ROWS // 100, replace=False)


def rows_of(version):
    rows = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
    if version == 2:
        rows[CHANGED] += 1
    return rows


@pytest.fixture(scope="module", params=TYPES, ids=str)
def table(request):
    return {"name": "t", "dim": DIM, **request.param}


@pytest.fixture(scope="module")
def repository(tmp_path_factory, table):
    root = tmp_path_factory.mktemp("delta") / "models"
    spec = ModelSpec.model_validate({"name": "m", "tables": [table]})
    for version in (1, 2):
        write_version(root, spec, version, {"t": (KEYS, rows_of(version))}, mapped=True)
    return root


@pytest.fixture
def node(repository, tmp_path):
    settings = {
        "models": {"repository": str(repository), "versions": {"all": True}},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"capacity_bytes": 1 << 20},
        },
    }
    with hps.open(settings) as opened:
        yield opened


def bytes_on_disk(*folders):
    """Allocated bytes, each file once, whatever its number of links."""
    found = {}
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                stat = os.stat(path)
                found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def mapped_bytes(folder):
    """Bytes of pages of files below ``folder`` that this process has in memory, each page once (PSS)."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            counted = str(folder) in line
        elif first == "Pss:" and counted:
            total += int(line.split()[1]) * 1024
    return total


def test_both_versions_have_their_rows(node, table):
    for version in (1, 2):
        found = node.lookup("m", {"t": KEYS}, version=version)
        assert not found.defaulted
        stored = rows_of(version).astype(table.get("dtype", "float32"))
        np.testing.assert_array_equal(found.vectors["t"], stored)


def test_updates_replace_rows_of_base_and_delta(node):
    for key in (KEYS[CHANGED[:1]], KEYS[np.setdiff1d(np.arange(ROWS), CHANGED)[:1]]):
        node.write("m", "t", key, np.full((1, DIM), 9, np.float32))
        assert (node.lookup("m", {"t": key}, version=2).vectors["t"] == 9).all()
        node.write("m", "t", deleted=key)
        assert node.lookup("m", {"t": key}, version=2).defaulted == 1


def test_a_percent_of_changed_rows_costs_two_percent_at_most(node, repository):
    first, second = repository / "m/1", repository / "m/2"
    assert bytes_on_disk(first, second) < 1.02 * bytes_on_disk(first)
    for version in (1, 2):
        node.lookup("m", {"t": KEYS}, version=version)
    one = (first / "tables/t/mapped").stat().st_size
    assert 0.98 * one < mapped_bytes(repository) < 1.02 * one


def test_version_with_a_damaged_delta_is_not_loaded(repository, tmp_path):
    models = tmp_path / "models"
    shutil.copytree(repository, models)
    settings = {
        "models": {"repository": str(models), "serve": {"m": {"version": 1}}},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}},
    }
    path = models / "m/2/tables/t/delta/mapped"
    content = path.read_bytes()
    with hps.open(settings) as node:
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
        with pytest.raises(ModelError, match=f"damaged mapped file: {path}: wrong checksum"):
            node.load("m", 2)
        found = node.lookup("m", {"t": KEYS})
        assert (found.defaulted, found.degraded, node.damage()) == (0, (), "")
        path.write_bytes(content)
        assert node.load("m", 2) == 2
        found = node.lookup("m", {"t": KEYS})
        assert (found.defaulted, found.degraded) == (0, ())
