"""Rows in readable form, for ``hps lookup`` and the admin port."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hps.types import EmbeddingTable, KeyArray, LookupResult, Source, version_unix_ms


def explain_rows(table: EmbeddingTable, keys: KeyArray, result: LookupResult) -> dict[str, Any]:
    """Describe each key of ``keys (n,)``: its vector, the tier it came from, its version and age.

    ``result`` must answer a request by table with sources."""
    now_ms = time.time_ns() // 1_000_000
    vectors = result.vectors[table.name].astype(np.float32, copy=False)
    rows = []
    for i, key in enumerate(keys.tolist()):
        code, version = int(result.sources[table.name][i]), int(result.versions[table.name][i])
        rows.append(
            {
                "key": key,
                "found": code != Source.DEFAULT,
                "source": Source(code).name.lower(),
                "version": version,
                # Layouts that keep no version report 0.
                "age_s": (now_ms - version_unix_ms(version)) / 1e3 if version else None,
                "vector": vectors[i],
            }
        )
    return {
        "model": table.model,
        "version": table.version,
        "table": table.name,
        "dim": table.dim,
        "dtype": table.dtype.name,
        "rows": rows,
        "degraded": list(result.degraded),
    }
