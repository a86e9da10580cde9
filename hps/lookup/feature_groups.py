"""The features of a request by table; kept, because requests of a model look alike."""

from __future__ import annotations

from hps.errors import BadRequest
from hps.lookup.base import Feature, LookupModel
from hps.lookup.checks import unknown_name_error
from hps.types import EmbeddingTable

Group = tuple[EmbeddingTable, tuple[Feature, ...]]
"""The features of a request that share a table."""
_KEPT = 256


class FeatureGroupCache:
    """Of one model. May be called from any thread."""

    def __init__(self, model: LookupModel) -> None:
        self._model = model
        self._found: dict[tuple[str, ...], tuple[Group, ...]] = {}
        self._by_table = {
            name: Feature(name, table, pooling="none") for name, table in model.tables.items()
        }

    def __call__(self, names: tuple[str, ...], by_table: bool) -> tuple[Group, ...]:
        """Raises ``BadRequest`` for no names, and for one the model does not have."""
        plan = None if by_table else self._found.get(names)
        if plan is not None:
            return plan
        model = self._model
        if not names:
            raise BadRequest(f"the request names no feature of model {model.name!r}")
        known = self._by_table if by_table else model.features
        groups: dict[EmbeddingTable, list[Feature]] = {}
        for name in names:
            feature = known.get(name)
            if feature is None:
                raise unknown_name_error(
                    "table" if by_table else "feature", name, known, model.name
                )
            groups.setdefault(feature.table, []).append(feature)
        plan = tuple((table, tuple(features)) for table, features in groups.items())
        if not by_table:
            if len(self._found) >= _KEPT:
                self._found.clear()
            self._found[names] = plan
        return plan
