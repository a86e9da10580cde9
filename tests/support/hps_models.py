"""Models of the unit cases of HPS's plug-ins for PyTorch and TensorFlow, opened by a ``ps.json``.

The sizes, keys and checks are those of HugeCTR 24.06: hps_torch/test and hps_tf/test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hps
from hps.config import load_config
from tests.support.waiting import PATIENCE_S


@dataclass(frozen=True)
class HpsTable:
    """Random rows ``(rows, dim)`` of the keys from ``first`` on; a sample has up to ``hotness`` keys."""

    name: str
    rows: int
    dim: int
    hotness: int
    first: int = 0

    @property
    def keys(self) -> Any:
        return np.arange(self.first, self.first + self.rows)

    @property
    def vectors(self) -> Any:
        return np.random.default_rng(self.first + self.dim).random(
            (self.rows, self.dim), np.float32
        )


@dataclass(frozen=True)
class HpsModel:
    """A model; ``default`` is the vector of unknown keys, ``max_batch`` the samples of a request."""

    name: str
    tables: Sequence[HpsTable]
    max_batch: int
    default: float


TENSORFLOW_MODELS = (
    HpsModel("foo", [HpsTable("sparse_embedding0", 30_000, 16, 10)], 16_384, 1.0),
    HpsModel(
        "bar",
        [
            HpsTable("sparse_embedding0", 50_000, 64, 3),
            HpsTable("sparse_embedding1", 2_000, 32, 5),
        ],
        1_024,
        1.0,
    ),
)
PYTORCH_MODELS = tuple(
    HpsModel(
        f"{n}_table",
        [HpsTable(f"table{i}", 10_000, 128, 10, i * 10_000) for i in range(n)],
        256,
        0.0,
    )
    for n in (1, 8)
)


@contextmanager
def opened(models: Sequence[HpsModel], folder: Path, **options: Any) -> Iterator[hps.Node]:
    """Write the models' files and ``ps.json``, whose ``options`` are given, into ``folder``; open a node."""
    document = {**options, "models": [_description(model, folder) for model in models]}
    path = folder / "ps.json"
    path.write_text(json.dumps(document))
    overrides = [
        "tiers.gpu.use=off",
        f"tiers.rocksdb.path={folder / 'db'}",
        f"tiers.rocksdb.guard.deadline_ms={PATIENCE_S * 1e3:.0f}",
    ]
    with hps.open(load_config(path, overrides, environ={})) as node:
        yield node


def _description(model: HpsModel, folder: Path) -> Mapping[str, Any]:
    files = []
    for number, table in enumerate(model.tables):
        files.append(f"{model.name}_{number}")
        written = folder / files[-1]
        written.mkdir()
        table.keys.astype("<i8").tofile(written / "key")
        table.vectors.astype("<f4").tofile(written / "emb_vector")
    return {
        "model": model.name,
        "sparse_files": files,
        "embedding_table_names": [table.name for table in model.tables],
        "embedding_vecsize_per_table": [table.dim for table in model.tables],
        "maxnum_catfeature_query_per_table_per_sample": [t.hotness for t in model.tables],
        "default_value_for_each_table": [model.default] * len(model.tables),
        "deployed_device_list": [0],
        "max_batch_size": model.max_batch,
        "hit_rate_threshold": 1.0,
        "gpucacheper": 1.0,
        "gpucache": True,
    }
