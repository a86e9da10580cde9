"""Checks of remote lookup requests before they are sent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hps.bounded_memo import memoize
from hps.lookup.base import Feature, LookupModel
from hps.lookup.checks import check_keys, check_out_names, check_sizes, check_targets
from hps.lookup.feature_groups import FeatureGroupCache
from hps.lookup.remote.lookup_codec import LookupRequestTemplate
from hps.observability.meters import LookupMeter
from hps.types import JaggedKeys, LookupRequest

_INT64 = np.dtype(np.int64)
# The number of cached codecs, one per form of request.
_KEPT = 256


class RemoteRequestChecks:
    """Checks requests for one version of a model. Thread-safe."""

    def __init__(self, model: LookupModel, meter: LookupMeter) -> None:
        self._model, self._meter = model, meter
        self._groups = FeatureGroupCache(model)
        self._kept: dict[tuple[object, ...], LookupRequestTemplate] = {}

    def prepare(
        self, request: LookupRequest
    ) -> tuple[LookupRequestTemplate, Mapping[str, JaggedKeys]]:
        """Return the codec of ``request`` and its checked keys. Raises BadRequest."""
        key = _alike(request)
        if key is None:
            return self._new(request)
        template = self._kept.get(key)
        if template is None:
            template, _ = self._new(request)
            memoize(self._kept, key, template, _KEPT)
        return template, request.features

    def _new(self, request: LookupRequest) -> tuple[LookupRequestTemplate, dict[str, JaggedKeys]]:
        known = self._groups.features(request.by_table)
        features = self._checked(request, known)
        return LookupRequestTemplate(self._model, known, request, features, self._meter), features

    def _checked(
        self, request: LookupRequest, known: Mapping[str, Feature]
    ) -> dict[str, JaggedKeys]:
        self._groups(tuple(request.features), request.by_table)  # raises for unknown names
        check_sizes(self._model, request)
        found = {name: check_keys(known[name], keys) for name, keys in request.features.items()}
        if out := request.out:
            check_out_names(out, request, self._model.name)
            for name, keys in found.items():
                check_targets(known[name].table, [known[name]], [keys], out)
        return found


def _alike(request: LookupRequest) -> tuple[object, ...] | None:
    """Return a cache key for requests whose form decides if they are valid; None for others."""
    if request.out:
        return None
    signature: list[object] = [request.by_table, request.want_source]
    for name, keys in request.features.items():
        flat = keys.keys
        if keys.offsets is not None or keys.weights is not None:
            return None
        if flat.dtype != _INT64 or not flat.flags.c_contiguous:
            return None
        signature.append((name, flat.shape, keys.batch))
    return tuple(signature)
