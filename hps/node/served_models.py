"""Models served in this process, wherever their rows are: shared by nodes and attached processes."""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from hps.array_inputs import Features, output_arrays, tensor
from hps.config.traffic_settings import RequestKey
from hps.errors import BadRequest, NotFound
from hps.lookup.base import features_by_input
from hps.lookup.padding import jagged_offsets, lookup_padded
from hps.node.served_versions import ServedModel, ServedModels, VersionNames
from hps.node.tier_status import TierStatus, describe_table
from hps.node.traffic_split import input_text, value_text
from hps.observability.metrics import Metrics
from hps.suggestions import hint_for
from hps.threads import LookupPools
from hps.types import (
    EmbeddingTable,
    JaggedKeys,
    LookupRequest,
    LookupResult,
    PredictRequest,
    PredictResult,
)


@dataclass(slots=True, repr=False, kw_only=True)
class OpenModels:
    """Models open in this process. Any number of threads may call it until ``close``.

    A process forked from the one that opened it must not."""

    models: ServedModels
    """The served versions: a mapping of names to current versions, and all of them."""
    metrics: Metrics
    tiers: list[TierStatus]
    workers: LookupPools
    warnings: tuple[str, ...] = ()
    _resources: ExitStack = field(default_factory=ExitStack)
    _opened: float = field(default_factory=time.monotonic)
    _process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        # The interpreter's end would take CUDA's memory, and modules, from running threads.
        atexit.register(self.close)

    def __repr__(self) -> str:
        models = ", ".join(f"{model.name}/{model.version}" for model in self.models.versions)
        tiers = " > ".join(entry.tier.info.name for entry in self.tiers)
        return f"<hps.{type(self).__name__}: {models}; {tiers}>"

    def model(self, name: str, version: str | int | None = None) -> ServedModel:
        """A served version by its number or a label; None or "": the current one. Raises ``NotFound``."""
        return self.models.find(name, version)

    def table(self, model: str, table: str, version: str | int | None = None) -> EmbeddingTable:
        """A table of a served version. Raises ``NotFound``."""
        tables = self.model(model, version).tables
        if table not in tables:
            raise NotFound(f"model '{model}' has no table '{table}'{hint_for(table, tables)}")
        return tables[table]

    def _choose(
        self,
        model: str,
        version: str | int | None,
        inputs: tuple[Features, ...],
        parameters: Mapping[str, Any] | None,
    ) -> ServedModel:
        """The version for a request. Raises ``NotFound``."""
        models = self.models  # replaced as a whole by a change
        if not models.splits:
            return models.find(model, version)

        def value_of(key: RequestKey) -> str | None:
            if key.kind == "input":
                found = next((each[key.name] for each in inputs if key.name in each), None)
                return input_text(found.keys if isinstance(found, JaggedKeys) else found)
            return value_text((parameters or {}).get(key.name))

        return models.choose(model, version, value_of)

    def complete_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete predictions of a GPU's scheduler on the thread of ``loop``, this one.

        Nothing on that thread may wait for a prediction."""

    def lookup(
        self,
        model: str,
        features: Features,
        *,
        version: str | int | None = None,
        out: Mapping[str, Any] | None = None,
        by_table: bool = False,
        want_source: bool = False,
        timeout_s: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        stored_rows: bool = False,
        padded: bool = False,
    ) -> LookupResult:
        """The vectors of ``features``: any of the model's features, or tables with ``by_table``.

        ``version``: a served version's number or label; None: the current one, or that of the model's traffic
        rule, for which ``parameters`` has the values of request parameters and headers.
        ``out``: arrays that are written in place: NumPy arrays, or writable tensors on the host with
        ``__dlpack__``, C-contiguous, of the table's dtype and the result's shape. ``stored_rows``: rows of
        narrow formats that are not pooled are returned as they are stored, if `LookupResult.stored_rows`.
        ``padded``: the vectors of features with ``max_length`` are padded, see `hps.lookup.padding`."""
        into = None if out is None else output_arrays(out)
        served = self._choose(model, version, (features,), parameters)
        keys, deadline = served.keys(features, by_table), deadline_in(timeout_s)
        request = LookupRequest(
            keys, deadline, want_source, into, by_table, stored_rows=stored_rows
        )
        served.freshness.require()
        if padded:
            return served.freshness.mark(lookup_padded(served.engine, request))
        result = served.engine.lookup(request)
        result.offsets = jagged_offsets(served.engine, request)
        return served.freshness.mark(result)

    def predict(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, Any] | None = None,
        *,
        version: str | int | None = None,
        top_k: int | None = None,
        outputs: tuple[str, ...] | None = None,
        want_source: bool = False,
        timeout_s: float | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> PredictResult:
        """The model's named outputs for a batch; see ``PredictRequest``.

        ``version`` and ``parameters``: as of `lookup`."""
        served = self._choose(model, version, (features, dense or {}), parameters)
        pipeline = served.pipeline
        if pipeline is None:
            raise BadRequest(f"model '{model}' has no dense part; use lookup")
        served.freshness.require()
        tensors = {name: tensor(name, array) for name, array in (dense or {}).items()}
        request = PredictRequest(
            served.keys(features), tensors, top_k, deadline_in(timeout_s), want_source, outputs
        )
        return served.freshness.mark(pipeline.predict(request))

    def status(self) -> dict[str, Any]:
        """The models, tiers and queues of this process, ready for JSON."""
        from hps import __version__

        models = self.models  # replaced as a whole by a change
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._opened, 3),
            "models": [self._model_status(model, models.names) for model in models.versions],
            "tiers": [entry.describe() for entry in self.tiers],
            "lookups_waiting": self.workers.waiting,
            "warnings": list(self.warnings),
        }

    def _model_status(
        self, model: ServedModel, names_by_model: Mapping[str, VersionNames]
    ) -> dict[str, Any]:
        names = names_by_model[model.name]
        return {
            "name": model.name,
            "version": model.version,
            "current": model.version == names.current,
            "labels": names.labels_of(model.version),
            "weight": names.weights().get(model.version, 0.0),
            "dense": model.pipeline is not None,
            "features": list(features_by_input(model.engine.features)),
            "tables": [describe_table(table, self.tiers) for table in model.tables.values()],
        }

    def close(self) -> None:
        """Finish accepted requests, then free threads, files and memory. Idempotent; called at the process's
        end at the latest.

        Lookups then raise ``Unavailable``. Does nothing in a process forked from the one that opened this."""
        if os.getpid() == self._process:
            atexit.unregister(self.close)
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def deadline_in(timeout_s: float | None) -> float | None:
    """The instant of ``time.monotonic()`` that is ``timeout_s`` from now."""
    return None if timeout_s is None else time.monotonic() + timeout_s
