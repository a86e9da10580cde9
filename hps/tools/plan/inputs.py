"""What a plan is computed from: each table's curve, and the typical request."""

from __future__ import annotations

from collections.abc import Mapping

from hps.tiers.cpu.cache import Eviction
from hps.tools.plan.allocation import TableDemand
from hps.tools.plan.calibration_requests import TableLoad
from hps.tools.plan.curves import TableCurve
from hps.tools.plan.key_check import known_keys
from hps.tools.plan.model import PlannedModel
from hps.tools.plan.trace import Trace


def demands_of(
    model: PlannedModel, trace: Trace, evictions: Mapping[str, Eviction]
) -> dict[str, TableDemand]:
    """Compute the curve of each table of ``trace``; ``evictions``: policies by table.

    Raises BadRequest for keys that are not the model's."""
    demands = {}
    for name, sample in trace.samples.items():
        planned = model.tables[name]
        known = known_keys(planned, sample)
        curve = TableCurve(sample, planned.rows, evictions[name], known=known)
        demands[name] = TableDemand(planned.table, curve, sample.accesses / trace.accesses)
    return demands


def loads_of(model: PlannedModel, trace: Trace) -> list[TableLoad]:
    """Describe the typical request of ``trace``, for a calibration."""
    poolings = {feature.table.name: feature.pooling for feature in model.features.values()}
    return [
        TableLoad(
            name,
            model.tables[name].table.dim,
            model.tables[name].table.dtype.name,
            model.tables[name].rows,
            max(1, round(sample.accesses / trace.requests)),
            max(1, round(trace.batch)),
            poolings.get(name, "none"),
        )
        for name, sample in trace.samples.items()
    ]
