"""Files of a loaded version that are verified before the node switches to it."""

import time

import numpy as np
import pytest

import hps
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.errors import ModelError
from hps.models.manifest import checksum_file
from hps.models.mapped_file import MAPPED_FILE
from hps.models.version_writer import write_version
from hps.native.mapped_format import HEADER_BYTES
from hps.node import mapped_files
from hps.node.mapped_files import VerificationPace

ROWS = 20_000
SPEC = ModelSpec(
    name="m",
    tables=[TableSpec(name="a", dim=4)],
    features=[FeatureSpec(name="a", table="a", pooling="none")],
)


def publish(folder, version):
    """Every row is full of the version; returns the table's mapped file."""
    rows = np.arange(ROWS), np.full((ROWS, 4), version, np.float32)
    return write_version(folder, SPEC, version, {"a": rows}) / "tables/a" / MAPPED_FILE


def flip_byte(path):
    """Damage a row of a file; again: repair it."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 40)
        byte = file.read(1)
        file.seek(HEADER_BYTES + 40)
        file.write(bytes([byte[0] ^ 0xFF]))


@pytest.fixture
def models(tmp_path):
    publish(tmp_path / "models", 1)
    return tmp_path / "models"


@pytest.fixture
def open_node(tmp_path, models):
    nodes = []

    def make(rocksdb=None, **mapped):
        """Open a node that reads no file into memory."""
        config = {
            "models": {"repository": str(models), "rollback_s": 0},
            "tiers": {
                "cpu_cache": {"warm": False},
                "rocksdb": {"path": str(tmp_path / "db"), **(rocksdb or {})},
                "mapped": {"memory_bytes": 0, "verify": "before_switch", **mapped},
            },
        }
        nodes.append(hps.open(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def served(node):
    """The version that the rows of a lookup are of."""
    (version,) = np.unique(node.lookup("m", {"a": np.arange(ROWS)}).vectors["a"])
    return version


@pytest.mark.parametrize("rocksdb", [{}, {"enabled": False}])
def test_file_that_is_not_read_into_memory_is_verified_before_a_switch(open_node, models, rocksdb):
    node = open_node(rocksdb=rocksdb)
    path = publish(models, 2)
    flip_byte(path)
    with pytest.raises(
        ModelError,
        match=rf"table m/2/a has a damaged mapped file: {path}: wrong checksum in block 0. Restore",
    ):
        node.control.load("m", 2)
    assert served(node) == 1
    assert not node.damage()
    flip_byte(path)
    assert node.control.load("m", 2) == 2
    assert served(node) == 2


@pytest.mark.parametrize("name", ["key", "emb_vector"])
def test_files_that_fill_the_caches_are_verified_before_a_switch(open_node, models, name):
    node = open_node()
    path = publish(models, 2).with_name(name)
    flip_byte(path)
    with pytest.raises(ModelError, match=rf"{path}: the contents do not match the manifest"):
        node.control.load("m", 2)
    assert served(node) == 1
    flip_byte(path)
    assert node.control.load("m", 2) == 2


def test_files_are_verified_before_a_switch_once_and_at_the_rate(open_node, models, monkeypatch):
    verified, steps, call = [], [], VerificationPace.__call__

    def checksum(path, pace):
        verified.append(path)
        return checksum_file(path, pace)

    def step(pace, n):
        steps.append(n)
        call(pace, n)

    monkeypatch.setattr(mapped_files, "checksum_file", checksum)
    monkeypatch.setattr(VerificationPace, "__call__", step)
    first = models / "m/1/tables/a" / MAPPED_FILE
    node = open_node(verify_bytes_per_s=first.stat().st_size * 4)
    path = publish(models, 2)
    begun = time.monotonic()
    node.control.load("m", 2)
    assert time.monotonic() - begun > 0.4  # the mapped file and its sources: about twice its bytes
    files = [path.with_name("key"), path.with_name("emb_vector")]
    assert verified == files
    rows = path.stat().st_size - HEADER_BYTES
    assert sum(steps) >= rows + sum(each.stat().st_size for each in files)
    for version in (1, 2, 1):
        node.control.load("m", version)
    assert verified == [*files, first.with_name("key"), first.with_name("emb_vector")]


def test_damaged_delta_is_found_before_a_switch(open_node, models):
    node = open_node()
    keys, vectors = np.arange(ROWS), np.full((ROWS, 4), 1, np.float32)
    vectors[:50] = 2
    folder = write_version(models, SPEC, 2, {"a": (keys, vectors)}) / "tables/a"
    path = folder / "delta" / MAPPED_FILE
    flip_byte(path)
    with pytest.raises(ModelError, match=rf"m/2/a has a damaged mapped file: {path}: wrong"):
        node.control.load("m", 2)
    assert served(node) == 1
