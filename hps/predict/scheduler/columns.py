"""Columns: a prediction's inputs and outputs as the native batch scheduler moves them.

A column has a fixed number of bytes per sample, so samples of different requests fit into one batch. The
inputs are each feature's keys ``(batch, hotness) int64``, then the dense inputs; the outputs are the
network's. A request's columns lie one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Feature
from hps.types import JaggedKeys, PredictRequest

_INT64 = np.dtype(np.int64)
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TensorColumn:
    """A tensor's name, dtype and shape per sample."""

    name: str
    dtype: str
    tail: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes per sample."""
        return int(np.prod(self.tail, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def view(self, data: NDArray[np.uint8], batch: int) -> NDArray[Any]:
        return data.view(self.dtype).reshape(batch, *self.tail)


class ModelColumns:
    """The columns of one model. Thread-safe."""

    def __init__(
        self,
        features: Sequence[Feature],
        inputs: Sequence[TensorColumn],
        outputs: Sequence[TensorColumn],
        max_batch_size: int,
    ) -> None:
        """``inputs`` are the dense ones, ``outputs`` the network's."""
        self.features = tuple(features)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.hotness = [feature.hotness or 1 for feature in features]
        self.input_widths = [*(8 * h for h in self.hotness), *(c.width for c in inputs)]
        self.output_widths = [column.width for column in outputs]
        self._max_batch_size = max_batch_size
        self._fields = list(zip(self.features, self.hotness, strict=True))
        self._names = [column.name for column in self.inputs]
        self._out_at = [0, *accumulate(self.output_widths)]

    @property
    def output_width(self) -> int:
        """Bytes of all outputs per sample."""
        return self._out_at[-1]

    def encode(
        self, request: PredictRequest, inputs: Mapping[str, NDArray[Any]], batch: int
    ) -> list[NDArray[Any]] | None:
        """Return the input columns of a checked request, ``inputs (batch, ...)`` among them.

        None for a request that has no columns: with offsets or weights, other numbers of keys, or keys
        to be converted."""
        if not 0 < batch <= self._max_batch_size:
            return None
        columns: list[NDArray[Any]] = []
        for feature, hotness in self._fields:
            jagged = request.features[feature.name]
            keys = jagged.keys
            if (
                jagged.offsets is not None
                or jagged.weights is not None
                or keys.dtype != _INT64
                or not keys.flags.c_contiguous
            ):
                return None
            if len(keys) != batch * hotness:
                if jagged.batch != 1 or len(keys) != hotness:
                    return None
                keys = np.tile(keys, batch)  # a context feature
            columns.append(feature.shift(keys))
        columns += [inputs[name] for name in self._names]
        return columns

    def message_layout(
        self,
        request: PredictRequest,
        inputs: Mapping[str, NDArray[Any]],
        batch: int,
        places: Mapping[str, tuple[int, int]],
    ) -> list[tuple[int, int, int]] | None:
        """Return where a message has the input columns: offset, bytes, and what is added to keys.

        ``places``: offset and bytes of each tensor in the message of ``request``, by its name there. None if
        the columns are not in the message as they are."""
        if self.encode(request, inputs, batch) is None:
            return None
        layout = []
        for (feature, _), width in zip(self._fields, self.input_widths, strict=False):
            offset, size = places.get(feature.input, (0, 0))
            if size != width * batch or feature.table.key_bits != 64:
                return None
            layout.append((offset, size, _signed(feature.key_offset)))
        for column in self.inputs:
            offset, size = places.get(column.name, (0, 0))
            if size != column.width * batch or request.dense[column.name].dtype != column.dtype:
                return None
            layout.append((offset, size, 0))
        return layout

    def decode_inputs(
        self, data: NDArray[np.uint8], batch: int
    ) -> tuple[dict[str, JaggedKeys], Arrays]:
        """Return the features' keys, as requests have them, and the dense inputs: views of ``data``."""
        at, features, dense = 0, {}, {}
        for feature, hotness in self._fields:
            end = at + 8 * hotness * batch
            keys = data[at:end].view(np.uint64) - np.uint64(feature.key_offset % 2**64)
            features[feature.name] = JaggedKeys(keys.view(np.int64), batch)
            at = end
        for column in self.inputs:
            end = at + column.width * batch
            dense[column.name] = column.view(data[at:end], batch)
            at = end
        return features, dense

    def decode_outputs(self, data: NDArray[np.uint8], batch: int, names: Sequence[str]) -> Arrays:
        """Return the outputs ``names``: views of ``data``, the output columns."""
        outputs = {}
        for column, start, end in zip(self.outputs, self._out_at, self._out_at[1:], strict=False):
            if column.name in names:
                outputs[column.name] = column.view(data[start * batch : end * batch], batch)
        return {name: outputs[name] for name in names}


def _signed(number: int) -> int:
    """Return ``number`` mod 2^64 as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63
