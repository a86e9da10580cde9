"""A node with the models of HPS's cases for TensorFlow, one with small tables, and their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.support.hps_models import TENSORFLOW_MODELS, opened
from tests.support.waiting import PATIENT_GUARD

SPEC = {
    "name": "m",
    "tables": [
        {"name": "plain", "dim": 8, "default": 0.5},
        {"name": "half", "dim": 4, "dtype": "float16"},
    ],
}


@pytest.fixture(scope="package")
def rows() -> Mapping[str, np.ndarray]:
    """Rows of the keys 0…99, by table."""
    rng = np.random.default_rng(0)
    drawn = {table["name"]: rng.random((100, table["dim"]), np.float32) for table in SPEC["tables"]}
    return drawn | {"half": drawn["half"].astype(np.float16).astype(np.float32)}


@pytest.fixture(scope="package")
def node(rows, tmp_path_factory) -> Iterator[hps.Node]:
    root = tmp_path_factory.mktemp("keras")
    tables = {name: (np.arange(100), of) for name, of in rows.items()}
    write_version(root / "models", ModelSpec.model_validate(SPEC), 1, tables)
    database = {"path": str(root / "db"), "guard": PATIENT_GUARD}
    settings = {"models": {"repository": str(root / "models")}, "tiers": {"rocksdb": database}}
    with hps.open(settings) as opened_node:
        yield opened_node


@pytest.fixture(scope="package")
def ps_json_node(tmp_path_factory) -> Iterator[hps.Node]:
    folder = tmp_path_factory.mktemp("hps")
    with opened(TENSORFLOW_MODELS, folder, supportlonglong=False) as opened_node:
        yield opened_node
