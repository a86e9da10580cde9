"""A small model version and a database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.models.repository import ModelVersion, Repository
from hps.models.version_writer import write_version
from hps.rows.tiers import RocksDbRows
from hps.tiers.rocksdb import RocksDbTier

Write = Callable[..., ModelVersion]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes table ``t`` of model ``m``: ``keys (n,)``, ``vectors (n, dim)``."""

    def version(keys: object, vectors: object, **table: object) -> ModelVersion:
        rows = np.asarray(vectors, np.float32)
        described = {"name": "t", "dim": rows.shape[1], **table}
        spec = ModelSpec.model_validate({"name": "m", "tables": [described]})
        write_version(tmp_path / "models", spec, 1, {"t": (np.asarray(keys, np.int64), rows)})
        return Repository(tmp_path / "models").open("m")

    return version


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksDbRows]:
    tier = RocksDbTier(tmp_path / "db")
    yield RocksDbRows(tier)
    tier.close()
