"""A ps.json with fp8_quant: every tier returns the vectors of float8 rows for static tables, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.config import load_config
from hps.errors import ConfigError, ModelError
from hps.models.importers.import_model import import_model
from hps.models.importers.sources import plan_import
from hps.models.repository import Repository
from hps.native.twin_rows import LARGEST_FLOAT8, LEAST_SCALE
from hps.row_format import row_format
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable, Source
from tests.support import twin_device

ROWS = 700
DIMS = {"user": 16, "item": 6}
DEFAULT = 0.1  # no value of a float8 row
KEYS = np.arange(ROWS, dtype=np.int64) * 3 + 2**40


def vectors_of(dim: int) -> Any:
    """(ROWS, dim): rows of different magnitudes; one is zero, one below the least scale's."""
    random = np.random.default_rng(dim)
    vectors = random.standard_normal((ROWS, dim)) * 10.0 ** random.integers(-6, 6, (ROWS, 1))
    vectors[3], vectors[4] = 0, vectors[4] * 1e-12
    return vectors.astype(np.float32)


def stored(dim: int) -> tuple[Any, Any]:
    """The rows of such a table as they are stored, and the vectors that they decode to."""
    table = EmbeddingTable.make("x", dim, rows="float8_e4m3")
    rows = to_rows(table, vectors_of(dim))
    return rows, to_vectors(table, rows)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    for table, dim in DIMS.items():
        (tmp_path / table).mkdir()
        KEYS.astype("<i8").tofile(tmp_path / table / "key")
        vectors_of(dim).astype("<f4").tofile(tmp_path / table / "emb_vector")
    model = {
        "model": "wdl",
        "sparse_files": [*DIMS],
        "embedding_vecsize_per_table": [*DIMS.values()],
        "embedding_table_names": [*DIMS],
        "default_value_for_each_table": [DEFAULT, DEFAULT],
        "maxnum_catfeature_query_per_table_per_sample": [1, 1],
        "max_batch_size": ROWS,
        "embedding_cache_type": "static",
        "fp8_quant": True,
    }
    return {"models": [model]}


@pytest.fixture
def open_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens one node at a time; all are closed before ``monkeypatch`` removes the twin of a GPU."""
    nodes: list[Any] = []

    def make(document: dict[str, Any], *overrides: str, gpu: str = "off") -> Any:
        for node in nodes:
            node.close()
        nodes.clear()
        path = tmp_path / "ps.json"
        path.write_text(json.dumps(document))
        common = (f"tiers.gpu.use={gpu}", f"tiers.rocksdb.path={tmp_path / 'db'}")
        if "persistent_db" in document:
            common = common[:1]
        nodes.append(hps.open(load_config(path, [*common, *overrides], environ={})))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def check(node: Any, expected: dict[str, Any], source: Source) -> None:
    for name, vectors in expected.items():
        found = node.lookup("wdl", {name: KEYS}, by_table=True, want_source=True)
        assert found.vectors[name].dtype == np.float32
        assert found.vectors[name].tobytes() == vectors.tobytes()
        assert set(found.sources[name].tolist()) == {int(source)}
        unknown = node.lookup("wdl", {name: np.array([5])}, by_table=True).vectors[name]
        assert (unknown == np.float32(DEFAULT)).all()


def exact() -> dict[str, Any]:
    return {name: vectors_of(dim) for name, dim in DIMS.items()}


def rounded() -> dict[str, Any]:
    return {name: stored(dim)[1] for name, dim in DIMS.items()}


CPU, ROCKSDB = [], ["tiers.cpu_cache.enabled=false"]


@pytest.mark.parametrize(
    ("tiers", "source"), [(CPU, Source.CPU), (ROCKSDB, Source.ROCKSDB)], ids=["cpu", "rocksdb"]
)
def test_vectors_are_those_of_float8_rows(
    document: dict[str, Any], open_node: Any, tiers: list[str], source: Source
) -> None:
    node = open_node(document, *tiers)
    check(node, rounded(), source)
    assert not [warning for warning in node.warnings if "fp8_quant" in warning]
    for name, dim in DIMS.items():
        table = node.model("wdl").tables[name]
        assert table.row_bytes == row_format("float8_e4m3").row_bytes(dim) == dim + 4
        found = node.lookup("wdl", {name: KEYS}, by_table=True, stored_rows=True)
        rows = found.vectors[name]
        assert rows.tobytes() == stored(dim)[0].tobytes()
        largest = np.abs(vectors_of(dim)).max(axis=1)
        scales = np.ascontiguousarray(rows[:, -4:]).view("<f4")[:, 0]
        np.testing.assert_array_equal(scales, np.maximum(largest / LARGEST_FLOAT8, LEAST_SCALE))


@pytest.mark.parametrize("tiers", [CPU, ROCKSDB], ids=["cpu", "rocksdb"])
@pytest.mark.parametrize("change", [{"fp8_quant": False}, {"embedding_cache_type": "dynamic"}])
def test_without_it_and_in_other_tables_vectors_are_exact(
    document: dict[str, Any], open_node: Any, tiers: list[str], change: dict[str, Any]
) -> None:
    document["models"][0] |= {"hit_rate_threshold": 1.1, "gpucacheper": 1.0, **change}
    node = open_node(document, *tiers)
    check(node, exact(), Source.ROCKSDB if tiers else Source.CPU)
    named = [warning for warning in node.warnings if "fp8_quant" in warning]
    assert len(named) == ("embedding_cache_type" in change)


def test_static_table_on_a_gpu_has_float8_rows(
    document: dict[str, Any], open_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = twin_device.install(monkeypatch)
    node = open_node(document, gpu="required")
    table = node.model("wdl").tables["user"]
    assert caches[0].sealed(table)
    assert table.row_format.name == "float8_e4m3"
    for name, vectors in rounded().items():
        found = node.lookup_on_device("wdl", {name: KEYS}).vectors[name].get()
        assert found.tobytes() == vectors.tobytes()


def test_database_of_hps_keeps_its_float32_rows(
    document: dict[str, Any], open_node: Any, tmp_path: Path
) -> None:
    """HPS reads that database too."""
    document["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / "hps")}
    node = open_node(document, "tiers.cpu_cache.enabled=false")
    check(node, exact(), Source.ROCKSDB)
    assert [t.row_bytes for t in node.model("wdl").tables.values()] == [4 * 16, 4 * 6]
    (warning,) = [each for each in node.warnings if "fp8_quant" in each]
    assert "persistent_db.type is rocks_db, and HPS's layout there holds float32 rows" in warning


def test_chosen_layout_of_hps_is_an_error_that_names_the_key(
    document: dict[str, Any], open_node: Any
) -> None:
    with pytest.raises(ConfigError, match=r"rows of float8_e4m3, .* 'hps' .*fp8_quant: false"):
        open_node(document, "tiers.rocksdb.layout=hps")


def test_vector_that_is_not_finite_is_an_error_that_names_the_key(
    document: dict[str, Any], open_node: Any, tmp_path: Path
) -> None:
    vectors = vectors_of(16)
    vectors[9, 1] = np.inf
    vectors.tofile(tmp_path / "user" / "emb_vector")
    with pytest.raises(ModelError, match=r"'user': .* float8_e4m3; .*fp8_quant: false"):
        open_node(document)


def test_changed_key_loads_the_files_again(document: dict[str, Any], open_node: Any) -> None:
    for given in (False, True, False):
        document["models"][0]["fp8_quant"] = given
        check(open_node(document), rounded() if given else exact(), Source.CPU)


def test_changed_key_is_rejected_if_rows_were_written(
    document: dict[str, Any], open_node: Any
) -> None:
    node = open_node(document)
    node.write("wdl", "user", KEYS[:1], vectors_of(16)[5:6])
    document["models"][0]["fp8_quant"] = False
    message = r"holds its rows as float8_e4m3, not as float32, and rows were streamed"
    with pytest.raises(ModelError, match=message):
        open_node(document)


def test_written_rows_are_stored_as_float8(document: dict[str, Any], open_node: Any) -> None:
    expected = rounded()
    expected["user"][0] = expected["user"][5]
    for again in (False, True):
        node = open_node(document)
        if not again:
            node.write("wdl", "user", KEYS[:1], vectors_of(16)[5:6])
        check(node, expected, Source.CPU)


def test_running_node_takes_a_changed_key_with_another_version(
    document: dict[str, Any], open_node: Any, tmp_path: Path
) -> None:
    node = open_node(document)
    changed = {**document["models"][0], "fp8_quant": False}
    (tmp_path / "ps.json").write_text(json.dumps({"models": [changed]}))
    with pytest.raises(ModelError, match="another `version`"):
        node.load("wdl")
    check(node, rounded(), Source.CPU)
    (tmp_path / "ps.json").write_text(json.dumps({"models": [changed | {"version": 2}]}))
    node.load("wdl")
    check(node, exact(), Source.CPU)


def test_imported_model_has_the_row_format(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ps.json").write_text(json.dumps(document))
    import_model(tmp_path / "models", "wdl", plan_import(tmp_path / "ps.json"))
    spec = Repository(tmp_path / "models").open("wdl").spec
    assert {table.rows for table in spec.tables} == {"float8_e4m3"}
