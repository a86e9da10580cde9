"""Features of a request grouped by table; cached, since a model's requests repeat."""

from __future__ import annotations

from collections.abc import Mapping

from hps.bounded_memo import memoize
from hps.errors import BadRequest
from hps.lookup.base import Feature, LookupModel
from hps.lookup.checks import unknown_name_error
from hps.types import EmbeddingTable

Group = tuple[EmbeddingTable, tuple[Feature, ...]]
"""The features of a request that share a table."""
_KEPT = 256


class FeatureGroupCache:
    """The feature groups of one model, by the names that a request has. Thread-safe."""

    def __init__(self, model: LookupModel) -> None:
        self._model = model
        self._groups: dict[tuple[str, ...], tuple[Group, ...]] = {}
        self._by_table = {
            name: Feature(name, table, pooling="none") for name, table in model.tables.items()
        }

    def features(self, by_table: bool) -> Mapping[str, Feature]:
        """The features that a request may name; ``by_table``: one per table, of its rows."""
        return self._by_table if by_table else self._model.features

    def __call__(self, names: tuple[str, ...], by_table: bool) -> tuple[Group, ...]:
        """Group ``names`` by table. Raises ``BadRequest`` for an empty list and for an unknown name."""
        group_plan = None if by_table else self._groups.get(names)
        if group_plan is not None:
            return group_plan
        model = self._model
        if not names:
            raise BadRequest(f"the request names no feature of model {model.name!r}")
        known = self.features(by_table)
        groups: dict[EmbeddingTable, list[Feature]] = {}
        for name in names:
            feature = known.get(name)
            if feature is None:
                raise unknown_name_error(
                    "table" if by_table else "feature", name, known, model.name
                )
            groups.setdefault(feature.table, []).append(feature)
        group_plan = tuple((table, tuple(features)) for table, features in groups.items())
        if not by_table:
            memoize(self._groups, names, group_plan, _KEPT)
        return group_plan
