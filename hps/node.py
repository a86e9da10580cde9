"""An open node: models that answer, and what may be asked of them without a server.

``hps.build`` puts a node together; REST, gRPC, the command line and user code call it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from hps.config.model_schema import ModelSpec
from hps.errors import BadRequest, NotFound
from hps.given import Features, jagged, targets, tensor
from hps.lookup.base import Lookup
from hps.lookup.on_device import DeviceLookup
from hps.metrics import Metrics
from hps.names import hint_for
from hps.pipeline import InferencePipeline
from hps.streams import Streams
from hps.tier_status import TierStatus, describe_table, hot_keys
from hps.types import (
    EmbeddingTable,
    KeyArray,
    LookupRequest,
    LookupResult,
    PredictRequest,
    PredictResult,
    as_keys,
)
from hps.updates.freshness import FRESH, Freshness
from hps.updates.writer import CacheWriter
from hps.workers import Lanes


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model, ready. ``pipeline`` is None for a model without a dense part."""

    name: str
    version: int
    spec: ModelSpec
    tables: Mapping[str, EmbeddingTable]
    engine: Lookup
    pipeline: InferencePipeline | None = None
    on_devices: tuple[DeviceLookup, ...] = ()
    """Lookups whose vectors stay on a GPU, one per GPU."""
    freshness: Freshness = FRESH


@dataclass(slots=True, repr=False)
class Node:
    """What ``hps.open`` returns. Any number of threads may call it until ``close``; a process that was
    forked from the one that opened it may not."""

    models: dict[str, ServedModel]
    metrics: Metrics
    tiers: list[TierStatus]
    writer: CacheWriter
    streams: Streams
    workers: Lanes
    warnings: tuple[str, ...] = ()
    promotions_into_stores: Callable[[], Mapping[str, int]] = dict
    """Keys waiting to be copied from one store into another, by the latter's name."""
    _resources: ExitStack = field(default_factory=ExitStack)
    _opened: float = field(default_factory=time.monotonic)
    _process: int = field(default_factory=os.getpid)
    _turn: Iterator[int] = field(default_factory=count)

    def __repr__(self) -> str:
        models = ", ".join(f"{model.name}/{model.version}" for model in self.models.values())
        tiers = " > ".join(entry.tier.info.name for entry in self.tiers)
        return f"<hps.Node: {models}; {tiers}>"

    def model(self, name: str, version: str | int | None = None) -> ServedModel:
        """The served model; ``version`` None or "" takes the one there is. Raises ``NotFound``."""
        found = self.models.get(name)
        if found is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version not in (None, "") and str(version) != str(found.version):
            raise NotFound(
                f"Request for unknown model: '{name}' version {version} is not found; version "
                f"{found.version} is served"
            )
        return found

    def lookup(
        self,
        model: str,
        features: Features,
        *,
        out: Mapping[str, Any] | None = None,
        by_table: bool = False,
        want_source: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        """The vectors of ``features``: any of the model's features, or tables with ``by_table``.

        ``out`` names arrays that are written in place: NumPy arrays, or writable tensors on the host
        with ``__dlpack__``, C-contiguous, of the table's dtype and the result's shape.
        """
        into = None if out is None else targets(out)
        request = LookupRequest(jagged(features), _deadline(timeout_s), want_source, into, by_table)
        served = self.model(model)
        served.freshness.require()
        return served.freshness.mark(served.engine.lookup(request))

    def lookup_on_device(
        self,
        model: str,
        features: Features,
        *,
        by_table: bool = False,
        want_source: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        """As `lookup`, with vectors that stay on a GPU: complete CuPy arrays, which Torch takes by DLPack. Of
        several GPUs each in turn. Raises ``BadRequest`` for a node without a GPU cache."""
        served = self.model(model)
        served.freshness.require()
        lookups = served.on_devices
        if not lookups:
            raise BadRequest(
                "this node has no GPU cache (tiers.gpu.use); lookup answers on the host"
            )
        request = LookupRequest(
            jagged(features), _deadline(timeout_s), want_source, by_table=by_table
        )
        return served.freshness.mark(lookups[next(self._turn) % len(lookups)].pooled(request))

    def table(self, model: str, table: str) -> EmbeddingTable:
        """A table of a served model. Raises ``NotFound``."""
        tables = self.model(model).tables
        if table not in tables:
            raise NotFound(f"model '{model}' has no table '{table}'{hint_for(table, tables)}")
        return tables[table]

    def write(
        self, model: str, table: str, keys: Any = (), vectors: Any = (), *, deleted: Any = ()
    ) -> int:
        """Upsert ``vectors (n, dim)`` for ``keys (n,)`` and delete ``deleted (m,)``, the table's own keys: in
        every store, then in the caches; then return. The version they got: Unix ms << 20 | sequence. For
        a few rows at a time; many belong into a stream (`hps.updates.Producer`).

        Raises ``BadRequest``, ``NotFound``, ``TierError`` or ``Unavailable``; calling again is harmless.
        """
        found = self.table(model, table)
        rows = np.asarray(tensor("vectors", vectors))
        if rows.size == 0:
            rows = np.empty((0, found.dim), found.dtype)
        if rows.dtype.kind not in "fiu" or rows.ndim != 2:
            raise BadRequest(f"vectors must be numbers (n, dim), not {rows.shape} {rows.dtype}")
        return self.streams.write(found, _keys("keys", keys), rows, _keys("deleted", deleted))

    def predict(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, Any] | None = None,
        *,
        top_k: int | None = None,
        outputs: tuple[str, ...] | None = None,
        want_source: bool = False,
        timeout_s: float | None = None,
    ) -> PredictResult:
        """The model's named outputs for a batch; see ``PredictRequest``."""
        served = self.model(model)
        pipeline = served.pipeline
        if pipeline is None:
            raise BadRequest(f"model '{model}' has no dense part; use lookup")
        served.freshness.require()
        tensors = {name: tensor(name, array) for name, array in (dense or {}).items()}
        request = PredictRequest(
            jagged(features), tensors, top_k, _deadline(timeout_s), want_source, outputs
        )
        return served.freshness.mark(pipeline.predict(request))

    def hot_keys(
        self, model: str | None = None, table: str | None = None, limit: int = 20
    ) -> list[dict[str, Any]]:
        """The hottest keys of each table (of ``model``; its ``table``) that a cache ranks, with their scores
        from 255 down, ready for JSON. Looks through whole caches. Raises ``NotFound``."""
        chosen = list(self.models.values()) if model is None else [self.model(model)]
        if table is not None and not any(table in served.tables for served in chosen):
            who = "no model has a" if model is None else f"model '{model}' has no"
            raise NotFound(f"{who} table '{table}'")
        found = []
        for served in chosen:
            for name, each in served.tables.items():
                if table in (None, name):
                    where = {"model": served.name, "table": name}
                    found += [where | hot for hot in hot_keys(each, self.tiers, limit)]
        return found

    def promotions_waiting(self) -> dict[str, int]:
        """Keys waiting to be copied into a tier, by its name; ``cpu`` stands for all caches."""
        return {"cpu": self.writer.waiting_keys, **self.promotions_into_stores()}

    def status(self) -> dict[str, Any]:
        """What the node serves and holds, ready for JSON."""
        from hps import __version__

        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._opened, 3),
            "models": [self._model_status(model) for model in self.models.values()],
            "tiers": [entry.describe() for entry in self.tiers],
            "lookups_waiting": self.workers.waiting,
            "updates": self.streams.status(),
            "promotions_waiting_keys": sum(self.promotions_waiting().values()),
            "warnings": list(self.warnings),
        }

    def _model_status(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "version": model.version,
            "dense": model.pipeline is not None,
            "features": list(model.engine.features),
            "tables": [describe_table(table, self.tiers) for table in model.tables.values()],
        }

    def close(self) -> None:
        """Finish what was accepted, then release threads, files and memory. Idempotent; does nothing
        in a process that was forked from the one that opened the node, whose it stays."""
        if os.getpid() == self._process:
            self._resources.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _keys(name: str, keys: Any) -> KeyArray:
    try:
        found = as_keys(tensor(name, keys))
    except TypeError as error:
        raise BadRequest(f"{name}: {error}") from None
    if found.ndim != 1:
        raise BadRequest(f"{name} must be (n,), not {found.shape}")
    return found


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
