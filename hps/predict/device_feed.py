"""Device feed: predictions by a Triton on the same machine, which reads the vectors in GPU memory.

No vector is copied to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from hps.dense.base import DenseModel
from hps.lookup.base import Feature
from hps.lookup.gpu.device_lookup import DeviceLookup, DeviceLookupResult
from hps.types import LookupRequest, LookupResult, PredictRequest

Arrays = dict[str, NDArray[Any]]


class DeviceFeed:
    """Predictions of one model on one device, by a network of Triton. Thread-safe."""

    def __init__(
        self,
        lookup: DeviceLookup,
        network: DenseModel,
        feeds: Sequence[tuple[Feature, str]],
    ) -> None:
        """``network`` takes arrays on the lookup's device; ``feeds``: each feature and the network's input
        that takes its vectors."""
        self.lookup = lookup
        self._space = lookup.cache.space
        self._network = network
        types = {tensor.name: tensor.dtype for tensor in network.inputs}
        self._feeds = [(feature, tensor, types[tensor]) for feature, tensor in feeds]

    def quick(
        self, request: PredictRequest, inputs: Arrays, batch: int, names: tuple[str, ...]
    ) -> tuple[Arrays, LookupResult] | None:
        """See `hps.predict.pipeline.DevicePredictor`."""
        if not batch:
            return None
        lookup_request = LookupRequest(request.features, request.deadline, request.want_source)
        rows = self.lookup.lookup_resident(lookup_request)
        if rows is None:
            return None
        return self._predict(rows.vectors, inputs, batch, names, request.deadline), rows

    def run(
        self,
        rows: LookupResult,
        inputs: Arrays,
        batch: int,
        names: tuple[str, ...],
        deadline: float | None = None,
    ) -> Arrays:
        """See `hps.predict.pipeline.DevicePredictor`."""
        assert isinstance(rows, DeviceLookupResult)
        stream = self._space.take_stream()
        vectors = {
            feature.name: self._space.empty(rows.shapes[feature.name], feature.table.dtype, stream)
            for feature, _, _ in self._feeds
        }
        rows.into(vectors, stream)
        self._space.give_back(stream)
        return self._predict(vectors, inputs, batch, names, deadline)

    def _predict(
        self,
        vectors: Mapping[str, Any],
        inputs: Arrays,
        batch: int,
        names: tuple[str, ...],
        deadline: float | None,
    ) -> Arrays:
        """Run the network on ``vectors``. They must be complete: it reads its inputs on another stream."""
        feed: dict[str, Any] = dict(inputs)
        stream = self._space.take_stream()
        for feature, tensor, dtype in self._feeds:
            array = vectors[feature.name]
            if feature.pooling == "none":
                array = array.reshape(-1, feature.hotness or 1, feature.table.dim)
            if len(array) != batch or array.dtype != dtype:  # must be repeated or widened
                whole = self._space.empty((batch, *array.shape[1:]), dtype, stream)
                self._space.assign(whole, array, stream)
                array = whole
            feed[tensor] = array
        stream.synchronize()
        self._space.give_back(stream)
        return self._network.predict(feed, names, deadline)
