"""A node with small tables, and the same rows as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import COMPILED
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
    if not COMPILED:
        pytest.skip("the operators are in the compiled core")
    from hps.onnx import register_node, unregister_node

    root = tmp_path_factory.mktemp("onnx")
    tables = {name: (np.arange(100), of) for name, of in rows.items()}
    write_version(root / "models", ModelSpec.model_validate(SPEC), 1, tables)
    database = {"path": str(root / "db"), "guard": PATIENT_GUARD}
    settings = {"models": {"repository": str(root / "models")}, "tiers": {"rocksdb": database}}
    with hps.open(settings) as opened:
        register_node("rows", opened)
        yield opened
        unregister_node("rows")
