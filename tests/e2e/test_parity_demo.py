"""The model that comes with hps gives the scores its trainer recorded, without a server."""

from __future__ import annotations

import numpy as np
import pytest

import hps
from hps.cli.demo_data import FOLDER, load_demo
from hps.models.repository import Repository
from hps.types import Source


@pytest.fixture
def node(tmp_path):
    settings = {
        "models": {"repository": str(FOLDER)},
        "tiers": {"rocksdb": {"path": str(tmp_path / "rocksdb")}},
    }
    with hps.open(settings) as opened:
        yield opened


def test_scores_equal_the_recorded_ones(node):
    demo = load_demo()
    assert demo.samples == 256
    result = node.predict(demo.model, demo.keys, demo.dense, want_source=True)
    assert list(result.outputs) == list(demo.scores) == ["click", "logit"]
    for name, recorded in demo.scores.items():
        found = result.outputs[name].ravel()
        np.testing.assert_allclose(found, recorded, rtol=0, atol=1e-5, err_msg=name)
        assert np.unique(recorded).size > demo.samples / 2  # it tells requests apart
    assert result.defaulted == 0
    assert Source.DEFAULT not in np.concatenate(list(result.sources.values()))


def test_unknown_key_gets_the_learned_default(node):
    demo = load_demo()
    table = next(t for t in node.model(demo.model).spec.tables if t.name == "ad")
    found = node.lookup(demo.model, {"ad": np.array([-1])})
    assert found.vectors["ad"].tobytes() == np.array([table.default], np.float32).tobytes()
    assert np.any(found.vectors["ad"])
    assert found.defaulted == 1


def test_demo_model_is_small_and_names_its_source():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    manifest = Repository(FOLDER).open(load_demo().model).manifest
    assert manifest is not None
    assert manifest.metadata["trainer"] == "examples/ctr"
    assert manifest.metadata["test_auc"] > 0.68
