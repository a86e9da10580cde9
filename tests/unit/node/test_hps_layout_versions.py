"""Several versions of a model in stores of HPS's layout, whose own names have no version."""

from pathlib import Path

import numpy as np
import pytest

import hps
from hps.tiers.rocksdb.database_options import existing_families
from tests.support.redis_servers import settings as redis_settings
from tests.support.redis_servers import shared_server
from tests.support.waiting import PATIENT_GUARD
from tests.unit.node.test_versions import ROWS, served, value, write


@pytest.fixture
def config(tmp_path):
    write(tmp_path / "models", 1, 2, 3)
    return {
        "models": {"repository": str(tmp_path / "models"), "serve": {"words": {"version": 1}}},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD, "layout": "hps"},
            "cpu_cache": {"share": 0.5},
        },
    }


def families(config):
    found = existing_families(Path(config["tiers"]["rocksdb"]["path"]))
    return {name for name in found if name.startswith("hps_et.")}


def test_versions_are_served_and_switched_beside_each_other(config):
    with hps.open(config) as node:
        assert value(node) == 1
        node.load("words", 2, labels=["next"])
        assert (value(node), value(node, 1), value(node, "next")) == (2, 1, 2)
        node.load("words", 3, switch=False)
        assert [value(node, version) for version in (1, 2, 3)] == [1, 2, 3]
        assert node.rollback("words") == 1
        assert (value(node), served(node)) == (1, [1, 2, 3])
        # HPS finds the rows of version 1 under its own names, also while others are served.
        names = {"hps_et.words.left", "hps_et.words.right"}
        assert families(config) == names | {f"{n}@{v}" for n in names for v in (2, 3)}
        node.switch("words", 2)
    with hps.open(config) as node:  # as after a crash: the choice was recorded
        assert (value(node), served(node)) == (2, [2, 3])


def test_written_rows_are_of_one_version(config):
    with hps.open(config) as node:
        node.load("words", 2)
        rows = np.full((1, 4), 7, np.float32)
        node.write("words", "left", [5], rows, deleted=[6], version=2)
    with hps.open(config) as node:
        rows = node.lookup("words", {"left": np.array([5])}, version=2).vectors["left"]
        assert rows[0, 0] == 7
        assert node.lookup("words", {"left": np.array([6])}, version=2).defaulted == 1
        node.load("words", 1)
        assert value(node) == 1


def test_setting_chooses_the_version_with_the_names_of_hps(config):
    config["models"]["serve"]["words"]["hps_version"] = 3
    with hps.open(config) as node:
        node.load("words", 3)
        assert value(node) == 3
    assert families(config) == {
        f"hps_et.words.{table}{version}" for table in ("left", "right") for version in ("", "@1")
    }


def test_versions_have_names_in_redis(config):
    server = shared_server()
    redis = redis_settings(server).model_dump(mode="json", exclude_defaults=True)
    config["tiers"]["redis"] = {
        **redis,
        "layout": "hps",
        "partitions": 1,
        "initial_cache_rate": 1.0,
    }
    with hps.open(config) as node:
        node.load("words", 2)
        assert [value(node, version) for version in (1, 2)] == [1, 2]
        keys = set(server.ask("KEYS", "hps_et{hps_et.words.left*/p0}v"))
        assert keys == {
            b"hps_et{hps_et.words.left/p0}v",
            b"hps_et{hps_et.words.left@2/p0}v",
        }
        row = server.ask("HGET", "hps_et{hps_et.words.left@2/p0}v", np.int64(5).tobytes())
        assert np.frombuffer(row, np.float32)[0] == 2005
        assert {server.ask("HLEN", key) for key in keys} == {ROWS}
