"""Further outputs of lookups of features that are not pooled: offsets, padded vectors and their mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Feature, LookupModel, features_by_input
from hps.lookup.padding import TruncatedKeys, lengths, mask, pad
from hps.types import JaggedKeys


class SequenceOutputs:
    """Makes these outputs, which a request must name.

    ``f.offsets`` INT64 ``[batch + 1]`` divides the vectors ``f`` into samples. A feature with ``max_length``
    also has ``f.padded [batch, max_length, dim]`` and ``f.mask`` BOOL ``[batch, max_length]``. Keys of
    several tables have one ``f.offsets`` and one ``f.mask``."""

    def __init__(self, model: LookupModel) -> None:
        self._model = model
        self._of: dict[str, tuple[Literal["offsets", "padded", "mask"], Feature]] = {}
        for name, features in features_by_input(model.features).items():
            first = features[0]
            if first.pooling != "none":
                continue
            self._of[f"{name}.offsets"] = "offsets", first
            if first.max_length is not None:
                self._of |= {f"{each.name}.padded": ("padded", each) for each in features}
                self._of[f"{name}.mask"] = "mask", first
        self.names = tuple(self._of)
        """All names, without those that stand for several outputs."""

    def among(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` that this makes."""
        return [name for name in names if name in self._of]

    def check(self, names: Sequence[str], keys: Mapping[str, JaggedKeys]) -> None:
        """Raise ``BadRequest`` if ``keys`` cannot be padded as the outputs ``names`` require."""
        self._truncated(names, keys)

    def make(
        self,
        names: Sequence[str],
        keys: Mapping[str, JaggedKeys],
        vectors: Mapping[str, NDArray[Any]],
    ) -> dict[str, NDArray[Any]]:
        """Return the outputs ``names`` from the lookup's ``vectors``, without those that have no ``keys``."""
        truncated = self._truncated(names, keys)
        made: dict[str, NDArray[Any]] = {}
        for name in names:
            kind, feature = self._of[name]
            if feature.name not in keys:
                continue
            if kind == "offsets":
                made[name] = _offsets(keys[feature.name])
                continue
            fit, most = truncated.features[feature.name], feature.max_length
            assert most is not None
            if kind == "mask":
                made[name] = mask(fit, most)
                continue
            rows = vectors[feature.name]
            if feature.name in truncated.cut:
                rows = rows[truncated.cut[feature.name][1]]
            made[name] = pad(rows, fit, most)
        return made

    def _truncated(self, names: Sequence[str], keys: Mapping[str, JaggedKeys]) -> TruncatedKeys:
        """Truncate the keys of the features that ``names`` pad."""
        padded = {of.name for kind, of in map(self._of.__getitem__, names) if kind != "offsets"}
        some = {name: jagged for name, jagged in keys.items() if name in padded}
        return TruncatedKeys.of(self._model, some)


def _offsets(keys: JaggedKeys) -> NDArray[np.int64]:
    offsets = np.zeros(keys.batch + 1, np.int64)
    np.cumsum(lengths(keys), out=offsets[1:])
    return offsets
