"""An open node: models that answer, and what may be asked of them without a server.

``hps.build`` puts a node together; REST, gRPC, the command line and user code call it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import ModelSpec
from hps.errors import BadRequest, NotFound, TierError
from hps.lookup.base import Lookup
from hps.metrics import Metrics
from hps.pipeline import InferencePipeline
from hps.tiers.base import Tier
from hps.tiers.cpu_reads import CacheReads
from hps.types import (
    EmbeddingTable,
    JaggedKeys,
    LookupRequest,
    LookupResult,
    PredictRequest,
    PredictResult,
    VectorArray,
    as_keys,
)
from hps.updates.writer import CacheWriter
from hps.workers import Lanes

Features = Mapping[str, Any]
"""Keys by feature: ``JaggedKeys``, or integers ``(batch,)`` or ``(batch, hotness)`` as an array, a list
or anything on the host with ``__dlpack__``."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model, ready. ``pipeline`` is None for a model without a dense part."""

    name: str
    version: int
    spec: ModelSpec
    tables: Mapping[str, EmbeddingTable]
    engine: Lookup
    pipeline: InferencePipeline | None = None


@dataclass(slots=True)
class TierStatus:
    """A tier and what can be said of it: its ``rows`` of a table, its ``capacity`` of a table in rows when
    it is bounded, the ``state`` of its circuit when it is guarded, the ``size`` of a table in bytes where it
    knows that, and further ``facts``, ready for JSON. None of them waits."""

    tier: Tier
    rows: Callable[[EmbeddingTable], int]
    capacity: Callable[[EmbeddingTable], int | None] = lambda _table: None
    state: Callable[[], str] = lambda: "closed"
    size: Callable[[EmbeddingTable], int | None] = lambda _table: None
    facts: Callable[[], Mapping[str, Any]] = dict

    def known_rows(self, table: EmbeddingTable) -> int | None:
        """``rows``, or None when a broken tier cannot say: a status is asked for most when one is."""
        try:
            return self.rows(table)
        except TierError:
            return None


@dataclass(slots=True, repr=False)
class Node:
    """What ``hps.open`` returns. Any number of threads may call it until ``close``; a process that was
    forked from the one that opened it may not."""

    models: dict[str, ServedModel]
    metrics: Metrics
    tiers: list[TierStatus]
    writer: CacheWriter
    workers: Lanes
    warnings: tuple[str, ...] = ()
    promotions_into_stores: Callable[[], Mapping[str, int]] = dict
    """Keys waiting to be copied from one store into another, by the latter's name."""
    _resources: ExitStack = field(default_factory=ExitStack)
    _opened: float = field(default_factory=time.monotonic)
    _process: int = field(default_factory=os.getpid)

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
        targets = None if out is None else _targets(out)
        request = LookupRequest(
            _jagged(features), _deadline(timeout_s), want_source, targets, by_table
        )
        return self.model(model).engine.lookup(request)

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
        pipeline = self.model(model).pipeline
        if pipeline is None:
            raise BadRequest(f"model '{model}' has no dense part; use lookup")
        tensors = {name: _tensor(name, array) for name, array in (dense or {}).items()}
        return pipeline.predict(
            PredictRequest(
                _jagged(features), tensors, top_k, _deadline(timeout_s), want_source, outputs
            )
        )

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
                for entry in self.tiers:
                    if table in (None, name) and isinstance(entry.tier, CacheReads):
                        keys, scores = entry.tier.top_k(each, limit)
                        hot = {"keys": keys.tolist(), "scores": scores.tolist()}
                        found.append({"model": served.name, "table": name} | hot)
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
            "tiers": [
                {
                    "name": entry.tier.info.name,
                    "kind": "cache" if entry.tier.info.cache else "store",
                    "volatile": entry.tier.info.volatile,
                    "shared": entry.tier.info.shared,
                    "circuit": entry.state(),
                    **entry.facts(),
                }
                for entry in self.tiers
            ],
            "lookups_waiting": self.workers.waiting,
            "promotions_waiting_keys": sum(self.promotions_waiting().values()),
            "warnings": list(self.warnings),
        }

    def _model_status(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "version": model.version,
            "dense": model.pipeline is not None,
            "features": list(model.engine.features),
            "tables": [self._table_status(table) for table in model.tables.values()],
        }

    def _table_status(self, table: EmbeddingTable) -> dict[str, Any]:
        held = {entry.tier.info.name: entry.known_rows(table) for entry in self.tiers}
        bounds = {entry.tier.info.name: entry.capacity(table) for entry in self.tiers}
        sizes = {entry.tier.info.name: entry.size(table) for entry in self.tiers}
        return {
            "name": table.name,
            "dim": table.dim,
            "dtype": table.dtype.name,
            "miss_policy": table.miss.kind,
            "rows": {name: rows for name, rows in held.items() if rows is not None},
            "capacity_rows": {name: rows for name, rows in bounds.items() if rows is not None},
            "bytes": {name: size for name, size in sizes.items() if size is not None},
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


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _jagged(features: Features) -> dict[str, JaggedKeys]:
    jagged = {}
    for name, keys in features.items():
        if not isinstance(keys, JaggedKeys):
            try:
                keys = JaggedKeys.dense(as_keys(_tensor(name, keys)))
            except TypeError as error:
                raise BadRequest(f"feature {name!r}: {error}") from None
        jagged[name] = keys
    return jagged


def _tensor(name: str, array: Any) -> NDArray[Any]:
    """Any array-like on the host as NumPy, without a copy where there is an array already."""
    if isinstance(array, np.ndarray):
        return array
    try:
        if hasattr(array, "__dlpack__"):
            return np.from_dlpack(array)
        return np.asarray(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BadRequest(f"{name!r} is not an array on the host: {error}") from None


def _targets(out: Any) -> dict[str, VectorArray] | None:
    if not isinstance(out, Mapping):
        kind = type(out).__name__
        raise BadRequest(f"out must be a mapping from names to arrays, got {kind}")
    return {name: _target(name, array) for name, array in out.items()} or None


def _target(name: str, array: Any) -> VectorArray:
    """A caller's array to write into: the memory itself, never a copy."""
    if isinstance(array, np.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise BadRequest(f"out[{name!r}] must be an array or a tensor, got {type(array).__name__}")
    target = _tensor(name, array)
    if not target.flags.writeable:
        raise BadRequest(
            f"out[{name!r}] cannot be written through DLPack (it is read-only, or its exporter is "
            "older than DLPack 1.0); pass its NumPy view, as tensor.numpy()"
        )
    return target
