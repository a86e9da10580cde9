"""Padding: vectors of jagged keys that are not pooled, as a dense array with a mask.

Networks over sequences (attention) take ``(batch, max_length, dim)``. A sample's vectors are its first ones
there, in the order of its keys, and zeros follow, also if the table's default is another vector. The mask
``(batch, max_length)`` is True at keys.

``max_length`` and ``truncation`` are those of the feature: a sample with more keys is rejected, or keeps its
first or its last ones, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.lookup.base import Feature, Lookup, LookupModel
from hps.lookup.checks import check_keys
from hps.types import IndexArray, JaggedKeys, LookupRequest, LookupResult, VectorArray


def lengths(keys: JaggedKeys) -> IndexArray:
    """Return the number of keys of each sample, ``(batch,) int64``."""
    if keys.offsets is not None:
        return np.diff(keys.offsets)
    return np.full(keys.batch, keys.hotness, np.int64)


def mask(keys: JaggedKeys, max_length: int) -> NDArray[np.bool_]:
    """Return ``(batch, max_length)``, True at the positions of keys. No sample may have more keys."""
    return np.arange(max_length) < lengths(keys)[:, None]


def pad(vectors: VectorArray, keys: JaggedKeys, max_length: int) -> VectorArray:
    """Return the ``vectors (n, dim)`` of ``keys`` as ``(batch, max_length, dim)``, padded with zeros.

    C-contiguous, of the dtype of ``vectors``; a view of them if each sample has ``max_length``. No sample may
    have more."""
    dim = vectors.shape[1]
    if len(vectors) == keys.batch * max_length:
        return np.ascontiguousarray(vectors).reshape(keys.batch, max_length, dim)
    padded = np.zeros((keys.batch * max_length, dim), vectors.dtype)
    padded[np.flatnonzero(mask(keys, max_length))] = vectors
    return padded.reshape(keys.batch, max_length, dim)


def truncate(feature: Feature, keys: JaggedKeys) -> tuple[JaggedKeys, IndexArray | None]:
    """Return ``keys`` with at most ``feature.max_length`` a sample, and the positions of the kept ones.

    Positions are ascending; None if all keys are kept, then ``keys`` are as `check_keys` returns them. Raises
    ``BadRequest`` for invalid keys, and if ``feature.truncation`` is ``reject`` and a sample has too many."""
    keys, most = check_keys(feature, keys), feature.max_length
    every = lengths(keys)
    if most is None or not len(every) or (longest := int(every.max())) <= most:
        return keys, None
    if feature.truncation == "reject":
        raise BadRequest(
            f"feature {feature.input!r} takes at most {most} keys per sample (max_length), sample "
            f"{int(every.argmax())} has {longest}; send fewer, or set truncation in model.yaml to keep the "
            "first or the last ones"
        )
    kept = np.minimum(every, most)
    offsets = np.zeros(keys.batch + 1, np.int64)
    np.cumsum(kept, out=offsets[1:])
    ends = np.cumsum(every)
    starts = ends - (every if feature.truncation == "keep_first" else kept)
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], kept)
    return JaggedKeys(keys.keys[positions], keys.batch, offsets), positions


@dataclass(frozen=True, slots=True)
class TruncatedKeys:
    """A request's keys, at most ``max_length`` a sample where their feature has it.

    ``features``: the keys to look up. ``cut``: of each feature that has lost keys, the number of its keys in
    the request, and the positions of those to look up."""

    features: Mapping[str, JaggedKeys]
    cut: Mapping[str, tuple[int, IndexArray]]

    @staticmethod
    def of(
        model: LookupModel, keys: Mapping[str, JaggedKeys], batch: int | None = None
    ) -> TruncatedKeys:
        """Truncate ``keys``; those of unknown features stay, for the lookup to reject.

        ``batch``: to which a network broadcasts them; by default their own. Raises ``BadRequest`` as
        `truncate` does, and if the padded keys would be more than a request may have."""
        fit, padded = dict(keys), 0
        cut: dict[str, tuple[int, IndexArray]] = {}
        for name, jagged in keys.items():
            feature = model.features.get(name)
            if feature is None or feature.max_length is None:
                continue
            fit[name], positions = truncate(feature, jagged)
            if positions is not None:
                cut[name] = len(jagged.keys), positions
            padded += feature.max_length * (jagged.batch if batch is None else batch)
        if padded > model.max_keys:
            raise BadRequest(
                f"a request to '{model.name}' may have at most {model.max_keys} keys, and has {padded} when "
                "padded to max_length; send smaller batches or raise server.max_keys"
            )
        return TruncatedKeys(fit, cut)

    def report_all(self, result: LookupResult) -> LookupResult:
        """Return ``result`` with sources and versions of all keys of the request: 0 for those cut."""
        if not (self.cut and result.sources):
            return result
        sources = {name: self._spread(name, codes) for name, codes in result.sources.items()}
        versions = {name: self._spread(name, seen) for name, seen in result.versions.items()}
        return replace(result, sources=sources, versions=versions)

    def _spread(self, name: str, reports: NDArray[Any]) -> NDArray[Any]:
        if name not in self.cut:
            return reports
        n, positions = self.cut[name]
        every = np.zeros(n, reports.dtype)
        every[positions] = reports
        return every


def lookup_padded(lookup: Lookup, request: LookupRequest) -> LookupResult:
    """Look up ``request`` and pad the vectors of the features that have ``max_length``.

    ``LookupResult.masks`` has their masks. Waits for the result. Raises ``BadRequest`` if no feature of the
    request has ``max_length``, for a request by table and for one with ``out``."""
    features = request.features
    lengths_by_name = {
        name: feature.max_length
        for name in features
        if (feature := lookup.features.get(name)) and feature.max_length is not None
    }
    if request.by_table or request.out:
        given = "by_table" if request.by_table else "out"
        raise BadRequest(
            f"padded vectors are of features, in new arrays; leave out {given} or padded"
        )
    if features and not lengths_by_name and features.keys() <= lookup.features.keys():
        raise BadRequest(
            f"none of the features {', '.join(map(repr, features))} has max_length in model.yaml; leave out "
            "padded"
        )
    truncated = TruncatedKeys.of(lookup.model, features)
    result = lookup.lookup(replace(request, features=truncated.features))
    vectors, masks = dict(result.vectors), dict(result.masks)
    for name, most in lengths_by_name.items():
        keys = truncated.features[name]
        vectors[name], masks[name] = pad(vectors[name], keys, most), mask(keys, most)
    return replace(truncated.report_all(result), vectors=vectors, masks=masks)


def jagged_offsets(lookup: Lookup, request: LookupRequest) -> dict[str, IndexArray]:
    """Return the offsets ``(batch + 1,) int64`` of the request's jagged keys whose vectors are not pooled."""
    return {
        name: np.asarray(keys.offsets, np.int64)
        for name, keys in request.features.items()
        if keys.offsets is not None
        and (request.by_table or lookup.features[name].pooling == "none")
    }
