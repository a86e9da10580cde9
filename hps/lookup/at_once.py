"""Lookups whose every row is in the device's cache, in one launch that was prepared for their like."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Feature
from hps.types import JaggedKeys

_INT64 = np.dtype(np.int64)
_ALIGN = 256
_FORMS_KEPT = 64
_LONGEST_PAUSE = 64

Signature = tuple[tuple[str, int, int], ...]


def signature_of(features: Mapping[str, JaggedKeys]) -> Signature | None:
    """The names, numbers of keys and batches of a request without offsets, weights, keys to be converted or
    features without keys; None for others."""
    found = []
    for name, keys in features.items():
        plain = keys.offsets is None and keys.weights is None and keys.keys.dtype == _INT64
        if not plain or not len(keys.keys):
            return None
        found.append((name, len(keys.keys), keys.batch))
    return tuple(found)


class Patience:
    """Leaves out what was in vain last time, for longer each time. Any thread may ask: none minds a turn more
    or less."""

    def __init__(self) -> None:
        self._pause = self._streak = 0

    def is_due(self) -> bool:
        if self._pause:
            self._pause -= 1
            return False
        return True

    def tell(self, *, worked: bool) -> None:
        self._streak = 0 if worked else min(_LONGEST_PAUSE, 2 * self._streak + 1)
        self._pause = self._streak


@dataclass(frozen=True, slots=True)
class _Form:
    """A prepared pooling into one block, and where each feature's vectors lie in it."""

    prepared: Any
    block: Any
    places: list[tuple[str, int, int, Any, tuple[int, ...]]]


class AtOnce:
    """``device`` is a `GpuCache`. Any number of threads may call it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._forms: dict[Any, queue.SimpleQueue[_Form]] = {}
        self._patience = Patience()

    def lookup(
        self,
        key: Any,
        features: Sequence[Feature],
        keys: Sequence[NDArray[np.int64]],
        batches: list[int],
    ) -> dict[str, Any] | None:
        """The vectors of ``features`` as new arrays, complete; None when a row is not there. ``key`` tells
        requests apart that differ in more than their keys."""
        if not self._patience.is_due():
            return None
        space = self._device.space
        forms = self._forms.get(key)
        if forms is None:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            forms = self._forms[key] = queue.SimpleQueue()
        stream = space.take_stream()
        with space.device:
            try:
                form = forms.get_nowait()
            except queue.Empty:
                form = self._prepare(features, keys, batches)
            for feature, mine, there in zip(features, keys, form.prepared.keys, strict=True):
                there[:] = feature.shift(mine)
            form.prepared.launch(stream)
            fresh = space.empty((len(form.block),), np.uint8, stream)
            space.assign(fresh, form.block, stream)
            stream.synchronize()
        missing = form.prepared.missing()
        forms.put(form)
        space.give_back(stream)
        self._patience.tell(worked=not missing)
        if missing:
            return None
        return {
            name: fresh[start:stop].view(dtype).reshape(shape)
            for name, start, stop, dtype, shape in form.places
        }

    def _prepare(
        self, features: Sequence[Feature], keys: Sequence[NDArray[np.int64]], batches: list[int]
    ) -> _Form:
        shapes: list[tuple[int, ...]] = [
            (len(mine) if f.pooling == "none" else batch, f.table.dim)
            for f, mine, batch in zip(features, keys, batches, strict=True)
        ]
        sizes = [shape[0] * f.table.row_bytes for shape, f in zip(shapes, features, strict=True)]
        ends = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
        block = self._device.space.bytes(ends[-1])
        places, asks = [], []
        for feature, mine, shape, size, (start, _) in zip(
            features, keys, shapes, sizes, pairwise(ends), strict=True
        ):
            dtype = feature.table.dtype
            out = block[start : start + size].view(dtype).reshape(shape)
            hotness = len(mine) // shape[0]
            asks.append((feature.table, len(mine), hotness, feature.pooling == "mean", out))
            places.append((feature.name, start, start + size, dtype, shape))
        return _Form(self._device.prepare(asks), block, places)
