"""A node with small tables, and the same rows as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.support.waiting import PATIENT_GUARD

SPEC = {
    "name": "m",
    "tables": [
        {"name": "plain", "dim": 8, "default": 0.5},
        {"name": "pooled", "dim": 4, "default": 0.25},
        {"name": "half", "dim": 4, "dtype": "float16"},
    ],
    "features": [
        {"name": "shifted", "table": "plain", "pooling": "sum", "key_offset": 5},
        {"name": "sums", "table": "pooled", "pooling": "sum"},
        {"name": "means", "table": "pooled", "pooling": "mean"},
        {"name": "short", "table": "pooled", "pooling": "sqrtn", "max_norm": 0.8},
    ],
}


@pytest.fixture(scope="package")
def rows() -> Mapping[str, np.ndarray]:
    """Rows of the keys 0…99, by table."""
    rng = np.random.default_rng(0)
    drawn = {table["name"]: rng.random((100, table["dim"]), np.float32) for table in SPEC["tables"]}
    return drawn | {"half": drawn["half"].astype(np.float16).astype(np.float32)}


@pytest.fixture(scope="package")
def repository(rows, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("torch") / "models"
    tables = {name: (np.arange(100), of) for name, of in rows.items()}
    write_version(root, ModelSpec.model_validate(SPEC), 1, tables)
    return root


@pytest.fixture(scope="package")
def node(repository) -> Iterator[hps.Node]:
    database = {"path": str(repository.parent / "db"), "guard": PATIENT_GUARD}
    with hps.open(
        {"models": {"repository": str(repository)}, "tiers": {"rocksdb": database}}
    ) as it:
        yield it
