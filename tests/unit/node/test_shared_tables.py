"""Versions on one node that share tables: one table in stores and caches, updates serve both, retirement."""

import shutil
import tempfile
import time

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.models.derived_version import derive_dense_version
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.observability import metric_names as m
from hps.types import Source
from tests.support.waiting import PATIENT_GUARD, until

SPEC = ModelSpec.model_validate(
    {"name": "words", "tables": [{"name": "left", "dim": 4}, {"name": "right", "dim": 2}]}
)
ROWS = 300
KEYS = np.arange(ROWS)


def write(root, version, right, *, mapped=True, **options):
    """``left`` is the same in every version; all rows of ``right`` are the number ``right``."""
    tables = {
        "left": (KEYS, np.full((ROWS, 4), 7, np.float32) + KEYS[:, None]),
        "right": (KEYS, np.full((ROWS, 2), right, np.float32)),
    }
    write_version(root, SPEC, version, tables, mapped=mapped, **options)


@pytest.fixture(params=["mapped", "loaded"])
def repository(tmp_path, request):
    for version in (1, 2):
        write(tmp_path / "models", version, version, mapped=request.param == "mapped")
    return tmp_path / "models"


@pytest.fixture
def settings(repository, tmp_path):
    with tempfile.TemporaryDirectory(prefix="hps-") as runtime:
        yield {
            "models": {
                "repository": str(repository),
                "rollback_s": 0,
                "serve": {"words": {"version": 1}},
            },
            "tiers": {
                "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
                "cpu_cache": {"share": 0.5},
                "mapped": {"memory_bytes": 0},
            },
            "server": {"runtime": runtime},
        }


def look_up(models, version=None, keys=KEYS):
    found = models.lookup("words", {"left": keys, "right": keys}, version=version, want_source=True)
    assert not found.degraded
    return found


def values(models, version=None, keys=KEYS):
    found = look_up(models, version, keys)
    return found.vectors["left"][:, 0].tolist(), set(found.vectors["right"][:, 0].tolist())


EXPECTED = (KEYS + 7).tolist()


def cached(node):
    return {table.id for table in node.tiers[0].tier._tables}


def families(node):
    return {table.id for table in node.control._switcher.loader._parts.stores.tables}


def test_both_versions_have_one_table(settings):
    with hps.open(settings) as node:
        first = node.model("words")
        rows_before = node.tiers[0].rows(first.tables["left"])
        node.load("words", 2, switch=False)
        second = node.model("words", 2)
        assert second.tables["left"] is first.tables["left"]
        assert node.tiers[0].rows(first.tables["left"]) == rows_before  # nothing is filled again
        assert values(node, 1) == (EXPECTED, {1.0})
        assert values(node, 2) == (EXPECTED, {2.0})
        assert cached(node) == {"words/1/left", "words/1/right", "words/2/right"}
        names = list(node.metrics.numbers()[m.TABLE_ROWS])
        assert len(names) == len(set(names))
        node.metrics.render()


def test_updates_of_one_version_serve_the_other(settings):
    with hps.open(settings) as node:
        node.load("words", 2, switch=False)
        node.write("words", "left", [5], np.full((1, 4), 55, np.float32))
        for version in (1, 2):
            assert look_up(node, version, [5]).vectors["left"].tolist() == [[55] * 4]
    with hps.open(settings) as node:
        assert node.load("words", 2) == 2
        assert look_up(node, None, [5]).vectors["left"].tolist() == [[55] * 4]


def test_shared_tables_stay_until_no_version_needs_them(settings, repository):
    write(repository, 3, 3)
    with hps.open(settings) as node:
        node.write("words", "left", [5], np.full((1, 4), 55, np.float32))
        for version in (2, 3):
            node.load("words", version)
            until(lambda: node.control._switcher.retirement.is_idle)
            assert cached(node) == {"words/1/left", f"words/{version}/right"}
            assert families(node) == {"words/1/left", f"words/{version}/right"}
            assert look_up(node, None, [5]).vectors["left"].tolist() == [[55] * 4]
        left = [*EXPECTED[:5], 55.0, *EXPECTED[6:]]
        assert values(node) == (left, {3.0})
        versions = {labels[2] for labels in node.metrics.numbers()[m.TIER_KEYS]}
        assert versions == {"1", "3"}
        assert node.load("words", 1) == 1
        until(lambda: node.control._switcher.retirement.is_idle)
        assert values(node) == (left, {1.0})
        node.unload("words")
        until(lambda: node.control._switcher.retirement.is_idle)
        assert families(node) == set()


def test_start_without_the_introducing_version(settings, repository):
    """Its folder was deleted: rows, and those written over them, are served from the other one's files."""
    with hps.open(settings) as node:
        node.write("words", "left", [5], np.full((1, 4), 55, np.float32))
    shutil.rmtree(repository / "words/1")
    settings["models"]["serve"]["words"]["version"] = 2
    with hps.open(settings) as node:
        assert look_up(node, None, [5]).vectors["left"].tolist() == [[55] * 4]
        assert values(node, None, KEYS[6:]) == (EXPECTED[6:], {2.0})
        assert node.model("words").tables["left"].version == 1
        assert not [each for each in node.status()["warnings"] if "erase" in each]


def test_rows_of_a_shared_table_are_no_leftovers(settings, repository):
    """Version 1 was deleted, version 3 is served: version 2 still needs rows of version 1."""
    with hps.open(settings):
        pass
    shutil.rmtree(repository / "words/1")
    write(repository, 3, 3, base="none")
    settings["models"]["serve"]["words"]["version"] = 3
    with hps.open(settings) as node:
        assert not [each for each in node.status()["warnings"] if "words/1" in each]
    shutil.rmtree(repository / "words/2")
    with hps.open(settings) as node:
        assert [each for each in node.status()["warnings"] if "words/1" in each]


@pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core")
def test_attached_processes_share_the_table(settings):
    with hps.open(settings) as node, hps.attach(settings) as attached:
        node.load("words", 2, switch=False)
        first, second = attached.model("words", 1), attached.model("words", 2)
        assert first.tables["left"] is second.tables["left"]
        for version in (1, 2):
            assert values(attached, version) == (EXPECTED, {float(version)})
            assert Source.CPU in look_up(attached, version).sources["left"]
        del first, second
        node.switch("words", 2)
        until(lambda: node.control._switcher.retirement.is_idle)
        assert values(attached) == (EXPECTED, {2.0})
        assert Source.CPU in look_up(attached).sources["left"]


def test_loading_another_network_takes_no_time(tmp_path):
    """Rows of 200 MB: its load reads none of them."""
    keys = np.arange(400_000)
    spec = ModelSpec.model_validate(
        {
            "name": "wide",
            "tables": [{"name": "t", "dim": 128}],
            "dense": {"outputs": [{"name": "y", "shape": [-1]}]},
        }
    )
    write_version(
        tmp_path / "models",
        spec,
        1,
        {"t": (keys, np.ones((400_000, 128), np.float32))},
        dense=b"",
        mapped=True,
    )
    settings = {
        "models": {"repository": str(tmp_path / "models"), "rollback_s": 0},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}},
        "server": {"role": "lookup"},
    }
    with hps.open(settings) as node:
        derive_dense_version(tmp_path / "models", "wide", b"newer")
        began = time.monotonic()
        assert node.load("wide") == 2
        assert time.monotonic() - began < 1.0
        assert node.model("wide").tables["t"].id == "wide/1/t"
