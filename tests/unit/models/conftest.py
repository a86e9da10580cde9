"""Small model repositories to read and to damage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version

MakeVersion = Callable[..., Path]


def spec(name: str = "ctr", **tables: int) -> ModelSpec:
    dims = tables or {"users": 4, "items": 8}
    return ModelSpec.model_validate(
        {"name": name, "tables": [{"name": t, "dim": d} for t, d in dims.items()]}
    )


def rows(n: int, dim: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.permutation(n).astype(np.int64) - n // 2, rng.random((n, dim), np.float32)


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    return spec


@pytest.fixture
def make_rows() -> Callable[..., tuple[Any, Any]]:
    return rows


@pytest.fixture
def make_version(tmp_path: Path) -> MakeVersion:
    """Writes a version with random rows, without mapped files by default; returns its folder."""

    def make(version: int = 1, n: int = 100, **settings: Any) -> Path:
        settings.setdefault("mapped", False)
        described = settings.pop("spec", None) or spec()
        tables = settings.pop("tables", None) or {
            t.name: rows(n, t.dim, seed=version + i) for i, t in enumerate(described.tables)
        }
        return write_version(tmp_path / "models", described, version, tables, **settings)

    return make
