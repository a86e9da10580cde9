"""Endpoints of a model, with dynamic batching if the settings enable it."""

from __future__ import annotations

from hps.config.admission_settings import BatchingSettings
from hps.config.server_settings import ServerSettings
from hps.lookup.base import Lookup
from hps.lookup.batched_lookup import BatchedLookup
from hps.lookup.batching import BatchLimits
from hps.node.served_versions import ServedModel
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.predict.batched_pipeline import BatchedPipeline
from services.frontend.endpoints import Endpoint
from services.frontend.lookup_endpoint import LookupEndpoint
from services.frontend.metadata import ModelInfo, lookup_info, ranking_info, tables_info
from services.frontend.ranking_endpoint import RankingEndpoint


def endpoints(
    served: ServedModel, settings: ServerSettings, metrics: Metrics
) -> tuple[list[tuple[Endpoint, ModelInfo]], Lookup]:
    """Endpoints of ``<m>`` and ``<m>.lookup``, and the lookup of the latter."""
    pipeline, lookup_name = served.pipeline, f"{served.name}.lookup"
    engine: Lookup = served.engine
    if settings.batching is not None:
        bounds = _bounds(settings.batching, served, settings.max_keys)
        engine = BatchedLookup(
            engine, bounds, metrics.histogram(m.BATCH_REQUESTS, lookup_name).observe
        )
    lookup = LookupEndpoint(served, lookup_name, engine), lookup_info(served)
    if pipeline is None:
        return [(LookupEndpoint(served, served.name, engine), tables_info(served)), lookup], engine
    scores = None
    # A GPU's scheduler batches by itself.
    if settings.batching is not None and not pipeline.is_scheduled:
        observe = metrics.histogram(m.BATCH_REQUESTS, served.name).observe
        scores = BatchedPipeline(pipeline, served.engine.features, bounds, observe).submit
    return [(RankingEndpoint(served, scores), ranking_info(served)), lookup], engine


def _bounds(settings: BatchingSettings, served: ServedModel, max_keys: int) -> BatchLimits:
    return BatchLimits(
        min(settings.max_rows, served.spec.max_batch_size),
        min(settings.max_keys, max_keys),
        settings.max_delay_us * 1e-6,
        settings.at_once,
    )
