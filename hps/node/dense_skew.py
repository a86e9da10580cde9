"""Skew between rows and networks: how far streamed rows are ahead of the network that uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hps.node.model_opening import OpenedModel
from hps.node.streams import UpdateStreams
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics

Gauge = Iterator[tuple[tuple[str, ...], float]]
STEP = "step"
"""Entry of a manifest's ``metadata``: the training step of the version's network."""


def publish_dense_skew(
    metrics: Metrics, streams: UpdateStreams, opened: Sequence[OpenedModel]
) -> None:
    """Register gauges of the ``opened`` versions, a list that follows what is served."""

    def versions() -> Gauge:
        for each in [*opened]:
            network, _step = streams.trained_with(each.tables.values())
            if network:
                number = each.version.version
                yield (each.version.name, str(number)), network - number

    def steps() -> Gauge:
        for each in [*opened]:
            _network, step = streams.trained_with(each.tables.values())
            own = _step_of(each)
            if step and own is not None:
                yield (each.version.name, str(each.version.version)), step - own

    metrics.gauges(m.MODEL_DENSE_SKEW, versions)
    metrics.gauges(m.MODEL_STEP_SKEW, steps)


def _step_of(model: OpenedModel) -> int | None:
    """The training step that the manifest states; None without one."""
    manifest = model.version.manifest
    stated = None if manifest is None else manifest.metadata.get(STEP)
    try:
        return None if stated is None else int(stated)
    except (TypeError, ValueError):
        return None
