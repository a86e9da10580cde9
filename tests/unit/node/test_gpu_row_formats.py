"""Narrow rows in the GPU cache: a node on NumPy twins and on a real GPU answers like one without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.types import JaggedKeys, Source, version_now
from tests.unit.node.test_gpu_caches import (  # noqa: F401 # fixtures
    DENSE,
    FEATURES,
    HELD,
    TABLES,
    both,
    network,
    open_node,
    pair,
    request_of,
    require_network_on_gpu,
    same,
    table_of,
)

FORMATS = {
    "int8": ("int8", "int8"),
    "int4 and float32 as float16": ("int4", "float32"),
    "float8": ("float8_e4m3", "float8_e4m3"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 as float32": ("float16", "int4"),
    "one of two": ("float32", "int8"),
}
HOTNESS = {"item": 3, "seen": 2}


@pytest.fixture(scope="module", params=FORMATS)
def repository(request, tmp_path_factory):
    """The model of the tests of a GPU, with rows in narrow formats; all features have a fixed hotness."""
    folder = tmp_path_factory.mktemp("models")
    formats = zip(TABLES, FORMATS[request.param], strict=True)
    tables = [table.model_copy(update={"rows": rows}) for table, rows in formats]
    features = [f.model_copy(update={"hotness": HOTNESS.get(f.name, f.hotness)}) for f in FEATURES]
    spec = ModelSpec(name="m", tables=tables, features=features, dense=DENSE)
    rng, keys = np.random.default_rng(1), np.arange(HELD)
    held = {
        table.name: (keys, rng.standard_normal((HELD, table.dim)).astype(np.float32))
        for table in tables
    }
    write_version(folder, spec, 1, held, dense=network())
    return folder


def check_lookups(node, plain, features, **options):
    expected = plain.lookup("m", features)
    for _ in range(3):
        found = node.lookup_on_device("m", features, **options)
        assert found.vectors.keys() == expected.vectors.keys()
        for name, values in expected.vectors.items():
            vectors = found.vectors[name].get()
            assert vectors.dtype == values.dtype
            assert vectors.tobytes() == values.tobytes()
        assert found.defaulted == expected.defaulted
        node.writer.flush()


@pytest.mark.parametrize("keys", [(0, 200), (HELD - 100, HELD + 100)], ids=str)
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_predictions_and_vectors_equal_those_without_a_gpu(both, batch, keys):  # noqa: F811
    node, plain = both
    for _ in range(3):
        features, dense = request_of(np.arange(*keys), batch)
        same(node.predict("m", features, dense), plain.predict("m", features, dense))
        node.writer.flush()
    check_lookups(node, plain, features)
    check_lookups(node, plain, {"user": features["user"]})
    check_lookups(node, plain, features, want_source=True)


def test_deleted_and_missing_rows_have_exact_defaults(both):  # noqa: F811
    node, plain = both
    for each in both:
        gone = np.arange(20, 40), np.full(20, version_now(), np.uint64)
        each.writer.delete(table_of(each, "users"), *gone).result()
    features, _ = request_of(np.arange(15, 60), 50)
    check_lookups(node, plain, features)
    plain_keys = {"last": np.array([[20, HELD + 5]])}
    vectors = node.lookup_on_device("m", plain_keys).vectors["last"].get()
    assert (vectors.reshape(2, -1)[1] == -1).all()


def test_bags_of_different_sizes_with_weights_equal_host_results(both):  # noqa: F811
    node, plain = both
    lists, weights = [[1, 2, HELD + 7], [5, 5, 6]], [[0.5, 2, 1], [1, 0, 0.25]]
    bags = {"item": JaggedKeys.from_lists(lists, weights)}
    expected = plain.lookup("m", bags).vectors["item"]
    assert node.lookup_on_device("m", bags).vectors["item"].get().tobytes() == expected.tobytes()


def test_rows_of_the_cpu_cache_reach_the_gpu_as_they_are_stored(pair):  # noqa: F811
    node, _, (cache,) = pair
    keys = np.arange(40)
    found = node.lookup("m", {"user": keys}, want_source=True)
    assert set(found.sources["user"].tolist()) <= set(map(int, Source))
    table = table_of(node, "users")
    for key, entry in list(cache._tables[table].items()):
        assert entry.row.dtype == table.row_dtype, key
        assert entry.row.shape == (table.row_width,)


@pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
@pytest.mark.parametrize("gpus", [1, pytest.param(None, marks=pytest.mark.gpu)])
def test_common_batches_take_narrow_rows(open_node, tmp_path, gpus):  # noqa: F811
    node, _ = open_node(
        gpus=gpus,
        gpu={"share": 0.5, "use": "required"},
        cpu={"shared": {"name": "test", "folder": str(tmp_path)}, "share": 1.0},
        server={"runtime": str(tmp_path / "run")},
    )
    require_network_on_gpu(node)
    plain = open_node(gpus=None, gpu={"use": "off"}, dense={"provider": "cpu"})[0]
    for batch in (1, 40, 700):
        for keys in (np.arange(200), np.arange(HELD)):
            asked = request_of(keys, batch)
            for _ in range(2):
                same(node.predict("m", *asked), plain.predict("m", *asked))
