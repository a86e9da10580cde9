"""Keys of one table in a request: each key once, with the index back to the features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hps.lookup.base import Feature
from hps.lookup.pooling import is_pooled
from hps.native import dedup
from hps.tiers.base import Part
from hps.types import EmbeddingTable, IndexArray, JaggedKeys, VectorArray


@dataclass(slots=True)
class TableKeys:
    """Distinct keys of one table in a request.

    ``inverse (n,)`` finds each key's row in ``part``; None if no key was repeated. ``keys[i]`` belongs to
    ``features[i]``.
    """

    part: Part
    inverse: IndexArray | None
    features: tuple[Feature, ...]
    keys: list[JaggedKeys]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Each feature's name and number of keys."""
        return [(f.name, len(k.keys)) for f, k in zip(self.features, self.keys, strict=True)]


def make_table_keys(
    table: EmbeddingTable,
    features: tuple[Feature, ...],
    keys: list[JaggedKeys],
    out: Mapping[str, VectorArray],
) -> TableKeys:
    """Collect every distinct key of ``features``, in order of first appearance."""
    if len(features) == 1:
        flat = features[0].shift(keys[0].keys)
    else:
        flat = np.concatenate([f.shift(k.keys) for f, k in zip(features, keys, strict=True)])
    if len(flat) < 2:
        unique, inverse = flat, None
    else:
        unique, positions = dedup(flat)
        inverse = None if len(unique) == len(flat) else positions
    target = None
    alone = inverse is None and len(features) == 1
    if out and alone and not is_pooled(features[0].pooling, keys[0]):
        target = out.get(features[0].name)  # the tier writes rows to the caller's array
    return TableKeys(Part.make(table, unique, target), inverse, features, keys)
